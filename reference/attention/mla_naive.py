"""Multi-head latent attention with up-projected keys and values (the naive form), in one pass or with chunked context.

With the cache row ``[c, k_pe]`` of a token (:mod:`attncheck.reference.attention.mla_cache`), query heads of ``P + E``
and the up-projections ``w_uk`` (``[L, H, P]``) and ``w_uv`` (``[L, H, V]``)::

    k[j, h] = [ c[j] . w_uk[:, h] , k_pe[j] ]        q[h] = [ q_nope[h] , q_pe[h] ]
    v[j, h] =   c[j] . w_uv[:, h]                    softmax attention, one KV head per query head

Keys and values are computed one key tile at a time, so that memory does not grow with the length of a request. If
``precision.out`` is set, it also rounds keys and values, because an engine stores them between two kernels.
"""

import torch
from torch import Tensor

from attncheck.reference.arguments import require_positive_int
from attncheck.reference.attention.merge import merge_attn_states
from attncheck.reference.attention.mla_cache import check_latent, check_weights
from attncheck.reference.attention.mla_layer import MLAParams, require_mla_params
from attncheck.reference.attention.online_softmax import FetchKeys, ScoreRule, attend
from attncheck.reference.attention.pages import PagedRequest, paged_requests, read_tokens, require_kv_range
from attncheck.reference.attention.params import Precision
from attncheck.reference.attention.visibility import Span, Visibility


