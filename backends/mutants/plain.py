"""The plain candidate: attention as its definition, in float32, and the correct base of most mutants.

Each rule of attention is one statement here, so that a patch of the catalogue can change it alone. A request is
computed at once, with all its scores in memory. Positions, not pages, decide which keys a row sees.
"""

from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu

from attncheck.backends.base.coded_rows import INT8
from attncheck.backends.contract import AttentionLayer, AttentionType, CommonAttentionMetadata, Conventions
from attncheck.backends.paged import PagedBackend, PagedImpl
from attncheck.backends.paged_metadata import PagedBuilder, PagedMetadata
from attncheck.reference.step_spec import KVCacheDType

State = tuple[Tensor, Tensor]
"""Attention over some keys: output ``[rows, H, Dv]`` and log-sum-exp ``[rows, H]``, float32."""


class PlainBackend(PagedBackend):
    """Backend with every feature of attention; it reads lengths on the host, so no CUDA graph."""

    features = frozenset(
        {
            "sliding_window",
            "logits_soft_cap",
            "alibi",
            "alibi_non_causal",
            "sinks",
            "non_causal",
            "head_size_v",
            "lse",
            "local",
            "kv_sharing",
            "fp8_kv",
            "fp8_per_head",
            "fp8_query",
            "output_quant",
            "short_keys",
            "tree",
            "cascade",
            "merge_nan",
            "mm_prefix",
            "rswa",
            "fp8_index",
            "sparse",
        }
    )
    conventions = Conventions(padded_rows="untouched")
    supported_kv_cache_dtypes = get_args(KVCacheDType)
    registered_kv_cache_dtype = (INT8, torch.int8)
    supported_attn_types = tuple(AttentionType)

    @classmethod
    def get_name(cls) -> str:
        return "PLAIN"

    @classmethod
    def get_impl_cls(cls) -> type["PlainImpl"]:
        return PlainImpl

    @classmethod
    def get_builder_cls(cls) -> type["PlainBuilder"]:
        return PlainBuilder

    @staticmethod
    def get_metadata_cls() -> type["PlainMetadata"]:
        return PlainMetadata

    @classmethod
    def functions(cls) -> dict[str, Callable[..., Any]]:
        return {
            "merge_attn_states": merge_attn_states,
            "reshape_and_cache": reshape_and_cache,
            "copy_blocks": copy_blocks,
            "swap_blocks": swap_blocks,
            "causal_conv1d": causal_conv1d,
            "sparse_attn_indexer": sparse_attn_indexer,
        }


class PlainMetadata(PagedMetadata):
    """Metadata of one step of the plain backend."""


class PlainBuilder(PagedBuilder):
    """Builder of :class:`PlainMetadata`."""

    backend = PlainBackend
    metadata_cls = PlainMetadata

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedMetadata:
        common = common_attn_metadata  # a patch may change it
        return super().build(common_prefix_len, common, fast_build)


