"""A question that was put in several rounds, each in a process of its own, is one question: its worst outcome counts.

Without rounds, records go through untouched. Must not know: what was asked, how records are shown.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from attncheck.reports.run_file.records import BUDGET_SHARE, FALLEN_SHORT, Failed, Outcome, Passed, Record, RecordKey

_WORST_FIRST: tuple[Outcome, ...] = (
    "crashed",
    "errored",
    "failed",
    "xpassed",
    "xfailed",
    "unavailable",
    "unsupported",
    "passed",
)


@dataclass(frozen=True)
class Question:
    """One check of one case of one backend. ``record``: the worst of its rounds, the first of those.

    ``rounds``: how often it was asked, ``short``: in how many of them it fell short.
    """

    record: Record
    rounds: int
    short: int


def questions(records: Sequence[Record]) -> tuple[Question, ...]:
    """The records of each question together, in the order in which questions first come."""
    if not any(record.round for record in records):
        return tuple(Question(record, 1, int(record.outcome in FALLEN_SHORT)) for record in records)
    asked: dict[RecordKey, list[Record]] = {}
    for record in records:
        asked.setdefault(record.key._replace(round=0), []).append(record)
    return tuple(
        Question(min(members, key=_badness), len(members), sum(each.outcome in FALLEN_SHORT for each in members))
        for members in asked.values()
    )


def _badness(record: Record) -> tuple[int, float]:
    """Smaller is worse: by outcome, then by the share of the error budget that was used."""
    share = float(record.figures.get(BUDGET_SHARE, 0.0)) if isinstance(record, Passed | Failed) else 0.0
    return _WORST_FIRST.index(record.outcome), -math.inf if math.isnan(share) else -share
