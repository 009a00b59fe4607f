"""The command ``engine``: serves requests by vLLM, and judges its attention by the history of each request."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
from attncheck.harness.engine.internals import check_internals
from attncheck.harness.run.options import split_commas

if TYPE_CHECKING:
    from attncheck.harness.engine.traffic import EngineRun, ServedTraffic
    from attncheck.reports.run_file.store import Run

_DEFAULTS: Mapping[str, str] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler and the model runner in one process
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1",  # findings name requests as they are drawn
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "NUMBA_NUM_THREADS": "1",  # of the drafter; vLLM uses one of them
    "TQDM_DISABLE": "1",
}
"""Environment variables of the process that serves; the first two are always set, the others unless they are given."""

_ALWAYS = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION")

_SHOWN_LINES = 15
"""Last lines of vLLM's output that an error shows."""


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
    dtype: Annotated[str | None, typer.Option(metavar="NAME", help="The dtype of the model, as vLLM names it.")] = None,
    steps: Annotated[int | None, _count("N", "End each kind of traffic after N steps.")] = None,
    every: Annotated[
        int | None, _count("N", "Judge outputs and pages of every Nth step. [default: 1; with COMMAND: 16]")
    ] = None,
    follow: Annotated[int | None, _count("M", "Follow one of M first blocks of prompts. [default: 1]")] = None,
    limit: Annotated[
        int | None,
        typer.Option("--case-timeout", metavar="SECONDS", help="For a kind of traffic. [default: 600]", min=1),
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
    drawn = {
        "model": model,
        "traffic": traffic,
        "seed": seed,
        "requests": requests,
        "blocks": blocks,
        "budget": budget,
        "dtype": dtype,
        "steps": steps,
        "limit_s": limit,
    }
    given = {name: value for name, value in drawn.items() if value is not None}
    watched = {name: value for name, value in {"every": every, "follow": follow}.items() if value is not None}
    if command:
        if given:
            name = next(iter(given)).replace("limit_s", "case-timeout")
            raise QuestionError(f"--{name}: the requests are those of {command[0]}; leave it out, or leave out COMMAND")
        return _watch(command, watched, output, context.obj or (), color)
    check_internals()
    with interruptible(), tempfile.TemporaryDirectory(prefix="attncheck-engine-") as folder:
        runs = engine_runs(given | watched, Path(folder))
        return _serve(runs, output, context.obj or (), color)


def engine_runs(given: Mapping[str, Any], folder: Path) -> "list[EngineRun]":
    """Return the runs of ``given`` options, a model after the other. ``folder``: where small models are made.

    Raises:
        QuestionError: a kind of traffic or a model is unknown, or two models have the same name.
    """
    from attncheck.harness.engine.models import CONFIGS
    from attncheck.harness.engine.traffic import TRAFFIC, EngineRun

    common = {name: value for name, value in given.items() if name not in ("model", "traffic")}
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
        runs += [EngineRun(model=model, folder=str(place), traffic=kind, **common) for kind in kinds]
    if len({run.case_id for run in runs}) < len(runs):
        raise QuestionError("--model: two folders have the same name; judge them in two runs")
    return runs


def _watch(
    command: Sequence[str], watched: Mapping[str, int], output: Path | None, words: Sequence[str], color: ColorChoice
) -> int:
    """Run a command that starts vLLM, and watch its engine; return its exit code, or 1 if something was found."""
    from attncheck.harness.cli.run_files import free_path, make_kept_folder, runs_folder
    from attncheck.harness.engine.plugin import WatchSettings, serve_watched
    from attncheck.reports.run_file.store import read_run, refuse_existing

    if output is not None:
        refuse_existing(output)
    if output is None:
        make_kept_folder(runs_folder())
    path = output or free_path(runs_folder())
    print_stderr(f"run file: {path}; it is written while the engine serves")
    settings = WatchSettings(path, watched.get("every", 16), watched.get("follow", 1), tuple(words))
    code = serve_watched(settings, command)
    if not path.exists():
        reason = f"vLLM ran no step in {command[0]!r}, or attncheck is not installed in its environment"
        print_stderr(f"error: {path} was not written: {reason}")
        return code or 1
    run = read_run(path)
    _print_run(run, path, color)
    return code or _exit_code(run)


def _print_run(run: "Run", path: Path, color: ColorChoice) -> None:
    from attncheck.harness.cli.run_files import report_command
    from attncheck.reports.terminal import run as terminal

    with printing_to_stdout(path):
        typer.echo(terminal.render_run(run, color=use_color(color), width=terminal_width()), color=use_color(color))
        print_foreign(f"run file: {path}; {report_command(path)} shows it again")


# Serves the kinds of traffic, and writes and prints what was found.


def _serve(runs: "Sequence[EngineRun]", output: Path | None, words: Sequence[str], color: ColorChoice) -> int:
    from attncheck.harness.cli.run_files import open_run, runs_folder
    from attncheck.harness.engine.findings import header_of
    from attncheck.harness.run.options import RunOptions
    from attncheck.reports.run_file.store import read_run, refuse_existing

    if output is not None:
        refuse_existing(output)
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        served, errors = _results(runs, log)
        if not served:
            printed = [f"vLLM | {line}" for line in _last_lines(log)]
            raise QuestionError("\n".join([*dict.fromkeys(errors), *printed]))
    header = header_of(
        [each.case for each in served if each.case is not None],
        [each.backend for each in served if each.backend is not None],
        next(each.environment for each in served if each.environment is not None),
        runs[0].seed,
        words,
    )
    with open_run(output, runs_folder(), header, RunOptions.keep) as writer:
        for record in (record for each in served for record in each.records):
            writer.add(record)
        for error in errors:
            writer.fail(error)
    assert writer.path is not None
    run = read_run(writer.path)
    _print_run(run, writer.path, color)
    return _exit_code(run)


def _exit_code(run: "Run") -> int:
    """Return exit code 0, 1 or 3. Raise SelectionError if a case was not served, or nothing was compared."""
    from attncheck.harness.engine.findings import STOPPED
    from attncheck.reports.run_file.records import EXAMINED, FALLEN_SHORT

    unsupported = [each for each in run.records if each.outcome == "unsupported"]
    ours = [each for each in unsupported if each.reasons[0].startswith(STOPPED)]
    if ours:
        print_stderr(f"{ours[0].case}: {ours[0].reasons[0]}")
        return 3
    if any(record.outcome in FALLEN_SHORT for record in run.records):
        return 1
    if run.errors:
        raise SelectionError("some kinds of traffic were not served (see the errors above)")
    if not any(record.outcome in EXAMINED for record in run.records):
        raise SelectionError("nothing was judged; the reasons are above")
    return 0


def _results(runs: "Sequence[EngineRun]", log: Any) -> "tuple[list[ServedTraffic], list[str]]":
    """Serve the runs in a process of their own, and return what each gave, and errors of those that did not start.

    ``log``: a file for what vLLM prints.
    """
    from attncheck.harness.engine.traffic import ended_traffic

    served, errors = [], []
    with _lines_of_process(runs, log) as lines:
        for number, run in enumerate(runs, 1):
            began, environment = time.monotonic(), None
            found = next(lines, None)
            if found is not None and found.is_start:
                environment, found = found.environment, next(lines, None)
            if found is None:
                errors.append("vLLM cannot be imported, or its process ended")
                break
            if found.ended and environment is not None:
                found = ended_traffic(run, found.ended, environment, "\n".join(_last_lines(log)))
            if found.case is None:
                errors.append(f"{run.case_id}: vLLM did not start: {found.not_started or found.ended}")
            else:
                served.append(found)
            verdict = found.verdict or "not served"
            print_stderr(f"{number}/{len(runs)} {run.case_id}: {verdict}, {time.monotonic() - began:.1f} s")
    return served, errors


@contextmanager
def _lines_of_process(runs: "Sequence[EngineRun]", log: Any) -> "Iterator[Iterator[ServedTraffic]]":
    """Start the process that serves, and yield its lines as they come; end it on leaving."""
    from attncheck.harness.engine.traffic import ServedTraffic

    environment = _DEFAULTS | os.environ | {name: _DEFAULTS[name] for name in _ALWAYS}
    read_from, write_to = os.pipe()
    words = [sys.executable, "-m", "attncheck.harness.engine.traffic", str(write_to)]
    process = subprocess.Popen(  # noqa: S603 (this module)
        words,
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        env=environment,
        pass_fds=[write_to],
        text=True,
        start_new_session=True,
    )
    os.close(write_to)
    try:
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as stdin:  # it may have ended already
            stdin.write(json.dumps([run.model_dump() for run in runs]))
        with os.fdopen(read_from, encoding="utf-8") as pipe:
            yield (ServedTraffic.model_validate_json(line) for line in pipe)
    finally:
        _end_group(process)


def _end_group(process: "subprocess.Popen[str]") -> None:
    """End a process and its forks, and wait for it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_lines(log: Any) -> list[str]:
    """Return the last lines that vLLM printed."""
    log.seek(0)
    lines = [line.rstrip() for line in log if line.strip()]
    return lines[-_SHOWN_LINES:]
