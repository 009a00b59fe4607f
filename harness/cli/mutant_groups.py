"""Examines mutants in groups; each group has its own process and shares problems and truths. Loads no torch."""

import itertools
import multiprocessing
import os
import threading
from collections.abc import Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from attncheck.backends.mutants.catalogue import Mutant
from attncheck.errors import BackendUnavailableError, QuestionError
from attncheck.harness.cli.run_options import RunOptions
from attncheck.reports.run_file.store import Run, read_run

T = TypeVar("T")

_MOST = 10
"""Maximum mutants in a group. Larger groups share the start of a process, smaller ones balance the load."""


@dataclass(frozen=True)
class ExaminedGroup:
    """Backends or providers that one process examines.

    ``are_right``: whether they are the correct bases of mutants. ``checks``, ``keys``: replace those of the run's
    options, unless empty. ``run``: the result, or None if there is none because of ``reason``.
    """

    refs: tuple[str, ...]
    are_providers: bool = False
    are_right: bool = False
    checks: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    run: Run | None = None
    reason: str = ""


def groups_of(mutants: Sequence[Mutant]) -> list[ExaminedGroup]:
    """Return ``mutants`` grouped by base, and each base as a group of its own."""
    groups: list[ExaminedGroup] = []
    for _, found in itertools.groupby(sorted(mutants, key=lambda mutant: mutant.base), lambda mutant: mutant.base):
        same = list(found)
        are_providers = same[0].is_provider
        count = -(-len(same) // _MOST)
        groups += [ExaminedGroup(tuple(each.ref for each in same[n::count]), are_providers) for n in range(count)]
        groups.append(ExaminedGroup((same[0].base_ref,), are_providers, are_right=True))
    return groups


def examine_groups(
    groups: Sequence[ExaminedGroup], options: RunOptions, jobs: int, folder: Path
) -> Iterator[ExaminedGroup]:
    """Examine ``groups`` as ``options`` specifies, in ``jobs`` processes at once, and yield each when it is finished.

    ``folder``: an empty folder for run files.
    """
    stopped = threading.Event()
    with ThreadPoolExecutor(jobs) as pool:
        try:
            tasks = [pool.submit(_examined, group, options, folder / str(n), stopped) for n, group in enumerate(groups)]
            for future in as_completed(tasks):
                yield from future.result()
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.kill()
            raise


def _examined(group: ExaminedGroup, options: RunOptions, files: Path, stopped: threading.Event) -> list[ExaminedGroup]:
    """Examine the group in a process of its own, with run files in ``files``, and return the result.

    If the process dies, each member is examined alone. If a member alone kills its process, it is examined as
    `attncheck run` does, which records the crash. If ``stopped`` is set, BrokenProcessPool is raised instead.
    """
    files.mkdir()
    run_options = _options_of(group, options, files / "run.jsonl")
    try:
        reason = _apart(run_options)
    except BrokenProcessPool:
        if stopped.is_set():
            raise
        if len(group.refs) > 1:
            alone = [replace(group, refs=(ref,)) for ref in group.refs]
            return [part for n, each in enumerate(alone) for part in _examined(each, options, files / str(n), stopped)]
        run_options = replace(run_options, in_process=False, output=files / "ended.jsonl")
        reason = _apart(run_options)
    output = None if reason else run_options.output
    return [replace(group, run=None if output is None else read_run(output), reason=reason)]


def _apart(options: RunOptions) -> str:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(_examine_silently, options).result()


def joined(runs: Iterable[Run]) -> Run | None:
    """Return one run with all records of ``runs``, or None if there are no runs."""
    parts = list(runs)
    if not parts:
        return None
    headers = [run.header for run in parts]
    header = headers[0].model_copy(
        update={
            "suites": _unique((each.name, each) for header in headers for each in header.suites),
            "cases": _unique(((each.suite, each.id), each) for header in headers for each in header.cases),
            "checks": _unique((each, each) for header in headers for each in header.checks),
            "backends": _unique((each.ref, each) for header in headers for each in header.backends),
            "notes": _unique((each, each) for header in headers for each in header.notes),
        }
    )
    return Run("mutants", header, tuple(record for run in parts for record in run.records))


def _unique(pairs: Iterable[tuple[Hashable, T]]) -> tuple[T, ...]:
    return tuple(dict(pairs).values())


def _options_of(group: ExaminedGroup, options: RunOptions, output: Path) -> RunOptions:
    return replace(
        options,
        backends=() if group.are_providers else group.refs,
        providers=group.refs if group.are_providers else (),
        checks=group.checks or options.checks,
        keys=group.keys or options.keys,
        until_failure="" if group.are_right else options.until_failure,
        in_process=True,
        output=output,
    )


def _examine_silently(options: RunOptions) -> str:
    """Call :func:`_examine` in a fresh process, and discard what mutants print."""
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        for stream in (1, 2):
            os.dup2(nowhere.fileno(), stream)
    from attncheck.backends.interpreter import required_environment
    from attncheck.harness.run.backend_choice import choose_device

    os.environ.update(required_environment(choose_device(options.device)))  # must be set before Triton is imported
    return _examine(options)


def _examine(options: RunOptions) -> str:
    """Run the examination; return why it is impossible, or an empty string if it was done."""
    from attncheck.harness.cli.run_execution import execute_run

    try:
        execute_run(options, lambda _header: None, see=lambda _record: None)
    except (QuestionError, BackendUnavailableError) as error:
        return str(error)
    return ""
