"""The order in which the questions of a run go to lanes, each of which has one process at work."""

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from attncheck.cases.model import Case
from attncheck.harness.problem.memory_estimate import needed_bytes
from attncheck.harness.run.backend_description import BackendDescription
from attncheck.harness.run.plan import RunPlan
from attncheck.harness.run.timing_rounds import untimed_questions

_SMALL = 2**30
"""Bytes up to which a case may run beside one that needs more."""

_START_S = 5.0
"""Estimated seconds that one more process of a backend needs until its first case."""

_SAMPLE = 5
"""Number of cases of a backend from whose times those of the others are estimated."""

Costs = Mapping[tuple[str, str, str], float]
"""Seconds that a check took in earlier runs, by reference of the backend, hash of the case and check."""


@dataclass(frozen=True)
class BackendQuestion:
    """A question to a backend: ``checks`` of ``case``. ``is_drawn``: the case is in no suite."""

    backend: BackendDescription
    case: Case
    checks: tuple[str, ...]
    is_drawn: bool = False

    @cached_property
    def group(self) -> Hashable | None:
        """Key that questions share if they share a CUDA-graph level; None if no level is measured."""
        if "cudagraph" not in self.checks:
            return None
        return (self.backend.ref, self.case.layer, replace(self.case.cache, num_blocks=None, first_block=None))

    def cost(self, costs: Costs) -> float | None:
        """Return the seconds that the checks took in earlier runs, or None if one of them was not made."""
        each = [costs.get((self.backend.ref, self.case.hash, check)) for check in self.checks]
        return None if None in each else sum(filter(None, each))


def untimed(plan: RunPlan, backends: Iterable[BackendDescription]) -> list[BackendQuestion]:
    """Return the questions of ``plan`` except timings, by backend, then by case."""
    return [
        BackendQuestion(backend, case, checks)
        for backend in backends
        for case, checks in untimed_questions(plan, backend.ref).questions
    ]


class Schedule:
    """Hands out ``questions`` by index, the first ones first.

    One lane begins a backend. Once all are begun, other lanes help where enough questions are left. A process measures
    a CUDA-graph level once, so the cases that share one stay in one lane. Only one case that needs much memory runs at
    a time.
    """

    def __init__(
        self,
        questions: Sequence[BackendQuestion],
        clock: Callable[[], float] = time.monotonic,
        costs: Costs | None = None,
    ) -> None:
        self._questions, self._clock = questions, clock
        self._cost_s = [each.cost(costs) if costs else None for each in questions]
        self._waiting: dict[str, list[int]] = {}
        for index, each in enumerate(questions):
            if each.backend.is_loaded:
                self._waiting.setdefault(each.backend.ref, []).append(index)
        self._began: dict[str, float] = {}
        self._lanes: Counter[str] = Counter()
        self._over: Counter[str] = Counter()
        self._owners: dict[Hashable, int] = {}
        self._refused: set[tuple[str, int]] = set()
        self._large: BackendQuestion | None = None

    def to_begin(self, lane: int) -> str | None:
        """Return the first backend that no lane has begun and ``lane`` may begin, or None."""
        waiting = (ref for ref, left in self._waiting.items() if left and (ref, lane) not in self._refused)
        return next((ref for ref in waiting if ref not in self._began), None)

    def begin(self, ref: str) -> None:
        """Count one more lane as at work for the backend ``ref``."""
        self._began.setdefault(ref, self._clock())
        self._lanes[ref] += 1

    def leave(self, ref: str) -> None:
        """Count one lane less as at work for the backend ``ref``."""
        self._lanes[ref] -= 1

    def to_help(self, lane: int) -> str | None:
        """Return a backend with enough questions left to justify starting one more process, or None."""
        for ref, began in self._began.items():
            took, over, lanes = self._clock() - began, self._over[ref], self._lanes[ref]
            if (ref, lane) in self._refused or not lanes:
                continue
            left = self._open(ref, lane)
            known = [cost for index in left if (cost := self._cost_s[index]) is not None]
            if len(known) >= _SAMPLE:
                each_s = sum(known) / len(known)
            elif over >= _SAMPLE or took >= 2 * _START_S:
                each_s = took * lanes / (over + 1)
            else:
                continue
            if each_s * len(left) / (lanes + 1) > _START_S:
                return ref
        return None

    def has_left(self, ref: str, lane: int) -> bool:
        """Return whether ``lane`` may take one more question of the backend ``ref``, now or later."""
        return bool(self._open(ref, lane))

    def left(self, ref: str) -> list[BackendQuestion]:
        """Return the questions to the backend ``ref`` that no lane has taken."""
        return [self._questions[index] for index in self._waiting.get(ref, ())]

    def take(self, ref: str, lane: int) -> int | None:
        """Take the next question to the backend ``ref``; return None if there is none, or it must wait for memory."""
        for index in self._open(ref, lane):
            question = self._questions[index]
            is_large = needed_bytes(question.case) > _SMALL
            if is_large and self._large is not None:
                continue
            self._waiting[ref].remove(index)
            if is_large:
                self._large = question
            if (group := question.group) is not None:
                self._owners[group] = lane
            return index
        return None

    def finish(self, question: BackendQuestion) -> None:
        """Count a question that was taken as examined."""
        self._over[question.backend.ref] += 1
        if self._large is question:
            self._large = None

    def refuse(self, ref: str, lane: int) -> None:
        """Exclude ``lane`` from the backend ``ref``; if no other lane is at work for it, another one may begin it."""
        self._refused.add((ref, lane))
        self.leave(ref)
        if not self._lanes[ref]:
            del self._began[ref]

    def _open(self, ref: str, lane: int) -> list[int]:
        """Return the remaining questions that are not reserved for another lane."""
        waiting = self._waiting.get(ref, ())
        return [index for index in waiting if self._owners.get(self._questions[index].group, lane) == lane]