class PlainImpl(PagedImpl):
    """One layer."""

    backend = PlainBackend
    metadata_cls = PlainMetadata

    def write(
        self,
        layer: AttentionLayer,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        k_scale, v_scale = _scales(layer)
        reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        caches: tuple[Tensor, Tensor] | None,
        metadata: PagedMetadata,
        output: Tensor,
        output_lse: Tensor | None,
    ) -> None:
        query = self.query_values(layer, query)
        common = metadata.common
        table = common.block_table_tensor
        starts = common.query_start_loc.tolist()
        lens = common.seq_lens.tolist()
        num_rows = starts[-1]
        out = torch.zeros(num_rows, self.num_heads, self.head_size_v, device=query.device)
        lse = torch.zeros(num_rows, self.num_heads, device=query.device)
        for request, seq_len in enumerate(lens):
            start, end = starts[request], starts[request + 1]
            if start == end:
                continue
            q_pos = torch.arange(seq_len - (end - start), seq_len, device=query.device)
            k_pos = torch.arange(seq_len, device=query.device)
            if caches is not None:
                scales = _scales(layer)
                keys, values = (_read(*each, table[request], k_pos) for each in zip(caches, scales, strict=True))
            else:
                keys, values = key[start:end].float(), value[start:end].float()
            seen = self.seen(metadata, q_pos, k_pos)
            seen = self.with_prefixes(seen, metadata, request, q_pos, k_pos)
            seen = self.of_chosen_keys(seen, metadata, start, end)
            scores = self.scores(query[start:end], keys, q_pos, k_pos)
            scores = scores.masked_fill(~seen, -torch.inf)
            # Weight 0 does not hide NaN: values that no row sees are left out.
            values = values.masked_fill(~seen.any(0)[:, None, None], 0.0)
            prefix = metadata.common_prefix_len
            parts = [(0, prefix), (prefix, seq_len)] if prefix else [(0, seq_len)]
            first, *further = [
                self.state(scores[..., lo:hi], values[lo:hi], has_sinks=(lo, hi) == parts[0]) for lo, hi in parts
            ]
            state = first
            for part in further:
                state = merge_attn_states(*state, *part)
            out[start:end], lse[start:end] = state
        output[:num_rows] = out.to(output.dtype)
        if output_lse is not None:
            output_lse[:num_rows] = lse

    def query_values(self, layer: AttentionLayer, query: Tensor) -> Tensor:
        """Return the values of query rows, ``[rows, H, size]``; only FP8 codes have a scale."""
        if query.itemsize > 1:
            return query
        return query.float() * self.query_scale(layer).reshape(-1, 1)

    def kv_head(self, device: torch.device) -> Tensor:
        """Return the KV head of each query head, ``[H]``."""
        return torch.arange(self.num_heads, device=device) // (self.num_heads // self.num_kv_heads)

    def seen(self, metadata: PagedMetadata, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """Return which rows of a request see which keys, by their positions: bool ``[rows, keys]``."""
        distance = k_pos[None, :] - q_pos[:, None]
        seen = torch.ones_like(distance, dtype=torch.bool)
        if metadata.common.causal:
            seen &= distance <= 0
        window, _ = self.sliding_window  # keys to the left, and without a causal mask as many to the right
        if window >= 0:
            seen &= distance >= -window
            seen &= distance <= window
        chunk = metadata.attention_chunk_size
        if chunk is not None:
            seen &= k_pos[None, :] // chunk == q_pos[:, None] // chunk
        tree = metadata.tree
        if tree is not None and len(tree) == len(q_pos):
            node = k_pos - q_pos[0]  # new keys are numbered like rows; older ones are seen by all
            seen &= (node < 0) | tree[:, node.clamp(min=0)]
        return seen

    def with_prefixes(
        self, seen: Tensor, metadata: PagedMetadata, request: int, q_pos: Tensor, k_pos: Tensor
    ) -> Tensor:
        """Return which rows see which keys with the window beside first keys, and with image spans."""
        row, key = q_pos[:, None], k_pos[None, :]
        window, prefix_lens = metadata.rswa_window, metadata.common.rswa_prefix_lens
        if window is not None and prefix_lens is not None:
            is_first_key = key < prefix_lens[request]
            in_window = row - key < window
            seen = seen & (is_first_key | in_window)
        ranges = metadata.common.mm_req_doc_ranges or {}
        for first, last in ranges.get(request, ()):
            row_inside = (row >= first) & (row <= last)
            key_inside = (key >= first) & (key <= last)
            seen = seen | (row_inside & key_inside)
        return seen

    def of_chosen_keys(self, seen: Tensor, metadata: PagedMetadata, start: int, end: int) -> Tensor:
        """Return which rows see which keys without those that an indexer did not choose for rows ``start .. end - 1``.

        ``seen``: bool ``[rows, keys]``.
        """
        if metadata.topk_indices is None:
            return seen
        chosen = torch.zeros_like(seen)
        own = metadata.topk_indices[start:end]
        for row, entries in enumerate(own.long()):
            named = entries[entries >= 0]
            chosen[row, named] = True
        return seen & chosen

    def scores(self, query: Tensor, keys: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """Return the scores before the mask, ``[H, rows, keys]``."""
        keys = keys[:, self.kv_head(query.device)]
        scores = torch.einsum("qhd,khd->hqk", query.float(), keys)
        scores = scores * self.scale
        cap = self.logits_soft_cap
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        slopes = self.slopes_on(query.device)
        if slopes is not None:
            scores = scores + slopes[:, None, None] * (k_pos[None, :] - q_pos[:, None])
        return scores

    def state(self, scores: Tensor, values: Tensor, *, has_sinks: bool) -> State:
        """Return the state over some keys from ``scores [H, rows, keys]``, -inf where a row does not see.

        A row that sees nothing gets output 0, and LSE -inf without sinks.
        """
        sinks = self.sinks.to(scores.device)[:, None, None] if self.sinks is not None and has_sinks else None
        top = torch.full((*scores.shape[:2], 1), torch.finfo(torch.float32).min, device=scores.device)
        if scores.shape[-1]:
            top = torch.maximum(top, scores.amax(-1, keepdim=True))
        if sinks is not None:
            top = torch.maximum(top, sinks)
        weights = torch.exp(scores - top)
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + torch.exp(sinks - top)
        weights = weights / total.masked_fill(total == 0, 1.0)
        out = torch.einsum("hqk,khd->qhd", weights, values[:, self.kv_head(values.device)])
        lse = top + torch.log(total)
        return out, lse.squeeze(-1).T


def _scales(layer: AttentionLayer) -> tuple[Tensor, Tensor]:
    """Return the scales of keys and of values."""
    return layer._k_scale, layer._v_scale


def _read(cache: Tensor, scale: Tensor, table_row: Tensor, positions: Tensor) -> Tensor:
    """Return the tokens of one request at ``positions``, float32 ``[n, Hkv, size]``; ``scale`` decodes FP8 codes."""
    page = table_row[positions // cache.shape[1]].long()
    tokens = cache[page, positions % cache.shape[1]].float()
    return tokens * scale.reshape(-1, 1) if cache.itemsize == 1 else tokens


def _codes(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the FP8 codes of ``x [n, Hkv, size]``: rounded to nearest, saturating."""
    limit = torch.finfo(dtype).max
    scaled = x.float() / scale.reshape(-1, 1)
    return scaled.clamp(-limit, limit).to(dtype)


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """Store row ``t`` of ``key`` and ``value`` at slot ``slot_mapping[t]``; skip negative slots and extra rows."""
    rows = (slot_mapping >= 0).nonzero().squeeze(1)
    slots = slot_mapping[rows]
    for new, cache, scale in ((key[rows], key_cache, k_scale), (value[rows], value_cache, v_scale)):
        page, offset = slots // cache.shape[1], slots % cache.shape[1]
        if cache.itemsize == 1:
            cache.view(torch.uint8)[page, offset] = _codes(new, scale, cache.dtype).view(torch.uint8)
        else:
            cache[page, offset] = new.to(cache.dtype)


def copy_blocks(caches: Sequence[Tensor], mapping: Tensor) -> None:
    """Copy page ``s`` of each cache to its page ``d``, for each row ``(s, d)`` of ``mapping``."""
    for cache in caches:
        for source, destination in mapping.tolist():
            cache[destination] = cache[source]


def swap_blocks(src: Tensor, dst: Tensor, mapping: Tensor) -> None:
    """Copy ``src[s]`` to ``dst[d]`` for each row ``(s, d)`` of ``mapping``."""
    for source, destination in mapping.tolist():
        dst[destination] = src[source]


def merge_attn_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> State:
    """Return the state over the keys of both; one without keys has LSE -inf and does not contribute."""
    highest = torch.maximum(lse_a, lse_b)
    weight_a, weight_b = _weight(lse_a, highest), _weight(lse_b, highest)
    total = weight_a + weight_b
    out = _weighted(out_a, weight_a) + _weighted(out_b, weight_b)
    out = out / total.masked_fill(total == 0, 1.0)[..., None]
    return out.to(out_a.dtype), highest + total.log()


def _weight(lse: Tensor, highest: Tensor) -> Tensor:
    return torch.exp(lse - highest.masked_fill(highest.isinf(), 0.0))


def _weighted(out: Tensor, weight: Tensor) -> Tensor:
    # Weight 0 does not hide NaN.
    return (out.float() * weight[..., None]).masked_fill((weight == 0)[..., None], 0.0)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    query_start_loc: Tensor,
    cache_indices: Tensor,
    has_initial_state: Tensor,
    *,
    activation: str | None,
    pad_id: int,
) -> Tensor:
    """Return the convolution of each sequence of ``x``, and store its last rows in its line of ``states``."""
    y, past = torch.zeros_like(x), weight.shape[1] - 1
    starts = query_start_loc.tolist()
    for request, line in enumerate(cache_indices.tolist()):
        start, end = starts[request], starts[request + 1]
        if line == pad_id or start == end:
            continue
        state = states[line]
        before = state[:, :past].clone() if has_initial_state[request] else torch.zeros_like(state[:, :past])
        tape = torch.cat([before, x[start:end].T], dim=1)
        out = conv1d(tape.float()[None], weight.float()[:, None], groups=len(tape))[0].T
        if bias is not None:
            out = out + bias.float()
        if activation is not None:
            out = silu(out)
        y[start:end] = out.to(x.dtype)
        state[:, :past] = tape[:, tape.shape[1] - past :]
    return y


def sparse_attn_indexer(
    query: Tensor,
    weights: Tensor,
    key: Tensor,
    index_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    slot_mapping: Tensor,
    *,
    index_topk: int,
) -> Tensor:
    """Store the new keys, and return the positions of the keys of the largest scores of each row, then -1."""
    block_size, size = index_cache.shape[1], key.shape[1]
    written = (slot_mapping >= 0).nonzero()[:, 0]
    slots, stored = slot_mapping[written], key[written]
    scales = None
    if index_cache.dtype == torch.uint8:  # FP8 keys of a block, then their float32 scales
        blocks = index_cache.flatten(1)
        scales = blocks[:, block_size * size :].view(torch.float32)
        index_cache = blocks[:, : block_size * size].view(torch.float8_e4m3fn).unflatten(1, (block_size, size))
        new_scales = stored.float().abs().amax(dim=1) / 448
        scales[slots // block_size, slots % block_size] = new_scales
        stored = (stored.float() / new_scales[:, None]).to(torch.float8_e4m3fn)
    index_cache[slots // block_size, slots % block_size] = stored
    chosen = torch.full((len(query), index_topk), -1, dtype=torch.int32, device=query.device)
    bounds = query_start_loc.tolist()
    for number, seq_len in enumerate(seq_lens.tolist()):
        start, end = bounds[number], bounds[number + 1]
        key_positions = torch.arange(seq_len, device=query.device)
        page = block_table[number][key_positions // block_size].long()
        keys = index_cache[page, key_positions % block_size].float()
        if scales is not None:
            keys = keys * scales[page, key_positions % block_size, None]
        for row in range(start, end):
            products = query[row].float() @ keys.T
            scores = weights[row] @ products.relu()
            position = seq_len - end + row
            scores = scores.masked_fill(key_positions > position, -torch.inf)
            count = min(index_topk, position + 1)
            chosen[row, :count] = scores.topk(count).indices.int()
    return chosen


class Base(PlainBackend):
    """The plain candidate under the name of the subclass, whose nested ``Impl`` or ``Builder`` contains the fault."""

    Impl = PlainImpl
    Builder = PlainBuilder

    @classmethod
    def get_name(cls) -> str:
        return cls.__name__.upper()

    @classmethod
    def get_impl_cls(cls) -> type[PlainImpl]:
        return cls.Impl

    @classmethod
    def get_builder_cls(cls) -> type[PlainBuilder]:
        return cls.Builder
