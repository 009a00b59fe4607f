"""Record the batches that an engine gives to its layers."""

import copy
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

import numpy as np

from attncheck.errors import SpecError
from attncheck.harness.recording.traffic import Batch, LayerKind, Lengths, Traffic, shared_prefix
from attncheck.reference.spec import MODIFIERS, AttentionType, DType, LayerSpec, MLASpec
from attncheck.reference.step_spec import FP8_CACHES, CacheSpec, KVCacheDType, Layout

# Reads a batch from the attention metadata that a model runner passes to a builder.
#
# Only tensors in host memory are read, so that nothing synchronises with a device. During the step they are only
# copied.

_NO_BATCH_WORD = (
    "mm_req_doc_ranges",
    "dcp_local_seq_lens",
    "encoder_seq_lens",
    "rswa_prefix_lens",
    "num_logits_indices",
)
"""Fields of the metadata that change the correct result if they are set, and that are not recorded."""


class Snapshot(NamedTuple):
    """Copies of a batch's metadata, taken during its step because the engine reuses the buffers for the next batch.

    ``starts``, ``totals``: ``query_start_loc`` and ``seq_lens``. ``pages``: the used part of the block table, or None
    if host memory has no copy of it.
    """

    starts: Lengths
    totals: Lengths
    pages: Lengths | None
    table_width: int
    table_stride: int
    num_actual_tokens: int
    causal: bool

    @property
    def size(self) -> int:
        """Total number of elements."""
        return self.starts.size + self.totals.size + (0 if self.pages is None else self.pages.size)


