"""Delays a step until the tokens of the steps before it are known, as async scheduling needs."""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attncheck.harness.engine.events import ContinuedRequest, LayerRows, StepPlan
from attncheck.harness.engine.observer import EngineObserver

# With async scheduling, an engine starts a step before it has the tokens that the step before sampled. They are on the
# device, and so is the number of accepted drafts. Such a step is copied, and observed when the tokens arrive. Whether
# they arrive before or after the next step begins says nothing: its plan was made earlier, in another process.

Sampled = Mapping[str, tuple[int, ...]]
"""The sampled tokens of each request of a step."""


_Change = tuple[str, Callable[[], None]]


class _Inputs(NamedTuple):
    request_ids: tuple[str, ...]
    input_ids: Tensor | None
    positions: Tensor | None


class _Copy(NamedTuple):
    """Copies of some rows of a tensor."""

    num_rows: int
    rows: Tensor
    copied: Tensor

    def spread(self) -> Tensor:
        """Return a tensor of all rows, with zeros for those that were not copied."""
        spread = self.copied.new_zeros(self.num_rows, *self.copied.shape[1:])
        spread[self.rows] = self.copied
        return spread


class _LayerCopies(NamedTuple):
    layer: str
    query: _Copy
    key: _Copy | None
    value: _Copy | None
    output: _Copy


@dataclass
class LateStep:
    """A step whose sampled tokens are not known yet.

    before: the step before, if the plan may assume that all its drafts are accepted. requests: calls of the observer
    that must precede the step, with the ids of their requests. copied_rows: int64, those of requests that may be
    followed. is_observed: what follows of the step is passed on at once.
    """

    plan: StepPlan
    before: "LateStep | None"
    requests: list[_Change]
    inputs: _Inputs | None = None
    copied_rows: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    layers: list[_LayerCopies] = field(default_factory=list)
    num_rejected: dict[str, int] = field(default_factory=dict)
    is_observed: bool = False

    @property
    def is_ready(self) -> bool:
        """Whether its drafts are known: with async scheduling, they are read from the inputs."""
        return self.inputs is not None or not any(-1 in drafts for drafts in self.plan.drafts.values())


