"""The order in which slots get the questions of a run."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from attncheck.cases.model import Case
from attncheck.harness.problem.sizes import needed_bytes
from attncheck.harness.run.outcomes import BackendDescription
from attncheck.harness.run.run import Costs
from attncheck.harness.run.selection import RunPlan, untimed_questions
from attncheck.harness.workers.pool import SMALL_BYTES
from attncheck.reference.spec import LayerSpec
from attncheck.reference.step_spec import CacheSpec

LOOK_EVERY_S = 0.2
"""Seconds after which a wait is begun again, to look whether help is needed, or whether a signal has arrived."""

_START_S = 5.0
"""Estimated seconds that one more process of a backend needs until its first case."""

_SAMPLE = 5
"""Number of cases of a backend from whose times those of the others are estimated."""


Group = tuple[str, LayerSpec, CacheSpec]
"""Key of questions that share one measured CUDA-graph level: reference of the backend, layer, cache."""


@dataclass(frozen=True)
class BackendQuestion:
    """A question to a backend: ``checks`` of ``case``. ``is_drawn``: the case is in no suite."""

    backend: BackendDescription
    case: Case
    checks: tuple[str, ...]
    is_drawn: bool = False

    @cached_property
    def group(self) -> Group | None:
        """Key that questions share if they share a CUDA-graph level; None if no level is measured."""
        if "cudagraph" not in self.checks:
            return None
        return (self.backend.ref, self.case.layer, self.case.cache.unplaced)

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


class Chosen(NamedTuple):
    """A backend for a slot. ``is_first``: no other slot is at work for it."""

    ref: str
    is_first: bool


class Schedule:
    """Hands out ``questions`` to slots, in threads, by index, the first ones first.

    One slot begins a backend. Once all are begun, other slots help where enough questions are left. A process measures
    a CUDA-graph level once, so the cases that share one stay in one slot. If the slots share one machine, only one case
    that needs much memory runs at a time. Slot 0 may begin a backend again that it failed to start, so that every
    question gets a record.
    """

    def __init__(
        self,
        questions: Sequence[BackendQuestion],
        clock: Callable[[], float] = time.monotonic,
        costs: Costs | None = None,
        *,
        shares_machine: bool = True,
    ) -> None:
        self._questions, self._clock, self._shares_machine = questions, clock, shares_machine
        self._cost_s = [each.cost(costs) if costs else None for each in questions]
        self._waiting: dict[str, list[int]] = {}
        for index, each in enumerate(questions):
            if each.backend.is_loaded:
                self._waiting.setdefault(each.backend.ref, []).append(index)
        self._num_due = sum(map(len, self._waiting.values()))
        self._began: dict[str, float] = {}
        self._slots: Counter[str] = Counter()
        self._over: Counter[str] = Counter()
        self._owners: dict[Group, int] = {}
        self._refused: set[tuple[str, int]] = set()
        self._large: int | None = None
        self._is_closed = False
        self._changed = threading.Condition()

    def choose(self, slot: int) -> Chosen | None:
        """Wait until there is a backend for ``slot``, and return it; return None if all questions are over."""
        with self._changed:
            while self._num_due and not self._is_closed:
                first = self._to_begin(slot)
                ref = first or self._to_help(slot)
                if ref is not None:
                    self._began.setdefault(ref, self._clock())
                    self._slots[ref] += 1
                    return Chosen(ref, first is not None)
                self._changed.wait(LOOK_EVERY_S)
            return None

    def take(self, ref: str, slot: int) -> int | None:
        """Take the next question to the backend ``ref``, or return None if none is left for ``slot``.

        Waits as long as the next ones need much memory, and such a case is under examination.
        """
        with self._changed:
            while (indices := self._open(ref, slot)) and not self._is_closed:
                for index in indices:
                    is_large = self._shares_machine and needed_bytes(self._questions[index].case) > SMALL_BYTES
                    if not is_large or self._large is None:
                        self._waiting[ref].remove(index)
                        self._large = index if is_large else self._large
                        if (group := self._questions[index].group) is not None:
                            self._owners[group] = slot
                        return index
                self._changed.wait()
            return None

    def finish(self, index: int, *, is_over: bool = True) -> None:
        """Count a question that was taken as examined; if it is not over, another slot may take it."""
        question = self._questions[index]
        with self._changed:
            self._large = None if self._large == index else self._large
            if is_over:
                self._over[question.backend.ref] += 1
                self._num_due -= 1
            else:
                self._waiting[question.backend.ref].insert(0, index)
            self._changed.notify_all()

    def leave(self, ref: str, slot: int, *, is_refused: bool = False) -> None:
        """Count ``slot`` as no longer at work for the backend ``ref``.

        Its process ends, so any slot may get its groups. ``is_refused``: its process could not be started; only slot 0
        may get the backend again.
        """
        with self._changed:
            self._owners = {group: owner for group, owner in self._owners.items() if (group[0], owner) != (ref, slot)}
            self._slots[ref] -= 1
            if not self._slots[ref]:
                del self._began[ref]  # another slot may begin it
            if is_refused:
                self._refused.add((ref, slot))
            self._changed.notify_all()

    def close(self) -> None:
        """Hand out nothing more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _to_begin(self, slot: int) -> str | None:
        due = (ref for ref, left in self._waiting.items() if left and ref not in self._began)
        return next((ref for ref in due if slot == 0 or (ref, slot) not in self._refused), None)

    def _to_help(self, slot: int) -> str | None:
        """Return a backend with enough questions left to justify starting one more process, or None.

        On a machine of its own, the process slows down no other one: one question is enough.
        """
        for ref, began in self._began.items():
            if (ref, slot) in self._refused:
                continue
            took = self._clock() - began
            over, slots = self._over[ref], self._slots[ref]
            left = self._open(ref, slot)
            if left and not self._shares_machine:
                return ref
            known = [cost for index in left if (cost := self._cost_s[index]) is not None]
            if len(known) >= _SAMPLE:
                each_s = sum(known) / len(known)
            elif over >= _SAMPLE or took >= 2 * _START_S:
                each_s = took * slots / (over + 1)
            else:
                continue
            if each_s * len(left) / (slots + 1) > _START_S:
                return ref
        return None

    def _open(self, ref: str, slot: int) -> list[int]:
        groups = {index: self._questions[index].group for index in self._waiting.get(ref, ())}
        return [index for index, group in groups.items() if group is None or self._owners.get(group, slot) == slot]
