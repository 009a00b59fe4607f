"""Shared by ``fuzz`` and ``shrink``: the backend's process, and writing and printing of small failures."""

import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer

from attncheck.cases.yaml_text import case_yaml
from attncheck.errors import unwritable
from attncheck.harness.cli.run_files import kept_folder
from attncheck.harness.cli.run_options import read_size
from attncheck.harness.fuzz.examination import BackendProcess
from attncheck.harness.fuzz.failures import Failure, SmallFailure
from attncheck.harness.fuzz.shrinking import size_in_words
from attncheck.harness.fuzz.stand_alone import write_stand_alone
from attncheck.harness.workers.memory_limits import MemoryLimits
from attncheck.harness.workers.passed_environment import read_patterns
from attncheck.harness.workers.time_limits import TimeLimits, read_limit
from attncheck.harness.workers.worker_pool import WorkerPool
from attncheck.harness.workers.worker_settings import WorkerSettings
from attncheck.reports.analysis.findings import stated_cause
from attncheck.reports.analysis.repro import assignments, repro_command
from attncheck.reports.run_file.records import OURSELVES, Errored, Failed


@contextmanager
def backend_process(
    ref: str,
    *,
    device: str | None,
    seed: int,
    case_timeout: float | None,
    memory_limit: str | None,
    pass_env: Sequence[str] | None,
) -> Iterator[BackendProcess]:
    """Yield a process of the backend with these options; end it on leaving."""
    limits = TimeLimits(read_limit("--case-timeout", case_timeout), math.inf)
    memory = MemoryLimits(read_size("--memory-limit", memory_limit), None)
    settings = WorkerSettings(limits, memory, read_patterns(pass_env or ()))
    with WorkerPool(settings=settings) as pool:
        yield BackendProcess(ref, pool, device=device, seed=seed)


def folder_for(output: Path | None, command: str) -> Path:
    """Create the folder for small failures, ``output`` or a new one among the kept runs, and return it.

    Raises:
        WriteError: the folder cannot be created.
    """
    folder = output or kept_folder() / f"{command}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(f"--output {folder}", error) from error
    return folder


def print_small(process: BackendProcess, failure: SmallFailure, folder: Path) -> int:
    """Write the small case and its stand-alone file, print how it was reduced, and return the exit code."""
    first, small, shrunk = failure.first, failure.small, failure.shrunk
    record = small.record
    typer.echo(f"\n{record.outcome}  {process.backend.name}  {record.check}: {small.case.description or first.way[2]}")
    typer.echo(f"  found: {size_in_words(first.case)}")
    if shrunk is None:
        typer.echo("  does not fail again by itself: it depends on the cases before it, or on chance")
    else:
        tried = f"{shrunk.tried} steps tried in {shrunk.seconds:.1f} s{'' if shrunk.is_finished else ', out of time'}"
        typer.echo(f"  small: {size_in_words(small.case)} ({tried})")
    if isinstance(record, Failed) and record.meaning:
        typer.echo(f"  {stated_cause(record)}")
    written = _write_case(small, folder)
    repeat = record.model_copy(update={"suite": str(written), "case_id": small.case.id})
    environment = process.backend.info.required_environment
    typer.echo(f"  repeat: {repro_command(repeat, environment=environment)}")
    answer = write_stand_alone(process, small, written.with_suffix(".py"))
    if answer.written:
        words = f"with {answer.needs}" if answer.needs else "without attncheck"
        typer.echo(f"  {words}: {assignments(environment)}python {written.with_suffix('.py')}")
    else:
        typer.echo(f"  no stand-alone file: {answer.reason}")
    is_ours = isinstance(record, Errored) and record.stage == OURSELVES
    return 3 if is_ours else 1


def _write_case(failure: Failure, folder: Path) -> Path:
    path = folder / f"{failure.record.check}-{failure.case.hash}.yaml"
    try:
        path.write_text(case_yaml(failure.case), encoding="utf-8")
    except OSError as error:
        raise unwritable(str(path), error) from error
    return path