@torch.no_grad()
def mla_attention_naive(
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

    Rows, positions, pages, rows that see no key, rows of no request, ``kv_range``, ``precision`` and tiles are as in
    :func:`~attncheck.reference.attention.paged.paged_attention`.

    q_nope, q_pe: ``[T, H, P]``, ``[T, H, E]``, ``T >= query_start_loc[-1]``; any float dtype but float8.
    kv_cache: ``[NB, BS, L + E]``, of any strides and any float dtype; slots that no request owns are never read.
    w_uk, w_uv: ``[L, H, P]``, ``[L, H, V]``, any float dtype but float8.
    block_table, seq_lens, query_start_loc: ``[R, M]``, ``[R]``, ``[R + 1]``, int32 or int64.
    k_scale: scale of a float8 cache: a number (used exactly) or one element. It applies to whole rows, hence to values
        too. Ignored for other caches.

    Raise :class:`~attncheck.errors.ReferenceArgumentError` for undefined arguments. No argument is modified.

    Two tokens of equal score and values 3 + 50, 4 + 60:

    >>> layer = MLAParams(1, kv_lora_rank=2, qk_nope_head_dim=2, qk_rope_head_dim=1, v_head_dim=1)
    >>> queries = torch.zeros(1, 1, 2), torch.zeros(1, 1, 1)
    >>> cache = torch.tensor([[[3.0, 5.0, 0.0], [4.0, 6.0, 0.0]]])
    >>> weights = torch.ones(2, 1, 2), torch.tensor([1.0, 10.0]).view(2, 1, 1)
    >>> lens = torch.tensor([[0]]), torch.tensor([2]), torch.tensor([0, 1])
    >>> out, lse = mla_attention_naive(*queries, cache, *weights, *lens, layer)
    >>> out.item(), round(lse.item(), 6)
    (58.5, 0.693147)
    """
    form = _NaiveForm(q_nope, q_pe, kv_cache, w_uk, w_uv, params, k_scale, precision, (q_tile, kv_tile))
    require_kv_range(kv_range)
    requests = paged_requests(("q_nope", q_nope), kv_cache, block_table, seq_lens, query_start_loc)
    out_THV, lse_TH = form.no_keys(len(q_nope))
    for request in requests:
        out_THV[request.rows], lse_TH[request.rows] = form.attend(request, request.span(kv_range))
    return out_THV, lse_TH


@torch.no_grad()
def mla_attention_chunked(
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
    workspace: int,
    k_scale: float | Tensor = 1.0,
    precision: Precision = Precision(),  # noqa: B008 (frozen)
    q_tile: int = 128,
    kv_tile: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Return :func:`mla_attention_naive` computed in parts: the new rows, then chunks of context, merged.

    The context is cut per request. Its parts are ``[context_len, seq_len)``, then ``[0, workspace)``,
    ``[workspace, 2 * workspace)`` and so on up to ``context_len``. Each part is merged into the result, which is then
    rounded to ``precision.out``, as in an engine that merges in place.

    workspace: context tokens of a request that are up-projected at once, at least 1. The other arguments are those of
    :func:`mla_attention_naive`.
    """
    form = _NaiveForm(q_nope, q_pe, kv_cache, w_uk, w_uv, params, k_scale, precision, (q_tile, kv_tile))
    require_positive_int("workspace", workspace)
    requests = paged_requests(("q_nope", q_nope), kv_cache, block_table, seq_lens, query_start_loc)
    out_THV, lse_TH = form.no_keys(len(q_nope))
    for request in requests:
        context_len = max(request.context_len, 0)
        state = form.attend(request, (context_len, request.seq_len))
        for begin in range(0, context_len, workspace):
            piece = form.attend(request, (begin, min(begin + workspace, context_len)))
            state = merge_attn_states(*state, *piece, precision=precision)
        out_THV[request.rows], lse_TH[request.rows] = state
    return out_THV, lse_TH


class _NaiveForm:
    """The checked queries, cache and weights of a batch; the caller chooses the keys to attend to."""

    def __init__(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        kv_cache: Tensor,
        w_uk: Tensor,
        w_uv: Tensor,
        params: MLAParams,
        k_scale: float | Tensor,
        precision: Precision,
        tile_sizes: tuple[int, int],
    ) -> None:
        require_mla_params(params)
        queries = {"q_nope": (q_nope, params.qk_nope_head_dim), "q_pe": (q_pe, params.qk_rope_head_dim)}
        check_latent(queries, kv_cache, params, k_scale, tile_sizes)
        check_weights(w_uk, w_uv, kv_cache, params)
        self.q_nope, self.q_pe, self.kv_cache, self.k_scale = q_nope, q_pe, kv_cache, k_scale
        self.params, self.tile_sizes = params, tile_sizes
        self.rule = ScoreRule(params.naive, precision, kv_cache.device, sinks=False)
        compute = precision.compute
        self.w_uk_LX, self.w_uv_LX = (w.to(compute).reshape(params.kv_lora_rank, -1) for w in (w_uk, w_uv))

    def no_keys(self, rows: int) -> tuple[Tensor, Tensor]:
        """Return ``(out, lse)`` of ``rows`` rows that see no key."""
        compute, heads = self.rule.precision.compute, self.params.num_heads
        out_THV = torch.zeros(rows, heads, self.params.v_head_dim, dtype=compute, device=self.kv_cache.device)
        return out_THV, out_THV.new_full((rows, heads), -torch.inf)

    def attend(self, request: PagedRequest, span: Span) -> tuple[Tensor, Tensor]:
        """Return ``(out [q, H, V], lse [q, H])`` of the request's rows over its keys within ``span``."""
        query_qHD = torch.cat([self.q_nope[request.rows], self.q_pe[request.rows]], dim=-1)
        out_qHV, lse_qH = self.no_keys(len(query_qHD))
        sight = Visibility(self.rule.params, span, request.context_len, request.index)
        attend(query_qHD, self._reader(request.pages), sight, self.rule, self.tile_sizes, out_qHV, lse_qH)
        return out_qHV, lse_qH

    def _reader(self, pages: Tensor) -> FetchKeys:
        params, precision = self.params, self.rule.precision
        heads, latent, nope = params.num_heads, params.kv_lora_rank, params.qk_nope_head_dim

        def fetch(lo: int, hi: int) -> tuple[Tensor, Tensor]:
            row_kD = read_tokens(self.kv_cache, pages, lo, hi, self.k_scale, precision.compute).to(precision.compute)
            c_kL, k_pe_kE = row_kD[:, :latent], row_kD[:, latent:]
            k_HkD = row_kD.new_empty(heads, hi - lo, params.qk_head_dim)
            k_HkD[..., :nope] = precision.round_out(c_kL @ self.w_uk_LX).view(hi - lo, heads, nope).transpose(0, 1)
            k_HkD[..., nope:] = k_pe_kE
            v_kHV = precision.round_out(c_kL @ self.w_uv_LX).view(hi - lo, heads, params.v_head_dim)
            return k_HkD, v_kHV.transpose(0, 1)

        return fetch
