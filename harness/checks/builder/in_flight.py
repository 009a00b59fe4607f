"""Steps for which several builders build metadata before any of them runs; each must give right outputs.

Model runners do this for layer groups and micro-batches, each of which has its own builder.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from attncheck.harness.checks.findings import Broken
from attncheck.harness.checks.numerics import check_numerics
from attncheck.harness.driver.construction import construct_builder
from attncheck.harness.driver.foreign_code import StageError, call_backend
from attncheck.harness.driver.forward_calls import ForwardCall, forward_calls_of
from attncheck.harness.driver.observation import Raised
from attncheck.harness.driver.persistent_inputs import copied_calls
from attncheck.harness.driver.results import observed, placed
from attncheck.harness.driver.session import Session
from attncheck.harness.driver.step import Step, make_step
from attncheck.harness.truth.truth import Truth

_MEANING = "builders share memory, or one of them keeps for all what it found for its own step"


@dataclass(frozen=True)
class _Play:
    """The steps of two builders (0: the case's, 1: with the requests reversed), and the order in which they run."""

    steps: tuple[int, int]
    forwards: tuple[int, int]

    @property
    def in_words(self) -> str:
        """The play in words, for a reader who repeats it."""
        is_shared = self.steps[0] == self.steps[1]
        what = "from one CommonAttentionMetadata" if is_shared else "the second from the requests in the opposite order"
        first, second = (index + 1 for index in self.forwards)
        return f"two builders built, {what}; then forward ran with the metadata of builder {first}, then of {second}"


_PLAYS = (_Play((0, 1), (0, 1)), _Play((0, 1), (1, 0)), _Play((0, 0), (0, 1)))


@dataclass(frozen=True)
class _Built:
    """A step, the call passed to a builder, and the metadata that it built."""

    step: Step
    call: ForwardCall
    metadata: Any


def new_builder(session: Session) -> Any:
    """Return another builder for the layer of ``session``."""
    backend, problem = session.backend, session.problem
    return call_backend("builder", lambda: construct_builder(backend, (problem,), session.device, session.attn_layer))


def step_of(session: Session, order: Sequence[int]) -> tuple[Step, tuple[ForwardCall, ...]]:
    """Return the step of the session's problem with requests in ``order``, and its calls. Copy the calls before use."""
    backend = session.backend
    step = make_step(session.problem, session.device, order, pad_seq_len=backend.conventions.pad_seq_len)
    return step, forward_calls_of(step, backend.features, session.threshold)


def wrong_beside_others(session: Session, truth: Truth) -> Broken | Raised | None:
    """Build with two builders, then run each; return what is wrong with outputs that are right for one builder alone.

    The case's hash selects whether both builders receive one CommonAttentionMetadata or the second receives the same
    requests in reverse order, and which runs first. Return None for a step of several calls.
    """
    play = _PLAYS[int(session.problem.case.hash, 16) % len(_PLAYS)]
    steps = [step_of(session, order) for order in (session.order, _opposite(session))]
    if any(len(calls) > 1 for _, calls in steps):
        return None
    lent = [(step, copied_calls(calls)[0]) for step, calls in steps]
    try:
        built = [_built(session, *lent[which]) for which in play.steps]
        for index in play.forwards:
            wrong = _fault(session, truth, built[index])
            if wrong is not None:
                return _finding(session, truth, play, index, built[index].step, wrong)
    except StageError as failure:
        return replace(failure.raised, stage=f"{failure.raised.stage} beside another builder")
    return None


def wrong_draft(session: Session, truth: Truth) -> Broken | None:
    """Return what is wrong with the step if it runs with metadata of ``build_for_drafting``. Raise StageError."""
    step, calls = step_of(session, session.order)
    (call,) = copied_calls(calls)
    build = partial(new_builder(session).build_for_drafting, common_attn_metadata=call.common, draft_index=0)
    wrong = _fault(session, truth, _Built(step, call, call_backend("build_for_drafting", build)))
    return wrong and replace(wrong, summary=f"with the metadata of build_for_drafting: {wrong.summary}")


def _finding(session: Session, truth: Truth, play: _Play, index: int, step: Step, wrong: Broken) -> Broken | None:
    """Return the finding for a wrong output, or None if the step is also wrong alone, which other checks report."""
    (call,) = copied_calls(forward_calls_of(step, session.backend.features, session.threshold))
    if _fault(session, truth, _built(session, step, call)) is None:
        what = f"{play.in_words}; the answer by builder {index + 1} was wrong"
        summary = f"wrong beside the metadata of another builder: {wrong.summary}"
        return Broken(summary, wrong.figures, _MEANING, (what, *wrong.details))
    if session.threshold is None or step.order == tuple(session.order):
        return None
    summary = f"wrong with the requests in the order {list(step.order)}: {wrong.summary}"
    meaning = (
        "the builder needs another order of the requests: a runner sorts by the smallest reorder_batch_threshold of "
        f"all builders, which may be below {session.threshold}"
    )
    return Broken(summary, wrong.figures, meaning, wrong.details)


def _opposite(session: Session) -> list[int]:
    """Return the requests in reverse order; if the builder has a threshold, those of one row come first.

    A model runner sorts by the smallest threshold of all builders, so each builder must be right for a smaller one.
    """
    requests = session.problem.requests
    behind = reversed(range(len(requests)))
    return sorted(behind, key=lambda i: session.threshold is not None and requests[i].query_len > 1)


def _built(session: Session, step: Step, call: ForwardCall) -> _Built:
    builder = new_builder(session)
    build = partial(builder.build, common_prefix_len=call.common_prefix_len, common_attn_metadata=call.common)
    return _Built(step, call, call_backend("build", build))


def _fault(session: Session, truth: Truth, built: _Built) -> Broken | None:
    layer, pool, kv_cache = session.layer, session.pool, None
    if pool is not None:
        kv_cache = pool.filled()
        layer.store_new_rows(pool, built.step)
    buffers = layer.output_buffers(session.problem, built.call)
    returned = call_backend(
        "forward", lambda: layer.enter(built.call, kv_cache, built.metadata, buffers), session.device
    )
    result = layer.result_of(built.call, returned, buffers)
    seen = observed(placed([result]), built.step, [result], pool_before=None, pool_after=None, changed=())
    finding = check_numerics(session.problem, truth, seen, explains=False)
    return finding if isinstance(finding, Broken) else None