class LateSteps:
    """Passes each step to an observer once the tokens of all earlier steps are known.

    Without async scheduling, that is when it begins. With it (``is_async``), pages are not compared: the next step may
    have written them when a step is judged. ``judge_every``: that of the observer; what only a judged step needs is not
    copied for others. Rows of requests that are never followed are not copied.
    """

    def __init__(self, observer: EngineObserver, *, is_async: bool = False, judge_every: int = 1) -> None:
        self.is_async = is_async
        self._observer = observer
        self._judge_every = judge_every
        self._num_steps = 0
        self._steps: deque[LateStep] = deque()
        self._last: LateStep | None = None
        self._requests: list[_Change] = []
        self._is_in_forward = False
        self._stream: torch.cuda.Stream | None = None  # of the model, on which copies and kept keys are written
        self.lock = threading.RLock()  # a worker process takes sampled tokens in a thread of its own

    def request_added(self, request_id: str, *request: Any) -> None:
        """Take a new request, or one that is added again after the steps that have begun.

        What these compute does not depend on a new one. The observer is given it at once, and then states whether it is
        followed.
        """
        with self.lock:
            is_late = bool(self._steps) and (self._observer.knows(request_id) or self._is_changing(request_id))
            self._change(request_id, self._observer.request_added, *request, is_late=is_late)

    def request_finished(self, request_id: str) -> None:
        """Let the observer forget a request after the steps that have begun."""
        with self.lock:
            self._change(request_id, self._observer.request_finished, is_late=bool(self._steps))

    def _change(self, request_id: str, change: Callable[..., None], *arguments: Any, is_late: bool) -> None:
        if is_late:
            self._requests.append((request_id, partial(change, request_id, *arguments)))
        else:
            change(request_id, *arguments)

    def _is_changing(self, request_id: str) -> bool:
        """Return whether a request is added or ended before a step that is not observed yet."""
        waiting = [*self._requests, *(change for step in self._steps for change in step.requests)]
        return any(request_id == changed for changed, _ in waiting)

    def _rows_to_copy(self, step: LateStep, request_ids: Sequence[str]) -> Tensor:
        """Return the rows of requests that are followed, or may be when the step is observed."""
        spans, first = [torch.zeros(0, dtype=torch.int64)], 0
        for request_id in request_ids:
            end = first + step.plan.num_scheduled_tokens[request_id]
            if self._is_changing(request_id) or self._observer.may_follow(request_id):
                spans.append(torch.arange(first, end))
            first = end
        return torch.cat(spans)

    def step_begins(self, plan: StepPlan) -> LateStep:
        """Take the plan of the next step."""
        with self.lock:
            step = LateStep(plan, before=self._last if self.is_async else None, requests=self._requests)
            self._last = step
            self._requests = []
            self._steps.append(step)
            self._observe_first()
            return step

    def inputs(self, request_ids: Sequence[str], input_ids: Tensor | None, positions: Tensor | None) -> None:
        """Take what the model is given in the step that began last."""
        with self.lock:
            self._is_in_forward = True
            self._num_steps += 1
            self._stream = _stream_of(input_ids if positions is None else positions)
            step = self._steps[-1]
            if step.is_observed:
                self._observer.inputs(request_ids, input_ids, positions)
            else:
                copies = (None if given is None else given.clone() for given in (input_ids, positions))
                step.inputs = _Inputs(tuple(request_ids), *copies)
                step.copied_rows = self._rows_to_copy(step, request_ids)
                self._observe_first()

    def layer_rows(self, rows: LayerRows) -> None:
        """Take what a layer computes in the step that began last."""
        with self.lock:
            if self._observer.failure is not None:
                self._steps.clear()  # replayed graphs go on giving rows
            if not self._is_in_forward or not self._steps:
                return  # a dummy batch, or a drafter
            step = self._steps[-1]
            if step.is_observed:
                self._observer.layer_rows(rows._replace(kv_cache=None) if self.is_async else rows)
                return
            step.copied_rows = step.copied_rows.to(rows.query.device)  # copied once, since this waits for the device
            is_judged = self._num_steps % self._judge_every == 0
            copies = _LayerCopies(
                layer=rows.layer,
                query=_copy(step, rows.query, is_needed=is_judged),
                key=None if rows.key is None else _copy(step, rows.key),
                value=None if rows.value is None else _copy(step, rows.value),
                output=_copy(step, rows.output, is_needed=is_judged),
            )
            step.layers.append(copies)

    def forward_ends(self) -> None:
        """Ignore what layers do from now on until the next :meth:`inputs`."""
        with self.lock:
            self._is_in_forward = False
            if self._steps and self._steps[-1].is_observed:
                self._observer.forward_ends()

    def step_ends(self, step: LateStep, sampled: Sampled) -> None:
        """Take the sampled tokens of a step, and observe the next one.

        In whichever thread, what this reads on a GPU is read on the model's stream, behind what writes it.
        """
        with self.lock, self._on_stream():
            if not self._steps or step is not self._steps[0]:
                raise ValueError("the sampled tokens of a step arrive before those of an earlier one")
            if not step.is_observed:  # its inputs were not seen
                self._observe(step)
            self._steps.popleft()
            step.num_rejected = _num_rejected(step.plan, sampled)
            self._observer.step_ends(sampled)
            if self._steps:
                self._observe_first()
            else:
                _call_all(self._requests)

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _observe_first(self) -> None:
        """Observe the first step whose tokens are not known, as soon as it can be."""
        step = self._steps[0]
        if step.is_ready and not step.is_observed:
            self._observe(step)

    def _observe(self, step: LateStep) -> None:
        """Pass on what was copied of a step."""
        _call_all(step.requests)
        step.is_observed = True
        self._observer.step_begins(self._corrected_plan(step))
        step.before = None
        if step.inputs is None:
            return
        self._observer.inputs(*step.inputs)
        for each in step.layers:
            key, value = (None if copy is None else copy.spread() for copy in (each.key, each.value))
            rows = LayerRows(each.layer, each.query.spread(), key, value, each.output.spread())
            self._observer.layer_rows(rows)
        step.layers.clear()
        if step is not self._steps[-1] or not self._is_in_forward:
            self._observer.forward_ends()

    def _corrected_plan(self, step: LateStep) -> StepPlan:
        """Return the plan with what the scheduler could not know: accepted counts, and the drafts on the device.

        Before it has the tokens of the last step, the scheduler assumes that every draft is accepted; it writes -1 for
        each draft. The drafts are read from the inputs, so that their tokens are not checked.
        """
        rejected = {} if step.before is None else step.before.num_rejected
        continued = tuple(self._counted(each, rejected.get(each.request_id, 0)) for each in step.plan.continued)
        return replace(step.plan, continued=continued, drafts=_given_drafts(step))

    def _counted(self, request: ContinuedRequest, num_rejected: int) -> ContinuedRequest:
        """Return a request without the rejected drafts of the last step, if its count includes them and is right so."""
        computed = self._observer.num_computed_tokens(request.request_id)
        if computed is None or request.num_computed_tokens != computed + num_rejected:
            return request
        return replace(request, num_computed_tokens=computed)


def _copy(step: LateStep, given: Tensor, *, is_needed: bool = True) -> _Copy:
    """Copy the followed rows of a tensor; none if they are not needed. It may have more rows than the step, or less."""
    num_rows = sum(step.plan.num_scheduled_tokens.values())
    rows = step.copied_rows if is_needed else step.copied_rows[:0]
    if len(given) < num_rows:
        num_rows, rows = len(given), rows[rows < len(given)]
    return _Copy(num_rows, rows, given[rows])


def _stream_of(given: Tensor | None) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(given.device) if given is not None and given.is_cuda else None


def _call_all(changes: list[_Change]) -> None:
    for _, change in changes:
        change()
    changes.clear()


def _num_rejected(plan: StepPlan, sampled: Sampled) -> dict[str, int]:
    """Return how many drafts of each request were rejected: one token more than the accepted drafts is sampled."""
    return {
        request_id: len(drafts) + 1 - len(sampled[request_id])
        for request_id, drafts in plan.drafts.items()
        if sampled.get(request_id)
    }


def _given_drafts(step: LateStep) -> dict[str, tuple[int, ...]]:
    drafts = dict(step.plan.drafts)
    if not drafts or step.inputs is None or step.inputs.input_ids is None:
        return drafts
    given = step.inputs.input_ids.tolist()
    end = 0
    for request_id in step.inputs.request_ids:
        end += step.plan.num_scheduled_tokens[request_id]
        own = drafts.get(request_id)
        if own and -1 in own:
            drafts[request_id] = tuple(given[end - len(own) : end])
    return drafts
