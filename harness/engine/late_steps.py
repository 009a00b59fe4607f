"""Delays a step until the tokens of the steps before it are known, as async scheduling needs.

With async scheduling, the engine starts a step before it has the tokens that the step before sampled. They are on the
device, and so is the number of drafts that were accepted. Such a step is copied, and observed when the tokens arrive.
"""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from torch import Tensor

from attncheck.harness.engine.events import ContinuedRequest, StepPlan

Sampled = Mapping[str, tuple[int, ...]]
"""The sampled tokens of each request of a step."""


class StepObserver(Protocol):
    """The methods of ``EngineObserver`` that are called in each step."""

    def step_begins(self, plan: StepPlan) -> None: ...
    def inputs(self, request_ids: Sequence[str], input_ids: Tensor, positions: Tensor) -> None: ...
    def layer_rows(
        self,
        layer: str,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        output: Tensor,
        kv_cache: Tensor | None = None,
    ) -> None: ...
    def step_ends(self, sampled: Sampled) -> None: ...
    def request_finished(self, request_id: str) -> None: ...


class _Inputs(NamedTuple):
    request_ids: tuple[str, ...]
    input_ids: Tensor
    positions: Tensor


class _LayerRows(NamedTuple):
    layer: str
    query: Tensor
    key: Tensor | None
    value: Tensor | None
    output: Tensor


@dataclass
class _Step:
    """A step whose tokens are not known yet. ``before``: the steps whose tokens its plan assumes to be accepted."""

    plan: StepPlan
    before: tuple["_Step", ...]
    finished: list[str] = field(default_factory=list)
    inputs: _Inputs | None = None
    layers: list[_LayerRows] = field(default_factory=list)
    num_rejected: dict[str, int] = field(default_factory=dict)
    is_observed: bool = False


class LateSteps:
    """Passes each step to an observer, once the tokens of all earlier steps are known.

    A step that begins when they are known is passed on at once: without async scheduling, each is. The pages of a late
    step are not compared, since the next step may have written them when its rows are observed.
    """

    def __init__(self, observer: StepObserver) -> None:
        self._observer = observer
        self._steps: deque[_Step] = deque()
        self._lock = threading.RLock()  # a worker process reads sampled tokens in a thread of its own

    def request_finished(self, request_id: str) -> None:
        """Drop a request, after the steps whose tokens are not known yet: it may be in them."""
        with self._lock:
            if self._steps:
                self._steps[-1].finished.append(request_id)
            else:
                self._observer.request_finished(request_id)

    def step_begins(self, plan: StepPlan) -> None:
        """Take the plan of the next step."""
        with self._lock:
            step = _Step(plan, before=tuple(self._steps))
            self._steps.append(step)
            if not step.before:
                self._observe(step)

    def inputs(self, request_ids: Sequence[str], input_ids: Tensor, positions: Tensor) -> None:
        """Take what the model is given in the step that began last."""
        with self._lock:
            step = self._steps[-1]
            if step.is_observed:
                self._observer.inputs(request_ids, input_ids, positions)
                return
            num_rows = sum(step.plan.num_scheduled_tokens.values())
            step.inputs = _Inputs(tuple(request_ids), input_ids[:num_rows].clone(), positions[:num_rows].clone())

    def layer_rows(
        self,
        layer: str,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        output: Tensor,
        kv_cache: Tensor | None = None,
    ) -> None:
        """Take the arguments and the output of a layer in the step that began last."""
        with self._lock:
            if not self._steps or self._steps[-1].is_observed:
                self._observer.layer_rows(layer, query, key, value, output, kv_cache)
                return
            step = self._steps[-1]
            num_rows = sum(step.plan.num_scheduled_tokens.values())
            copies = (None if rows is None else rows[:num_rows].clone() for rows in (key, value))
            step.layers.append(
                _LayerRows(layer, query[:num_rows].clone(), *copies, output[:num_rows].clone())
            )

    def step_ends(self, sampled: Sampled) -> None:
        """Take the sampled tokens of the oldest step that still lacks them, and observe the next one."""
        with self._lock:
            step = self._steps.popleft()
            step.num_rejected = _num_rejected(step.plan, sampled)
            self._observer.step_ends(sampled)
            for request_id in step.finished:
                self._observer.request_finished(request_id)
            if self._steps:
                self._observe(self._steps[0])

    def _observe(self, step: _Step) -> None:
        """Pass on what was copied of a step; what follows of it is passed on at once."""
        step.is_observed = True
        plan = _corrected_plan(step)
        step.before = ()
        self._observer.step_begins(plan)
        if step.inputs is not None:
            self._observer.inputs(*step.inputs)
        for rows in step.layers:
            self._observer.layer_rows(*rows)
        step.layers.clear()


def _num_rejected(plan: StepPlan, sampled: Sampled) -> dict[str, int]:
    """Return how many drafts of each request were rejected: one token more than the accepted drafts is sampled."""
    return {
        request_id: len(drafts) + 1 - len(sampled[request_id])
        for request_id, drafts in plan.drafts.items()
        if sampled.get(request_id)
    }


def _corrected_plan(step: _Step) -> StepPlan:
    """Return the plan with what the scheduler could not know: accepted counts, and the drafts that are on the device.

    The scheduler assumes that every draft is accepted, and writes -1 for each draft. Which tokens these are is read
    from the inputs, so the token of a draft is not checked.
    """
    rejected: dict[str, int] = {}
    for earlier in step.before:
        for request_id, number in earlier.num_rejected.items():
            rejected[request_id] = rejected.get(request_id, 0) + number
    continued = tuple(_less_computed(request, rejected.get(request.request_id, 0)) for request in step.plan.continued)
    return replace(step.plan, continued=continued, drafts=_given_drafts(step))


def _less_computed(request: ContinuedRequest, number: int) -> ContinuedRequest:
    return replace(request, num_computed_tokens=request.num_computed_tokens - number) if number else request


def _given_drafts(step: _Step) -> dict[str, tuple[int, ...]]:
    drafts = dict(step.plan.drafts)
    if step.inputs is None or not drafts:
        return drafts
    given = step.inputs.input_ids.tolist()
    end = 0
    for request_id in step.inputs.request_ids:
        end += step.plan.num_scheduled_tokens[request_id]
        own = drafts.get(request_id)
        if own and -1 in own:
            drafts[request_id] = tuple(given[end - len(own) : end])
    return drafts
