"""Multi-head latent attention: its parameters, its cache, and attention in the naive and in the absorbed form.

A token has one cache row, shared by all heads: the latent part ``c`` (``L`` wide, already normalised), then the rotated
part ``k_pe`` of the keys (``E`` wide). There is no value cache; values are computed from ``c``. Query heads are
``P + E`` wide, and the up-projections are ``w_uk`` (``[L, H, P]``) and ``w_uv`` (``[L, H, V]``).

The naive form projects keys and values up, one key tile at a time, so that memory does not grow with a request::

    k[j, h] = [ c[j] . w_uk[:, h] , k_pe[j] ]        q[h] = [ q_nope[h] , q_pe[h] ]
    v[j, h] =   c[j] . w_uv[:, h]                    softmax attention, one KV head per query head

The absorbed form computes the same function from unchanged cache rows. It applies the key up-projection to the query,
one query tile at a time, and the value up-projection to the output::

    k[j] = [ c[j] , k_pe[j] ]        q[h] = [ w_uk[:, h] . q_nope[h] , q_pe[h] ]
    v[j] =   c[j]                    softmax attention, one KV head, with the softmax scale of the naive form
    out[h] = out_latent[h] . w_uv[:, h]

If ``precision.out`` is set, it also rounds what an engine stores between two kernels: the projected keys and values of
the naive form, the latent query and the latent output of the absorbed one.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.arguments import (
    host_ints,
    require_float,
    require_positive_int,
    require_same_device,
    require_shape,
)
from attncheck.reference.attention.cache import check_cache, reshape_and_cache
from attncheck.reference.attention.online_softmax import FetchKeys, ScoreRule, attend, merge_attn_states
from attncheck.reference.attention.paged import (
    PagedRequest,
    paged_requests,
    read_tokens,
    require_kv_range,
    require_topk_indices,
    token_places,
)
from attncheck.reference.attention.params import AttentionParams, Precision, Span, Visibility, chosen_keys
from attncheck.reference.spec import MODIFIERS, AttentionType, LayerSpec


@dataclass(frozen=True)
class MLAParams:
    """The parameters of one layer of multi-head latent attention (DeepSeek-V2, 2024). Hashable.

    num_heads: ``H``, query heads; all of them read the same latent row of a token.
    kv_lora_rank: ``L``, width of the latent part ``c`` of a cache row.
    qk_nope_head_dim: ``P``, width of a query or key head without rotary embedding; may be 0 if ``E`` is not.
    qk_rope_head_dim: ``E``, width with rotary embedding, shared by the heads of a key; may be 0 if ``P`` is not.
    v_head_dim: ``V``, width of a value or output head.
    scale: any finite number; ``None`` means ``(P + E) ** -0.5``, in the naive and in the absorbed form.
    causal: whether a row sees only its own key and earlier keys.

    Raise :class:`~attncheck.errors.ReferenceArgumentError` (a ``ValueError``) with the name of the invalid field.

    >>> MLAParams(128, kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=128).softmax_scale
    0.0625
    """

    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    scale: float | None = None
    causal: bool = True

    def __post_init__(self) -> None:
        for name in ("num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            size, least = getattr(self, name), int(not name.startswith("qk_"))
            if not isinstance(size, int) or isinstance(size, bool) or size < least:
                raise ReferenceArgumentError(name, size, f"an integer >= {least}")
        if self.qk_head_dim == 0:
            raise ReferenceArgumentError("qk_nope_head_dim + qk_rope_head_dim", 0, "at least 1")
        if self.scale is not None and not math.isfinite(self.scale):
            raise ReferenceArgumentError(
                "scale", self.scale, "a finite number, or None for (qk_nope_head_dim + qk_rope_head_dim) ** -0.5"
            )

    @property
    def qk_head_dim(self) -> int:
        """``P + E``: width of an unabsorbed query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_size(self) -> int:
        """``L + E``: width of a cache row, and of an absorbed query head."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """The factor on the scores; its default comes from ``P + E``, never from ``L + E``."""
        return float(self.qk_head_dim) ** -0.5 if self.scale is None else float(self.scale)

    @property
    def naive(self) -> AttentionParams:
        """Attention parameters of the naive form: keys of ``P + E``, values of ``V``, one KV head per query head."""
        heads, scale = self.num_heads, self.softmax_scale
        return AttentionParams(heads, heads, self.qk_head_dim, self.v_head_dim, scale=scale, causal=self.causal)

    @property
    def latent(self) -> AttentionParams:
        """Attention parameters of the absorbed form: one KV head of ``L + E``, values of ``L``."""
        heads, scale = self.num_heads, self.softmax_scale
        return AttentionParams(heads, 1, self.latent_size, self.kv_lora_rank, scale=scale, causal=self.causal)


def mla_params(layer: LayerSpec, *, causal: bool | None = None) -> MLAParams:
    """Return the parameters of a layer spec with ``mla``. ``causal`` overrides the layer's own flag for one call.

    Raise :class:`~attncheck.errors.ReferenceArgumentError` for settings that latent attention does not define:
    windows, soft cap, ALiBi, sinks, chunks, ``head_size_v``, attention types other than decoder.

    >>> from attncheck.reference.spec import MLASpec
    >>> sizes = MLASpec(kv_lora_rank=32, qk_nope_head_dim=12, qk_rope_head_dim=4, v_head_dim=8)
    >>> mla_params(LayerSpec(num_heads=4, num_kv_heads=1, head_size=36, mla=sizes)).softmax_scale
    0.25
    """
    if layer.mla is None:
        raise ReferenceArgumentError("layer.mla", None, "the sizes of latent attention; others have layer_params")
    for name in ("head_size_v", *MODIFIERS):
        if getattr(layer, name) not in (None, False):
            raise ReferenceArgumentError(
                f"layer.{name}", getattr(layer, name), "left out: not defined for latent attention"
            )
    if layer.attn_type != AttentionType.DECODER:
        raise ReferenceArgumentError("layer.attn_type", str(layer.attn_type), "decoder: only it has a latent cache")
    return MLAParams(
        num_heads=layer.num_heads,
        kv_lora_rank=layer.mla.kv_lora_rank,
        qk_nope_head_dim=layer.mla.qk_nope_head_dim,
        qk_rope_head_dim=layer.mla.qk_rope_head_dim,
        v_head_dim=layer.mla.v_head_dim,
        scale=layer.softmax_scale,
        causal=layer.is_causal if causal is None else causal,
    )


@torch.no_grad()
def mla_write_cache(
    kv_c_normed: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: float | Tensor = 1.0,
) -> None:
    """Write new rows into a latent cache in place: row ``t`` to slot ``slot_mapping[t]``, negative slots skipped.

    kv_c_normed, k_pe: ``[T', L]``, ``[T', E]``, any float dtype but float8. Rows beyond the mapping are padding.
    kv_cache: ``[NB, BS, L + E]``, of any strides. Only the named slots change. A float8 cache receives codes, with the
        same ``k_scale`` for the latent and the rotated part. Other caches receive converted values, without the scale.
    slot_mapping: ``[T]`` int32 or int64, ``T <= T'``; no slot twice.
    k_scale: a number, or one element.

    All arguments are checked before the first write. Raise :class:`~attncheck.errors.ReferenceArgumentError` if one is
    invalid.

    >>> cache = torch.zeros(2, 2, 3)
    >>> mla_write_cache(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]]), cache, torch.tensor([2]))
    >>> cache.view(4, 3)[2]
    tensor([1., 2., 3.])
    """
    parts, slots = {"kv_c_normed": kv_c_normed, "k_pe": k_pe}, host_ints("slot_mapping", slot_mapping)
    for name, rows in parts.items():
        require_float(name, rows)
        require_shape(name, rows, None, None, legend="rows, size")
        if len(rows) < len(slots):
            raise ReferenceArgumentError(f"{name}.shape", tuple(rows.shape), f"at least {len(slots)} rows, one a slot")
    latent = kv_c_normed.shape[1]
    width = latent + k_pe.shape[1]
    check_cache("kv_cache", kv_cache, None, None, width, legend="blocks, block_size, L + E", scale=k_scale)
    require_same_device("kv_cache", kv_cache, **parts)
    heads = kv_cache.unsqueeze(2)
    reshape_and_cache(
        kv_c_normed.unsqueeze(1),
        k_pe.unsqueeze(1),
        heads[..., :latent],
        heads[..., latent:],
        slot_mapping,
        k_scale=k_scale,
        v_scale=k_scale,
    )


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
    topk_indices: Tensor | None = None,
    precision: Precision = Precision(),  # noqa: B008 (frozen)
    q_tile: int = 128,
    kv_tile: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Return latent attention ``(out [T, H, V], lse [T, H])`` of every query row over the cached tokens of its request.

    Rows, positions, pages, rows that see no key, rows of no request, ``kv_range``, ``topk_indices``, ``precision`` and
    tiles are as in :func:`~attncheck.reference.attention.paged.paged_attention`.

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
    require_kv_range(kv_range)
    table, tiles = (block_table, seq_lens, query_start_loc), (q_tile, kv_tile)
    batch = _checked_batch(("q_nope", q_nope, q_pe), kv_cache, table, params, k_scale, precision, tiles, topk_indices)
    weights = _up_projections(w_uk, w_uv, batch)
    out_THV, lse_TH = batch.no_keys(len(q_nope), params.v_head_dim)
    for request in batch.requests:
        out_THV[request.rows], lse_TH[request.rows] = batch.attend_naive(request, request.span(kv_range), *weights)
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
    require_positive_int("workspace", workspace)
    table, tiles = (block_table, seq_lens, query_start_loc), (q_tile, kv_tile)
    batch = _checked_batch(("q_nope", q_nope, q_pe), kv_cache, table, params, k_scale, precision, tiles)
    weights = _up_projections(w_uk, w_uv, batch)
    out_THV, lse_TH = batch.no_keys(len(q_nope), params.v_head_dim)
    for request in batch.requests:
        context_len = max(request.context_len, 0)
        state = batch.attend_naive(request, (context_len, request.seq_len), *weights)
        for begin in range(0, context_len, workspace):
            piece = batch.attend_naive(request, (begin, min(begin + workspace, context_len)), *weights)
            state = merge_attn_states(*state, *piece, precision=precision)
        out_THV[request.rows], lse_TH[request.rows] = state
    return out_THV, lse_TH


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
    topk_indices: Tensor | None = None,
    precision: Precision = Precision(),  # noqa: B008 (frozen)
    q_tile: int = 128,
    kv_tile: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Return latent attention ``(out [T, H, V], lse [T, H])`` of every query row over the cached tokens of its request.

    Arguments, errors and (up to rounding) results are those of :func:`mla_attention_naive`.
    """
    require_kv_range(kv_range)
    table, tiles = (block_table, seq_lens, query_start_loc), (q_tile, kv_tile)
    batch = _checked_batch(("q_nope", q_nope, q_pe), kv_cache, table, params, k_scale, precision, tiles, topk_indices)
    w_uk_LHP, w_uv_LHV = _up_projections(w_uk, w_uv, batch)
    w_uk_HPL, w_uv_HLV = w_uk_LHP.permute(1, 2, 0), w_uv_LHV.transpose(0, 1)
    out_THV, lse_TH = batch.no_keys(len(q_nope), params.v_head_dim)
    for request, rows in batch.row_tiles():
        q_HqL = precision.round_out(torch.bmm(q_nope[rows].to(precision.compute).transpose(0, 1), w_uk_HPL))
        out_qHL, lse_TH[rows] = batch.attend_latent(request, rows, q_HqL.transpose(0, 1), kv_range)
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
    require_kv_range(kv_range)
    table, tiles = (block_table, seq_lens, query_start_loc), (q_tile, kv_tile)
    batch = _checked_batch(("q_latent", q_latent, q_pe), kv_cache, table, params, k_scale, precision, tiles)
    out_THL, lse_TH = batch.no_keys(len(q_latent), params.kv_lora_rank)
    for request, rows in batch.row_tiles():
        out_THL[rows], lse_TH[rows] = batch.attend_latent(request, rows, q_latent[rows], kv_range)
    return out_THL, lse_TH


