"""``attncheck recommend``: which backends were measured as correct for a combination of needs. Loads no torch."""

import json
from enum import StrEnum
from typing import Annotated

import typer

from attncheck.errors import QuestionError
from attncheck.harness.cli.output import Color, ColorChoice, terminal_width, use_color
from attncheck.harness.cli.site import Folders, RunFiles, Skipped, chosen_files


class AnswerFormat(StrEnum):
    """Output format of the answer."""

    terminal = "terminal"
    json = "json"


def recommend(
    runs: RunFiles = None,
    *,
    needs: Annotated[
        list[str],
        typer.Option(metavar="NEED,...", help="Needs of a model, such as sinks,fp8_kv,block_size=32,dtype=bfloat16."),
    ],
    folders: Folders = None,
    skipped: Skipped = "",
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="Answer for the devices with this in their name alone.")
    ] = None,
    form: Annotated[
        AnswerFormat, typer.Option("--format", help="Text, or JSON with times in nanoseconds.")
    ] = AnswerFormat.terminal,
    color: Color = ColorChoice.AUTO,
) -> int:
    """Print the backends that are right for all needs, by device.

    Exit code 0: at least one is right in cases that need all of them; 1: none is.
    """
    from attncheck.reports.analysis.measured import measured_run, subjects
    from attncheck.reports.analysis.recommendation import checked_needs, known_needs
    from attncheck.reports.analysis.recommendation import recommend as judged
    from attncheck.reports.run_file.store import read_run
    from attncheck.reports.speeds.speed import forward_times
    from attncheck.reports.terminal import recommendation as terminal
    from attncheck.reports.terminal.columns import Style

    read = [read_run(path) for path in chosen_files(runs, folders, skipped)]
    measured = subjects(measured_run(run, run.path, forward_times(run)) for run in read)
    wanted = checked_needs(",".join(needs), known_needs(measured))
    if not wanted:
        raise QuestionError("--needs names nothing; give features and forms, such as sinks,block_size=16")
    devices = terminal.by_device(measured)
    chosen = {name: own for name, own in devices.items() if device is None or device.lower() in name.lower()}
    if not chosen:
        raise QuestionError(f"--device {device}: nothing was measured on it; measured are: {', '.join(devices)}")
    answers = {name: judged(wanted, own) for name, own in chosen.items()}
    if form == AnswerFormat.json:
        document = {"needs": wanted, "devices": [terminal.as_json(*answer) for answer in answers.items()]}
        typer.echo(json.dumps(document, indent=2))
    else:
        style = Style(terminal_width(), use_color(color))
        texts = [terminal.render_recommendation(name, wanted, found, style) for name, found in answers.items()]
        typer.echo("\n\n".join(texts))
    is_right = any(each.standing == "right" for found in answers.values() for each in found)
    return 0 if is_right else 1
