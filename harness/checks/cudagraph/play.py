"""Capture a batch of a probe in a graph, replay it with other inputs, and judge each step."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import chain, islice
from math import nan
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor

from attncheck.backends.contract import AttentionBackend, CommonAttentionMetadata
from attncheck.backends.conventions import Conventions
from attncheck.cases.consistency import implied_path
from attncheck.cases.model import Case
from attncheck.harness.checks import cache_write, containment, numerics
from attncheck.harness.checks.containment import padding_rows
from attncheck.harness.checks.cudagraph.probes import BLOCK_TABLE, DRAFT_UPDATE, Bucket, Probe, ProbeStep, probes_of
from attncheck.harness.checks.cudagraph.recorder import (
    CaptureError,
    Forward,
    Recorder,
    Recording,
    Released,
    UnseenError,
    record_unwatched,
)
from attncheck.harness.checks.findings import Broken
from attncheck.harness.checks.numerics import check_numerics
from attncheck.harness.driver.construction import max_model_len
from attncheck.harness.driver.foreign_code import StageError, call_backend, unsupported_reasons
from attncheck.harness.driver.observation import Observation
from attncheck.harness.driver.pool import KVPool
from attncheck.harness.driver.session import BackendLayer, Fill, OutputBuffers, Session, Turn
from attncheck.harness.driver.step import (
    ForwardCall,
    PersistentInputs,
    lend_in_place,
    map_tensors,
    micro_batches_of,
    operand_views,
    zeroed,
)
from attncheck.harness.problem.pages import RandomStream, key_places, lay_out
from attncheck.harness.problem.problem import Problem, build_problem, place_requests
from attncheck.harness.truth.truth import Truth, TruthCache
from attncheck.reference.spec import BatchSpec, PaddingSpec, PathSpec, RequestSpec, SpecDecodeOptions, StridesSpec
from attncheck.reports.analysis.phrases import plural
from attncheck.reports.analysis.reasons import named
from attncheck.reports.run_file.causes import ALTERNATIVE, UNKNOWN, likely_causes
from attncheck.reports.run_file.graph_levels import PaddingRows, worst_padding

# Record where each tensor of metadata is in memory and the value of each number, at one moment.
#
# Holds no tensor, so that memory a builder releases is freed. The result is used for explanations, never for verdicts,
# because objects that cannot be inspected, or that exceed the limits below, are missing.

_DEEPEST, _WIDEST, _MOST = 6, 1_000, 10_000
"""Limits of the search: depth of nesting, parts of one object, and leaves or objects in total."""

Place = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Address, shape, strides."""


_NOWHERE: Place = (-1, (), ())

_HANDED = "metadata.common"
"""Path at which backends by convention keep the common metadata."""


class _Gone:
    def __repr__(self) -> str:
        return "gone"


_GONE = _Gone()


@dataclass(frozen=True)
class MetadataTrace:
    """Places of tensors, and values of numbers on the host, by their path from ``metadata``."""

    places: Mapping[str, Place]
    numbers: Mapping[str, object]

    def moved(self, later: "MetadataTrace") -> list[str]:
        """Return paths of tensors that have another address in ``later`` or are missing there."""
        return [path for path, place in self.places.items() if later.places.get(path, _NOWHERE)[0] != place[0]]

    def reshaped(self, later: "MetadataTrace") -> list[str]:
        """Return paths of tensors with the same address in ``later`` but another shape or other strides."""
        pairs = ((path, place, later.places.get(path, _NOWHERE)) for path, place in self.places.items())
        return [path for path, was, now in pairs if was[0] == now[0] and was != now]

    def changed(self, later: "MetadataTrace") -> list[str]:
        """Return texts for numbers that differ in ``later``, with both values; only the first one of a sequence.

        Numbers of the backend come before those of the common metadata, whose maxima are only upper bounds.
        """
        first: dict[str, str] = {}
        for path, was in self.numbers.items():
            now = later.numbers.get(path, _GONE)
            if was != now:
                name = path.partition("[")[0]
                first.setdefault(name, f"{path} was {was!r} at capture and is {now!r} now")
        return [text for _, text in sorted(first.items(), key=lambda item: item[0].startswith(_HANDED))]

    def path_of(self, start: int, end: int) -> str | None:
        """Return the path of the tensor at an address in ``[start, end)``, or None if there is none."""
        return next((path for path, (address, *_) in self.places.items() if start <= address < end), None)


def trace(parts: Mapping[str, object]) -> MetadataTrace:
    """Return the trace of the result of :func:`parts_of`."""
    places, numbers = {}, {}
    for path, value in parts.items():
        if isinstance(value, Tensor):
            places[path] = _place(value)
        else:
            numbers[path] = value
    return MetadataTrace(places, numbers)


def parts_of(metadata: object) -> dict[str, object]:
    """Return the tensors and numbers in the metadata that ``build`` returned, by path."""
    return dict(islice(_leaves(metadata, "metadata", 0, set()), _MOST))


def _place(tensor: Tensor) -> Place:
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride())


