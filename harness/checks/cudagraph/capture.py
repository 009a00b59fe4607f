"""Capture one ``forward`` of a backend in a graph: its inputs, its metadata, and what it returned."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import islice
from math import nan
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from attncheck.backends.contract import CommonAttentionMetadata
from attncheck.harness.checks.cudagraph.probes import Bucket
from attncheck.harness.checks.cudagraph.recorder import CaptureError, Forward, Recorder, Recording, UnseenError
from attncheck.harness.driver.foreign_code import call_backend
from attncheck.harness.driver.lending import PersistentInputs, map_tensors, zeroed
from attncheck.harness.driver.session import BackendLayer, OutputBuffers
from attncheck.harness.driver.step import ROWS_BEHIND, ForwardCall, operand_views, with_topk_indices
from attncheck.harness.problem.problem import Problem
from attncheck.reference import SparseMetadata
from attncheck.reference.step_spec import StridesSpec

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
            if path in later.numbers and later.numbers[path] == was:
                continue
            now = repr(later.numbers[path]) if path in later.numbers else "gone"
            name = path.partition("[")[0]
            first.setdefault(name, f"{path} was {was!r} at capture and is {now} now")
        return [text for _, text in sorted(first.items(), key=lambda item: item[0].startswith(_HANDED))]

    def path_of(self, start: int, end: int) -> str | None:
        """Return the path of the tensor at an address in ``[start, end)``, or None if there is none."""
        return next((path for path, (address, *_) in self.places.items() if start <= address < end), None)


def trace(parts: Mapping[str, object]) -> MetadataTrace:
    """Return the trace of the result of :func:`parts_of`, without host tensors beside those of a GPU."""
    places, numbers = {}, {}
    has_device = any(isinstance(value, Tensor) and value.device.type != "cpu" for value in parts.values())
    for path, value in parts.items():
        if not isinstance(value, Tensor):
            numbers[path] = value
        elif not has_device or value.device.type != "cpu":  # a captured graph reads no host memory
            places[path] = value.data_ptr(), tuple(value.shape), tuple(value.stride())
    return MetadataTrace(places, numbers)


def parts_of(metadata: object) -> dict[str, object]:
    """Return the tensors and numbers in the metadata that ``build`` returned, by path."""
    return dict(islice(_leaves(metadata, "metadata", 0, set()), _MOST))


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
    query, key, value = (torch.zeros(shape, dtype=problem.dtype, device=device) for shape in shapes)
    rows = (problem.passed_query(query), key, value)
    query, key, value = operand_views(rows, StridesSpec(query="fused", key="fused", value="fused"))
    return PersistentInputs(_call(problem, zeroed(largest.common, device), query, key, value))


def dummy_call(problem: Problem, bucket: Bucket, max_model_len: int, *, longest: bool) -> ForwardCall:
    """Return the call that a graph is captured with: NaN rows, slots of -1, and block tables full of the null page.

    As in vLLM's model runner, ``max_seq_len`` is ``max_model_len``, while later steps have their own maxima.
    ``longest``: use ``seq_lens`` of ``max_model_len`` tokens instead of the query lengths.
    """
    num_pages = -(-max_model_len // problem.cache.block_size)
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
        block_table_tensor=torch.zeros(bucket.num_reqs, num_pages, dtype=torch.int32),
        slot_mapping=torch.full((bucket.num_tokens,), -1),
        causal=problem.layer.is_causal,
        rswa_prefix_lens=None if problem.layer.rswa_window is None else torch.zeros_like(seq_lens),
    )
    if problem.topk_indices is not None:
        shape = bucket.num_tokens + ROWS_BEHIND, problem.topk_indices.shape[1]
        dummy = with_topk_indices(dummy, torch.full(shape, -1, dtype=torch.int32))
    query, key, value = (
        torch.full((bucket.num_tokens, *rows.shape[1:]), nan, dtype=problem.dtype)
        for rows in (problem.query, problem.keys, problem.values)
    )
    return _call(problem, dummy, problem.passed_query(query), key, value)


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
    if isinstance(common, SparseMetadata) and common.topk_indices is not None:  # some of the keys do not exist yet
        common = replace(common, topk_indices=torch.full_like(common.topk_indices, -1))
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


# Capture one `forward` of a backend: build metadata, warm up, record the graph, and keep what it returned.

Group = Sequence[tuple[Any, ForwardCall]]
"""The calls in one graph, each with the builder of its metadata."""

Build = Callable[[Any, CommonAttentionMetadata], Any]
"""Builds metadata with a builder."""

Refusal = CaptureError | UnseenError
"""Why there is no graph: ``forward`` cannot be captured, or the recorder does not see what it does."""


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
    buffers: Sequence[OutputBuffers],
    build: Build = build_for_capture,
    *,
    is_updated: bool = False,
) -> CapturedGraph | Refusal:
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

    def attempt() -> Recording | Refusal:
        try:
            return recorder.record(prepare)
        except (CaptureError, UnseenError) as refusal:
            return refusal.with_traceback(None)  # the traceback's frames would keep the graph and this exception alive

    recording = call_backend("warm-up for capture", attempt)
    if not isinstance(recording, Recording):
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
