"""The check ``builder``: what a metadata builder changes, what it shares, and where it waits for the device."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from attncheck.backends.contract import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from attncheck.cases.model import Case
from attncheck.harness.checks.again import least_failing
from attncheck.harness.checks.cudagraph.capture import allocate_inputs, dummy_call, parts_of, trace
from attncheck.harness.checks.cudagraph.check import level_for
from attncheck.harness.checks.cudagraph.emulation import Watch, run
from attncheck.harness.checks.cudagraph.operators import Args, Kwargs, TorchFunction
from attncheck.harness.checks.cudagraph.probes import BLOCK_TABLE, Bucket
from attncheck.harness.checks.cudagraph.recorder import Violation, ViolationKind, first_wait
from attncheck.harness.checks.findings import Broken, Finding, Holds, NotExamined
from attncheck.harness.checks.interface import Check, CheckedCase
from attncheck.harness.checks.numerics import check_numerics, output_shares
from attncheck.harness.device import accelerator_of
from attncheck.harness.driver.construction import construct_builder, max_model_len
from attncheck.harness.driver.foreign_code import StageError, call_backend, stage_named
from attncheck.harness.driver.lending import changed_inputs, copied_calls
from attncheck.harness.driver.observation import Observation, Raised
from attncheck.harness.driver.session import Session
from attncheck.harness.driver.step import (
    HOST_TENSORS,
    ForwardCall,
    forward_calls_of,
    make_step,
    refill_host,
    request_order,
)
from attncheck.harness.problem.problem import Arrangement, Problem, arranged, build_problem
from attncheck.harness.truth.truth import Truth
from attncheck.reference.step_spec import BatchSpec, FastPrefillOptions, PaddingSpec, RequestSpec
from attncheck.reports.run_file.graph_levels import GRAPH_LEVELS, GraphLevel, GraphLevels, GraphProbe

# Find the lines of `build` that wait for the device.
#
# On a GPU torch raises at the first one. Without a GPU, the watch of emulated graphs tracks which memory a GPU would
# hold. Cannot see: waits in C++ code that does not use torch.

T = TypeVar("T")


class _WatchForWaits(Watch):
    """A watch that allows copies for which the host does not wait."""

    _is_unwaited = False

    def function(self, func: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        outer = self._is_unwaited
        is_copy = getattr(func, "__name__", "") == "copy_"
        self._is_unwaited = outer or kwargs.get("non_blocking") is True or (is_copy and args[2:3] == (True,))
        try:
            return super().function(func, args, kwargs)
        finally:
            self._is_unwaited = outer

    def _note(self, kind: ViolationKind, call: str, *, mixes_devices: bool = False) -> None:
        if not self._is_unwaited:
            super()._note(kind, call, mixes_devices=mixes_devices)


class WaitFinder:
    """Follows one builder from its construction on, to track which memory the builder puts on the host."""

    def __init__(self, device: torch.device) -> None:
        accelerator = accelerator_of(device)
        self._reporting = accelerator if accelerator is not None and accelerator.reports_waits else None
        self._watch = _WatchForWaits()

    def construct(self, make: Callable[[], T]) -> T:
        """Return the result of ``make``, called under watch."""
        if self._reporting is not None:
            return make()
        with self._watch.active():
            return make()

    def waits_of(self, build: Callable[[], object], common: CommonAttentionMetadata) -> tuple[Violation, ...] | None:
        """Call ``build`` with the metadata ``common``, and return where it waits, in order.

        If torch reports waits, return the first one only. Return None if ``build`` raises under watch.
        """
        if self._reporting is not None:
            found = first_wait(build, self._reporting)
            return () if found is None else None if found.kind == "error" else (found,)
        for name in HOST_TENSORS:
            self._watch.host.mark(getattr(common, name))
        with self._watch.recording(run.__code__) as tape:
            try:
                run(build)
            except Exception:  # noqa: BLE001 (the caller repeats the build without the watch, to see if it raises too)
                return None
        return tuple(tape.violations)


# Steps for which several builders build metadata before any of them runs; each must give right outputs.
#
# Model runners do this for layer groups and micro-batches. Each has its own builder.

_REFILLED = (
    "a host tensor of the metadata is read after build, when a runner that schedules asynchronously may refill it; "
    'copy it in build, or declare host_lens="exact"'
)
_MEANING = "builders share memory, or one of them keeps for all what it found for its own step"


_NOT_UPDATED = "update_block_table keeps something that build derived from the first group's block table or slots"
_FIRST_CHANGED = "update_block_table changes the metadata of the first group of layers, which still uses them"


@dataclass(frozen=True)
class _Sequence:
    """The steps of two builders (0: the case's, 1: with the requests reversed), and the order in which they run."""

    steps: tuple[int, int]
    forwards: tuple[int, int]

    @property
    def in_words(self) -> str:
        """The sequence in words, for a reader who repeats it."""
        is_shared = self.steps[0] == self.steps[1]
        what = "from one CommonAttentionMetadata" if is_shared else "the second from the requests in the opposite order"
        first, second = (index + 1 for index in self.forwards)
        return f"two builders built, {what}; then forward ran with the metadata of builder {first}, then of {second}"


_SEQUENCES = (_Sequence((0, 1), (0, 1)), _Sequence((0, 1), (1, 0)), _Sequence((0, 0), (0, 1)))


@dataclass(frozen=True)
class _Built:
    """A session that runs the step, the call passed to a builder, and the metadata that it built."""

    session: Session
    call: ForwardCall
    metadata: Any


def wrong_beside_others(session: Session, truth: Truth) -> Broken | None:
    """Build with two builders, then run each; return what is wrong with outputs that are right for one builder alone.

    The case's hash selects whether both builders receive one CommonAttentionMetadata or the second receives the same
    requests in reverse order, and which runs first. Return None for a step of several calls. Raise StageError.
    """
    sequence = _SEQUENCES[int(session.problem.case.hash, 16) % len(_SEQUENCES)]
    sessions = [session.in_order(order) for order in (session.order, _opposite(session))]
    calls = [copied_calls(each.prepared().calls) for each in sessions]
    if any(len(each) > 1 for each in calls):
        return None
    with stage_named("beside another builder"):
        built = [_built(sessions[which], calls[which][0]) for which in sequence.steps]
        for index in sequence.forwards:
            wrong = _fault(built[index], truth)
            if wrong is not None:
                return _finding(session, truth, sequence, index, built[index].session, wrong)
    return None


def wrong_after_refill(session: Session, truth: Truth) -> Broken | None:
    """Return what is wrong with a step whose host tensors are refilled after ``build``, and that is right if not.

    The finding names the fewest tensors that suffice. Return None for a step of several calls, and if the backend
    declares ``host_lens="exact"``.
    """
    if len(session.prepared().calls) > 1 or session.backend.conventions.host_lens == "exact":
        return None

    def run(some: Sequence[str]) -> Broken | None:
        (call,) = copied_calls(session.prepared().calls)
        built = _built(session, call)
        refill_host(call.common, some)
        return _fault(built, truth)

    found = least_failing(HOST_TENSORS, run)
    if found is None or not found[1]:
        return None
    wrong, needed = found
    how = f"after {' and '.join(needed)} {'is' if len(needed) == 1 else 'are'} refilled between build and forward"
    if isinstance(wrong, Raised):
        if wrong.may_end_the_device:  # the step without refilled tensors was not run
            raise StageError(wrong)
        return Broken(f"forward raises {how}: {wrong.in_words}", meaning=_REFILLED)
    return Broken(f"wrong {how}: {wrong.summary}", wrong.figures, _REFILLED, wrong.details)


def wrong_draft(session: Session, truth: Truth) -> Broken | None:
    """Return what is wrong with the step if it runs with metadata of ``build_for_drafting``. Raise StageError."""
    (call,) = copied_calls(session.prepared().calls)
    builder = session.with_second_builder(session.problem).builder
    build = partial(builder.build_for_drafting, common_attn_metadata=call.common, draft_index=0)
    wrong = _fault(_Built(session, call, call_backend("build_for_drafting", build)), truth)
    return wrong and replace(wrong, summary=f"with the metadata of build_for_drafting: {wrong.summary}")


def wrong_update(session: Session, truth: Truth) -> Broken | None:
    """Return what is wrong if a second group, with a builder and pages of its own, updates the first one's metadata.

    Return None for a step of several calls. Raise StageError.
    """
    problem = session.problem
    first = session.beside(arranged(problem, Arrangement.of_all(problem)), is_judged=True)
    calls, own_calls = (copied_calls(each.prepared().calls) for each in (first, session))
    if len(calls) > 1 or len(own_calls) > 1:
        return None
    built, common = _built(first, calls[0]), own_calls[0].common
    update = session.with_second_builder(problem).builder.update_block_table
    make = partial(update, built.metadata, common.block_table_tensor, common.slot_mapping)
    derived = _Built(session, own_calls[0], call_backend("update_block_table", make))
    for each, which, meaning in ((built, "first", _FIRST_CHANGED), (derived, "second", _NOT_UPDATED)):
        wrong = _fault(each, truth)
        if wrong is not None:
            summary = f"with update_block_table for a second group of layers, the {which} group: {wrong.summary}"
            return replace(wrong, summary=summary, meaning=meaning)
    return None


def _finding(
    session: Session, truth: Truth, sequence: _Sequence, index: int, ordered: Session, wrong: Broken
) -> Broken | None:
    """Return the finding for a wrong output, or None if the step is also wrong alone, which other checks report."""
    (call,) = copied_calls(ordered.prepared().calls)
    if _fault(_built(ordered, call), truth) is None:
        what = f"{sequence.in_words}; the answer by builder {index + 1} was wrong"
        summary = f"wrong beside the metadata of another builder: {wrong.summary}"
        return Broken(summary, wrong.figures, _MEANING, (what, *wrong.details))
    if session.threshold is None or ordered.order == session.order:
        return None
    summary = f"wrong with the requests in the order {ordered.order}: {wrong.summary}"
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


def _built(session: Session, call: ForwardCall) -> _Built:
    ((_, metadata),) = session.with_second_builder(session.problem).built((call,))
    return _Built(session, call, metadata)


def _fault(built: _Built, truth: Truth) -> Broken | None:
    """Run ``forward`` over a freshly filled cache, and return what is wrong with its output."""
    session = built.session
    begun = session.begin(images=False)
    session.take(begun, built.call, built.metadata)
    finding = check_numerics(session.problem, truth, session.finish(begun), explains=False)
    return finding if isinstance(finding, Broken) else None


# `builder`: building metadata changes no shared object, and the metadata stay valid when other builders build too.
#
# All builders of a step receive one CommonAttentionMetadata. Builders of other layer groups and of other micro-batches
# build before any layer runs. So nothing in that object may change, on the device or on the host, and the metadata of
# all builders must give right outputs. A builder may reuse its own buffers in its next step; the check allows this. A
# line of `build` that waits for the device adds a note, or fails the check if `sync_free_build` is declared. Cannot
# see: changes outside the common metadata.

Build = Callable[[CommonAttentionMetadata], object]

_SHARED = "shared metadata are changed: all builders and layers of a step read one CommonAttentionMetadata"

_PLAIN = ("paged", "mla")
"""Paths whose steps are captured in graphs and used for drafts."""

_NUM_SMS = 132
"""``num_sms`` (streaming multiprocessors) passed to ``use_cascade_attention``. Any bool it returns is accepted."""

_UNSEEN = "where build waits for the device is unknown: it does not run while torch's modes watch it"


def _check(case: CheckedCase) -> Finding:
    session, seen = case.first_step()
    notes: list[str] = []
    return _first_fault(_faults(case, session, seen, notes), notes)


def _first_fault(faults: Iterator[Broken | None], notes: list[str]) -> Holds | Broken:
    return next((fault for fault in faults if fault is not None), None) or Holds(notes=tuple(dict.fromkeys(notes)))


def _faults(case: CheckedCase, session: Session, seen: Observation, notes: list[str]) -> Iterator[Broken | None]:
    """Yield faults, or None, one after another; append to ``notes``."""
    finder = WaitFinder(case.device)
    builders = finder.construct(partial(session.with_second_builder, session.problem)).builders
    calls = session.prepared().calls
    yield from _build_faults(session.backend, case.problem, builders, calls, finder, notes)
    changed = [name for name in seen.changed if name.startswith("metadata.")]
    yield Broken(f"forward changed {', '.join(changed)}", meaning=_SHARED) if changed else None
    yield _cascade_fault(session, builders[0], calls[0])
    if not bool(seen.unwritten.any()) and not bool((output_shares(case.truth, seen) > 1).any()):
        yield wrong_after_refill(session, case.truth)
        yield wrong_beside_others(session, case.truth)
        yield wrong_draft(session, case.truth) if _is_draft(case.problem, builders[0]) else None
        if getattr(builders[0], BLOCK_TABLE, False) and session.pool is not None:
            yield wrong_update(session, case.truth)


def _build_faults(
    backend: type[AttentionBackend],
    problem: Problem,
    builders: Sequence[Any],
    calls: Sequence[ForwardCall],
    finder: WaitFinder,
    notes: list[str],
) -> Iterator[Broken | None]:
    """Build from each of ``calls``, and by each further method; yield faults, or None, and append to ``notes``."""
    for call in calls:
        (lent,) = copied_calls((call,))
        own = builders[call.builder]
        watched = partial(own.build, common_prefix_len=call.common_prefix_len, common_attn_metadata=lent.common)
        waits = finder.waits_of(watched, lent.common)
        if waits != ():  # a build that waits may have been aborted
            call_backend("build", watched)
        yield metadata_fault("build", call, lent)
        yield _waiting_fault(backend, problem, waits, notes)
    for name, call, build in builds_of(backend, problem, builders[0], calls[0]):
        (lent,) = copied_calls((call,))
        call_backend(name, partial(build, lent.common))
        yield metadata_fault(name, call, lent)


def builds_of(
    backend: type[AttentionBackend], problem: Problem, builder: Any, call: ForwardCall
) -> Iterator[tuple[str, ForwardCall, Build]]:
    """Yield (name, call, function that builds from its metadata) for builder methods that are overridden.

    For a graph, the call has dummy inputs. Drafts apply only if each request has one row.
    """
    batch = problem.case.batch
    if batch.path.name not in _PLAIN:
        return
    if (
        _overrides(builder, "build_for_cudagraph_capture")
        and level_for(backend, problem) is not AttentionCGSupport.NEVER
    ):
        size, room = batch.num_requests, max_model_len(backend, [problem])
        inputs = allocate_inputs(problem, size, size, room, call.query.device)
        dummy = inputs.load(dummy_call(problem, Bucket(size, size, query_len=1), room, longest=True))
        yield "build_for_cudagraph_capture", dummy, builder.build_for_cudagraph_capture
    if _is_draft(problem, builder):
        yield "build_for_drafting", call, partial(builder.build_for_drafting, draft_index=0)


def _is_draft(problem: Problem, builder: Any) -> bool:
    """Return whether the step can be a draft step and the builder overrides ``build_for_drafting``."""
    batch = problem.case.batch
    return batch.path.name in _PLAIN and batch.max_query_len == 1 and _overrides(builder, "build_for_drafting")


def _overrides(builder: Any, method: str) -> bool:
    """Return whether the builder overrides ``method``, or has its own if it is another library's class."""
    own = getattr(type(builder), method, None)
    return own is not None and own is not getattr(AttentionMetadataBuilder, method)


def metadata_fault(name: str, call: ForwardCall, lent: ForwardCall) -> Broken | None:
    """Return what ``name`` changed in the metadata ``lent``, compared with ``call``, or None."""
    changed = [field for field in changed_inputs(call, lent) if field.startswith("metadata.")]
    if not changed:
        return None
    fields = [field.removeprefix("metadata.") for field in changed]
    details = [f"{field} was {getattr(call.common, field)}, and is {getattr(lent.common, field)}" for field in fields]
    return Broken(f"{name} changed {', '.join(changed)}", meaning=_SHARED, details=tuple(details))


def _waiting_fault(
    backend: type[AttentionBackend], problem: Problem, waits: tuple[Violation, ...] | None, notes: list[str]
) -> Broken | None:
    """Return the fault of a build that waits if it must not; otherwise add notes and return None.

    Does not apply to fast prefill, whose wrapper around the builder reads the device, as in vLLM.
    """
    if isinstance(problem.case.batch.path.options, FastPrefillOptions):
        return None
    if waits is None:
        notes.append(_UNSEEN)
    elif waits and backend.conventions.sync_free_build:
        return Broken(
            f"build waits for the device, although sync_free_build is declared: {waits[0]}",
            {"waits": len(waits)},
            details=tuple(map(str, waits[1:])),
        )
    else:
        notes += [f"build waits for the device: {wait}" for wait in waits]
    return None


def _cascade_fault(session: Session, builder: Any, call: ForwardCall) -> Broken | None:
    """Return what is wrong with ``use_cascade_attention``, which a model runner calls before a step, or None."""
    layer, path = session.problem.layer, session.problem.case.batch.path.name
    if path != "cascade" or not _overrides(builder, "use_cascade_attention"):
        return None
    query_lens = call.common.query_start_loc_cpu.diff().numpy().copy()
    passed_lens = query_lens.copy()
    answer: object = call_backend(
        "use_cascade_attention",
        lambda: builder.use_cascade_attention(
            common_prefix_len=call.common_prefix_len,
            query_lens=passed_lens,
            num_query_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            use_alibi=layer.alibi_slopes is not None,
            use_sliding_window=layer.sliding_window is not None,
            use_local_attention=layer.attn_chunk_size is not None,
            num_sms=_NUM_SMS,
        ),
    )
    if not np.array_equal(passed_lens, query_lens):
        return Broken(f"use_cascade_attention changed query_lens from {query_lens} to {passed_lens}")
    return (
        None
        if isinstance(answer, bool | np.bool_)
        else Broken(f"use_cascade_attention answered {answer!r}, expected a bool")
    )


CHECKS = {"builder": Check(_check)}


# Checks of a backend whose metadata builder is the only part that can be driven, such as for layers with a state.
#
# `builder`: metadata must not change during a build, as for any backend. `cudagraph`: the metadata that a graph of
# decodes would read are examined. After one capture, the builder builds for other batches. Tensors must keep their
# addresses and numbers their values; each request's state index must be its own first page, and padding must not use a
# request's page. Cannot see: what kernels compute, which metadata they read, and steps that verify drafts. Therefore no
# level is ever reported as measured.

_ONLY = "only its metadata builder is driven: its kernels take a state, which no case of attention has"
_BUCKET = 4
_LENGTHS = (5, 40, 17, 33)
"""Numbers of keys of the requests in the first step. The second step's are longer."""

_LONGER = 21

_STATES = "state_indices"
"""Substring of the names of metadata that contain the page of a request's state."""

_DECODES: GraphLevel = "UNIFORM_SINGLE_TOKEN_DECODE"


class BuilderChecks:
    """The checks of one case on one backend. ``reasons``: why the backend excludes the case."""

    def __init__(
        self, backend: type[AttentionBackend], case: Case, seed: int, device: torch.device, reasons: tuple[str, ...]
    ) -> None:
        self._backend = backend
        self._case = case
        self._seed = seed
        self._device = device
        self._reasons = reasons

    def find(self, check: str) -> Callable[[], Finding] | NotExamined:
        """Return the function that runs a check, or why it examines nothing."""
        if self._reasons:
            return NotExamined(self._reasons)
        examined = {"builder": self._purity, "cudagraph": self._levels}
        return examined.get(check, NotExamined((_ONLY,), "attncheck"))

    def dump(self, folder: Path, backend: str) -> None:
        """Write nothing, because a batch without keys and values is not a problem that could be repeated."""

    def _purity(self) -> Finding:
        problem = build_problem(self._case, self._seed)
        finder = WaitFinder(self._device)
        sizes = (self._case.batch.num_tokens,)
        make = partial(construct_builder, self._backend, (problem,), self._device, capture_sizes=sizes)
        builder = finder.construct(lambda: call_backend("builder", make))
        order = request_order(problem, builder.reorder_batch_threshold)
        step = make_step(problem, self._device, order, conventions=self._backend.conventions)
        calls = forward_calls_of(step, self._backend.features)[:1]
        notes: list[str] = []
        return _first_fault(_build_faults(self._backend, problem, (builder,), calls, finder, notes), notes)

    def _levels(self) -> Finding:
        steps = [
            build_problem(self._of(_BUCKET, longer=0), self._seed),
            build_problem(self._of(_BUCKET - 2, longer=_LONGER), self._seed),
        ]
        declared = level_for(self._backend, steps[0])
        promised = GRAPH_LEVELS[1 : declared.value + 1]
        fault = next(self._faults(steps), "") if promised else ""
        built = GraphProbe(
            name="metadata of decodes", level=_DECODES, outcome="failed" if fault else "passed", reason=fault
        )
        unseen = [
            GraphProbe(name=f"kernels at {level}", level=level, outcome="not examined", reason=_ONLY)
            for level in promised
        ]
        probes = (built, *unseen) if promised else ()
        graph = GraphLevels(declared=GRAPH_LEVELS[declared.value], measured=None, recorder="emulated", probes=probes)
        if not fault:
            held = "its builder keeps what a graph of decodes reads; " if promised else ""
            return NotExamined((f"{held}{_ONLY}",), "attncheck", graph=graph)
        return Broken(
            f"declared {declared.name}: probe {built.name!r} broke: {fault}",
            {"declared_level": declared.value},
            "build changes what the graph reads: a captured graph reads the memory and the numbers of its capture",
            graph=graph,
        )

    def _faults(self, steps: Sequence[Problem]) -> Iterator[str]:
        """Capture once, then build for a full and for a padded batch; yield what a graph would read wrongly."""
        room = max_model_len(self._backend, steps)
        inputs = allocate_inputs(steps[0], _BUCKET, _BUCKET, room, self._device)
        make = partial(construct_builder, self._backend, steps, self._device, capture_sizes=(_BUCKET,))
        builder = call_backend("builder", make)
        dummy = inputs.load(dummy_call(steps[0], Bucket(_BUCKET, _BUCKET, 1), room, longest=False)).common
        captured = call_backend("capture", lambda: builder.build_for_cudagraph_capture(dummy))
        at_capture = trace({path: part for path, part in parts_of(captured).items() if not _is_empty(part)})
        for problem in steps:
            padded = make_step(_padded(problem), self._device, conventions=self._backend.conventions)
            fresh = forward_calls_of(padded, self._backend.features)[0]
            common = inputs.load(fresh).common
            built = parts_of(call_backend("build", partial(builder.build, 0, common)))
            now = trace(built)
            yield from (f"{path} lies elsewhere than at capture" for path in at_capture.moved(now))
            yield from at_capture.changed(now)
            yield from _wrong_states(built, problem)

    def _of(self, count: int, longer: int) -> Case:
        requests = tuple(RequestSpec(query_len=1, seq_len=length + longer) for length in _LENGTHS[:count])
        return replace(self._case, batch=BatchSpec(requests=requests))


def _padded(problem: Problem) -> Problem:
    """Return the problem with its step padded to the size of the graph."""
    missing = _BUCKET - len(problem.requests)
    padding = PaddingSpec(requests=missing, tokens=missing)
    return replace(problem, case=replace(problem.case, batch=replace(problem.case.batch, padding=padding)))


def _is_empty(part: object) -> bool:
    return type(part) is Tensor and not part.numel()


def _wrong_states(built: dict[str, Any], problem: Problem) -> Iterator[str]:
    """Yield faults in state pages: a request must have its own first page, and padding no request's page."""
    count = len(problem.requests)
    own = problem.block_table[:, 0].tolist()
    owned = {page for row in problem.block_table.tolist() for page in row} - {0}
    for path, value in built.items():
        if _STATES not in path or type(value) is not Tensor or value.dim() not in (1, 2) or not len(value):
            continue
        first = (value if value.dim() == 1 else value[:, 0]).tolist()
        if first[:count] != own[: len(first)]:
            yield f"{path} names pages {first[:count]}, and the states of the requests lie in {own}"
        strays = [page for page in first[count:] if page in owned]
        if strays:
            yield f"{path} names page {strays[0]} for padding, which is a request's"
