"""Attention over packed sequences without a cache: the reference for encoder layers and other unpaged calls."""

from itertools import pairwise

import torch
from torch import Tensor

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.arguments import (
    host_offsets,
    require_float,
    require_positive_int,
    require_same_device,
    require_shape,
)
from attncheck.reference.attention.online_softmax import FetchKeys, ScoreRule, attend, heads_first
from attncheck.reference.attention.params import AttentionParams, Precision, Visibility, require_params


@torch.no_grad()
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    params: AttentionParams,
    *,
    include_sinks: bool = True,
    precision: Precision = Precision(),  # noqa: B008 (frozen)
    q_tile: int = 128,
    kv_tile: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Return softmax attention ``(out [Tq, H, Dv], lse [Tq, H])`` within each packed sequence.

    Sequence ``r`` has the query rows ``cu_seqlens_q[r] .. cu_seqlens_q[r + 1] - 1`` and the key rows
    ``cu_seqlens_k[r] .. cu_seqlens_k[r + 1] - 1``. With ``Lq`` query rows and ``Lk`` key rows, query row ``i`` is at
    position ``Lk - Lq + i`` and key row ``j`` at ``j``. For encoder layers pass ``causal=False`` and one ``cu_seqlens``
    for both.

    Formula, modifiers, rows that see no key, rows of no sequence, ``precision`` and tiles are as in
    :func:`~attncheck.reference.attention.paged.paged_attention`.

    query, key, value: ``[Tq, H, D]``, ``[Tk, Hkv, D]``, ``[Tk, Hkv, Dv]``; any strides, any float dtype but float8.
    cu_seqlens_q, cu_seqlens_k: ``[R + 1]`` int32 or int64, from 0, non-decreasing. Rows beyond the last offset belong
        to no sequence.

    Raise :class:`~attncheck.errors.ReferenceArgumentError` for undefined arguments. No argument is modified.

    >>> x, ends = torch.randn(5, 2, 4), torch.tensor([0, 2, 5])
    >>> encoder = AttentionParams(num_heads=2, num_kv_heads=2, head_size=4, causal=False)
    >>> both, _ = varlen_attention(x, x, x, ends, ends, encoder)
    >>> alone, _ = varlen_attention(x[2:], x[2:], x[2:], torch.tensor([0, 3]), torch.tensor([0, 3]), encoder)
    >>> bool((both[2:] == alone).all())
    True
    """
    require_params(params)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        require_float(name, tensor)
    heads = params.num_kv_heads
    require_shape("query", query, None, params.num_heads, params.head_size, legend="rows, num_heads, head_size")
    require_shape("key", key, None, heads, params.head_size, legend="rows, num_kv_heads, head_size")
    require_shape("value", value, key.shape[0], heads, params.value_head_size, legend="rows of key, num_kv_heads, Dv")
    require_same_device("query", query, key=key, value=value)
    require_positive_int("q_tile", q_tile)
    require_positive_int("kv_tile", kv_tile)
    q_starts = host_offsets("cu_seqlens_q", cu_seqlens_q, "query", query.shape[0])
    k_starts = host_offsets("cu_seqlens_k", cu_seqlens_k, "key", key.shape[0])
    if len(q_starts) != len(k_starts):
        raise ReferenceArgumentError("cu_seqlens_k.shape", (len(k_starts),), f"({len(q_starts)},), as cu_seqlens_q")

    compute = precision.compute
    out_THV = torch.zeros(len(query), params.num_heads, params.value_head_size, dtype=compute, device=query.device)
    lse_TH = torch.full((len(query), params.num_heads), -torch.inf, dtype=compute, device=query.device)
    rule = ScoreRule(params, precision, query.device, include_sinks)
    for (q_start, q_end), (k_start, k_end) in zip(pairwise(q_starts), pairwise(k_starts), strict=True):
        rows, num_keys = slice(q_start, q_end), k_end - k_start
        sight = Visibility(params, (0, num_keys), num_keys - (q_end - q_start))
        fetch = _row_reader(key[k_start:k_end], value[k_start:k_end], compute)
        attend(query[rows], fetch, sight, rule, (q_tile, kv_tile), out_THV[rows], lse_TH[rows])
    return out_THV, lse_TH


def _row_reader(key_kND: Tensor, value_kNV: Tensor, compute: torch.dtype) -> FetchKeys:
    def fetch(lo: int, hi: int) -> tuple[Tensor, Tensor]:
        return heads_first(key_kND[lo:hi], compute), heads_first(value_kNV[lo:hi], compute)

    return fetch
