"""Rounds: what each process of a backend is asked, and which backend's turn it is.

The check ``timing`` is made in rounds, in a fresh process of each backend every time, since the times of one process
share its luck. All other checks are made once, before, in processes of their own: every time is then that of a process
in which nothing else was done.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from attncheck.cases.model import Case
from attncheck.harness.run.plan import RunPlan
from attncheck.reports.run_file.timings import TIMING

Question = tuple[Case, tuple[str, ...]]
"""A case, and the checks to make of it; there is at least one."""

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class RoundQuestions:
    """What a backend is asked in one round; its records say which."""

    questions: tuple[Question, ...]
    round: int = 0


def untimed_questions(plan: RunPlan, ref: str) -> RoundQuestions:
    """All checks but ``timing`` of the cases that the backend of this reference is asked."""
    cases = plan.examined_cases_of(ref)
    asked = ((case, tuple(name for name in plan.checks_left(ref, case) if name != TIMING)) for case in cases)
    return RoundQuestions(tuple((case, checks) for case, checks in asked if checks))


def timed_questions(plan: RunPlan, ref: str, number: int = 0, left_out: Collection[str] = ()) -> RoundQuestions:
    """The check ``timing`` of the cases that the backend is asked, but for those whose keys are ``left_out``."""
    cases = (case for case in plan.examined_cases_of(ref) if case.key not in left_out)
    asked = (case for case in cases if TIMING in plan.checks_left(ref, case, number))
    return RoundQuestions(tuple((case, (TIMING,)) for case in asked), number)


def count_questions(plan: RunPlan, refs: Collection[str]) -> int:
    """How often a case is put to a backend over the whole run; each backend has processes of its own."""
    once = sum(len(untimed_questions(plan, ref).questions) for ref in refs)
    return once + sum(
        len(timed_questions(plan, ref, number).questions) for ref in refs for number in range(plan.rounds)
    )


def rotated(items: Sequence[_Item], number: int) -> tuple[_Item, ...]:
    """``items`` as they come in a round: each round begins with the next one, so that none is always first.

    >>> rotated("abc", 1), rotated("abc", 5)
    (('b', 'c', 'a'), ('c', 'a', 'b'))
    """
    first = number % len(items) if items else 0
    return (*items[first:], *items[:first])
