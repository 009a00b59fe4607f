"""A check that was made in several rounds, each in a process of its own, counts once: with its worst outcome.

A run without rounds keeps all its records.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from attncheck.reports.run_file.record_base import RecordKey
from attncheck.reports.run_file.records import BUDGET_SHARE, FALLEN_SHORT, Failed, Outcome, Passed, Record

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


@dataclass(frozen=True)
class WorstRound:
    """One check of one case of one backend. ``record``: the worst of its rounds, the first of those.

    ``rounds``: how often it was made, ``short``: in how many of them it fell short.
    """

    record: Record
    rounds: int
    short: int


def worst_rounds(records: Sequence[Record]) -> tuple[WorstRound, ...]:
    """The worst round of each check of each case and backend, in the order in which these first come."""
    if not any(record.round for record in records):
        return tuple(WorstRound(record, 1, int(record.outcome in FALLEN_SHORT)) for record in records)
    asked: dict[RecordKey, list[Record]] = {}
    for record in records:
        asked.setdefault(record.key._replace(round=0), []).append(record)
    return tuple(
        WorstRound(min(members, key=_badness), len(members), sum(each.outcome in FALLEN_SHORT for each in members))
        for members in asked.values()
    )


def _badness(record: Record) -> tuple[int, float]:
    """Smaller is worse: by outcome, then by the share of the error budget that was used."""
    share = float(record.figures.get(BUDGET_SHARE, 0.0)) if isinstance(record, Passed | Failed) else 0.0
    return _WORST_FIRST.index(record.outcome), -math.inf if math.isnan(share) else -share