def _leaves(value: Any, path: str, depth: int, seen: set[int]) -> Iterator[tuple[str, object]]:
    kind = type(value)  # isinstance would query a proxy for its __class__, which may raise
    if issubclass(kind, Tensor):
        if value.layout == torch.strided and not value.is_nested:
            yield path, value
    elif issubclass(kind, bool | int | float | str) or value is None:
        yield path, value
    elif not issubclass(kind, type | Enum | ModuleType) and depth < _DEEPEST and id(value) not in seen:
        if len(seen) == _MOST:
            return
        seen.add(id(value))
        try:
            parts = list(islice(_parts(value), _WIDEST))
        except Exception:  # noqa: BLE001 (foreign code may raise anything; omit the object)
            return
        for name, part in parts:
            yield from _leaves(part, f"{path}{name}", depth + 1, seen)


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """Yield (suffix of the path, value) for each part of ``value``."""
    match value:
        case Mapping():
            yield from ((f"[{key!r}]", part) for key, part in value.items())
        case list() | tuple():
            yield from ((f"[{index}]", part) for index, part in enumerate(value))
        case _:
            slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
            named = {name: getattr(value, name) for name in slots if hasattr(value, name)}
            yield from ((f".{name}", part) for name, part in {**named, **getattr(value, "__dict__", {})}.items())


# Inputs of graphs: buffers for the largest step of a probe, and dummy inputs for capture.


def allocate_inputs(
    problem: Problem, num_reqs: int, num_tokens: int, max_model_len: int, device: torch.device
) -> PersistentInputs:
    """Return buffers for steps of up to ``num_tokens`` rows and ``num_reqs`` requests of up to ``max_model_len``.

    Query, key and value are slices of one fused tensor, as in a model's layer.
    """
    largest = dummy_call(problem, Bucket(num_reqs, num_tokens, None), max_model_len, longest=True)
    shapes = ((num_tokens, *rows.shape[1:]) for rows in (problem.query, problem.keys, problem.values))
    rows = [torch.zeros(shape, dtype=problem.dtype, device=device) for shape in shapes]
    query, key, value = operand_views(rows, StridesSpec(query="fused", key="fused", value="fused"))
    return PersistentInputs(_call(problem, zeroed(largest.common, device), query, key, value))


def dummy_call(problem: Problem, bucket: Bucket, max_model_len: int, *, longest: bool) -> ForwardCall:
    """Return the call that a graph is captured with: NaN rows, slots of -1, and block tables full of the null page.

    As in vLLM's model runner, ``max_seq_len`` is ``max_model_len``, while later steps have their own maxima.
    ``longest``: use ``seq_lens`` of ``max_model_len`` tokens instead of the query lengths.
    """
    query_lens = torch.tensor(bucket.dummy_query_lens, dtype=torch.int32)
    seq_lens = torch.full_like(query_lens, max_model_len) if longest else query_lens
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), query_lens.cumsum(0).int()])
    dummy = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=seq_lens,
        seq_lens_cpu=seq_lens,
        num_computed_tokens_cpu=seq_lens - query_lens,
        num_reqs=bucket.num_reqs,
        num_actual_tokens=bucket.num_tokens,
        max_query_len=bucket.query_len or bucket.num_tokens,
        max_seq_len=max_model_len,
        block_table_tensor=torch.zeros(bucket.num_reqs, _num_pages(problem, max_model_len), dtype=torch.int32),
        slot_mapping=torch.full((bucket.num_tokens,), -1),
        causal=problem.layer.is_causal,
    )
    query, key, value = (
        torch.full((bucket.num_tokens, *rows.shape[1:]), nan, dtype=problem.dtype)
        for rows in (problem.query, problem.keys, problem.values)
    )
    return _call(problem, dummy, query, key, value)


def some_steps_earlier(call: ForwardCall, tokens: int, block_size: int | None = None) -> ForwardCall:
    """Return a call for the same requests in the same pages, up to ``tokens`` shorter, with slots of -1.

    ``block_size``: remove pages that the shorter requests do not need yet. If None, keep all pages, as for drafts.
    """
    common = call.common
    fewer = common.num_computed_tokens_cpu.clamp(min=0, max=tokens)
    seq_lens, table = common.seq_lens_cpu - fewer, common.block_table_tensor
    if block_size is not None:
        is_later = torch.arange(table.shape[1]) * block_size >= seq_lens[:, None]
        table = torch.where(is_later.to(table.device), table[:, -1:], table)
    return replace(
        call,
        common=replace(
            common,
            seq_lens=seq_lens.to(common.seq_lens),
            seq_lens_cpu=seq_lens,
            num_computed_tokens_cpu=common.num_computed_tokens_cpu - fewer,
            block_table_tensor=table,
            slot_mapping=torch.full_like(common.slot_mapping, -1),
        ),
    )


def _call(problem: Problem, common: CommonAttentionMetadata, query: Tensor, key: Tensor, value: Tensor) -> ForwardCall:
    """Return a call whose rows are all real. It has no keys and values if the layer shares another layer's cache."""
    index = torch.arange(len(query))
    has_keys = not problem.writes_nothing
    return ForwardCall(
        common=common,
        query=query,
        key=key if has_keys else None,
        value=value if has_keys else None,
        rows=index,
        nth=index,
        position=index,
        num_key_rows=len(query) if has_keys else 0,
    )


