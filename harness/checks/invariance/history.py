"""Earlier batches, and other layers and micro-batches of a step, which must not change a case's outputs.

A model runner uses one impl and one builder for batch after batch, and every layer of a group receives the metadata of
its builder. So the case's batch runs again after other batches, in a step of several layers. If the result is wrong, it
runs again with fewer of these, to find what makes the difference.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from attncheck.cases.model import Case
from attncheck.harness.checks.findings import Broken
from attncheck.harness.checks.invariance.decode_loop import check_decode_loop, loop_steps
from attncheck.harness.checks.invariance.earlier_batches import (
    EarlierBatch,
    alike,
    earlier_batches,
    half,
    named_batches,
)
from attncheck.harness.checks.invariance.other_layers import (
    LayerBeside,
    layer_of_another_group,
    mirror_layer,
    mirrored,
    named_layers,
    other_kind_of_layer,
    sharing_layer,
)
from attncheck.harness.checks.invariance.right_rows import RightRows
from attncheck.harness.driver.foreign_code import StageError, declared_reasons
from attncheck.harness.driver.model_step import run_step
from attncheck.harness.driver.observation import Raised
from attncheck.harness.driver.session import Session
from attncheck.harness.problem.problem import Problem, build_problem

_LARGE_POOL = 2**22
"""Largest cache in bytes for which other layers run beside the case's. Each of them allocates as much again."""

_SINGLE_CALLS = ("paged", "mla", "local", "encoder_only", "cross", "spec_decode")
"""Paths with one call per step, so that another micro-batch can be in flight."""


@dataclass(frozen=True)
class History:
    """What an impl and builder run before a case's batch, and in its step.

    ``layers``: the other layers of its step; with a micro-batch, all run before the case's layer. ``flight``: a
    micro-batch that is built before the case's has run.
    """

    before: tuple[EarlierBatch, ...] = ()
    layers: tuple[LayerBeside, ...] = ()
    flight: EarlierBatch | None = None

    @property
    def in_words(self) -> str:
        """The history in words, for a message."""
        beside = [beside.layer.role for beside in self.layers]
        beside += [f"{self.flight.in_words} in flight as a micro-batch"] if self.flight else []
        parts = [f"after {' and '.join(batch.in_words for batch in self.before)}"] if self.before else []
        parts += [f"in a step with {' and '.join(beside)}"] if beside else []
        return ", ".join(parts) or "when the step is repeated"

    def parts(self) -> Iterator["History"]:
        """Yield parts of the history, smallest first: none, then each element alone."""
        yield History()
        yield from (History(before=(batch,)) for batch in self.before)
        yield from (History(layers=(beside,)) for beside in self.layers)
        if self.flight is not None:
            yield History(flight=self.flight)


@dataclass(frozen=True)
class Repetition:
    """The case's rows in further steps. ``what``: the steps in words. ``wrong``: runs them; returns what is wrong."""

    what: str
    wrong: Callable[[], Broken | Raised | None]


def repetitions(rows: RightRows, session: Session) -> Iterator[Repetition]:
    """Yield the case's step with a history, and in most cases a decode loop. Raise StageError."""
    history = history_of(rows, session)
    yield Repetition(history.in_words, partial(check_step, rows, session, history))
    steps = loop_steps(rows.problem)
    if len(steps) > 1 and _chosen(rows.problem.case, among=3) < 2:
        yield Repetition(f"a decode loop of {len(steps)} steps", partial(check_decode_loop, rows, session))


def history_of(rows: RightRows, session: Session) -> History:
    """Return the history that the case names, or else one chosen by its hash, limited to what the backend declares.

    The hash chooses an earlier batch, and layers of the step. A third of the cases, and every case with a large cache,
    gets two earlier batches and no layers.
    """
    problem, backend, case = rows.problem, session.backend, rows.problem.case
    named = case.after or case.layers
    batches = named_batches(case) if named else earlier_batches(case)
    before = tuple(batch for batch in batches if _is_declared(session, batch))
    if named:
        return History(before, named_layers(rows, session))
    kind = _chosen(case, among=6)
    if kind < 2 or (session.pool is not None and len(session.pool.bytes()) > _LARGE_POOL):
        return History(before)
    mirror, before = mirror_layer(rows), before[:1]
    if kind == 2 and case.batch.path.name in _SINGLE_CALLS:
        flight = (half, alike)[_chosen(case, among=2)](case)
        if _is_declared(session, flight):
            return History(before, (mirror,), flight=flight)
    group = layer_of_another_group(problem, backend) if kind == 3 else None
    others = (mirror, sharing_layer(rows, backend), group or other_kind_of_layer(problem, backend))
    return History(before, tuple(beside for beside in others if beside is not None))


