"""Follows an engine and judges its attention, from what it is given about each step."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, repeat

import numpy as np
import torch
from torch import Tensor

from attncheck.harness.engine.events import (
    CheckKind,
    EngineFacts,
    KVGroup,
    LayerFacts,
    LayerRows,
    ObserverResult,
    ObserverSettings,
    StepPlan,
)
from attncheck.harness.engine.history import UNSEEN_START, EngineHistory, FollowedRequest
from attncheck.harness.engine.judge import Judge

# With async scheduling, an engine starts a step before it has the tokens that the step before sampled, and the number
# of accepted drafts. So what a step is given and computes is copied, and followed and judged when its own sampled
# tokens arrive; those of all earlier steps have arrived by then. Without async scheduling, that is at its own end.

LOGGER = logging.getLogger("attncheck")

_TOO_MANY_BYTES = "rows of steps whose queries and outputs do not fit into the memory for them"
"""Why a step is not judged: these are copied until its sampled tokens are known."""


@dataclass
class RecordedStep:
    """A step whose sampled tokens are not known yet.

    number: 1 for the first step. changes: requests that were added or ended before the step. request_ids: requests that
    are followed. rows: int64, their rows in the model's input. input_ids, positions, layers: copies of these rows.
    """

    plan: StepPlan
    changes: Sequence[Callable[[], None]]
    number: int
    is_judged: bool
    request_ids: list[str] = field(default_factory=list)
    rows: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    input_ids: Tensor | None = None
    positions: Tensor | None = None
    layers: list[LayerRows] = field(default_factory=list)

    def copied(self, given: LayerRows) -> LayerRows:
        """Return copies of the rows of a layer: query and output only if the step is judged."""
        is_part = len(given.query) < sum(self.plan.num_scheduled_tokens.values())
        rows = self.rows[:0] if is_part else self.rows.to(given.query.device)
        judged = rows if self.is_judged else rows[:0]
        return given._replace(
            query=given.query[judged],
            key=None if given.key is None else given.key[rows],
            value=None if given.value is None else given.value[rows],
            output=given.output[judged],
            is_part=is_part,
        )


class EngineObserver:
    """Observes one engine: call its methods in the order of the engine's steps.

    Requests are added after :meth:`engine_starts`. A step may begin before those before it have ended. After
    :meth:`fail`, only :meth:`result` may be called.
    """

    _history: EngineHistory
    _judge: Judge
    _most_judged: int  # rows of one step

    def __init__(self, settings: ObserverSettings | None = None) -> None:
        self.settings = settings or ObserverSettings()
        self._result = ObserverResult()
        self._reasons: dict[str, str | None] = {}  # why a request is not followed
        self._changes: list[Callable[[], None]] = []  # of requests, before the step that begins next
        self._steps: deque[RecordedStep] = deque()
        self._running: RecordedStep | None = None  # whose forward runs
        self._num_begun = 0
        self._stream: torch.cuda.Stream | None = None  # of the model, on which copies and kept keys are written
        self._lock = threading.RLock()  # a worker process takes sampled tokens in a thread of its own

    @property
    def failure(self) -> str | None:
        """Why it stopped, or None."""
        return self._result.failure

    @property
    def is_started(self) -> bool:
        """Whether :meth:`engine_starts` was called."""
        return hasattr(self, "_history")

    def fail(self, error: BaseException) -> None:
        """Stop observing because of an error of ours, or of what translates an engine's calls."""
        with self._lock:
            self._result.failure = f"{type(error).__name__}: {error}"
            if self.is_started:
                del self._history, self._judge  # keys and values are freed
            self._changes.clear()
            self._steps.clear()
            self._running = None
        LOGGER.error("attncheck stops watching this engine, which is not affected", exc_info=error)

    def result(self) -> ObserverResult:
        """Return what was observed so far."""
        with self._lock:
            return self._result.copy()

    def engine_starts(
        self, groups: Sequence[KVGroup], layers: Mapping[str, LayerFacts], engine: EngineFacts | None = None
    ) -> None:
        """Take the KV-cache groups and layers."""
        self._result.engine = engine or EngineFacts()
        number_bytes = getattr(torch, self._result.engine.dtype or "float32").itemsize
        row_bytes = number_bytes * sum(facts.row_size for facts in layers.values())
        max_bytes = self.settings.max_row_bytes
        if torch.cuda.is_initialized():
            max_bytes = min(max_bytes, torch.cuda.mem_get_info()[0] // 4)  # of the memory that is free
        capacity = max_bytes // max(1, row_bytes)
        params = [facts.params for facts in layers.values()]
        numbers = sum(each.num_heads * (each.head_size + each.value_head_size) for each in params)
        self._most_judged = max_bytes // max(1, number_bytes * numbers)
        self._history = EngineHistory(groups, layers, self._result, capacity, self.settings.follow_one_of)
        self._judge = Judge(self._history, self._result, self.settings.max_explained)

    # Requests change before the step that begins next.

    def request_added(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        prefix_key: str = "",
        not_followed: str | None = None,
    ) -> None:
        """Take a new request, or one that starts again with these tokens.

        ``prefix_key``: what besides its tokens its keys depend on, such as a LoRA adapter.
        ``not_followed``: why it cannot be followed.
        """
        with self._lock:
            if request_id not in self._reasons:
                self._reasons[request_id] = self._history.reason_of(prompt_token_ids)
            reason = self._reasons[request_id] = not_followed or self._reasons[request_id]
            self._changes.append(partial(self._history.add, request_id, prompt_token_ids, prefix_key, reason))

    def request_finished(self, request_id: str) -> None:
        """Forget a request that ended or was aborted."""
        with self._lock:
            self._reasons.pop(request_id, None)
            self._changes.append(partial(self._history.finish, request_id))

    # A step is copied.

    def step_begins(self, plan: StepPlan) -> RecordedStep:
        """Take the scheduler's plan of the next step."""
        with self._lock:
            self._num_begun += 1
            is_judged = self._num_begun % self.settings.judge_every == 0
            step = RecordedStep(plan, self._changes, self._num_begun, is_judged)
            self._changes = []
            self._steps.append(step)
            return step

    def inputs(self, request_ids: Sequence[str], input_ids: Tensor | None, positions: Tensor | None) -> None:
        """Take what the model is given in the step that began last.

        Args:
            request_ids: the requests in the order of their rows. Rows beyond the plan are padding.
            input_ids: ``[T]``, or None if tokens are not compared.
            positions: ``[T]``, or ``[3, T]`` for M-RoPE; None if positions are not compared.
        """
        with self._lock:
            step = self._running = self._steps[-1]
            self._choose_rows(step, request_ids)
            if step.is_judged and len(step.rows) > self._most_judged:
                step.is_judged = False
                num_layers = len(self._history.layers)
                self._result.not_compared["output", _TOO_MANY_BYTES] += num_layers * len(step.rows)
                self._result.not_compared["write", _TOO_MANY_BYTES] += len(step.request_ids) * num_layers
            given = input_ids if positions is None else positions
            if given is not None:
                step.rows = step.rows.to(given.device)  # moved once, since this waits for the device
                self._stream = torch.cuda.current_stream(given.device) if given.is_cuda else None
            step.input_ids = None if input_ids is None else input_ids[step.rows]
            step.positions = None if positions is None else positions[..., step.rows]

    def _choose_rows(self, step: RecordedStep, request_ids: Sequence[str]) -> None:
        """Choose the rows that are copied."""
        spans, first = [step.rows], 0
        for request_id in request_ids:
            num_rows = step.plan.num_scheduled_tokens[request_id]
            reason = self._reasons.get(request_id, UNSEEN_START)
            if reason is None:
                step.request_ids.append(request_id)
                spans.append(torch.arange(first, first + num_rows))
            else:
                self._result.not_followed[reason] += num_rows
            first += num_rows
        step.rows = torch.cat(spans)
        self._result.counts["rows"] += first

    def layer_rows(self, rows: LayerRows) -> None:
        """Take what a layer computes in the step."""
        with self._lock:
            step = self._running  # without one, it is a dummy batch or a drafter
            if step is not None and len(step.rows):
                # With async scheduling, the next step may have written the pages when this one is judged.
                kv_cache = None if self._result.engine.is_async else rows.kv_cache
                step.layers.append(step.copied(rows._replace(kv_cache=kv_cache)))

    def forward_ends(self) -> None:
        """Ignore what layers do from now on until the next :meth:`inputs`, such as those of a drafter."""
        with self._lock:
            self._running = None

    # A step is followed and judged.

    def step_ends(self, sampled: Mapping[str, tuple[int, ...]], step: RecordedStep | None = None) -> None:
        """Judge the first step that has not ended, and take the tokens that were sampled for each of its requests.

        In whichever thread, what this reads on a GPU is read on the model's stream, behind what writes it.

        Raises:
            ValueError: ``step`` is another one.
        """
        with self._lock, nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            first = self._steps[0]
            if step is not None and step is not first:
                raise ValueError("the sampled tokens of a step arrive before those of an earlier one")
            if self._running is first:
                self._running = None
            self._observe(first, sampled)
            self._steps.popleft()

    def _observe(self, step: RecordedStep, sampled: Mapping[str, tuple[int, ...]]) -> None:
        self._result.steps = step.number
        for change in step.changes:
            change()
        drafts = {name: _with_tokens(own, sampled.get(name, ())[:-1]) for name, own in step.plan.drafts.items()}
        plan = replace(step.plan, drafts=drafts)
        followed = self._history.begin_step(plan, step.request_ids)
        self._compare("token", step.input_ids, len(step.rows), followed)
        self._compare("position", step.positions, len(step.rows), followed)
        self._judge.judge(followed, step.layers, is_judged=step.is_judged)
        self._history.end_step(plan, sampled)

    def _compare(
        self, kind: CheckKind, given: Tensor | None, num_rows: int, followed: Sequence[FollowedRequest]
    ) -> None:
        """Compare what the model is given with what is right, row by row."""
        if given is None:
            reason = f"the {kind}s of rows that the model is given in another form"
            self._result.not_compared[kind, reason] += num_rows
            return
        rows = given.cpu().numpy()
        for request in followed:
            is_token = kind == "token"
            right = np.array(request.step_tokens if is_token else range(request.done, request.step_end))
            compared = right >= 0  # -1: a draft that was rejected
            own = rows[..., request.step_rows].reshape(-1, len(right))
            wrong = np.flatnonzero(compared & (own != right).any(axis=0))
            self._result.checks[kind] += int(compared.sum())
            if len(wrong):
                at = int(wrong[0])
                note = f"the model is given {kind} {own[:, at].tolist()[0]}, not {right[at]}"
                self._result.find(kind, request.request_id, request.done + at, num_rows=len(wrong), note=note)


def _with_tokens(drafts: Sequence[int], accepted: Sequence[int]) -> tuple[int, ...]:
    """Return the drafts, each accepted one of -1 replaced by its token.

    With async scheduling, drafts are on the device, and the scheduler writes -1 for each. An accepted draft is the
    token that was sampled. A rejected one stays -1, and is not compared.
    """
    tokens = zip(drafts, chain(accepted, repeat(-1)), strict=False)
    return tuple(token if draft == -1 else draft for draft, token in tokens)