def _num_pages(problem: Problem, max_model_len: int) -> int:
    return -(-max_model_len // problem.cache.block_size)


# Capture one `forward` of a backend: build metadata, warm up, record the graph, and keep what it returned.

Group = Sequence[tuple[Any, ForwardCall]]
"""The calls in one graph, each with the builder of its metadata."""

Build = Callable[[Any, CommonAttentionMetadata], Any]
"""Builds metadata with a builder."""


@dataclass(frozen=True)
class CapturedGraph:
    """One captured graph: the calls of a group. Each replay writes to the tensors that the calls returned at capture.

    ``returned``: what each call returned. ``buffers``: the output buffers of each. ``trace``: that of the metadata.
    ``read``: paths of tensors in the metadata that the graph may read.
    """

    recording: Recording
    returned: list[object]
    buffers: Sequence[OutputBuffers]
    trace: MetadataTrace
    read: frozenset[str]


def build_for_capture(builder: Any, common: CommonAttentionMetadata) -> Any:
    """Return the metadata of a capture."""
    return builder.build_for_cudagraph_capture(common)


def capture_graph(
    recorder: Recorder,
    layer: BackendLayer,
    group: Group,
    kv_cache: Tensor | None,
    build: Build,
    buffers: Sequence[OutputBuffers],
    *,
    is_updated: bool = False,
) -> CapturedGraph | CaptureError | UnseenError:
    """Capture the calls of ``group`` in one graph, after building all metadata. Replays read the memory of the calls.

    ``is_updated``: the graph begins with ``update_draft_decode_metadata``. Raise StageError if building or warming up
    fails.
    """
    returned: list[object] = []
    parts: dict[str, object] = {}

    def prepare() -> Forward:
        # New aliases for each run, so that a run that resizes them does not affect the next.
        lent = [(builder, map_tensors(call, Tensor.detach)) for builder, call in group]
        metadata = call_backend("build for capture", lambda: [build(builder, call.common) for builder, call in lent])
        parts.clear()
        parts.update(parts_of(alone(metadata)))
        returned.clear()  # discards what a warm-up returned

        def forward() -> None:
            if is_updated:
                for (builder, _), own in zip(lent, metadata, strict=True):
                    builder.update_draft_decode_metadata(own)
            for (_, call), own, answer in zip(lent, metadata, buffers, strict=True):
                returned.append(layer.enter(call, kv_cache, own, answer))

        return forward

    def attempt() -> Recording | CaptureError | UnseenError:
        try:
            return recorder.record(prepare)
        except (CaptureError, UnseenError) as refusal:
            return refusal.with_traceback(None)  # the traceback's frames would keep the graph and this exception alive

    recording = call_backend("warm-up for capture", attempt)
    if isinstance(recording, CaptureError | UnseenError):
        return recording
    tensors = {path: part for path, part in parts.items() if isinstance(part, Tensor)}
    read = frozenset(path for path, tensor in tensors.items() if recording.reads(tensor) is not False)
    made_of = trace(parts)
    # The graph must not depend on memory that only the capture's metadata keep alive.
    parts.clear()
    tensors.clear()
    return CapturedGraph(recording, returned, buffers, made_of, read)


def alone(metadata: Sequence[Any]) -> Any:
    """Return the only element, or all metadata if there are several calls."""
    return metadata[0] if len(metadata) == 1 else metadata


# Act as the model runner for one probe: capture its graphs, then run steps by replaying them.
#
# The impl, builders, cache and input buffers live as long as the session. Everything that a backend raises becomes a
# :class:`~attncheck.harness.driver.foreign_code.StageError`.


@dataclass(frozen=True)
class CapturedBucket:
    """The graphs of one bucket, the cache's bytes before and after capture, and inputs that ``forward`` changed."""

    graphs: tuple[CapturedGraph, ...]
    pool: KVPool
    before: Tensor
    after: Tensor
    changed: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepResult:
    """One step by one graph: the observation, the pool it ran over, and the trace of its metadata."""

    seen: Observation
    pool: KVPool
    trace: MetadataTrace


Launch = Callable[[Turn], None]
"""Makes the calls of a turn, by a graph or without one."""


class GraphSession:
    """A backend under one probe; ``problems`` are those of its turns. Raise StageError if set-up fails.

    ``is_pool_finite``: fill slots that no request owns with huge finite numbers instead of NaN.
    """

    def __init__(
        self,
        backend: type[AttentionBackend],
        probe: Probe,
        problems: Sequence[Problem],
        device: torch.device,
        recorder: Recorder,
        *,
        is_pool_finite: bool = False,
    ) -> None:
        self.backend, self.recorder = backend, recorder
        self.is_pool_finite = is_pool_finite or backend.conventions.needs_finite_pool
        self._probe = probe
        self._updates_drafts = probe.claim == DRAFT_UPDATE
        first, *later = problems
        parts = [bucket.part(probe.num_micro_batches) for bucket in probe.buckets]
        self._session = Session(
            backend,
            first,
            device,
            tuple(later),
            capture_sizes=tuple(sorted(part.num_tokens for part in parts)),
            least_builders=max(probe.num_builders, probe.num_micro_batches),
            watching=recorder.watching,
        )
        self._sessions = {first.case: self._session}
        batches = [problem.case.batch for problem in problems]
        num_reqs = [batch.num_requests + batch.padding.requests for batch in batches]
        num_tokens = [batch.num_tokens + batch.padding.tokens for batch in batches]
        num_reqs += [bucket.num_reqs for bucket in probe.buckets]
        num_tokens += [bucket.num_tokens for bucket in probe.buckets]
        self._max_model_len = max_model_len(backend, problems)
        self._inputs = [
            allocate_inputs(first, max(num_reqs), max(num_tokens), self._max_model_len, device)
            for _ in range(probe.num_micro_batches)
        ]
        for inputs in self._inputs:
            recorder.mark_host(*inputs.host_twins)

    @property
    def builders(self) -> list[Any]:
        """The builders of the graphs, or of the micro-batches in one graph."""
        return self._session.builders

    def capture(self, bucket: Bucket) -> CapturedBucket | CaptureError | UnseenError:
        """Capture and return the bucket's graphs. Raise StageError if building or warming up fails."""
        _pool_of(self._session).filled()
        part = bucket.part(self._probe.num_micro_batches)
        longest = self._probe.dummy_lens == "longest"
        dummy = dummy_call(self._session.problem, part, self._max_model_len, longest=longest)
        fresh = [dummy] * self._probe.num_micro_batches
        lent = lend_in_place(self._inputs, fresh)
        captured = self._captured(lent.calls, self._session, build_for_capture)
        if not isinstance(captured, CapturedBucket):
            return captured
        changed = set(lent.changed())
        if changed:  # build_for_cudagraph_capture may fill in inputs; subtract what it changes without forward
            lent = lend_in_place(self._inputs, fresh)
            for group in self._groups(lent.calls):
                self._built(build_for_capture, group)
            changed -= set(lent.changed())
        return replace(captured, changed=tuple(sorted(changed)))

    def step(self, turn: ProbeStep, problem: Problem, capture: CapturedBucket | None) -> list[StepResult]:
        """Run one step by the graphs of ``capture``, or without a graph if None.

        Return one result per builder, or one in total for micro-batches. Raise StageError.
        """
        session, fresh = self._begin(turn, problem)
        if turn.gains_pages:
            self._pass_a_page_earlier(turn, session, fresh, capture)
        lent = lend_in_place(self._inputs, fresh)
        taken = []
        for launch, made_of in self._launches(turn, session, lent.calls, capture):
            begun = session.begin(self._fill(problem), lent=lent)
            launch(begun)
            taken.append(StepResult(session.finish(begun), _pool_of(session), made_of))
        return taken

    def capture_step(self, turn: ProbeStep, problem: Problem) -> CapturedBucket | CaptureError | UnseenError:
        """Capture graphs with the inputs of this step instead of dummies. Raise StageError as :meth:`capture` does."""
        session, fresh = self._begin(turn, problem)
        begun = session.begin(self._fill(problem), images=False, lent=lend_in_place(self._inputs, fresh))
        return self._captured(begun.calls, session, partial(self._build, turn))

    def _begin(self, turn: ProbeStep, problem: Problem) -> tuple[Session, Sequence[ForwardCall]]:
        """Return the session of the step, and calls that are yet to be loaded into the buffers.

        For ``draft_index`` 1 and higher, first build the metadata of the previous draft in the same pages.
        """
        if problem.case not in self._sessions:
            self._sessions[problem.case] = self._session.in_place(problem)
        session = self._sessions[problem.case]
        fresh = session.prepared().calls
        if self._probe.num_micro_batches > 1:
            step = session.prepared().step
            fresh = micro_batches_of(step, (len(step.query) // 2,), session.threshold)
        if turn.draft_index and not self._updates_drafts:
            before = replace(turn, draft_index=turn.draft_index - 1)
            earlier = lend_in_place(self._inputs, [some_steps_earlier(call, 1) for call in fresh])
            for group in self._groups(earlier.calls):
                self._built(partial(self._build, before), group)
        return session, fresh

    def _pass_a_page_earlier(
        self, turn: ProbeStep, session: Session, fresh: Sequence[ForwardCall], capture: CapturedBucket | None
    ) -> None:
        """Run a step of the same requests with one page less each. Its output is not judged."""
        size = session.problem.cache.block_size
        lent = lend_in_place(self._inputs, [some_steps_earlier(call, size, size) for call in fresh])
        begun = session.begin(Fill(poison=0.0), images=False, lent=lent)
        for launch, _ in self._launches(turn, session, lent.calls, capture):
            launch(begun)

    def _launches(
        self, turn: ProbeStep, session: Session, calls: Sequence[ForwardCall], capture: CapturedBucket | None
    ) -> list[tuple[Launch, MetadataTrace]]:
        """Build metadata for each group of calls; return a function that runs the group, and its trace."""
        launches: list[tuple[Launch, MetadataTrace]] = []
        for index, group in enumerate(self._groups(calls)):
            graph = None if capture is None else capture.graphs[index]
            if graph is not None and self._updates_drafts:
                launches.append((partial(_replay, session, graph), graph.trace))
                continue
            metadata = self._built(partial(self._build, turn), group)
            made_of = trace(parts_of(alone(metadata)))
            if graph is None:
                launches.append((partial(_run, session, metadata), made_of))
            else:
                launches.append((partial(_replay, session, graph), made_of))
            del metadata  # the graph must not depend on memory that the step's metadata keep alive
        return launches

    def _groups(self, calls: Sequence[ForwardCall]) -> list[Group]:
        """Return the calls of each graph, each with its builder. Micro-batches share one graph."""
        if len(calls) > 1:
            return [list(zip(self.builders, calls, strict=True))]
        return [[(builder, calls[0])] for builder in self.builders]

    def _built(self, build: Build, group: Group) -> list[Any]:
        watching = self.recorder.watching
        return [
            call_backend("build", partial(build, builder, call.common), within=watching()) for builder, call in group
        ]

    def _fill(self, problem: Problem) -> Fill:
        """Return the poison in slots that no request owns."""
        huge = float(torch.finfo(problem.dtype).max) / 4
        return Fill(poison=huge if self.is_pool_finite else math.nan)

    def _build(self, turn: ProbeStep, builder: Any, common: CommonAttentionMetadata) -> Any:
        if turn.draft_index is not None:
            return builder.build_for_drafting(common_attn_metadata=common, draft_index=turn.draft_index)
        if self._probe.claim == BLOCK_TABLE:
            table, slots = common.block_table_tensor, common.slot_mapping
            other = replace(common, block_table_tensor=torch.zeros_like(table), slot_mapping=torch.full_like(slots, -1))
            return builder.update_block_table(builder.build(0, other), table, slots)
        return builder.build(common_prefix_len=0, common_attn_metadata=common)

    def _captured(
        self, calls: Sequence[ForwardCall], session: Session, build: Build
    ) -> CapturedBucket | CaptureError | UnseenError:
        layer, pool = session.layer, _pool_of(session)
        before = pool.bytes().clone()
        graphs = []
        for group in self._groups(calls):
            buffers = [layer.output_buffers(session.problem, call) for _, call in group]
            graph = capture_graph(
                self.recorder, layer, group, pool.kv_cache, build, buffers, is_updated=self._updates_drafts
            )
            if not isinstance(graph, CapturedGraph):
                return graph
            graphs.append(graph)
        return CapturedBucket(tuple(graphs), pool, before, pool.bytes().clone())


def _pool_of(session: Session) -> KVPool:
    """Return the pool of a layer for which graphs are captured, which has one."""
    return cast(KVPool, session.pool)


def _run(session: Session, metadata: Sequence[Any], begun: Turn) -> None:
    for call, own in zip(begun.calls, metadata, strict=True):
        session.take(begun, call, own)


def _replay(session: Session, graph: CapturedGraph, begun: Turn) -> None:
    for call, buffers in zip(begun.calls, graph.buffers, strict=True):
        buffers.refill(call.num_rows)
    call_backend("replay", graph.recording.replay, session.device)
    begun.results.extend(map(session.layer.result_of, begun.calls, graph.returned, graph.buffers))


# Describe in one line what is wrong with a capture or with one step of a graph, using the judges of other checks.


def capture_fault(problem: Problem, capture: CapturedBucket) -> str | None:
    """Return what a capture changed in inputs or cache, or None if it changed no byte. All its slots are -1."""
    if capture.changed:
        return f"forward changed its inputs at capture: {', '.join(capture.changed)}"
    if torch.equal(capture.before, capture.after):
        return None
    changed = "capture changed the cache, although every slot of its dummies is -1"
    if capture.pool.codec is None:
        return changed
    slots = torch.arange(problem.num_blocks * problem.cache.block_size, device=capture.before.device)
    pairs = [capture.pool.read_image(image, slots) for image in (capture.before, capture.after)]
    wrong = torch.stack([_differs(was, now) for was, now in zip(*pairs, strict=True)]).any(0).nonzero().flatten()
    if not len(wrong):
        return f"{changed}: bytes between the slots"
    name = problem.slot_name(int(wrong[0]))
    text = f"{changed}: {f'1 slot, {name}' if len(wrong) == 1 else f'{len(wrong)} slots, the first is {name}'}"
    if int(wrong[0]) >= problem.cache.block_size:
        return text
    spoilt = torch.stack([~torch.isfinite(rows[wrong].double()).flatten(1).all(1) for rows in pairs[1]]).any()
    what = "NaN or Inf now is" if bool(spoilt) else "another value now is"
    return f"{text}; {what} in the null page, which every padding row points to"


def step_fault(
    problem: Problem, truth: Truth, conventions: Conventions, seen: Observation, pool: KVPool | None
) -> str | None:
    """Return what is wrong with one step over ``pool``, or None. Padding rows of the output do not count.

    Judges guard zones, the cache, inputs, rows never written, the output and the LSE, in this order.
    """
    if seen.breaches:
        return containment.breach(seen)
    if pool is not None and pool.codec is not None:
        rows = problem.keys, problem.values
        written = cache_write.judge_pool(problem, pool, seen, rows, [rows])
        if isinstance(written, Broken):
            return written.summary + (f" ({written.meaning})" if written.meaning else "")
    elif seen.changed:
        return f"inputs were changed: {', '.join(seen.changed)}"
    output = check_numerics(problem, truth, replace(seen, protocol=()), explains=False)
    if isinstance(output, Broken):
        return output.summary
    log_sum = numerics.check_lse(problem, truth, seen, conventions) if seen.lse is not None else None
    return f"LSE: {log_sum.summary}" if isinstance(log_sum, Broken) else None


def first_fault(problem: Problem, truth: Truth, conventions: Conventions, taken: Sequence[StepResult]) -> str | None:
    """Return what is wrong with the first wrong result of a step, or None if all are right."""
    faults = (step_fault(problem, truth, conventions, one.seen, one.pool) for one in taken)
    return next((fault for fault in faults if fault is not None), None)


def _differs(was: Tensor, now: Tensor) -> Tensor:
    return (was.contiguous().view(torch.uint8) != now.contiguous().view(torch.uint8)).flatten(1).any(1)


# Build the problem and truth of each probe step, on first use and once for all backends.
#
# A step costs many small operations, so the steps of several probes are computed as one batch. Each step takes its rows
# and keys from the batch and has its own pages.


class ProbeProblems:
    """The probes of one layer and cache, which are those of ``case``; each probe brings its own batch.

    ``cache``: stores truths. If None, each truth is computed. ``smallest``: the case with one request of one token.
    """

    def __init__(self, case: Case, seed: int, device: torch.device, cache: TruthCache | None = None) -> None:
        self._case, self._seed = case, seed
        self._cache = cache or TruthCache(device)
        self.probes = probes_of(case.layer, case.cache)
        one_token = BatchSpec(requests=(RequestSpec(query_len=1),), path=implied_path(case.layer))
        self.smallest = replace(case, batch=one_token)
        self._cases: dict[tuple[Probe, ProbeStep, bool], Case] = {}
        self._problems: dict[Case, Problem] = {}
        self._truths: dict[Case, Truth] = {}
        self._batches: dict[Case, tuple[Case, int]] = {}

    def compute_together(self, probes: Iterable[Probe]) -> None:
        """Compute the steps of these probes as one batch, on first use of any of them."""
        steps = list(dict.fromkeys(self.case(probe, turn) for probe in probes for turn in probe.turns))
        steps = [step for step in steps if step not in self._problems and step not in self._batches]
        requests = tuple(chain.from_iterable(step.batch.requests for step in steps))
        if len(steps) < 2:
            return
        batch = replace(self._case, batch=BatchSpec(requests=requests, path=implied_path(self._case.layer)))
        first = 0
        for step in steps:
            self._batches[step] = batch, first
            first += step.batch.num_requests

    def case(self, probe: Probe, turn: ProbeStep, *, is_padded: bool = True) -> Case:
        """Return the case of one step. If ``is_padded``, it is padded to the size of its graph."""
        key = probe, turn, is_padded
        if key not in self._cases:
            self._cases[key] = self._case_of(probe, turn, is_padded=is_padded)
        return self._cases[key]

    def _case_of(self, probe: Probe, turn: ProbeStep, *, is_padded: bool) -> Case:
        requests = tuple(RequestSpec(query_len=query_len, seq_len=seq_len) for query_len, seq_len in turn.requests)
        padding = PaddingSpec()
        if turn.bucket is not None and is_padded:
            bucket, tokens = probe.buckets[turn.bucket], sum(request.query_len for request in requests)
            padding = PaddingSpec(requests=bucket.num_reqs - len(requests), tokens=bucket.num_tokens - tokens)
        path = implied_path(self._case.layer)
        if probe.drafts and turn.bucket is not None:
            path = PathSpec(name="spec_decode", options=SpecDecodeOptions(num_speculative_tokens=probe.drafts))
        return replace(
            self._case,
            batch=BatchSpec(requests=requests, padding=padding, path=path),
            cache=replace(
                self._case.cache, num_blocks=_num_blocks(probe, self._case.cache.block_size), first_block=None
            ),
        )

    def problem(self, case: Case) -> Problem:
        """Return the case as tensors."""
        if case not in self._problems:
            batch = self._batches.get(case)
            self._problems[case] = (
                build_problem(case, self._seed) if batch is None else _part(self.problem(batch[0]), case, batch[1])
            )
        return self._problems[case]

    def truth(self, case: Case) -> Truth:
        """Return the truth of a case, even if the case is too small to show the effect of a modifier."""
        if case not in self._truths:
            batch = self._batches.get(case)
            self._truths[case] = (
                self._cache.truth_of(self.problem(case), refuse_blindness=False)
                if batch is None
                else self.truth(batch[0]).of_requests(batch[1], batch[1] + case.batch.num_requests)
            )
        return self._truths[case]


def _part(batch: Problem, case: Case, first: int) -> Problem:
    """Return the problem of ``case``: rows and keys of ``batch`` from request ``first`` on, in separate pages."""
    requests = tuple(place_requests(case))
    lengths = [request.num_keys for request in requests]
    row, key = batch.requests[first].first_row, batch.requests[first].base
    rows = slice(row, row + sum(request.rows for request in requests))
    keys = slice(key, key + sum(lengths))
    layout = lay_out(case, lengths, key_places(lengths), RandomStream(batch.seed, case.hash))()
    return replace(
        batch,
        case=case,
        requests=tuple(replace(each, pages=pages) for each, pages in zip(requests, layout.pages, strict=True)),
        query=batch.query[rows],
        keys=batch.keys[keys],
        values=batch.values[keys],
        layout=layout,
    )


def _num_blocks(probe: Probe, block_size: int) -> int:
    """Return one cache size for all steps of a probe, since a model runner does not reallocate its cache."""
    return 4 + 2 * max(sum(-(-seq_len // block_size) for _, seq_len in turn.requests) for turn in probe.turns)


# Find why a graph's step is wrong: moved memory, frozen values, or a cause that is not the graph.
#
# Runs only after a fault, so it may be slow. It repeats the step without a graph, with a new impl and builder, and
# without padding.

_NAMED = 3


@dataclass(frozen=True)
class DiagnosedStep:
    """One step: ``turn`` of ``probe`` in ``session``. ``make`` creates sessions of the probe, for either pool."""

    probe: Probe
    turn: ProbeStep
    questions: ProbeProblems
    session: GraphSession
    make: Callable[..., GraphSession]

    @property
    def conventions(self) -> Conventions:
        """The conventions of the backend."""
        return self.session.backend.conventions

    def fault_without_graph(self, session: GraphSession, *, is_padded: bool = True) -> str | None:
        """Return what is wrong with this step if ``forward`` runs without a graph, or None if it is right."""
        problem, truth = self._problem_and_truth(is_padded=is_padded)
        try:
            taken = session.step(self.turn, problem, None)
        except StageError as failure:
            return failure.raised.in_words
        return first_fault(problem, truth, self.conventions, taken)

    def cause_without_graph(self) -> str | None:
        """Return the likely cause of a wrong output of this step without a graph, or None if none is known."""
        problem, truth = self._problem_and_truth()
        try:
            taken = self.session.step(self.turn, problem, None)
        except StageError:
            return None
        findings = (check_numerics(problem, truth, one.seen) for one in taken)
        meanings = (finding.meaning for finding in findings if isinstance(finding, Broken))
        return next((meaning for meaning in meanings if likely_causes(meaning)), None)

    def _problem_and_truth(self, *, is_padded: bool = True) -> tuple[Problem, Truth]:
        case = self.questions.case(self.probe, self.turn, is_padded=is_padded)
        return self.questions.problem(case), self.questions.truth(case)


def lets_nan_through(step: DiagnosedStep) -> bool:
    """Return whether the step is wrong only because of NaN in slots that no request owns.

    If so, the graph is not the cause. The step runs without a graph, with a new impl and builder, and without padding,
    whose NaN rows are another fault.
    """
    if step.session.is_pool_finite:
        return False

    def is_wrong(*, is_pool_finite: bool) -> bool:
        session = step.make(is_pool_finite=is_pool_finite)
        return step.fault_without_graph(session, is_padded=False) is not None

    try:
        return is_wrong(is_pool_finite=False) and not is_wrong(is_pool_finite=True)
    except StageError:  # a new session cannot be set up
        return False


def why_wrong(step: DiagnosedStep, capture: CapturedBucket, made_of: MetadataTrace, index: int) -> str:
    """Return the cause in words. ``made_of``: trace of the step's metadata, from the builder of graph ``index``."""
    without_graph = step.fault_without_graph(step.session)
    if without_graph is not None:
        return _why_wrong_anyway(step, without_graph)
    graph = capture.graphs[index]
    moved = [path for path in graph.trace.moved(made_of) if path in graph.read]
    reshaped = [path for path in graph.trace.reshaped(made_of) if path in graph.read]
    changed = graph.trace.changed(made_of)
    builder = "build_for_drafting" if step.turn.draft_index is not None else "build"
    causes = []
    if moved:
        buffers = named(moved, _NAMED)
        causes.append(f"{builder} puts {buffers} into new memory; the graph reads the memory of capture")
    if reshaped:
        causes.append(f"shapes are frozen at capture, and {builder} gives {', '.join(reshaped[:_NAMED])} another one")
    if read := graph.recording.host_reads:
        causes.append(f"numbers are frozen at capture, which forward took from the host: {'; '.join(read[:_NAMED])}")
    elif changed:
        causes.append(f"numbers are frozen at capture, such as these: {'; '.join(changed[:_NAMED])}")
    if not causes:
        causes.append("something that forward read or decided at capture is frozen (a plan, a shape, a branch)")
    return f"the same step is right without a graph: {'; and '.join(causes)}"


def _why_wrong_anyway(step: DiagnosedStep, fault: str) -> str:
    first = replace(step, turn=replace(step.turn, gains_pages=False))  # omits the earlier, shorter step
    try:
        anew = first.fault_without_graph(step.make(is_pool_finite=step.session.is_pool_finite))
    except StageError as failure:
        anew = failure.raised.message
    if anew is None:
        return "wrong without a graph, too, but right with a new impl and builder: something is kept from earlier steps"
    padding = step.questions.case(step.probe, step.turn).batch.padding
    if (padding.requests or padding.tokens) and step.fault_without_graph(step.session, is_padded=False) is None:
        return (
            "wrong without a graph, too, and right without padding: padding (query length 0, seq_lens "
            f"{step.conventions.pad_seq_len}, slot -1, rows of NaN) is not left alone"
        )
    cause, *others = (step.cause_without_graph() or "").split(ALTERNATIVE)
    if not cause:
        return f"{UNKNOWN}wrong without a graph, too: {fault}"
    return ALTERNATIVE.join((f"{cause}, without a graph, too", *others))


# Play one probe of a CUDA-graph level, from its captures to its last step, and return its fault.

_TOLD = 10
"""Most requests whose lengths a message lists."""


@dataclass(frozen=True)
class ProbeFault:
    """The fault of a probe. ``what``: where and how much. ``why``: the likely cause, if found.

    ``is_leak``: the cause is NaN in slots that no request owns, which also occurs without a graph.
    """

    what: str
    why: str | None = None
    is_leak: bool = False

    def __str__(self) -> str:
        return self.what if self.why is None else f"{self.what}; {self.why}"


@dataclass(frozen=True)
class UnmeasuredProbe:
    """A probe that cannot be judged on this machine, with the reason."""

    reason: str

    def __str__(self) -> str:
        return f"cannot be examined here: {self.reason}"


@dataclass(frozen=True)
class PlayedProbe:
    """``broke``: why the probe did not pass, or None. ``padding_rows``: their worst state after right steps."""

    broke: ProbeFault | UnmeasuredProbe | None
    padding_rows: PaddingRows = "not examined"


def play_probe(
    backend: type[AttentionBackend],
    probe: Probe,
    questions: ProbeProblems,
    device: torch.device,
    recorder: Recorder,
    *,
    is_pool_finite: bool,
) -> PlayedProbe:
    """Play one probe from capture to its last step.

    Raise StageError if the backend cannot be set up, or cannot run a step even without a graph.
    """
    refused = refused_batches(backend, probe, questions)
    if refused is not None:
        return PlayedProbe(refused)

    def is_played(turn: ProbeStep) -> bool:
        return turn.bucket is not None or not unsupported_reasons(backend, questions.case(probe, turn))

    turns = list(filter(is_played, probe.turns))
    problems = [questions.problem(questions.case(probe, turn)) for turn in turns]
    make = partial(GraphSession, backend, probe, problems, device, recorder)
    session = make(is_pool_finite=is_pool_finite)
    captures: list[CapturedBucket] = []
    for bucket in probe.buckets:
        capture = _captured(session, bucket, turns[0], problems[0])
        if isinstance(capture, UnmeasuredProbe):
            unwatched = GraphSession(backend, probe, problems, device, Recorder("emulated", record_unwatched))
            return PlayedProbe(_fault_unwatched(unwatched, probe.buckets[: len(captures) + 1]) or capture)
        if not isinstance(capture, CapturedBucket):
            return PlayedProbe(capture)
        captures.append(capture)
    padding: PaddingRows = "not examined"
    for turn, problem in zip(turns, problems, strict=True):
        step = DiagnosedStep(probe, turn, questions, session, make)
        try:
            result = _take(step, problem, None if turn.bucket is None else captures[turn.bucket])
        except StageError as failure:
            result = ProbeFault(f"{_in_words(step)}: {failure.raised.in_words}")
        if isinstance(result, ProbeFault):
            return PlayedProbe(replace(result, is_leak=lets_nan_through(step)), padding)
        if isinstance(result, UnmeasuredProbe):
            return PlayedProbe(result, padding)
        padding = worst_padding([padding, result])
    return PlayedProbe(None, padding)


def _captured(
    session: GraphSession, bucket: Bucket, turn: ProbeStep, problem: Problem
) -> CapturedBucket | ProbeFault | UnmeasuredProbe:
    """Capture and return the graphs of a bucket. Raise StageError if the backend fails even without a graph."""
    try:
        capture = session.capture(bucket)
    except StageError as failure:
        session.step(turn, problem, None)
        return ProbeFault(f"{failure.raised.in_words} ({bucket})")
    if isinstance(capture, CaptureError):
        return ProbeFault(f"forward cannot be captured ({bucket}): {capture}")
    if isinstance(capture, UnseenError):
        return UnmeasuredProbe(str(capture))
    fault = capture_fault(problem, capture)
    return capture if fault is None else ProbeFault(f"{fault} ({bucket})")


def _fault_unwatched(session: GraphSession, buckets: tuple[Bucket, ...]) -> ProbeFault | None:
    """Return what the backend raises in a capture with a new impl and no watch, or None if it raises nothing.

    A new impl raises again what the first impl raised once only, such as on the first call of a shape. An exception
    caused by the watch does not occur here.
    """
    for bucket in buckets:
        try:
            session.capture(bucket)
        except StageError as failure:
            return ProbeFault(f"{failure.raised.in_words} ({bucket})")
    return None


def refused_batches(backend: type[AttentionBackend], probe: Probe, questions: ProbeProblems) -> ProbeFault | None:
    """Return a fault if the backend declares that it refuses batches of the probe's graphs, else None."""
    for turn in probe.turns:
        reasons = () if turn.bucket is None else unsupported_reasons(backend, questions.case(probe, turn))
        if reasons:
            return ProbeFault(f"the backend declares that it does not serve such batches: {'; '.join(reasons)}")
    return None


def _take(
    step: DiagnosedStep, problem: Problem, capture: CapturedBucket | None
) -> ProbeFault | UnmeasuredProbe | PaddingRows:
    """Run one step of a probe; return its fault and the cause, or the state of its padding rows if it is right."""
    if capture is not None:
        for graph in capture.graphs:
            for memory in graph.recording.released():
                return _let_go(graph, memory)
    truth = step.questions.truth(problem.case)
    taken = step.session.step(step.turn, problem, capture)
    for index, one in enumerate(taken):
        fault = step_fault(problem, truth, step.conventions, one.seen, one.pool)
        if fault is None:
            continue
        if capture is None:
            return ProbeFault(
                f"{_in_words(step)}: {fault}", f"{UNKNOWN}this step was made without a graph, between replays"
            )
        if one.seen.changed:
            return ProbeFault(f"{_in_words(step)}: {fault}", "build or the graph writes to buffers of the model runner")
        if step.session.recorder.name == "emulated" and (hidden := _hidden(step, problem)):
            return UnmeasuredProbe(hidden)
        return ProbeFault(f"{_in_words(step)}: {fault}", why_wrong(step, capture, one.trace, index))
    return worst_padding(padding_rows(problem, one.seen, step.conventions)[0] for one in taken)


def _let_go(graph: CapturedGraph, memory: Released) -> ProbeFault:
    """Return the fault of a graph that uses released memory, which the allocator may give to another tensor."""
    what = "the graph uses memory that has been let go since capture"
    path = graph.trace.path_of(memory.start, memory.end)
    if path is None:
        return ProbeFault(f"{what}: {memory}", "a workspace or constant was replaced, or belonged to one run alone")
    return ProbeFault(
        f"{what}: {path} ({memory})", f"build puts {path} into new memory; the graph reads that of capture"
    )


def _hidden(step: DiagnosedStep, problem: Problem) -> str | None:
    """Return why work of ``forward`` is hidden from the emulation, whose replays then prove nothing, or None.

    Work is hidden if the step is right without a graph, but wrong with a graph captured at this very step.
    """
    if step.fault_without_graph(step.session) is not None:
        return None
    try:
        capture = step.session.capture_step(step.turn, problem)
        if isinstance(capture, UnseenError):
            return str(capture)
        if isinstance(capture, CaptureError):
            return None
        others = [turn for turn in step.probe.turns if turn.requests != step.turn.requests]
        if others and any(graph.recording.hands_out_memory for graph in capture.graphs):
            # Overwrite what hidden work left in the backend's own memory by running another step.
            other = step.questions.problem(step.questions.case(step.probe, others[0]))
            step.session.step(others[0], other, None)
        taken = step.session.step(step.turn, problem, capture)
    except StageError as failure:
        return failure.raised.in_words
    if first_fault(problem, step.questions.truth(problem.case), step.conventions, taken) is None:
        return None
    return (
        "forward does work that torch's dispatcher does not see, and that replaying its operators does not repeat "
        "(a kernel launched outside of a custom operator: torch.library.custom_op makes it visible)"
    )


def _in_words(step: DiagnosedStep) -> str:
    requests = step.turn.requests
    lengths = named([f"{query_len}/{seq_len}" for query_len, seq_len in requests], _TOLD)
    bucket = None if step.turn.bucket is None else step.probe.buckets[step.turn.bucket]
    where = "step without a graph, with" if bucket is None else f"graph captured for {bucket}, replayed with"
    draft = "" if step.turn.draft_index is None else f"draft {step.turn.draft_index} by build_for_drafting, "
    return f"{draft}{where} {plural(len(requests), 'request')} (query_len/seq_len {lengths})"
