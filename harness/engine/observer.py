"""Follows an engine and judges its attention, from what it is given about each step."""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from attncheck.harness.engine.events import (
    CheckKind,
    EngineFacts,
    EngineFinding,
    KVGroup,
    LayerFacts,
    LayerRows,
    ObserverResult,
    ObserverSettings,
    ObserverTally,
    StepPlan,
)
from attncheck.harness.engine.history import EngineHistory, StepInputs
from attncheck.harness.engine.judge import Judge

LOGGER = logging.getLogger("attncheck")

_GIVEN: tuple[CheckKind, CheckKind] = ("token", "position")

_Method = TypeVar("_Method", bound=Callable[..., None])


def _never_raises(method: _Method) -> _Method:
    """Turn the observer off if the method raises: a failure of ours must not stop the engine."""

    @functools.wraps(method)
    def guarded(self: "EngineObserver", *args: Any, **keywords: Any) -> None:
        if self.failure is not None:
            return
        try:
            method(self, *args, **keywords)
        except Exception as error:  # noqa: BLE001 (it must not stop the engine)
            self.fail(error)

    return cast(_Method, guarded)


class EngineObserver:
    """Observes one engine: call its methods in the order of the engine's steps.

    After a failure of its own it ignores every call; ``failure`` states it.
    """

    def __init__(self, settings: ObserverSettings | None = None) -> None:
        self.settings = settings or ObserverSettings()
        self.failure: str | None = None
        self._tally = ObserverTally(self.settings.max_findings)
        self._engine = EngineFacts()
        self._history: EngineHistory | None = None
        self._judge: Judge | None = None
        self._waiting: list[tuple[str, Sequence[int], str, str | None]] = []
        self._layers: list[LayerRows] = []
        self._is_in_step = False

    @property
    def is_started(self) -> bool:
        """Whether :meth:`engine_starts` was called."""
        return self._history is not None

    def knows(self, request_id: str) -> bool:
        """Return whether a request was added, and is not finished."""
        return self._history is not None and request_id in self._history.requests

    def may_follow(self, request_id: str) -> bool:
        """Return whether a request is followed now, or may be from a later step on."""
        request = None if self._history is None else self._history.requests.get(request_id)
        return request is None or request.never_followed is None

    def num_computed_tokens(self, request_id: str) -> int | None:
        """Return how many tokens of a request are computed, by our own count; None if it is not known."""
        request = None if self._history is None else self._history.requests.get(request_id)
        return None if request is None else request.done

    def fail(self, error: BaseException) -> None:
        """Stop observing because of an error of ours, or of what translates an engine's calls."""
        self.failure = f"{type(error).__name__}: {error}"
        self._is_in_step = False
        self._history = self._judge = None  # keys and values are freed; what was found is in the tally
        self._waiting.clear()
        LOGGER.error("attncheck stops watching this engine, which is not affected", exc_info=error)

    @_never_raises
    def engine_starts(
        self, groups: Sequence[KVGroup], layers: Mapping[str, LayerFacts], engine: EngineFacts | None = None
    ) -> None:
        """Take the KV-cache groups and layers; requests may be added before."""
        self._engine = engine or EngineFacts()
        row_size = (
            sum(each.row_size for each in layers.values()) * getattr(torch, self._engine.dtype or "float32").itemsize
        )
        capacity = self.settings.max_row_bytes // max(1, row_size)
        self._history = EngineHistory(groups, layers, self._tally, capacity, self.settings.follow_one_of)
        self._judge = Judge(self.settings, groups, layers, self._history, self._tally)
        for waiting in self._waiting:
            self._history.add(*waiting)
        self._waiting.clear()

    @_never_raises
    def request_added(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        prefix_key: str = "",
        not_followed: str | None = None,
    ) -> None:
        """Take a new request.

        ``prefix_key``: what besides its tokens its keys depend on, such as a LoRA adapter.
        ``not_followed``: why it cannot be followed.
        """
        if self._history is None:
            self._waiting.append((request_id, prompt_token_ids, prefix_key, not_followed))
        else:
            self._history.add(request_id, prompt_token_ids, prefix_key, not_followed)

    @_never_raises
    def request_finished(self, request_id: str) -> None:
        """Forget a request that ended or was aborted."""
        if self._history is not None:
            self._history.finish(request_id)

    @_never_raises
    def step_begins(self, plan: StepPlan) -> None:
        """Take the scheduler's plan of the next step."""
        assert self._history is not None
        with self._tally.timed("follow"):
            self._history.begin(plan)

    @_never_raises
    def inputs(self, request_ids: Sequence[str], input_ids: Tensor | None, positions: Tensor | None) -> None:
        """Take what the model is given: ``input_ids`` ``[T]`` and ``positions`` ``[T]`` or ``[3, T]`` (M-RoPE).

        ``request_ids``: in the order of the rows; rows beyond the plan are padding. None: not compared.
        """
        assert self._history is not None
        assert self._judge is not None
        self._tally.step += 1
        step = self._tally.step
        with self._tally.timed("follow"):
            due = self._history.enter(request_ids)
            for kind, given, right in zip(_GIVEN, (input_ids, positions), (due.tokens, due.positions), strict=True):
                self._compare(kind, due, given, right)
        self._tally.counts["rows"] += len(due.positions)
        self._due = due
        self._layers.clear()
        self._is_in_step = True

    def _compare(self, kind: CheckKind, due: StepInputs, given: Tensor | None, right: np.ndarray) -> None:
        """Compare what the model is given with what is right, row by row."""
        compared = right >= 0  # -1: of rows that are not followed, or a draft that was dropped
        if given is None:
            self._tally.not_followed[f"the {kind}s of rows that the model is given in another form"] += len(right)
            return
        if not compared.any():
            return
        rows = given[..., : len(right)].reshape(-1, len(right)).cpu().numpy()
        self._tally.checks[kind] += int(compared.sum())
        is_wrong = compared & (rows != right).any(axis=0)
        if not is_wrong.any():
            return
        for request in due.followed:
            wrong = np.flatnonzero(is_wrong[request.rows])
            if len(wrong):
                at = request.first + int(wrong[0])
                finding = EngineFinding(
                    kind=kind,
                    step=self._tally.step,
                    request_id=request.request_id,
                    position=int(due.positions[at]),
                    num_rows=len(wrong),
                    note=f"the model is given {kind} {rows[:, at].tolist()[0]}, not {right[at]}",
                )
                self._tally.find(finding)

    @_never_raises
    def layer_rows(self, rows: LayerRows) -> None:
        """Take what a layer computes in the step."""
        if self._is_in_step and self._judge is not None:
            num_rows = len(self._due.positions)
            self._layers.append(rows._replace(is_part=len(rows.query) < num_rows))

    @_never_raises
    def forward_ends(self) -> None:
        """Ignore what layers do from now on until the next :meth:`inputs`, such as those of a drafter."""
        self._is_in_step = False

    @_never_raises
    def step_ends(self, sampled: Mapping[str, tuple[int, ...]]) -> None:
        """Judge the step, and take the tokens that were sampled for each of its requests."""
        assert self._history is not None
        assert self._judge is not None
        self._is_in_step = False
        self._judge.judge(self._due, self._layers, is_judged=self._tally.step % self.settings.judge_every == 0)
        with self._tally.timed("follow"):
            self._history.end(sampled)

    def result(self) -> ObserverResult:
        """Return what was observed so far."""
        tally = self._tally
        return ObserverResult(
            steps=tally.step,
            checks=dict(tally.checks),
            findings=tuple(tally.findings),
            not_followed={reason: count for reason, count in tally.not_followed.items() if count},
            counts=dict(tally.counts),
            worst_share=tally.worst_share,
            seconds=dict(tally.seconds),
            failure=self.failure,
            findings_left_out=tally.findings_left_out,
            engine=self._engine,
        )
