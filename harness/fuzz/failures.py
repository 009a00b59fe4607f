"""Finds failures of drawn and recorded cases, distinguishes them and shrinks them."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count

from attncheck.cases.model import Case
from attncheck.harness.fuzz.axes import few_and_small
from attncheck.harness.fuzz.constants import constants_of
from attncheck.harness.fuzz.drawing import SUITE, Lengths
from attncheck.harness.fuzz.examination import BackendProcess, ExaminedCase
from attncheck.harness.fuzz.search import DrawnQuestion, declared_axes, questions
from attncheck.harness.fuzz.shrinking import Shrunk, shrink
from attncheck.reports.run_file.records import FALLEN_SHORT, Errored, Failed, Record

_INTERPRETED_KEYS = 96
"""Maximum keys of a batch for interpreted kernels."""


@dataclass(frozen=True)
class Failure:
    """A case, and the first of its records that failed."""

    case: Case
    record: Record

    @property
    def way(self) -> tuple[str, str, str]:
        """How it failed; failures that have this in common count as the same fault."""
        record = self.record
        return record.check, record.outcome, getattr(record, "finding", "")


@dataclass(frozen=True)
class SmallFailure:
    """A failure after shrinking: ``first`` as found, ``small`` with the smallest case and its record.

    ``shrunk``: how it was reduced, or None if the case does not fail again by itself and is unchanged.
    """

    first: Failure
    small: Failure
    shrunk: Shrunk | None


def search_failures(
    process: BackendProcess,
    *,
    seed: int,
    budget_s: float,
    checks: tuple[str, ...] | None,
    most: int,
    see: Callable[[DrawnQuestion, ExaminedCase], None],
) -> Iterator[Failure]:
    """Draw cases for ``budget_s`` seconds and yield the first failure of each kind, at most ``most`` of them.

    ``see`` is called with each case and its result. The time the caller spends on a failure does not count.

    Raises:
        MissingExtraError: hypothesis is not installed.
    """
    constants = constants_of(process.backend.ref)
    axes, lengths = declared_axes(process.reasons_against, constants), Lengths(constants)
    if process.backend.default_suite == "interpreted":
        axes = replace(axes, declared=few_and_small(axes.declared))
        lengths = Lengths(tuple(each for each in constants if each <= _INTERPRETED_KEYS), _INTERPRETED_KEYS)
    ends, ways = time.monotonic() + budget_s, set[tuple[str, str, str]]()
    for question in questions(axes, process.reasons_against, lengths, seed, checks):
        if time.monotonic() > ends or len(ways) >= most:
            return
        examined = process.examine(question.case, question.checks)
        see(question, examined)
        short = next((record for record in examined.records if record.outcome in FALLEN_SHORT), None)
        if short is not None:
            failure = Failure(question.case, short)
            if failure.way not in ways:
                ways.add(failure.way)
                paused = time.monotonic()
                yield failure
                ends += time.monotonic() - paused


class Shrinker:
    """Shrinks failures in one process; ``limit_s``: time limit for each, in seconds."""

    def __init__(self, process: BackendProcess, limit_s: float) -> None:
        self._process, self._limit_s = process, limit_s
        self._numbers = count(1)

    def make_small(self, failure: Failure) -> SmallFailure:
        """Shrink the case of ``failure`` as long as it fails in the same way, running only that check.

        The finding of a wrong result may change in a smaller case. So a second pass compares only check and outcome.
        """
        check = failure.record.check
        alone = replace(failure.case, suite=SUITE, checks=(check,), description="", notes=())
        latest = self._again(alone, failure, is_same_cause=True)
        if latest is None:
            return SmallFailure(failure, failure, None)
        first, latest = self._shrunk(alone, latest, failure, is_same_cause=True)
        second = first
        if isinstance(failure.record, Failed):
            second, latest = self._shrunk(first.case, latest, failure, is_same_cause=False)
            second = replace(second, tried=first.tried + second.tried, seconds=first.seconds + second.seconds)
        small = replace(second.case, id=f"{check}-{second.case.hash}", description=_summary(latest))
        return SmallFailure(failure, Failure(small, latest), second)

    def _shrunk(self, case: Case, record: Record, failure: Failure, *, is_same_cause: bool) -> tuple[Shrunk, Record]:
        """Shrink ``case``, which gave ``record``; return the result and the record of the smallest case."""
        latest = record

        def fails(candidate: Case) -> bool:
            nonlocal latest
            again = self._again(candidate, failure, is_same_cause=is_same_cause)
            latest = again or latest
            return again is not None

        limit_s = self._limit_s / 2 if isinstance(record, Failed) else self._limit_s
        return shrink(case, fails, limit_s=limit_s), latest

    def _again(self, case: Case, failure: Failure, *, is_same_cause: bool) -> Record | None:
        """Return the record of ``case`` if it fails as ``failure`` did, else None."""
        named = replace(case, id=f"shrink-{next(self._numbers)}")
        for record in self._process.examine(named, (failure.record.check,)).records:
            way = Failure(named, record).way
            if way == failure.way or (way[:2] == failure.way[:2] and not is_same_cause):
                return record
        return None


def _summary(record: Record) -> str:
    if isinstance(record, Failed):
        return record.summary
    if isinstance(record, Errored):
        return f"{record.error_type} in {record.stage}: {next(iter(record.message.splitlines()), '')}"
    return f"{record.outcome}: {getattr(record, 'cause', '')}"
