"""Attention over a paged KV cache: the reference for decoder layers, cross attention and their parts.

Splits a batch (block table, lengths, row offsets) into one call of ``online_softmax.attend`` per request, and reads
only the slots a request owns.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.arguments import (
    is_float8,
    require_float,
    require_positive_int,
    require_same_device,
    require_scale,
    require_shape,
)
from attncheck.reference.attention.online_softmax import FetchKeys, ScoreRule, attend, heads_first
from attncheck.reference.attention.pages import PagedRequest, paged_requests, per_head, read_tokens, require_kv_range
from attncheck.reference.attention.params import AttentionParams, Precision, require_params
from attncheck.reference.attention.quant import fp8_values
from attncheck.reference.attention.visibility import MaskFunction, Visibility

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

    def sight(request: PagedRequest) -> Visibility:
        span = request.span(kv_range)
        return Visibility(params, span, request.context_len, request.index, tree, mask_fn)

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
    for name, tensor in (("query", query), ("key_cache", key_cache), ("value_cache", value_cache)):
        require_float(name, tensor, float8=True)
    heads, size = params.num_kv_heads, params.head_size
    require_shape("query", query, None, params.num_heads, size, legend="rows, num_heads, head_size")
    legend = "blocks, block_size, num_kv_heads, head_size"
    require_shape("key_cache", key_cache, None, None, heads, size, legend=legend)
    require_shape(
        "value_cache", value_cache, *key_cache.shape[:2], heads, params.value_head_size, legend="as the key cache"
    )
    if key_cache.shape[1] == 0:
        raise ReferenceArgumentError("key_cache.shape", tuple(key_cache.shape), "at least one token a block")
    require_same_device("query", query, key_cache=key_cache, value_cache=value_cache)
    q_scale, k_scale, v_scale = scales
    if is_float8(query):
        require_scale("q_scale", q_scale, (params.num_heads,))
    for name, cache, scale in (("k_scale", key_cache, k_scale), ("v_scale", value_cache, v_scale)):
        if is_float8(cache):
            require_scale(name, scale, (heads,), tuple(cache.shape[:3]))
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
        return (
            heads_first(read_tokens(key_cache, pages, lo, hi, k_scale, compute), compute),
            heads_first(read_tokens(value_cache, pages, lo, hi, v_scale, compute), compute),
        )

    return fetch


def _check_tree(tree_mask: Tensor | None, max_query_len: int) -> None:
    if tree_mask is None:
        return
    if tree_mask.dtype != torch.bool:
        raise ReferenceArgumentError("tree_mask.dtype", tree_mask.dtype, "bool")
    if tree_mask.dim() != 2 or tree_mask.shape[0] != tree_mask.shape[1] or len(tree_mask) < max_query_len:
        raise ReferenceArgumentError(
            "tree_mask.shape", tuple(tree_mask.shape), f"square, at least {max_query_len} wide (the longest query)"
        )
