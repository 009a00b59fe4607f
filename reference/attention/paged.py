"""Attention over a paged KV cache: the reference for decoder layers, cross attention and their parts.

Splits a batch (block table, lengths, row offsets) into one call of ``online_softmax.attend`` per request, and reads
only the slots a request owns. The index tensors are read on the host once and checked before any computation. The last
function computes the part of one rank under decode context parallelism.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.arguments import (
    host_ints,
    host_offsets,
    is_float8,
    require_float,
    require_index,
    require_positive_int,
    require_same_device,
    require_scale,
    require_shape,
    require_shard,
)
from attncheck.reference.attention.cache import check_cache, fp8_values
from attncheck.reference.attention.online_softmax import FetchKeys, ScoreRule, attend, heads_first
from attncheck.reference.attention.params import (
    AttentionParams,
    MaskFunction,
    Precision,
    PrefixMask,
    Span,
    Visibility,
    chosen_keys,
    require_params,
)


@dataclass(frozen=True)
class PagedRequest:
    """A request with at least one row. ``pages``: int64, its blocks in order, on the device of the rows."""

    index: int
    rows: slice
    seq_len: int
    pages: Tensor

    @property
    def query_len(self) -> int:
        """Number of query rows."""
        return int(self.rows.stop - self.rows.start)

    @property
    def context_len(self) -> int:
        """Position of the first row; negative if the request has more rows than keys."""
        return self.seq_len - self.query_len

    def span(self, kv_range: Sequence[int] | None) -> Span:
        """Return the request's key positions within ``kv_range``; all of them if it is None."""
        lo, hi = (0, self.seq_len) if kv_range is None else kv_range
        return min(lo, self.seq_len), min(hi, self.seq_len)


