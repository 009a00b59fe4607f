"""Examines mutants in groups, each in a process of its own in which they share problems and truths. Loads no torch."""

import itertools
import multiprocessing
import os
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
"""Mutants of a group: more share the start of a process, fewer keep all processes at work to the end."""

RIGHT_UTILITIES = "attncheck.reference"
"""The provider that mutants of metadata utilities are without their fault."""


@dataclass(frozen=True)
class ExaminedGroup:
    """Backends or providers that one process examines. ``are_right``: they are the bases of mutants.

    ``run``: what was found; None: nothing, for ``reason``.
    """

    refs: tuple[str, ...]
    are_providers: bool = False
    are_right: bool = False
    run: Run | None = None
    reason: str = ""


def groups_of(mutants: Sequence[Mutant]) -> list[ExaminedGroup]:
    """Return the groups of ``mutants``, by their bases, and of the bases, each alone."""
    groups: list[ExaminedGroup] = []
    for base, found in itertools.groupby(sorted(mutants, key=lambda mutant: mutant.base), lambda mutant: mutant.base):
        same = list(found)
        are_providers = same[0].is_provider
        count = -(-len(same) // _MOST)
        groups += [ExaminedGroup(tuple(each.ref for each in same[n::count]), are_providers) for n in range(count)]
        groups.append(ExaminedGroup((RIGHT_UTILITIES if are_providers else base,), are_providers, are_right=True))
    return groups


def examine_groups(
    groups: Sequence[ExaminedGroup], options: RunOptions, jobs: int, folder: Path
) -> Iterator[ExaminedGroup]:
    """Yield each of ``groups`` when it is examined as ``options`` says; ``jobs`` processes are at work at once.

    ``folder``: an empty one for run files.
    """
    with ThreadPoolExecutor(jobs) as pool:
        try:
            asked = [pool.submit(_examined, group, options, folder / str(n)) for n, group in enumerate(groups)]
            for future in as_completed(asked):
                yield from future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _examined(group: ExaminedGroup, options: RunOptions, files: Path) -> list[ExaminedGroup]:
    """Return the group with what a process of its own found, written to run files in ``files``.

    Where that process ends, its members are examined one by one. One whose own process ends is examined as `attncheck
    run` does, which makes a record of that.
    """
    files.mkdir()
    asked = _options_of(group, options, files / "run.jsonl")
    try:
        reason = _apart(asked)
    except BrokenProcessPool:
        if len(group.refs) > 1:
            alone = [replace(group, refs=(ref,)) for ref in group.refs]
            return [part for n, each in enumerate(alone) for part in _examined(each, options, files / str(n))]
        asked = replace(asked, in_process=False, output=files / "ended.jsonl")
        reason = _apart(asked)
    return [replace(group, run=None if reason or asked.output is None else read_run(asked.output), reason=reason)]


def _apart(options: RunOptions) -> str:
    """:func:`_examine` in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(_examine_silently, options).result()


def joined(runs: Iterable[Run]) -> Run | None:
    """Return one run of all that ``runs`` found; None: there are none."""
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
    """Return one value for each key."""
    return tuple(dict(pairs).values())


def _options_of(group: ExaminedGroup, options: RunOptions, output: Path) -> RunOptions:
    return replace(
        options,
        backends=() if group.are_providers else group.refs,
        providers=group.refs if group.are_providers else (),
        until_failure="" if group.are_right else options.until_failure,
        in_process=True,
        output=output,
    )


def _examine_silently(options: RunOptions) -> str:
    """:func:`_examine` in a fresh process, where what mutants print goes nowhere."""
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        for stream in (1, 2):
            os.dup2(nowhere.fileno(), stream)
    from attncheck.backends.interpreter import required_environment
    from attncheck.harness.run.backend_choice import choose_device

    os.environ.update(required_environment(choose_device(options.device)))  # before anything imports Triton
    return _examine(options)


def _examine(options: RunOptions) -> str:
    """Examine as ``options`` says, and return why that cannot be; empty: it was done."""
    from attncheck.harness.cli.run_execution import execute_run

    try:
        execute_run(options, lambda _header: None, see=lambda _record: None)
    except (QuestionError, BackendUnavailableError) as error:
        return str(error)
    return ""
