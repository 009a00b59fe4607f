"""Multi-head latent attention with up-projected keys and values (the naive form), in one pass or with chunked context.

With the cache row ``[c, k_pe]`` of a token (:mod:`attncheck.reference.attention.mla`), query heads of ``P + E``
and the up-projections ``w_uk`` (``[L, H, P]``) and ``w_uv`` (``[L, H, V]``)::

    k[j, h] = [ c[j] . w_uk[:, h] , k_pe[j] ]        q[h] = [ q_nope[h] , q_pe[h] ]
    v[j, h] =   c[j] . w_uv[:, h]                    softmax attention, one KV head per query head

Keys and values are computed one key tile at a time, so that memory does not grow with the length of a request. If
``precision.out`` is set, it also rounds keys and values, because an engine stores them between two kernels.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.arguments import (
    host_ints,
    is_float8,
    require_float,
    require_positive_int,
    require_same_device,
    require_scale,
    require_shape,
)
from attncheck.reference.attention.cache import reshape_and_cache
from attncheck.reference.attention.online_softmax import FetchKeys, ScoreRule, attend, merge_attn_states
from attncheck.reference.attention.paged import PagedRequest, paged_requests, read_tokens, require_kv_range
from attncheck.reference.attention.params import AttentionParams, Precision, Span, Visibility
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


def require_mla_params(params: object) -> None:
    """Raise if ``params`` is not an :class:`MLAParams`."""
    if not isinstance(params, MLAParams):
        raise ReferenceArgumentError("params", params, "MLAParams")


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
    require_float("kv_cache", kv_cache, float8=True)
    require_shape("kv_cache", kv_cache, None, None, latent + k_pe.shape[1], legend="blocks, block_size, L + E")
    require_same_device("kv_cache", kv_cache, **parts)
    if is_float8(kv_cache):
        require_scale("k_scale", k_scale)
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


def check_latent(
    queries: dict[str, tuple[Tensor, int]],
    kv_cache: Tensor,
    params: MLAParams,
    k_scale: float | Tensor,
    tile_sizes: tuple[int, int],
) -> None:
    """Raise if tensors, scale or tiles do not fit each other or the layer; ``queries``: name to (tensor, width)."""
    rows = None
    for name, (query, size) in queries.items():
        require_float(name, query)
        require_shape(name, query, rows, params.num_heads, size, legend="rows, num_heads, size")
        rows = query.shape[0]
    require_float("kv_cache", kv_cache, float8=True)
    legend = "blocks, block_size, kv_lora_rank + qk_rope_head_dim"
    require_shape("kv_cache", kv_cache, None, None, params.latent_size, legend=legend)
    if kv_cache.shape[1] == 0:
        raise ReferenceArgumentError("kv_cache.shape", tuple(kv_cache.shape), "at least one token a block")
    require_same_device("kv_cache", kv_cache, **{name: query for name, (query, _) in queries.items()})
    if is_float8(kv_cache):
        require_scale("k_scale", k_scale)
    require_positive_int("q_tile", tile_sizes[0])
    require_positive_int("kv_tile", tile_sizes[1])


def check_weights(w_uk: Tensor, w_uv: Tensor, kv_cache: Tensor, params: MLAParams) -> None:
    """Raise if the up-projections do not fit the layer, or are not on the device of the cache."""
    for name, weight, size in (("w_uk", w_uk, params.qk_nope_head_dim), ("w_uv", w_uv, params.v_head_dim)):
        require_float(name, weight)
        require_shape(name, weight, params.kv_lora_rank, params.num_heads, size, legend="kv_lora_rank, num_heads, size")
        require_same_device("kv_cache", kv_cache, **{name: weight})


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
    :func:`~attncheck.reference.attention.mla.mla_attention_naive`.
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
