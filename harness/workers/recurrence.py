"""Find out whether a case that ended its process does so again: first, behind the cases before it, or not at all.

A kernel may corrupt memory long before its process dies, so that a later case seems to be at fault.
"""

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Literal

from attncheck.harness.workers.protocol import Examine
from attncheck.harness.workers.worker_process import WorkerProcess
from attncheck.reports.run_file.records import Record

_BUDGET_S = 600.0
"""Seconds after which the cases before are not narrowed down any further."""


@dataclass(frozen=True)
class Replayed:
    """What a fresh process did with requests. ``has_ended``: the last one ended it; ``records``: of the last one."""

    has_ended: bool
    records: tuple[Record, ...] = ()


Replay = Callable[[Sequence[Examine]], Generator[WorkerProcess | None, None, Replayed]]
"""Sends requests to a fresh process, one by one; yields as :data:`~attncheck.harness.workers.asking.Work` does."""


@dataclass(frozen=True)
class Recurrence:
    """``word`` and ``after`` as records have them. ``records``: of the case asked first; empty if that ended, too."""

    word: Literal["always", "after", "flaky"]
    after: str = ""
    records: tuple[Record, ...] = ()


def find_recurrence(
    replay: Replay,
    asked: Examine,
    earlier: Sequence[Examine],
    clock: Callable[[], float] = time.monotonic,
) -> Generator[WorkerProcess | None, None, Recurrence]:
    """Ask the case again, first in a fresh process; if that goes well, behind the cases before it.

    ``earlier``: what the process that ended was asked before ``asked``, as far as it is known. If all of them together
    make it end again, a bisection looks for the one that does it alone.

    Raises:
        QuestionError, OSError: from ``replay``, where no process can be started.
    """
    deadline = clock() + _BUDGET_S
    first = yield from replay([asked])
    if first.has_ended:
        return Recurrence("always")
    suspects = list(earlier)
    is_behind = bool(suspects) and (yield from replay([*suspects, asked])).has_ended
    if not is_behind:
        return Recurrence("flaky", records=first.records)
    is_shown = True
    while len(suspects) > 1 and clock() < deadline:
        middle = len(suspects) // 2
        is_shown = (yield from replay([*suspects[middle:], asked])).has_ended
        suspects = suspects[middle:] if is_shown else suspects[:middle]
    if len(suspects) == 1 and not is_shown:  # the other half was found innocent, which does not prove this case guilty
        is_shown = (yield from replay([*suspects, asked])).has_ended
    after = suspects[0].case if len(suspects) == 1 and is_shown else ""
    return Recurrence("after", after, first.records)
