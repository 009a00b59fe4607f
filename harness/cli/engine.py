"""The command ``engine``: serves requests by vLLM, and judges its attention by the history of each request."""

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attncheck.errors import QuestionError, SelectionError, UnknownNameError
from attncheck.harness.cli.common import (
    Color,
    ColorChoice,
    interruptible,
    print_foreign,
    print_stderr,
    printing_to_stdout,
    terminal_width,
    use_color,
)
from attncheck.harness.cli.run_files import free_path, make_kept_folder, open_run, report_command, runs_folder
from attncheck.harness.engine.plugin import PLUGIN, WatchSettings
from attncheck.harness.host import run_with_plugin
from attncheck.harness.run.options import RunOptions, split_commas
from attncheck.reports.run_file.records import EXAMINED, FALLEN_SHORT
from attncheck.reports.run_file.store import count_outcomes, now, read_run, refuse_existing

if TYPE_CHECKING:
    from attncheck.harness.engine.traffic import EngineRun


def _count(metavar: str, help: str, least: int = 1) -> Any:  # noqa: A002 (typer's name)
    return typer.Option(metavar=metavar, help=help, min=least, show_default=False)


def engine(
    context: typer.Context,
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND...", help="A command that starts vLLM; its own requests are judged."),
    ] = None,
    *,
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|DIR,...",
            help="full, hybrid or latent: a small model with random weights; or the folder of a model. "
            "[default: the three small ones]",
        ),
    ] = None,
    traffic: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND,...",
            help="shared-prefixes, chunked-prefill, preempted, drafts, mixed. [default: all]",
        ),
    ] = None,
    seed: Annotated[int | None, _count("N", "The seed of the requests. [default: 0]", least=0)] = None,
    requests: Annotated[int | None, _count("N", "Requests of each kind of traffic. [default: 16]")] = None,
    blocks: Annotated[
        int | None, _count("N", "Blocks of the small pool. [default: for 1.25 requests of the greatest length]")
    ] = None,
    budget: Annotated[int | None, _count("N", "Tokens of a step. [default: 128]")] = None,
    steps: Annotated[int | None, _count("N", "End each kind of traffic after N steps.")] = None,
    every: Annotated[
        int | None, _count("N", "Judge outputs and pages of every Nth step. [default: 1; with COMMAND: 16]")
    ] = None,
    follow: Annotated[int, typer.Option(metavar="M", help="Follow one of M first blocks of prompts.", min=1)] = 1,
    case_timeout: Annotated[
        int | None, _count("SECONDS", "For the start of an engine, and for a kind of traffic. [default: 600]")
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="The run file to write.")] = None,
    color: Color = ColorChoice.AUTO,
) -> int:
    """Judge every attention row of a serving engine.

    vLLM serves random requests of several kinds, or its own requests if a COMMAND such as `vllm serve` is given. Its
    outputs, and the tokens, positions and blocks that it uses, are compared with attention over the true history of
    each request, which knows no page, slot or table. Queries, keys and values are the engine's own and are not judged.
    attncheck must be installed in vLLM's environment. `attncheck report` shows the run file. Exit code 1: a finding.
    """
    numbers = {"seed": seed, "requests": requests, "blocks": blocks, "budget": budget, "steps": steps}
    drawn = {"model": model, "traffic": traffic, **numbers, "case-timeout": case_timeout}
    given = {name: value for name, value in drawn.items() if value is not None}
    if output is not None:
        refuse_existing(output)
    words = tuple(context.obj or ())
    if not command:
        path = _serve(given | {"every": every or 1, "follow": follow}, output, words)
        return _report(path, color)
    if given:
        name = next(iter(given))
        raise QuestionError(f"--{name}: the requests are those of {command[0]}; leave it out, or leave out COMMAND")
    if output is None:
        make_kept_folder(runs_folder())
    path = output or free_path(runs_folder())
    print_stderr(f"run file: {path}; it is written while the engine serves")
    settings = WatchSettings(path=path.absolute(), judge_every=every or 16, follow_one_of=follow, command=words)
    code = run_with_plugin(command, settings.environment(), PLUGIN)
    if path.exists():
        return _report(path, color, code)
    reason = f"vLLM ran no step in {command[0]!r}, or attncheck is not installed in its environment"
    print_stderr(f"error: {path} was not written: {reason}")
    return code or 2