def take_snapshot(metadata: Any, host_table: Lengths | None, block_size: int) -> Snapshot | str:
    """Return a snapshot of vLLM's ``CommonAttentionMetadata``, or the reason why no case describes the batch.

    ``host_table``: the block table in host memory, or None; without it shared prefixes are not detected.
    """
    given = vars(metadata)  # reading a property could synchronise with the device
    for name in _NO_BATCH_WORD:
        value = given.get(name)
        if any(value.values()) if isinstance(value, dict) else value is not None:
            return f"no case describes {name}"
    causal = given.get("causal", True)
    if not isinstance(causal, bool):
        return "no case describes causal for each request"
    starts = _on_host(given, "query_start_loc_cpu", "query_start_loc")
    totals = _on_host(given, "seq_lens", "seq_lens_cpu_upper_bound", "_seq_lens_cpu", "seq_lens_cpu")
    if starts is None or totals is None:
        return "the lengths are on the device alone"
    table = given.get("block_table_tensor")
    columns = -(-int(metadata.max_seq_len) // block_size)
    return Snapshot(
        starts=starts.copy(),
        totals=totals.copy(),
        pages=None if host_table is None else host_table[: starts.size - 1, :columns].copy(),
        table_width=0 if table is None else table.shape[1],
        table_stride=0 if table is None else table.stride(0),
        num_actual_tokens=int(metadata.num_actual_tokens),
        causal=causal,
    )


def batch_of(pending: "Pending") -> Batch | None:
    """Return the batch of a snapshot, or None if no request has a new token."""
    snapshot, block_size = pending.snapshot, pending.group.block_size
    query_lens = np.diff(snapshot.starts)
    live = np.flatnonzero(query_lens)
    if not live.size:
        return None
    padded = query_lens.size - live.size
    seq_lens, query_lens = snapshot.totals[live], query_lens[live]
    pages_shared, has_null_pages = 0, False
    sharers: tuple[int, ...] = ()
    if snapshot.pages is not None and snapshot.pages.size:
        pages = snapshot.pages[live]
        has_null_pages = not pages[:, 0].all()
        pages_shared, sharers = shared_prefix(pages, (seq_lens - query_lens) // block_size)
    return Batch(
        query_lens=query_lens,
        seq_lens=seq_lens,
        padding_requests=padded,
        padding_tokens=max(0, snapshot.num_actual_tokens - int(snapshot.starts[-1])),
        table_width=snapshot.table_width,
        table_stride=snapshot.table_stride,
        prefix=pages_shared * block_size,
        sharers=sharers,
        has_null_pages=has_null_pages,
        cascade=pending.cascade,
        drafts=pending.group.drafts,
        causal=snapshot.causal,
        graph_mode=pending.graph_mode,
    )


def _on_host(given: dict[str, Any], *names: str) -> Lengths | None:
    for name in names:
        tensor = given.get(name)
        if tensor is not None and tensor.device.type == "cpu":
            lengths: Lengths = tensor.numpy()
            return lengths
    return None


# Describes the layers of an engine by the keys of a case, read once from vLLM's layer objects.
#
# No weights are read: of ALiBi slopes and sinks, only whether the layer has them.

_KNOWN_LAYERS = ("Attention", "ChunkedLocalAttention", "EncoderOnlyAttention", "MLAAttention")
"""vLLM layer classes whose attention the truth can express; other classes change the mask or the keys."""

_LAYOUTS = {name: layout for layout in get_args(Layout) for name in (layout, f"LB{layout.replace('D', 'C')}")}
"""Layout of a case by vLLM's former name, such as NHD, or current one, such as LBNHC."""

_NO_LAYER_WORD = {
    "use_alibi_sqrt": "square-root ALiBi",
    "use_mm_prefix": "prefix ranges of images",
    "use_sparse": "chosen keys",
    "non_causal_multi_token_decode": "decodes that see later keys",
    "hisparse_cache": "keys in host memory",
}
"""Attributes of a layer that change the correct result in a way that the truth cannot express."""


def layer_kinds(
    layers: Iterable[Any], config: Any, block_size: int
) -> tuple[tuple[tuple[LayerKind, int], ...], dict[str, int]]:
    """Return the kinds of ``layers`` with their numbers, and reasons why others cannot be described, with theirs.

    ``config``: the engine's ``VllmConfig``. ``block_size``: tokens per page of the kernels.
    """
    kinds: Counter[LayerKind] = Counter()
    left_out: Counter[str] = Counter()
    for layer in layers:
        try:
            kinds[_kind(layer, config, block_size)] += 1
        except SpecError as error:
            left_out[error.reason] += 1
    return tuple(kinds.items()), dict(left_out)


def _kind(layer: Any, config: Any, block_size: int) -> LayerKind:
    described = layer_spec(layer, config.model_config.dtype)
    return LayerKind(described, _cache(layer, config, block_size, has_cache=described.has_cache))


NOT_DESCRIBED = "no case describes "
"""Begins the reason of a layer that no case describes."""


def layer_spec(layer: Any, of_dtype: Any) -> LayerSpec:
    """Return what a case states of a layer of vLLM, whose queries are ``of_dtype``, one of torch.

    Raises:
        SpecError: no case can describe the layer.
    """
    name = type(layer).__name__
    if name not in _KNOWN_LAYERS:
        raise _unsayable(f"layers of the class {name}")
    for attribute, words in _NO_LAYER_WORD.items():
        if getattr(layer, attribute, None):
            raise _unsayable(f"layers with {words}")
    dtype = str(of_dtype).removeprefix("torch.")
    if dtype not in get_args(DType):
        raise _unsayable(f"layers of dtype {dtype}")
    impl, sizes = layer.impl, {"num_heads": layer.num_heads, "num_kv_heads": layer.num_kv_heads}
    common: dict[str, Any] = {**sizes, "head_size": layer.head_size, "dtype": dtype}
    if type(layer).__name__ == "MLAAttention":
        mla = MLASpec(
            kv_lora_rank=layer.kv_lora_rank,
            qk_nope_head_dim=layer.qk_nope_head_dim,
            qk_rope_head_dim=layer.qk_rope_head_dim,
            v_head_dim=layer.v_head_dim,
        )
        described = LayerSpec(**common, mla=mla)
    else:
        size_v = getattr(layer, "head_size_v", layer.head_size)
        attn_type = str(getattr(layer.attn_type, "value", layer.attn_type))
        if attn_type not in list(AttentionType):
            raise _unsayable(f"layers of the type {attn_type}")
        described = LayerSpec(
            **common,
            head_size_v=None if size_v == layer.head_size else size_v,
            attn_type=AttentionType(attn_type),
            **described_modifiers(layer, impl),
            attn_chunk_size=getattr(layer, "attention_chunk_size", None) or None,
            kv_sharing=getattr(layer, "kv_sharing_target_layer_name", None) is not None,
        )
    scale = float(getattr(layer, "scale", getattr(impl, "scale", described.softmax_scale)))
    if abs(scale / described.softmax_scale - 1) > 1e-6:
        described = LayerSpec(**{**vars(described), "scale": scale})
    return described


def described_modifiers(layer: Any, impl: Any) -> dict[str, Any]:
    """Return the modifiers that the impl got. A layer has the window as given, and its impl as a pair."""
    found: dict[str, Any] = {}
    for name, modifier in MODIFIERS.items():
        if modifier.argument is not None:
            value = getattr(layer, modifier.argument, getattr(impl, modifier.argument, None))
            if modifier.kind == "keys" and value is not None and value < 1:
                value = None  # no key is hidden, as by vLLM's window of -1
            found[name] = value is not None if modifier.kind == "per head" else value or None
    return found


def _cache(layer: Any, config: Any, block_size: int, *, has_cache: bool) -> CacheSpec:
    if not has_cache:
        return CacheSpec()
    kept = str(layer.kv_cache_dtype)
    if kept not in get_args(KVCacheDType):
        raise _unsayable(f"layers with a cache of {kept}")
    layout = _LAYOUTS.get(str(getattr(config.cache_config, "kv_cache_layout", None)), "NHD")
    cache: dict[str, Any] = {"block_size": block_size, "layout": layout, "kv_cache_dtype": kept}
    if kept in FP8_CACHES:
        cache |= {f"{name}_scale": float(getattr(layer, f"_{name}_scale_float", 1.0)) for name in ("k", "v")}
    return CacheSpec(**cache)


def _unsayable(what: str) -> SpecError:
    return SpecError(f"{NOT_DESCRIBED}{what}", field="layer", value=what, allowed="other layers")


# Keeps as many batches of an engine as a time limit allows, and counts them many at once.
#
# An exception here ends the recording, never the engine's step.

LOGGER = logging.getLogger("attncheck")

MOST_NS = 50_000
MOST_SHARE = 0.01
"""Limits of the average recording time per batch: ``MOST_NS``, or this share of the time between batches.

The larger one applies.
"""

_IDLE_NS = 1_000_000_000
"""A longer gap between two batches means that the engine was idle, and is left out of the average."""

_SMOOTHING = 16
"""Number of batches over which the average time between batches is taken."""

_MOST_PENDING = 64
_MOST_NUMBERS = 2**20
"""Maximum batches kept before they are counted, and maximum numbers in them."""


@dataclass(frozen=True)
class Group:
    """Layers that share one builder.

    ``kinds``: kinds of layers, with the number of each. ``left_out``: reasons why other layers have no kind, with
    counts.
    ``block_size``: page size of the builder's block table. ``drafts``: maximum draft tokens per request.
    """

    kinds: tuple[tuple[LayerKind, int], ...]
    left_out: dict[str, int]
    block_size: int
    drafts: int


class Pending(NamedTuple):
    """A batch that is not counted yet. It represents ``calls`` calls per layer."""

    group: Group
    snapshot: Snapshot
    cascade: int
    graph_mode: str
    calls: int


@dataclass
class BatchRecorder:
    """The state of a recording.

    ``every``: at most one in this many batches is counted, and represents as many.
    ``on_first``: called before the first batch.
    ``seen``, ``looked_at``: number of batches, and of those kept for counting. ``spent_ns``: CPU time of the recording.
    ``host_tables``: block tables in host memory, by the address of their tensor on the device.
    """

    traffic: Traffic
    every: int = 1
    on_first: Callable[[], None] = lambda: None
    seen: int = 0
    looked_at: int = 0
    spent_ns: int = 0
    backends: dict[str, None] = field(default_factory=dict)
    is_on: bool = True
    graph_mode: str = ""
    host_tables: dict[int, Lengths] = field(default_factory=dict)
    _unseen: int = 0
    _last: tuple[int, Any] | None = None
    _last_ns: int = 0
    _gap_ns: float = 0.0
    _first_ns: int = 0
    _pending: list[Pending] = field(default_factory=list)
    _pending_size: int = 0
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    @contextmanager
    def looking_away(self) -> Iterator[None]:
        """Ignore batches during the context: they are dummy batches, or those of a drafter."""
        self._unseen += 1
        try:
            yield
        finally:
            self._unseen -= 1

    def see(self, group: Group, common_prefix_len: int, metadata: Any) -> None:
        """Keep one batch for counting if it is real and is sampled."""
        if not self.is_on or self._unseen:
            return
        began = time.thread_time_ns()
        try:
            if not self.seen:
                self.on_first()
            self.seen += 1
            self._last = common_prefix_len, metadata
            calls = self._stride()
            if self._random.random() * calls < 1:
                self.looked_at += 1
                self._keep(group, common_prefix_len, metadata, calls)
                if len(self._pending) >= _MOST_PENDING or self._pending_size >= _MOST_NUMBERS:
                    self.count_pending()
        except Exception:
            self.is_on = False
            LOGGER.exception("attncheck stops recording; the engine is not affected")
        self.spent_ns += time.thread_time_ns() - began
        self._first_ns = self._first_ns or self.spent_ns  # left out of the average: the first is slowest

    def see_update(self, group: Group, block_table: Any) -> None:
        """Keep the last batch again, for layers that reuse the metadata of others with another block table."""
        if self._last is not None and self.is_on:
            common_prefix_len, metadata = self._last
            metadata = copy.copy(metadata)
            metadata.block_table_tensor = block_table
            self.see(group, common_prefix_len, metadata)

    def count_pending(self) -> None:
        """Count the batches that were kept; many at once cost far less time per batch."""
        pending, self._pending, self._pending_size = self._pending, [], 0
        for each in pending:
            if (batch := batch_of(each)) is not None:
                self.traffic.add(batch, [(kind, layers * each.calls) for kind, layers in each.group.kinds])

    def _stride(self) -> int:
        """Return how many batches a batch kept now represents, so that recording stays within its time limit."""
        now = time.perf_counter_ns()
        gap, self._last_ns = now - self._last_ns, now
        if gap < _IDLE_NS:
            self._gap_ns += (gap - self._gap_ns) / min(self.seen, _SMOOTHING)
        look_ns = (self.spent_ns - self._first_ns) / max(self.looked_at, 1)
        return max(self.every, math.ceil(look_ns / max(MOST_NS, MOST_SHARE * self._gap_ns)))

    def _keep(self, group: Group, common_prefix_len: int, metadata: Any, calls: int) -> None:
        for reason, layers in group.left_out.items():
            self.traffic.leave_out(reason, layers * calls)
        if not group.kinds:
            return
        table = self._host_table(vars(metadata).get("block_table_tensor"))
        snapshot = take_snapshot(metadata, table, group.block_size)
        if isinstance(snapshot, str):
            self.traffic.leave_out(snapshot, sum(layers for _, layers in group.kinds) * calls)
            return
        self._pending.append(Pending(group, snapshot, int(common_prefix_len), self.graph_mode, calls))
        self._pending_size += snapshot.size

    def _host_table(self, table: Any) -> Lengths | None:
        if table is None:
            return None
        pages: Lengths | None = table.numpy() if table.device.type == "cpu" else self.host_tables.get(table.data_ptr())
        return pages