def _chosen(case: Case, among: int) -> int:
    """Return a number below ``among`` that depends only on the case's hash and ``among``."""
    return int(hashlib.sha256(f"{case.hash} {among}".encode()).hexdigest(), 16) % among


def _is_declared(session: Session, batch: EarlierBatch) -> bool:
    case = batch.case
    return not declared_reasons(partial(session.backend.unsupported_reasons, case.layer, case.cache, case.batch))


def check_step(rows: RightRows, session: Session, history: History) -> Broken | Raised | None:
    """Return what is wrong with the case's step under ``history``, naming the first part that suffices for it."""
    wrong = _played(rows, session, history)
    if wrong is None:
        return None
    least = next((less for less in history.parts() if _played(rows, session, less) is not None), history)
    changes: list[str] = []
    wrong = _played(rows, session, least, changes) or wrong
    if isinstance(wrong, Raised):
        return replace(wrong, stage=f"{wrong.stage}, {least.in_words}")
    beside = bool(least.layers or least.flight)
    return replace(
        wrong,
        summary=f"right in a first step, wrong {least.in_words}: {wrong.summary}",
        meaning=_meaning(least, changes),
        details=(*wrong.details, *dict.fromkeys(changes)) if beside else wrong.details,
    )


def _meaning(least: History, changes: list[str]) -> str:
    if least == History():
        return "the same step is wrong when it is repeated: the backend keeps state, or is not deterministic"
    if changes and least.layers:
        return "a layer changes the metadata, which all layers of the group share"
    if least.flight is not None:
        return "two micro-batches share memory: what is built for one is overwritten by the other"
    if [beside for beside in least.layers if beside.layer.shares_cache] == list(least.layers) != []:
        return (
            "a layer writes to a cache that it shares, or to something else that belongs to another layer of the step"
        )
    if least.layers:
        return "layers share what each must have for itself: something is kept from another layer of the step"
    return "something is kept from an earlier call"


def _played(
    rows: RightRows, session: Session, history: History, changes: list[str] | None = None
) -> Broken | Raised | None:
    """Return what is wrong with the step on a new impl and builder. The backend may refuse some of its layers."""
    try:
        return _played_once(rows, session, history, changes)
    except StageError as failure:
        kept = tuple(beside for beside in history.layers if beside.rows is not None and not beside.layer.shares_cache)
        less = replace(history, layers=kept)
        if failure.raised.is_refusal and less != history:
            return _played(rows, session, less, changes)
        return failure.raised


def _played_once(
    rows: RightRows, session: Session, history: History, changes: list[str] | None
) -> Broken | Raised | None:
    problem, backend, device = rows.problem, session.backend, session.device
    drawn = [
        build_problem(other.case, problem.seed + 1 + number, rows_of=problem)
        for number, other in enumerate((*history.before, *([history.flight] if history.flight else [])))
    ]
    before = drawn[: len(history.before)]
    in_group = [beside for beside in history.layers if not beside.layer.has_own_group]
    layers = [beside.layer for beside in in_group]
    own = Session(backend, problem, device, tuple(drawn), pool=session.pool, layers=layers)
    for batch, other in zip(before, history.before, strict=True):
        seen = own.beside(batch).run(images=False)
        if isinstance(seen, Raised):
            return replace(seen, stage=f"{seen.stage} of {other.in_words}")
    earlier: list[tuple[Session, RightRows | None]] = []
    later: list[tuple[Session, RightRows | None]] = []
    for beside, layer in zip(in_group, own.layers, strict=True):
        is_later = beside.comes_after and history.flight is None
        (later if is_later else earlier).append((layer, beside.rows))
    turns = [*earlier, (own, rows), *later]
    if history.flight is not None:
        turns = list(_with_flight(own, turns, drawn[-1], history.flight.in_words))
    for beside in history.layers:
        if beside.layer.has_own_group:
            turns.insert(0, (Session(backend, beside.layer.problem, device, role=beside.layer.role), beside.rows))
    observations = run_step([turn for turn, _ in turns], changes)
    for seen, (turn, judge) in zip(observations, turns, strict=True):
        wrong = None if judge is None else judge.wrong_in(seen)
        if isinstance(wrong, Broken):
            return replace(wrong, summary=f"{turn.role}: {wrong.summary}") if turn.role else wrong
    return None


def _with_flight(
    own: Session, turns: list[tuple[Session, RightRows | None]], other: Problem, role: str
) -> Iterator[tuple[Session, RightRows | None]]:
    """Yield each layer's turn for the case's micro-batch, then for the other one, which a second builder serves."""
    second = own.in_flight(other, role)
    for layer, judge in turns:
        yield layer, judge
        yield second if layer is own else layer.in_flight(mirrored(other), role, second), None
