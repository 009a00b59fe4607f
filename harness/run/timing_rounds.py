"""Rounds: which cases and checks each process of a backend gets, and in which order backends take turns.

The check ``timing`` runs in rounds, each in a fresh process of the backend, because timings from one process are
correlated. All other checks run once, before the rounds and in other processes, so that they do not disturb the
timings.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from attncheck.cases.model import Case
from attncheck.harness.run.plan import RunPlan
from attncheck.reports.run_file.timings import TIMING

Question = tuple[Case, tuple[str, ...]]
"""A case, and the checks to run on it; at least one."""

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class RoundQuestions:
    """The cases and checks of a backend in one round; ``round`` goes into its records."""

    questions: tuple[Question, ...]
    round: int = 0


def untimed_questions(plan: RunPlan, ref: str) -> RoundQuestions:
    """Return all checks except ``timing`` for the cases of this backend."""
    cases = plan.examined_cases_of(ref)
    questions = ((case, tuple(name for name in plan.checks_left(ref, case) if name != TIMING)) for case in cases)
    return RoundQuestions(tuple((case, checks) for case, checks in questions if checks))


def timed_questions(plan: RunPlan, ref: str, number: int = 0, left_out: Collection[str] = ()) -> RoundQuestions:
    """Return the check ``timing`` for the cases of this backend, except those whose keys are in ``left_out``."""
    cases = (case for case in plan.examined_cases_of(ref) if case.key not in left_out)
    timed = (case for case in cases if TIMING in plan.checks_left(ref, case, number))
    return RoundQuestions(tuple((case, (TIMING,)) for case in timed), number)


def count_questions(plan: RunPlan, refs: Collection[str]) -> int:
    """Return how many times the whole run gives a case to a process of a backend."""
    once = sum(len(untimed_questions(plan, ref).questions) for ref in refs)
    return once + sum(
        len(timed_questions(plan, ref, number).questions) for ref in refs for number in range(plan.rounds)
    )


def rotated(items: Sequence[_Item], number: int) -> tuple[_Item, ...]:
    """Return ``items`` rotated by ``number``, so that a different item comes first in each round.

    >>> rotated("abc", 1), rotated("abc", 5)
    (('b', 'c', 'a'), ('c', 'a', 'b'))
    """
    first = number % len(items) if items else 0
    return (*items[first:], *items[:first])