def engine_runs(given: Mapping[str, Any], folder: Path) -> "list[EngineRun]":
    """Return the runs of ``given`` options, a model after the other. ``folder``: where small models are made.

    Raises:
        QuestionError: a kind of traffic or a model is unknown, or two models have the same name.
    """
    from attncheck.harness.engine.models import CONFIGS
    from attncheck.harness.engine.traffic import TRAFFIC, EngineRun

    common = {name: value for name, value in given.items() if name not in ("model", "traffic", "case-timeout")}
    kinds = split_commas(given.get("traffic", TRAFFIC))
    for kind in kinds:
        if kind not in TRAFFIC:
            raise UnknownNameError("kind of traffic", kind, list(TRAFFIC))
    runs: list[EngineRun] = []
    for model in dict.fromkeys(split_commas(given.get("model", CONFIGS))):
        place = folder / model if model in CONFIGS else Path(model).resolve()
        if model not in CONFIGS and not (place / "config.json").is_file():
            names = ", ".join(CONFIGS)
            raise QuestionError(f"--model {model}: no folder with a config.json, and none of the small models {names}")
        runs += [EngineRun(model=model, folder=place, traffic=kind, **common) for kind in kinds]
    if len({run.case.id for run in runs}) < len(runs):
        raise QuestionError("--model: two folders have the same name; judge them in two runs")
    return runs


def _serve(given: Mapping[str, Any], output: Path | None, words: tuple[str, ...]) -> Path:
    """Serve each kind of traffic, write the run file, and return its path.

    Raises:
        QuestionError: vLLM cannot be imported, or starts with no kind of traffic.
        WorkerError: attncheck itself failed, and nothing was served.
    """
    from attncheck.harness.engine import traffic
    from attncheck.harness.engine.findings import STOPPED, header_of
    from attncheck.harness.workers.limits import Limit
    from attncheck.harness.workers.process import WorkerError

    started = now()
    limit = Limit(given.get("case-timeout", 600), "--case-timeout changes it")
    served, errors, failure = [], [], None
    with interruptible(), tempfile.TemporaryDirectory(prefix="attncheck-engine-") as folder:
        runs = engine_runs(given, Path(folder))
        traffic.import_vllm()
        for number, run in enumerate(runs, 1):
            began, verdict = time.monotonic(), "not served"
            try:
                served.append(traffic.serve_apart(run, limit))
            except QuestionError as error:
                errors.append(str(error))
            except WorkerError as error:
                failure = error
                errors.append(f"{run.case.id}: {STOPPED}{error}")
                print_stderr(error.fault.traceback)
            else:
                counts = count_outcomes(served[-1].records)
                verdict = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
            print_stderr(f"{number}/{len(runs)} {run.case.id}: {verdict}, {time.monotonic() - began:.1f} s")
    if not served:
        raise failure or QuestionError("\n".join(errors))
    header = header_of(served, started, seed=given.get("seed", 0), command=words)
    with open_run(output, runs_folder(), header, RunOptions.keep) as writer:
        for record in (record for each in served for record in each.records):
            writer.add(record)
        for text in errors:
            writer.fail(text)
    assert writer.path is not None
    return writer.path


def _report(path: Path, color: ColorChoice, code: int = 0) -> int:
    """Print a run, and return the exit code: ``code`` of the command that served, if it is not 0; or 0, 1 or 3.

    Raises:
        SelectionError: a kind of traffic was not served, or nothing was compared.
    """
    from attncheck.harness.engine.findings import STOPPED
    from attncheck.reports.terminal import run as terminal

    run = read_run(path)
    with printing_to_stdout(path):
        typer.echo(terminal.render_run(run, color=use_color(color), width=terminal_width()), color=use_color(color))
        print_foreign(f"run file: {path}; {report_command(path)} shows it again")
    if code:
        return code
    reasons = (f"{record.case}: {record.reasons[0]}" for record in run.records if record.outcome == "unsupported")
    for text in (*run.errors, *reasons):
        if STOPPED in text:
            print_stderr(text)
            return 3
    if any(record.outcome in FALLEN_SHORT for record in run.records):
        return 1
    if run.errors:
        raise SelectionError("some kinds of traffic were not served (see the errors above)")
    if not any(record.outcome in EXAMINED for record in run.records):
        raise SelectionError("nothing was judged; the reasons are above")
    return 0
