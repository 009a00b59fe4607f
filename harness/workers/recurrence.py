"""Find out whether a case that ended its process ends it again: always, only after earlier cases, or not at all.

A kernel may corrupt memory long before its process dies, so that a later case seems to be the cause.
"""

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Literal

from attncheck.harness.workers.protocol import Examine
from attncheck.harness.workers.worker_process import WorkerProcess
from attncheck.reports.run_file.records import Record

_BUDGET_S = 600.0
"""Seconds after which the search among the earlier cases stops."""


@dataclass(frozen=True)
class Replayed:
    """The result of sending requests to a new process.

    ``has_ended``: the last one ended it. ``records``: of the last one.
    """

    has_ended: bool
    records: tuple[Record, ...] = ()


Replay = Callable[[Sequence[Examine]], Generator[WorkerProcess | None, None, Replayed]]
"""Sends requests to a new process, one by one; yields as :data:`~attncheck.harness.workers.requesting.Work` does."""


@dataclass(frozen=True)
class Recurrence:
    """``word`` and ``after``: as in records. ``records``: of the first try; empty if it ended the process, too."""

    word: Literal["always", "after", "flaky"]
    after: str = ""
    records: tuple[Record, ...] = ()


def find_recurrence(
    replay: Replay,
    request: Examine,
    earlier: Sequence[Examine],
    clock: Callable[[], float] = time.monotonic,
) -> Generator[WorkerProcess | None, None, Recurrence]:
    """Try the case again, first alone in a new process; if that succeeds, after the earlier cases.

    ``earlier``: the known requests to the process that ended before ``request``. If all of them together make a process
    end again, a bisection searches for the single one that does so.

    Raises:
        QuestionError, OSError: from ``replay``, if no process can be started.
    """
    deadline = clock() + _BUDGET_S
    first = yield from replay([request])
    if first.has_ended:
        return Recurrence("always")
    suspects = list(earlier)
    is_behind = bool(suspects) and (yield from replay([*suspects, request])).has_ended
    if not is_behind:
        return Recurrence("flaky", records=first.records)
    is_shown = True
    while len(suspects) > 1 and clock() < deadline:
        middle = len(suspects) // 2
        is_shown = (yield from replay([*suspects[middle:], request])).has_ended
        suspects = suspects[middle:] if is_shown else suspects[:middle]
    if len(suspects) == 1 and not is_shown:  # the other half caused no end, which does not prove that this case does
        is_shown = (yield from replay([*suspects, request])).has_ended
    after = suspects[0].case if len(suspects) == 1 and is_shown else ""
    return Recurrence("after", after, first.records)
