"""Attention over a paged KV cache: the truth of the decoder paths, of cross attention, and of their parts.

Turns a batch (block table, lengths, row offsets) into one call of the shared computation a request, reading only the
slots a request owns. Must not know: how the softmax is summed, how a cache is written, backends.
"""

from collections.abc import Sequence
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
)
from attncheck.reference.online_softmax import FetchKeys, ScoreRule, attend, heads_first
from attncheck.reference.params import AttentionParams, Precision, require_params
from attncheck.reference.quant import fp8_values
from attncheck.reference.visibility import MaskFunction, Visibility


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
    """Softmax attention of every query row over the cached keys of its request: ``(out [T, H, Dv], lse [T, H])``.

    Request ``r`` has the rows ``query_start_loc[r] .. query_start_loc[r + 1] - 1`` and the keys at positions ``0 ..
    seq_lens[r] - 1``, this step's included (they have been written before). Its row ``i`` stands at position
    ``seq_lens[r] - query_len + i``: rows are aligned to the END of the keys. For 2 rows and 5 keys, causal::

        k k k k k
        x x x x .     row 0, position 3
        x x x x x     row 1, position 4

    The key at position ``p`` stands in block ``block_table[r, p // BS]`` at offset ``p % BS``. Scores, modifiers and
    their order: :class:`~attncheck.reference.params.AttentionParams`; who sees whom:
    :func:`~attncheck.reference.params.visible`. ``lse`` is the natural logarithm of the softmax denominator, sinks
    included. A row that sees no key gets ``out = 0``, ``lse = -inf`` (with a sink: the sink); a row of no request ``0``
    and ``-inf``. Both results are new, in ``precision.compute``.

    query: ``[T, H, D]``, ``T >= query_start_loc[-1]``; any float dtype, float8 with ``q_scale``.
    key_cache, value_cache: ``[NB, BS, Hkv, D]`` and ``[NB, BS, Hkv, Dv]``, logical views of any strides and of any
        float dtype; float8 with ``k_scale``, ``v_scale``. Slots that no request owns are never read.
    block_table: ``[R, M]`` int32 or int64. Entries from ``ceil(seq_len / BS)`` on are never looked at.
    seq_lens, query_start_loc: ``[R]``, ``[R + 1]``, int32 or int64. A request without rows is never looked at.
    k_scale, v_scale: the value of a float8 code is ``code * scale``: a number (used exactly), one element, ``[Hkv]``
        or ``[NB, BS, Hkv]``. Ignored for other caches, as in vLLM.
    q_scale: likewise for a float8 query: a number, one element, or ``[H]``.
    kv_range: only keys at ``lo <= j < hi`` count; positions and lengths stay. ``None``: all.
    include_sinks: False for all parts but one of a split whose states are merged.
    tree_mask: bool ``[Q, Q]``, ANDed among the new rows: row ``i`` may see new key ``m`` where ``tree_mask[i, m]``, one
        tree for all requests, ``query_len <= Q``; context keys are not affected. ``None``: no tree.
    mask_fn: ``(request, q_pos [a, 1], k_pos [1, b]) -> bool [a, b]`` instead of ``visible``; called with tiles of
        absolute positions. ``None``: ``visible``.
    precision: which roundings are made; the default is the float64 truth.
    q_tile, kv_tile: rows and keys of a tile; results depend on them by rounding only.

    Raises :class:`~attncheck.errors.ReferenceArgumentError` for whatever has no meaning: shapes that do not fit each
    other or ``params``, dtypes that are no numbers of the kind, falling offsets, negative lengths, a table narrower
    than a length, an owned block outside the cache. No argument is modified.

    What it computes, by a loop (one head, scale 1):

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
    _check_tensors(query, key_cache, value_cache, params)
    batch = _Batch(query, key_cache, block_table, seq_lens, query_start_loc)
    for name, cache, scale in (("k_scale", key_cache, k_scale), ("v_scale", value_cache, v_scale)):
        if is_float8(cache):
            require_scale(name, scale, (params.num_kv_heads,), tuple(cache.shape[:3]))
    if is_float8(query):
        require_scale("q_scale", q_scale, (params.num_heads,))
    _check_options(kv_range, tree_mask, batch.max_query_len, q_tile, kv_tile)

    tokens, compute = query.shape[0], precision.compute
    out_THV = torch.zeros(tokens, params.num_heads, params.value_head_size, dtype=compute, device=query.device)
    lse_TH = torch.full((tokens, params.num_heads), -torch.inf, dtype=compute, device=query.device)
    rule = ScoreRule(params, precision, query.device, include_sinks)
    tree = None if tree_mask is None else tree_mask.to(query.device)
    for request, rows, seq_len in batch.requests():
        query_qHD = query[rows]
        if is_float8(query):
            query_qHD = fp8_values(query_qHD, _per_head(q_scale), compute)
        pages = block_table[request, : -(-seq_len // batch.block_size)].to(query.device, torch.int64)
        lo, hi = (0, seq_len) if kv_range is None else (min(kv_range[0], seq_len), min(kv_range[1], seq_len))
        sight = Visibility(params, (lo, hi), seq_len - len(query_qHD), request, tree, mask_fn)
        fetch = _page_reader(key_cache, value_cache, pages, k_scale, v_scale, compute)
        attend(query_qHD, fetch, sight, rule, (q_tile, kv_tile), out_THV[rows], lse_TH[rows])
    return out_THV, lse_TH


class _Batch:
    """The index tensors on the host, found consistent."""

    def __init__(
        self, query: Tensor, key_cache: Tensor, block_table: Tensor, seq_lens: Tensor, query_start_loc: Tensor
    ) -> None:
        self.starts = host_offsets("query_start_loc", query_start_loc, "query", query.shape[0])
        requests = len(self.starts) - 1
        self.seq_lens = host_ints("seq_lens", seq_lens, requests)
        require_index("block_table", block_table)
        require_shape("block_table", block_table, requests, None, legend="one row a request")
        num_blocks, self.block_size = key_cache.shape[:2]
        table = block_table.cpu()
        for request, _, seq_len in self.requests():
            if seq_len < 0:
                raise ReferenceArgumentError(f"seq_lens[{request}]", seq_len, "at least 0")
            pages = -(-seq_len // self.block_size)
            if pages > table.shape[1]:
                raise ReferenceArgumentError(
                    "block_table.shape", tuple(table.shape), f"at least {pages} wide for seq_lens[{request}] {seq_len}"
                )
            owned = table[request, :pages]
            wrong = (owned < 0) | (owned >= num_blocks)
            if wrong.any():
                page = int(wrong.int().argmax())
                raise ReferenceArgumentError(
                    f"block_table[{request}, {page}]", int(owned[page]), f"a block of the cache, 0 to {num_blocks - 1}"
                )

    @property
    def max_query_len(self) -> int:
        """Rows of the longest request; 0 without requests."""
        return max((rows.stop - rows.start for _, rows, _ in self.requests()), default=0)

    def requests(self) -> list[tuple[int, slice, int]]:
        """``(request, its rows, its seq_len)`` for every request that has rows."""
        spans = enumerate(pairwise(self.starts))
        return [(r, slice(start, end), self.seq_lens[r]) for r, (start, end) in spans if start < end]


def _page_reader(
    key_cache: Tensor,
    value_cache: Tensor,
    pages: Tensor,
    k_scale: float | Tensor,
    v_scale: float | Tensor,
    compute: torch.dtype,
) -> FetchKeys:
    """Reads keys of one request through its pages: exactly the slots asked for, none beside them."""
    block_size = key_cache.shape[1]

    def fetch(lo: int, hi: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(lo, hi, device=pages.device)
        blocks, offsets = pages[positions // block_size], positions % block_size
        return (
            heads_first(_read(key_cache, blocks, offsets, k_scale, compute), compute),
            heads_first(_read(value_cache, blocks, offsets, v_scale, compute), compute),
        )

    return fetch


def _read(cache: Tensor, blocks: Tensor, offsets: Tensor, scale: float | Tensor, compute: torch.dtype) -> Tensor:
    """``cache[blocks, offsets]``, ``[k, Hkv, C]``; codes are given their value."""
    if not is_float8(cache):
        return cache[blocks, offsets]
    codes = cache.view(torch.uint8)[blocks, offsets].view(cache.dtype)
    if isinstance(scale, Tensor) and scale.numel() != 1 and scale.dim() > 1:
        scale = scale[blocks.to(scale.device), offsets.to(scale.device)]
    return fp8_values(codes, _per_head(scale), compute)


def _per_head(scale: float | Tensor) -> float | Tensor:
    """A scale that broadcasts to ``[rows, heads, size]``."""
    if not isinstance(scale, Tensor):
        return scale
    return scale.reshape(()) if scale.numel() == 1 else scale.unsqueeze(-1)


def _check_tensors(query: Tensor, key_cache: Tensor, value_cache: Tensor, params: AttentionParams) -> None:
    require_params(params)
    for name, tensor in (("query", query), ("key_cache", key_cache), ("value_cache", value_cache)):
        require_float(name, tensor, float8=True)
    require_shape("query", query, None, params.num_heads, params.head_size, legend="rows, num_heads, head_size")
    heads = params.num_kv_heads
    require_shape(
        "key_cache",
        key_cache,
        None,
        None,
        heads,
        params.head_size,
        legend="blocks, block_size, num_kv_heads, head_size",
    )
    require_shape(
        "value_cache", value_cache, *key_cache.shape[:2], heads, params.value_head_size, legend="as the key cache"
    )
    if key_cache.shape[1] == 0:
        raise ReferenceArgumentError("key_cache.shape", tuple(key_cache.shape), "at least one token a block")
    require_same_device("query", query, key_cache=key_cache, value_cache=value_cache)


def _check_options(
    kv_range: Sequence[int] | None, tree_mask: Tensor | None, max_query_len: int, q_tile: int, kv_tile: int
) -> None:
    require_positive_int("q_tile", q_tile)
    require_positive_int("kv_tile", kv_tile)
    if kv_range is not None and (len(kv_range) != 2 or not 0 <= kv_range[0] <= kv_range[1]):
        raise ReferenceArgumentError("kv_range", kv_range, "two positions 0 <= lo <= hi, or None")
    if tree_mask is not None:
        if tree_mask.dtype != torch.bool:
            raise ReferenceArgumentError("tree_mask.dtype", tree_mask.dtype, "bool")
        if tree_mask.dim() != 2 or tree_mask.shape[0] != tree_mask.shape[1] or len(tree_mask) < max_query_len:
            raise ReferenceArgumentError(
                "tree_mask.shape", tuple(tree_mask.shape), f"square, at least {max_query_len} wide (the longest query)"
            )
