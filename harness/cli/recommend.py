"""``attncheck recommend``: which backends were measured as correct for a combination of needs. Loads no torch."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from attncheck.errors import QuestionError
from attncheck.harness.cli.output import Color, ColorChoice, terminal_width, use_color


class AnswerFormat(StrEnum):
    """Output format of the answer."""

    terminal = "terminal"
    json = "json"


def recommend(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run files written by `attncheck run`.")],
    needs: Annotated[
        list[str],
        typer.Option(metavar="NEED,...", help="Needs of a model, such as sinks,fp8_kv,block_size=32,dtype=bfloat16."),
    ],
    form: Annotated[
        AnswerFormat, typer.Option("--format", help="Text, or JSON with times in nanoseconds.")
    ] = AnswerFormat.terminal,
    color: Color = ColorChoice.AUTO,
) -> int:
    """Print which backends were measured as right for all needs. Exit code 0: at least one is; 1: none is."""
    from attncheck.reports.analysis.recommendation import checked_needs
    from attncheck.reports.run_file.store import read_run
    from attncheck.reports.terminal import recommendation as terminal
    from attncheck.reports.terminal.columns import Style

    read = [read_run(path) for path in runs]
    wanted = checked_needs(",".join(needs), terminal.needs_of(read))
    if not wanted:
        raise QuestionError("--needs names nothing; give features and forms, such as sinks,block_size=16")
    answers = [(run, terminal.recommendation(run, wanted)) for run in read]
    if form == AnswerFormat.json:
        document = {"needs": wanted, "runs": [terminal.as_json(run, backends) for run, backends in answers]}
        typer.echo(json.dumps(document, indent=2))
    else:
        style = Style(terminal_width(), use_color(color))
        typer.echo(
            "\n\n".join(terminal.render_recommendation(run, wanted, backends, style) for run, backends in answers)
        )
    is_right = any(each.standing in ("right", "right in each") for _, backends in answers for each in backends)
    return 0 if is_right else 1
