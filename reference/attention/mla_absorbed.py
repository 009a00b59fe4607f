"""Multi-head latent attention in the absorbed form: the whole layer, or its decode kernel alone.

The key up-projection is applied to the query and the value up-projection to the output, so that cache rows are used
unchanged. :mod:`attncheck.reference.attention.mla_naive` has the legend and computes the same function::

    k[j] = [ c[j] , k_pe[j] ]        q[h] = [ w_uk[:, h] . q_nope[h] , q_pe[h] ]
    v[j] =   c[j]                    softmax attention, one KV head, with the softmax scale of the naive form
    out[h] = out_latent[h] . w_uv[:, h]

Queries are projected one tile at a time. If ``precision.out`` is set, it also rounds the latent query and the latent
output, because an engine stores them between two kernels.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from attncheck.reference.attention.mla_cache import check_latent, check_weights
from attncheck.reference.attention.mla_layer import MLAParams, require_mla_params
from attncheck.reference.attention.online_softmax import ScoreRule, attend
from attncheck.reference.attention.pages import PagedRequest, paged_requests, read_tokens, require_kv_range
from attncheck.reference.attention.params import Precision
from attncheck.reference.attention.visibility import Visibility


@torch.no_grad()
def mla_attention_absorbed(
    q_nope: Tensor,
    q_pe: Tensor,
    kv_cache: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    params: MLAParams,
    *,
    k_scale: float | Tensor = 1.0,
    kv_range: tuple[int, int] | None = None,
    precision: Precision = Precision(),  # noqa: B008 (frozen)
    q_tile: int = 128,
    kv_tile: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Return latent attention ``(out [T, H, V], lse [T, H])`` of every query row over the cached tokens of its request.

    Arguments, errors and (up to rounding) results are those of
    :func:`~attncheck.reference.attention.mla_naive.mla_attention_naive`.
    """
    require_mla_params(params)
    queries = {"q_nope": (q_nope, params.qk_nope_head_dim), "q_pe": (q_pe, params.qk_rope_head_dim)}
    check_latent(queries, kv_cache, params, k_scale, (q_tile, kv_tile))
    check_weights(w_uk, w_uv, kv_cache, params)
    require_kv_range(kv_range)
    requests = paged_requests(("q_nope", q_nope), kv_cache, block_table, seq_lens, query_start_loc)

    compute = precision.compute
    w_uk_HPL, w_uv_HLV = w_uk.to(compute).permute(1, 2, 0), w_uv.to(compute).transpose(0, 1)
    kernel = _LatentKernel(kv_cache, params, k_scale, precision, kv_tile)
    out_THV, lse_TH = kernel.no_keys(len(q_nope), params.v_head_dim)
    for request, rows in _row_tiles(requests, q_tile):
        q_HqL = precision.round_out(torch.bmm(q_nope[rows].to(compute).transpose(0, 1), w_uk_HPL))
        out_qHL, lse_TH[rows] = kernel.attend(request, rows, kv_range, q_HqL.transpose(0, 1), q_pe[rows])
        out_THV[rows] = precision.round_out(torch.bmm(out_qHL.transpose(0, 1), w_uv_HLV)).transpose(0, 1)
    return out_THV, lse_TH


@torch.no_grad()
def mla_latent_attention(
    q_latent: Tensor,
    q_pe: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    params: MLAParams,
    *,
    k_scale: float | Tensor = 1.0,
    kv_range: tuple[int, int] | None = None,
    precision: Precision = Precision(),  # noqa: B008 (frozen)
    q_tile: int = 128,
    kv_tile: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Return the result of the decode kernel on projected queries: ``(out_latent [T, H, L], lse [T, H])``.

    ``q_latent`` is ``[T, H, L]``. The other arguments are those of :func:`mla_attention_absorbed`. The function equals
    :func:`~attncheck.reference.attention.paged.paged_attention` with one KV head, whose values are the first ``L``
    channels of its keys.
    """
    require_mla_params(params)
    queries = {"q_latent": (q_latent, params.kv_lora_rank), "q_pe": (q_pe, params.qk_rope_head_dim)}
    check_latent(queries, kv_cache, params, k_scale, (q_tile, kv_tile))
    require_kv_range(kv_range)
    requests = paged_requests(("q_latent", q_latent), kv_cache, block_table, seq_lens, query_start_loc)
    kernel = _LatentKernel(kv_cache, params, k_scale, precision, kv_tile)
    out_THL, lse_TH = kernel.no_keys(len(q_latent), params.kv_lora_rank)
    for request, rows in _row_tiles(requests, q_tile):
        out_THL[rows], lse_TH[rows] = kernel.attend(request, rows, kv_range, q_latent[rows], q_pe[rows])
    return out_THL, lse_TH


class _LatentKernel:
    """Attention with cache rows as keys and their first ``L`` channels as values."""

    def __init__(
        self, kv_cache: Tensor, params: MLAParams, k_scale: float | Tensor, precision: Precision, kv_tile: int
    ) -> None:
        self.kv_cache, self.k_scale, self.kv_tile = kv_cache, k_scale, kv_tile
        self.rule = ScoreRule(params.latent, precision, kv_cache.device, sinks=False)

    def no_keys(self, rows: int, size: int) -> tuple[Tensor, Tensor]:
        """Return ``(out, lse)`` of ``rows`` rows that see no key, with output heads of ``size``."""
        compute, heads = self.rule.precision.compute, self.rule.params.num_heads
        out = torch.zeros(rows, heads, size, dtype=compute, device=self.kv_cache.device)
        return out, out.new_full((rows, heads), -torch.inf)

    def attend(
        self, request: PagedRequest, rows: slice, kv_range: Sequence[int] | None, q_qHL: Tensor, q_pe_qHE: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return ``(out_latent [q, H, L], lse [q, H])`` of some ``rows`` of the request."""
        params, compute = self.rule.params, self.rule.precision.compute

        def fetch(lo: int, hi: int) -> tuple[Tensor, Tensor]:
            row_1kD = read_tokens(self.kv_cache, request.pages, lo, hi, self.k_scale, compute).to(compute).unsqueeze(0)
            return row_1kD, row_1kD[..., : params.value_head_size]

        query_qHD = torch.cat([q_qHL.to(compute), q_pe_qHE.to(compute)], dim=-1)
        first = request.context_len + rows.start - request.rows.start
        sight = Visibility(params, request.span(kv_range), first, request.index)
        out_qHL, lse_qH = self.no_keys(len(query_qHD), params.value_head_size)
        attend(query_qHD, fetch, sight, self.rule, (len(query_qHD), self.kv_tile), out_qHL, lse_qH)
        return out_qHL, lse_qH


def _row_tiles(requests: Sequence[PagedRequest], q_tile: int) -> Iterator[tuple[PagedRequest, slice]]:
    """Yield the rows of every request, at most ``q_tile`` at a time."""
    for request in requests:
        for begin in range(request.rows.start, request.rows.stop, q_tile):
            yield request, slice(begin, min(begin + q_tile, request.rows.stop))
