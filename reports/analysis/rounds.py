"""The worst outcome of a check that was repeated in several rounds, each in its own process."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from attncheck.reports.run_file.record_base import RecordKey
from attncheck.reports.run_file.records import FALLEN_SHORT, Outcome, Record, budget_share

_WORST_FIRST: tuple[Outcome, ...] = (
    "crashed",
    "timed_out",
    "errored",
    "failed",
    "xpassed",
    "xfailed",
    "unavailable",
    "unsupported",
    "passed",
)
_CHECK_OF = attrgetter(*(name for name in RecordKey._fields if name != "round"))


class WorstRound(NamedTuple):
    """One check of one case of one backend. ``record``: its worst round, the first of equally bad ones.

    ``rounds``: the number of rounds. ``short``: in how many of them the check did not pass.
    """

    record: Record
    rounds: int
    short: int


def worst_rounds(records: Sequence[Record]) -> tuple[WorstRound, ...]:
    """Return the worst round of each check of each case and backend, in the order of their first records.

    If no record has a round above 0, every record is returned, even one with an equal key.
    """
    if not any(record.round for record in records):
        return tuple(_worst([record]) for record in records)
    checks: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        checks.setdefault(_CHECK_OF(record), []).append(record)
    return tuple(map(_worst, checks.values()))


def _worst(members: Sequence[Record]) -> WorstRound:
    record = min(members, key=_badness) if len(members) > 1 else members[0]
    return WorstRound(record, len(members), sum(each.outcome in FALLEN_SHORT for each in members))


def _badness(record: Record) -> tuple[int, float]:
    """Return a sort key, worst first: the outcome, then the share of the error budget used."""
    return _WORST_FIRST.index(record.outcome), -(budget_share(record) or 0.0)