def paged_requests(
    query: tuple[str, Tensor],
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    stored: Callable[[int], int] | None = None,
) -> list[PagedRequest]:
    """Return the requests that have rows, in order; requests without rows are skipped.

    query: name and tensor whose rows ``query_start_loc`` delimits. cache: ``[NB, BS, ...]``.
    stored: maps a number of first positions to how many of them this cache holds (a rank holds a part). ``None``: all.

    Raise :class:`~attncheck.errors.ReferenceArgumentError` for decreasing offsets, negative lengths, a table narrower
    than a length, or an owned block outside the cache.
    """
    name, rows = query
    starts = host_offsets("query_start_loc", query_start_loc, name, rows.shape[0])
    lens = host_ints("seq_lens", seq_lens, len(starts) - 1)
    require_index("block_table", block_table)
    require_shape("block_table", block_table, len(lens), None, legend="one row a request")
    num_blocks, block_size = cache.shape[:2]
    table = block_table.cpu()
    requests = []
    for index, ((start, end), seq_len) in enumerate(zip(pairwise(starts), lens, strict=True)):
        if start == end:
            continue
        if seq_len < 0:
            raise ReferenceArgumentError(f"seq_lens[{index}]", seq_len, "at least 0")
        pages = -(-(seq_len if stored is None else stored(seq_len)) // block_size)
        if pages > table.shape[1]:
            raise ReferenceArgumentError(
                "block_table.shape", tuple(table.shape), f"at least {pages} wide for seq_lens[{index}] {seq_len}"
            )
        owned = table[index, :pages].long()
        wrong = (owned < 0) | (owned >= num_blocks)
        if wrong.any():
            page = int(wrong.int().argmax())
            raise ReferenceArgumentError(
                f"block_table[{index}, {page}]", int(owned[page]), f"a block of the cache, 0 to {num_blocks - 1}"
            )
        requests.append(PagedRequest(index, slice(start, end), seq_len, owned.to(rows.device)))
    return requests


def token_places(pages: Tensor, lo: int, hi: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Return block and offset of the tokens ``lo .. hi - 1`` of a request, int64 ``[k]`` each."""
    tokens = torch.arange(lo, hi, device=pages.device)
    return pages.index_select(0, tokens // block_size), tokens % block_size


def read_tokens(cache: Tensor, places: tuple[Tensor, Tensor], scale: float | Tensor, compute: torch.dtype) -> Tensor:
    """Return the tokens stored at ``places``, ``[k, ...]``. No other slot is read.

    Codes of a float8 cache are dequantised to ``compute``. Other caches keep their dtype.
    """
    blocks, offsets = places
    if not is_float8(cache):
        return cache[blocks, offsets]
    codes = cache.view(torch.uint8)[blocks, offsets].view(cache.dtype)
    if isinstance(scale, Tensor) and scale.numel() != 1 and scale.dim() > 1:
        scale = scale[blocks.to(scale.device), offsets.to(scale.device)]
    return fp8_values(codes, per_head(scale), compute)


def per_head(scale: float | Tensor) -> float | Tensor:
    """Return a scale of one element, or of one per head, in a shape that broadcasts to ``[rows, heads, size]``."""
    if not isinstance(scale, Tensor):
        return scale
    return scale.reshape(()) if scale.numel() == 1 else scale.unsqueeze(-1)


def require_kv_range(kv_range: object) -> None:
    """Raise if ``kv_range`` is neither None nor a pair of positions ``0 <= lo <= hi``."""
    if kv_range is None:
        return
    if not (
        isinstance(kv_range, Sequence)
        and len(kv_range) == 2
        and all(type(end) is int for end in kv_range)
        and 0 <= kv_range[0] <= kv_range[1]
    ):
        raise ReferenceArgumentError("kv_range", kv_range, "two integers 0 <= lo <= hi, or None")


Scale = float | Tensor
"""The factor that dequantises float8 codes: ``value = code * scale``."""


@torch.no_grad()
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    params: AttentionParams,
    *,
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
    q_scale: float | Tensor = 1.0,
    kv_range: tuple[int, int] | None = None,
    include_sinks: bool = True,
    tree_mask: Tensor | None = None,
    mask_fn: MaskFunction | None = None,
    mm_req_doc_ranges: Mapping[int, Sequence[tuple[int, int]]] | None = None,
    rswa_prefix_lens: Tensor | None = None,
    topk_indices: Tensor | None = None,
    precision: Precision = Precision(),  # noqa: B008 (frozen)
    q_tile: int = 128,
    kv_tile: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Return softmax attention ``(out [T, H, Dv], lse [T, H])`` of every query row over the cached keys of its request.

    Request ``r`` has the rows ``query_start_loc[r]`` to ``query_start_loc[r + 1] - 1``, and the keys at positions 0 to
    ``seq_lens[r] - 1``. The keys of this step are included; they must already be in the cache. Row ``i`` of the request
    is at position ``seq_lens[r] - query_len + i``: rows are aligned to the END of the keys. For 2 rows and 5 keys,
    causal::

        k k k k k
        x x x x .     row 0, position 3
        x x x x x     row 1, position 4

    The key at position ``p`` is in block ``block_table[r, p // BS]`` at offset ``p % BS``. For scores, modifiers and
    their order see :class:`~attncheck.reference.attention.params.AttentionParams`; for masking see
    :func:`~attncheck.reference.attention.params.visible`. ``lse`` is the natural logarithm of the softmax denominator,
    sinks included. A row that sees no key gets ``out = 0``, ``lse = -inf`` (with a sink: the sink). A row of no request
    gets ``0`` and ``-inf``. Both results are new tensors in ``precision.compute``.

    query: ``[T, H, D]``, ``T >= query_start_loc[-1]``; any float dtype, float8 with ``q_scale``.
    key_cache, value_cache: ``[NB, BS, Hkv, D]`` and ``[NB, BS, Hkv, Dv]``, logical views of any strides and of any
        float dtype; float8 with ``k_scale``, ``v_scale``. Slots that no request owns are never read.
    block_table: ``[R, M]`` int32 or int64. Entries from ``ceil(seq_len / BS)`` on are never read.
    seq_lens, query_start_loc: ``[R]``, ``[R + 1]``, int32 or int64. Requests without rows are skipped.
    k_scale, v_scale: the value of a float8 code is ``code * scale``: a number (used exactly), one element, ``[Hkv]``
        or ``[NB, BS, Hkv]``. Ignored for other caches, as in vLLM.
    q_scale: likewise for a float8 query: a number, one element, or ``[H]``.
    kv_range: ``(lo, hi)``: only keys at ``lo <= j < hi`` count; positions and lengths stay. ``None``: all keys.
    include_sinks: False for all parts but one of a split whose states are merged.
    tree_mask: bool ``[Q, Q]``, ANDed among the new rows: row ``i`` may see new key ``m`` if ``tree_mask[i, m]``. All
        requests share one tree, and ``query_len <= Q``. Context keys are not affected. ``None``: no tree.
    mask_fn: ``(request, q_pos [a, 1], k_pos [1, b]) -> bool [a, b]``, used instead of ``visible``. It is called with
        tiles of absolute positions. ``None``: ``visible``.
    mm_req_doc_ranges: image spans of each request by its index, as inclusive positions ``(first, last)``, and
    rswa_prefix_lens: ``[R]``, the number of first keys that are seen beyond the window. Both add keys to those of
        ``visible``; see :class:`~attncheck.reference.attention.params.PrefixMask`. ``None``: no such keys.
    topk_indices: ``[M, K]`` int32 or int64, ``M >= T``: positions of the keys that each row may see, negative for none.
        ANDed; order and repetitions have no meaning (DeepSeek-V3.2, 2025, section 2.1). ``None``: all keys.
    precision: the roundings to apply; the default computes in float64.
    q_tile, kv_tile: rows and keys of a tile; they change results by rounding only.

    Raise :class:`~attncheck.errors.ReferenceArgumentError` for undefined arguments: shapes that do not fit each other
    or ``params``, dtypes of the wrong kind, decreasing offsets, negative lengths, a table narrower than a length, or an
    owned block outside the cache. No argument is modified.

    The same computation as a loop (one head, scale 1):

    >>> import math
    >>> cache, table = torch.arange(12.0).view(3, 4, 1, 1) / 8, torch.tensor([[2, 0]])
    >>> query, seq_len, block_size = torch.tensor([0.5, 2.0]).view(2, 1, 1), 6, 4
    >>> out, lse = paged_attention(query, cache, -cache, table, torch.tensor([seq_len]), torch.tensor([0, 2]),
    ...                            AttentionParams(num_heads=1, num_kv_heads=1, head_size=1))
    >>> for row in range(2):
    ...     total = weighted = 0.0
    ...     for position in range(seq_len - 2 + row + 1):
    ...         key = float(cache[table[0, position // block_size], position % block_size])
    ...         weight = math.exp(float(query[row]) * key)
    ...         total, weighted = total + weight, weighted + weight * -key
    ...     assert math.isclose(float(out[row]), weighted / total) and math.isclose(float(lse[row]), math.log(total))
    """
    check_paged(query, key_cache, value_cache, params, (q_scale, k_scale, v_scale), (q_tile, kv_tile))
    require_kv_range(kv_range)
    requests = paged_requests(("query", query), key_cache, block_table, seq_lens, query_start_loc)
    _check_tree(tree_mask, max((request.query_len for request in requests), default=0))
    tree = None if tree_mask is None else tree_mask.to(query.device)
    prefixes = prefix_masks(len(seq_lens), mm_req_doc_ranges, rswa_prefix_lens)
    require_topk_indices(topk_indices, len(query))

    def sight(request: PagedRequest) -> Visibility:
        span = request.span(kv_range)
        prefix = prefixes[request.index] if prefixes else None
        chosen = None if topk_indices is None else chosen_keys(topk_indices[request.rows], request.seq_len)
        return Visibility(params, span, request.context_len, request.index, tree, mask_fn, prefix, chosen)

    rule = ScoreRule(params, precision, query.device, include_sinks)
    scales = (q_scale, k_scale, v_scale)
    return attend_paged(query, key_cache, value_cache, requests, sight, rule, scales, (q_tile, kv_tile))


def attend_paged(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    requests: Sequence[PagedRequest],
    sight: Callable[[PagedRequest], Visibility],
    rule: ScoreRule,
    scales: tuple[Scale, Scale, Scale],
    tile_sizes: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Compute :func:`paged_attention` for checked arguments; ``scales`` of query, key and value.

    ``sight`` gives the visibility within a request, and the positions of the tokens stored in its pages.
    """
    params, compute = rule.params, rule.precision.compute
    out_THV = torch.zeros(len(query), params.num_heads, params.value_head_size, dtype=compute, device=query.device)
    lse_TH = torch.full((len(query), params.num_heads), -torch.inf, dtype=compute, device=query.device)
    q_scale, k_scale, v_scale = scales
    for request in requests:
        query_qHD = query[request.rows]
        if is_float8(query):
            query_qHD = fp8_values(query_qHD, per_head(q_scale), compute)
        fetch = _page_reader(key_cache, value_cache, request.pages, k_scale, v_scale, compute)
        attend(query_qHD, fetch, sight(request), rule, tile_sizes, out_THV[request.rows], lse_TH[request.rows])
    return out_THV, lse_TH


def check_paged(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    params: AttentionParams,
    scales: tuple[Scale, Scale, Scale],
    tile_sizes: tuple[int, int],
) -> None:
    """Raise if tensors, scales or tiles do not fit each other or the layer; ``scales`` of query, key, value."""
    require_params(params)
    q_scale, k_scale, v_scale = scales
    require_float("query", query, float8=True)
    heads, size, value_size = params.num_kv_heads, params.head_size, params.value_head_size
    require_shape("query", query, None, params.num_heads, size, legend="rows, num_heads, head_size")
    if is_float8(query):
        require_scale("q_scale", q_scale, (params.num_heads,))
    legend = "blocks, block_size, num_kv_heads, head_size"
    check_cache("key_cache", key_cache, None, None, heads, size, legend=legend, scale=k_scale)
    pages = key_cache.shape[:2]
    check_cache("value_cache", value_cache, *pages, heads, value_size, legend="as the key cache", scale=v_scale)
    require_same_device("query", query, key_cache=key_cache, value_cache=value_cache)
    require_positive_int("q_tile", tile_sizes[0])
    require_positive_int("kv_tile", tile_sizes[1])


def _page_reader(
    key_cache: Tensor,
    value_cache: Tensor,
    pages: Tensor,
    k_scale: Scale,
    v_scale: Scale,
    compute: torch.dtype,
) -> FetchKeys:
    def fetch(lo: int, hi: int) -> tuple[Tensor, Tensor]:
        places = token_places(pages, lo, hi, key_cache.shape[1])
        return (
            heads_first(read_tokens(key_cache, places, k_scale, compute), compute),
            heads_first(read_tokens(value_cache, places, v_scale, compute), compute),
        )

    return fetch


def prefix_masks(
    num_reqs: int,
    mm_req_doc_ranges: Mapping[int, Sequence[tuple[int, int]]] | None,
    rswa_prefix_lens: Tensor | None,
) -> tuple[PrefixMask, ...]:
    """Return the mask of each request from the fields of vLLM's common metadata; none if both are None."""
    if mm_req_doc_ranges is None and rswa_prefix_lens is None:
        return ()
    lens = [0] * num_reqs if rswa_prefix_lens is None else rswa_prefix_lens.tolist()
    if len(lens) != num_reqs:
        raise ReferenceArgumentError("rswa_prefix_lens.shape", (len(lens),), f"one number for each of {num_reqs}")
    ranges = mm_req_doc_ranges or {}
    for request, own in ranges.items():
        if not 0 <= request < num_reqs or any(first > last for first, last in own):
            required = f"pairs of first and last position for requests 0 to {num_reqs - 1}"
            raise ReferenceArgumentError("mm_req_doc_ranges", {request: own}, required)
    return tuple(
        PrefixMask(tuple((first, last) for first, last in ranges.get(r, ())), lens[r]) for r in range(num_reqs)
    )


def require_topk_indices(topk_indices: Tensor | None, num_rows: int) -> None:
    """Raise unless the indices are None, or integers ``[M, K]`` for at least ``num_rows`` rows."""
    if topk_indices is None:
        return
    require_index("topk_indices", topk_indices)
    require_shape("topk_indices", topk_indices, None, None, legend="rows, indices")
    if len(topk_indices) < num_rows:
        raise ReferenceArgumentError(
            "topk_indices.shape", tuple(topk_indices.shape), f"at least {num_rows} rows, one for each of the query"
        )


def _check_tree(tree_mask: Tensor | None, max_query_len: int) -> None:
    if tree_mask is None:
        return
    if tree_mask.dtype != torch.bool:
        raise ReferenceArgumentError("tree_mask.dtype", tree_mask.dtype, "bool")
    if tree_mask.dim() != 2 or tree_mask.shape[0] != tree_mask.shape[1] or len(tree_mask) < max_query_len:
        raise ReferenceArgumentError(
            "tree_mask.shape", tuple(tree_mask.shape), f"square, at least {max_query_len} wide (the longest query)"
        )


@torch.no_grad()
def dcp_rank_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    params: AttentionParams,
    *,
    dcp_size: int,
    dcp_rank: int,
    cp_kv_cache_interleave_size: int = 1,
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
    q_scale: float | Tensor = 1.0,
    precision: Precision = Precision(),  # noqa: B008 (frozen)
    q_tile: int = 128,
    kv_tile: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Return one rank's part of the attention over a paged cache: ``(out [T, H, Dv], lse [T, H])``.

    Arguments are as in :func:`~attncheck.reference.attention.paged.paged_attention`, except as stated below.
    ``I`` is ``cp_kv_cache_interleave_size``. Rank ``(p // I) % dcp_size`` holds position ``p``, as its local token
    ``p // (I * dcp_size) * I + p % I``. That token is in block ``block_table[r, local // BS]``, offset ``local % BS``.
    Visibility and ALiBi use global positions. Only rank 0 includes the sinks, so that
    :func:`~attncheck.reference.attention.online_softmax.merge_many` over all ranks gives the attention over the whole
    cache. A
    row that sees no key of this rank gets ``out = 0``, ``lse = -inf`` (on rank 0 with a sink: the sink).

    key_cache, value_cache, block_table: of this rank. A row of the table is as wide as this rank's part of the request.
        For latent attention, pass one KV head: ``kv_cache[:, :, None]`` and its first ``L`` channels.
    query, seq_lens, query_start_loc: the same on every rank. ``seq_lens`` counts the tokens of all ranks.
    cp_kv_cache_interleave_size: a divisor of the block size.

    Raise :class:`~attncheck.errors.ReferenceArgumentError` for undefined arguments. No argument is modified.

    >>> from attncheck.reference import merge_many, paged_attention
    >>> layer, query, rows = AttentionParams(1, 1, 1), torch.ones(1, 1, 1), torch.tensor([0, 1])
    >>> table, lens, keys = torch.tensor([[0]]), torch.tensor([5]), torch.arange(6.0).view(6, 1, 1)
    >>> shares = [keys[rank::2].view(1, 3, 1, 1) for rank in (0, 1)]  # what two ranks hold; the last key is not owned
    >>> parts = [dcp_rank_attention(query, share, share, table, lens, rows, layer, dcp_size=2, dcp_rank=rank)
    ...          for rank, share in enumerate(shares)]
    >>> whole = paged_attention(query, keys.view(1, 6, 1, 1), keys.view(1, 6, 1, 1), table, lens, rows, layer)
    >>> all(torch.allclose(a, b) for a, b in zip(merge_many(*zip(*parts)), whole))
    True
    """
    tile_sizes, scales = (q_tile, kv_tile), (q_scale, k_scale, v_scale)
    check_paged(query, key_cache, value_cache, params, scales, tile_sizes)
    require_shard(key_cache.shape[1], dcp_size, dcp_rank, cp_kv_cache_interleave_size)
    share = _Share(dcp_size, dcp_rank, cp_kv_cache_interleave_size)
    requests = paged_requests(("query", query), key_cache, block_table, seq_lens, query_start_loc, stored=share.count)

    def sight(request: PagedRequest) -> Visibility:
        return _ShareSight(params, (0, request.seq_len), request.context_len, request.index, share=share)

    rule = ScoreRule(params, precision, query.device, sinks=dcp_rank == 0)
    return attend_paged(query, key_cache, value_cache, requests, sight, rule, scales, tile_sizes)


@dataclass(frozen=True)
class _Share:
    """The positions that one of ``size`` ranks holds: ``interleave`` consecutive positions per turn.

    Each rank numbers its own positions densely. For 2 ranks and an interleave of 2::

        position     0  1  2  3  4  5  6  7  8
        rank         0  0  1  1  0  0  1  1  0
        local index  0  1  0  1  2  3  2  3  4
    """

    size: int
    rank: int
    interleave: int

    def count(self, positions: int) -> int:
        """Return how many of the first ``positions`` positions the rank holds; at most 0 for ``positions <= 0``."""
        rounds, rest = divmod(positions, self.size * self.interleave)
        return rounds * self.interleave + min(max(rest - self.rank * self.interleave, 0), self.interleave)

    def positions(self, local: Tensor) -> Tensor:
        """Return the global positions of local tokens."""
        turn = local.div(self.interleave, rounding_mode="floor") * self.size + self.rank
        return turn * self.interleave + local % self.interleave


@dataclass(frozen=True, kw_only=True)
class _ShareSight(Visibility):
    """Visibility over the rank's local key numbers; ``span`` and the predicates still use global positions."""

    share: _Share

    def reach(self, first: int, last: int) -> Span:
        lo, hi = super().reach(first, last)
        return self.share.count(lo), self.share.count(hi)

    def common(self, first: int, last: int) -> Span:
        lo, hi = super().common(first, last)
        return self.share.count(lo), self.share.count(hi)

    def key_positions(self, lo: int, hi: int, device: torch.device) -> Tensor:
        return self.share.positions(super().key_positions(lo, hi, device))