@dataclass(frozen=True)
class LatentBatch:
    """The checked queries and cache of one call of latent attention, and its requests that have rows.

    ``query``: ``[T, H, P]`` or, already projected, ``[T, H, L]``.
    """

    query: Tensor
    q_pe: Tensor
    kv_cache: Tensor
    requests: Sequence[PagedRequest]
    params: MLAParams
    k_scale: float | Tensor
    precision: Precision
    tile_sizes: tuple[int, int]
    topk_indices: Tensor | None = None

    def no_keys(self, rows: int, size: int) -> tuple[Tensor, Tensor]:
        """Return ``(out, lse)`` of ``rows`` rows that see no key, with output heads of ``size``."""
        heads, compute = self.params.num_heads, self.precision.compute
        out = torch.zeros(rows, heads, size, dtype=compute, device=self.kv_cache.device)
        return out, out.new_full((rows, heads), -torch.inf)

    def row_tiles(self) -> Iterator[tuple[PagedRequest, slice]]:
        """Yield the rows of every request, at most ``q_tile`` at a time."""
        q_tile, _ = self.tile_sizes
        for request in self.requests:
            for begin in range(request.rows.start, request.rows.stop, q_tile):
                yield request, slice(begin, min(begin + q_tile, request.rows.stop))

    def attend_naive(
        self, request: PagedRequest, span: Span, w_uk_LHP: Tensor, w_uv_LHV: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return ``(out [q, H, V], lse [q, H])`` of the request's rows over its keys within ``span``."""
        params, precision = self.params, self.precision
        heads, latent, nope = params.num_heads, params.kv_lora_rank, params.qk_nope_head_dim
        w_uk_LX, w_uv_LX = w_uk_LHP.reshape(latent, -1), w_uv_LHV.reshape(latent, -1)

        def fetch(lo: int, hi: int) -> tuple[Tensor, Tensor]:
            row_kD = self._read(request, lo, hi)
            c_kL, k_pe_kE = row_kD[:, :latent], row_kD[:, latent:]
            k_HkD = row_kD.new_empty(heads, hi - lo, params.qk_head_dim)
            k_HkD[..., :nope] = precision.round_out(c_kL @ w_uk_LX).view(hi - lo, heads, nope).transpose(0, 1)
            k_HkD[..., nope:] = k_pe_kE
            v_kHV = precision.round_out(c_kL @ w_uv_LX).view(hi - lo, heads, params.v_head_dim)
            return k_HkD, v_kHV.transpose(0, 1)

        query_qHD = torch.cat([self.query[request.rows], self.q_pe[request.rows]], dim=-1)
        chosen = self._chosen(request, request.rows)
        sight = Visibility(params.naive, span, request.context_len, request.index, chosen=chosen)
        return self._attend(query_qHD, fetch, sight)

    def attend_latent(
        self, request: PagedRequest, rows: slice, q_qHL: Tensor, kv_range: Sequence[int] | None
    ) -> tuple[Tensor, Tensor]:
        """Return ``(out_latent [q, H, L], lse [q, H])`` of some ``rows``, whose queries are projected."""
        params, compute = self.params, self.precision.compute

        def fetch(lo: int, hi: int) -> tuple[Tensor, Tensor]:
            row_1kD = self._read(request, lo, hi).unsqueeze(0)
            return row_1kD, row_1kD[..., : params.kv_lora_rank]

        query_qHD = torch.cat([q_qHL.to(compute), self.q_pe[rows].to(compute)], dim=-1)
        first = request.context_len + rows.start - request.rows.start
        span, chosen = request.span(kv_range), self._chosen(request, rows)
        return self._attend(query_qHD, fetch, Visibility(params.latent, span, first, request.index, chosen=chosen))

    def _chosen(self, request: PagedRequest, rows: slice) -> Tensor | None:
        """Return which keys of the request some of its rows may see, bool ``[q, S]``; None without ``topk_indices``."""
        return None if self.topk_indices is None else chosen_keys(self.topk_indices[rows], request.seq_len)

    def _read(self, request: PagedRequest, lo: int, hi: int) -> Tensor:
        """Return the cache rows ``lo .. hi - 1`` of the request, ``[k, L + E]``, in the compute dtype."""
        compute = self.precision.compute
        places = token_places(request.pages, lo, hi, self.kv_cache.shape[1])
        return read_tokens(self.kv_cache, places, self.k_scale, compute).to(compute)

    def _attend(self, query_qHD: Tensor, fetch: FetchKeys, sight: Visibility) -> tuple[Tensor, Tensor]:
        rule = ScoreRule(sight.params, self.precision, self.kv_cache.device, sinks=False)
        out_qHV, lse_qH = self.no_keys(len(query_qHD), sight.params.value_head_size)
        attend(query_qHD, fetch, sight, rule, self.tile_sizes, out_qHV, lse_qH)
        return out_qHV, lse_qH


def _checked_batch(
    query: tuple[str, Tensor, Tensor],
    kv_cache: Tensor,
    table: tuple[Tensor, Tensor, Tensor],
    params: MLAParams,
    k_scale: float | Tensor,
    precision: Precision,
    tile_sizes: tuple[int, int],
    topk_indices: Tensor | None = None,
) -> LatentBatch:
    """Return the batch of a call; raise if its arguments do not fit each other or the layer.

    query: the name of the first part, ``q_nope`` or ``q_latent``, then both parts. table: block table, sequence lengths
    and row offsets.
    """
    if not isinstance(params, MLAParams):
        raise ReferenceArgumentError("params", params, "MLAParams")
    name, first, q_pe = query
    widths = {"q_nope": params.qk_nope_head_dim, "q_latent": params.kv_lora_rank}
    legend = "rows, num_heads, size"
    require_shape(name, first, None, params.num_heads, widths[name], legend=legend)
    require_shape("q_pe", q_pe, len(first), params.num_heads, params.qk_rope_head_dim, legend=legend)
    for part_name, part in ((name, first), ("q_pe", q_pe)):
        require_float(part_name, part)
        require_same_device("kv_cache", kv_cache, **{part_name: part})
    legend = "blocks, block_size, kv_lora_rank + qk_rope_head_dim"
    check_cache("kv_cache", kv_cache, None, None, params.latent_size, legend=legend, scale=k_scale)
    require_positive_int("q_tile", tile_sizes[0])
    require_positive_int("kv_tile", tile_sizes[1])
    requests = paged_requests((name, first), kv_cache, *table)
    require_topk_indices(topk_indices, len(first))
    return LatentBatch(first, q_pe, kv_cache, requests, params, k_scale, precision, tile_sizes, topk_indices)


def _up_projections(w_uk: Tensor, w_uv: Tensor, batch: LatentBatch) -> tuple[Tensor, Tensor]:
    """Return the up-projections in the compute dtype; raise if they do not fit the layer or the device of the cache."""
    params, compute = batch.params, batch.precision.compute
    for name, weight, size in (("w_uk", w_uk, params.qk_nope_head_dim), ("w_uv", w_uv, params.v_head_dim)):
        require_float(name, weight)
        require_shape(name, weight, params.kv_lora_rank, params.num_heads, size, legend="kv_lora_rank, num_heads, size")
        require_same_device("kv_cache", batch.kv_cache, **{name: weight})
    return w_uk.to(compute), w_uv.to(compute)
