"""The command ``engine``: serves requests by vLLM, and judges its attention by the history of each request."""

import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from attncheck.errors import QuestionError, SelectionError
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
from attncheck.harness.run.options import RunOptions
from attncheck.reports.run_file.records import EXAMINED, FALLEN_SHORT
from attncheck.reports.run_file.store import count_outcomes, now, read_run, refuse_existing


def _option(metavar: str, help: str, least: int | None = None) -> Any:  # noqa: A002 (typer's name)
    return typer.Option(metavar=metavar, help=help, min=least, show_default=False)


_MODEL = "full, hybrid or latent: a small model with random weights; or the folder of a model. [default: all three]"
_TRAFFIC = "shared-prefixes, chunked-prefill, preempted, drafts, mixed. [default: all]"
_BLOCKS = "Blocks of the small pool. [default: for 1.25 requests of the greatest length]"
_EVERY = "Judge outputs and pages of every Nth step. [default: 1; with COMMAND: 16]"
_TIMEOUT = "For the start of an engine, and for a kind of traffic. [default: 600]"


def engine(
    context: typer.Context,
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND...", help="A command that starts vLLM; its own requests are judged."),
    ] = None,
    *,
    model: Annotated[list[str] | None, _option("NAME|DIR,...", _MODEL)] = None,
    traffic: Annotated[list[str] | None, _option("KIND,...", _TRAFFIC)] = None,
    seed: Annotated[int | None, _option("N", "The seed of the requests. [default: 0]", least=0)] = None,
    requests: Annotated[int | None, _option("N", "Requests of each kind of traffic. [default: 16]", least=1)] = None,
    blocks: Annotated[int | None, _option("N", _BLOCKS, least=1)] = None,
    budget: Annotated[int | None, _option("N", "Tokens of a step. [default: 128]", least=1)] = None,
    steps: Annotated[int | None, _option("N", "End each kind of traffic after N steps.", least=1)] = None,
    every: Annotated[int | None, _option("N", _EVERY, least=1)] = None,
    follow: Annotated[int, _option("M", "Follow one of M first blocks of prompts. [default: 1]", least=1)] = 1,
    case_timeout: Annotated[int | None, _option("SECONDS", _TIMEOUT, least=1)] = None,
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


def _serve(given: dict[str, Any], output: Path | None, words: tuple[str, ...]) -> Path:
    """Serve each kind of traffic, write the run file, and return its path.

    Raises:
        QuestionError: vLLM cannot be imported, or starts with no kind of traffic.
        WorkerError: attncheck itself failed, and nothing was served.
    """
    from attncheck.harness.engine import traffic
    from attncheck.harness.engine.findings import STOPPED, joined
    from attncheck.harness.workers.limits import Limit
    from attncheck.harness.workers.process import WorkerError

    started = now()
    limit = Limit(given.pop("case-timeout", 600), "--case-timeout changes it")
    served, errors, failure = [], [], None
    with interruptible(), tempfile.TemporaryDirectory(prefix="attncheck-engine-") as folder:
        runs = traffic.runs_of(given, Path(folder))
        traffic.import_vllm()
        for number, run in enumerate(runs, 1):
            began, verdict = time.monotonic(), "not served"
            try:
                served.append(traffic.serve_apart(run, limit))
                counts = count_outcomes(served[-1].records)
                verdict = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
            except QuestionError as error:
                errors.append(str(error))
            except WorkerError as error:
                failure = error
                errors.append(f"{run.case.id}: {STOPPED}{error}")
                print_stderr(error.fault.traceback)
            print_stderr(f"{number}/{len(runs)} {run.case.id}: {verdict}, {time.monotonic() - began:.1f} s")
    if not served:
        raise failure or QuestionError("\n".join(errors))
    whole = joined(served, started, words)
    with open_run(output, runs_folder(), whole.header, RunOptions.keep) as writer:
        for record in whole.records:
            writer.add(record)
        for text in (*whole.errors, *errors):
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
    for text in run.errors:
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
