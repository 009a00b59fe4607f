"""The parameters of one attention layer, the precision of the reference, and the keys that a row sees.

The formulas and their order are in :mod:`attncheck.reference.attention.online_softmax`. This module defines each
parameter and rejects undefined values. :func:`visible` is the rule for one row and key; :class:`Visibility` gives it
for runs of rows, so that the tiled computation can skip and trim tiles.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.spec import LayerSpec

_ENDLESS = 2**62
"""Limit of positions and distances, which are compared in 64 bits: the sum of two values below it does not overflow."""

_FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class LayerParams:
    """The parameters of one attention layer that are single numbers; :class:`AttentionParams` has their meaning."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int | None = None
    scale: float | None = None
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    logits_soft_cap: float | None = None
    alibi_sqrt: bool = False
    attn_chunk_size: int | None = None
    attn_chunk_lookback: int = 0

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_size", "head_size_v", "attn_chunk_size"):
            size = getattr(self, name)
            if size is not None and not (_is_int(size) and 0 < size < _ENDLESS):
                raise ReferenceArgumentError(name, size, "a positive integer below 2**62")
        if self.num_heads % self.num_kv_heads:
            raise ReferenceArgumentError("num_kv_heads", self.num_kv_heads, f"a divisor of num_heads {self.num_heads}")
        if self.scale is not None and not math.isfinite(self.scale):
            raise ReferenceArgumentError("scale", self.scale, "a finite number, or None for head_size ** -0.5")
        if self.logits_soft_cap is not None and not 0 <= self.logits_soft_cap < math.inf:
            raise ReferenceArgumentError("logits_soft_cap", self.logits_soft_cap, "a number >= 0; None or 0: off")
        window = tuple(self.window)
        if len(window) != 2 or not all(_is_int(distance) and distance < _ENDLESS for distance in window):
            required = "two integers (left, right) below 2**62; negative: unlimited"
            raise ReferenceArgumentError("window", self.window, required)
        object.__setattr__(self, "window", window)
        if not (_is_int(self.attn_chunk_lookback) and 0 <= self.attn_chunk_lookback < _ENDLESS):
            raise ReferenceArgumentError(
                "attn_chunk_lookback", self.attn_chunk_lookback, "an integer >= 0, below 2**62"
            )

    @property
    def group_size(self) -> int:
        """``G``: number of consecutive query heads that read the same KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def value_head_size(self) -> int:
        """``Dv``: head size of value and output."""
        return self.head_size if self.head_size_v is None else self.head_size_v

    @property
    def softmax_scale(self) -> float:
        """The factor on the scores; its default comes from ``head_size``, never from ``head_size_v``."""
        return float(self.head_size) ** -0.5 if self.scale is None else float(self.scale)

    @property
    def soft_cap(self) -> float | None:
        """The soft cap, or None if it is None or 0."""
        return self.logits_soft_cap or None


@dataclass(frozen=True)
class AttentionParams(LayerParams):
    """The parameters of one attention layer. Hashable; two layers with equal parameters compute the same function.

    With query row at position ``q``, query head ``h``, key position ``j`` and KV head ``h // (num_heads //
    num_kv_heads)``, a score is computed in this order (checked against vLLM: the cap comes before ALiBi)::

        s = scale * <Q[q, h], K[j, h // G]>
        s = cap * tanh(s / cap)              logits_soft_cap
        s = s + slope[h] * (j - q)           alibi_slopes; with alibi_sqrt: - slope[h] * sqrt(max(q - j, 0))
        s = s if visible(q, j) else -inf     causal, window, attn_chunk_size: see visible()

    ``sinks`` add ``exp(sink[h])`` to the softmax denominator only: unscaled, uncapped, unbiased, unmasked.

    num_heads, num_kv_heads: query heads and KV heads; the second divides the first (GQA, Ainslie et al. 2023).
    head_size, head_size_v: size of a query/key head, and of a value/output head; ``None``: ``head_size``.
    scale: any finite number; ``None``: ``head_size ** -0.5``.
    causal: whether a row sees only its own key and earlier keys.
    window: inclusive distances ``(left, right)``. A negative distance is unlimited; ``(0, 0)`` is a window of one key.
    logits_soft_cap: ``None`` or 0 for no cap (Gemma 2).
    alibi_slopes: one per query head, or ``None`` (Press et al. 2022). The bias changes sign for keys after the query.
    alibi_sqrt: the square-root form of the bias, 0 for keys ahead; no effect without slopes.
    sinks: one logit per query head, or ``None``; ``-inf`` means no sink for that head.
    attn_chunk_size: local attention in chunks aligned to position 0, or ``None``.
    attn_chunk_lookback: number of earlier chunks a row sees besides its own; no effect without a chunk size.

    Raise :class:`~attncheck.errors.ReferenceArgumentError` (a ``ValueError``) with the name of the invalid field.

    >>> AttentionParams(num_heads=8, num_kv_heads=2, head_size=64).softmax_scale
    0.125
    >>> AttentionParams(num_heads=8, num_kv_heads=3, head_size=64)
    Traceback (most recent call last):
    attncheck.errors.ReferenceArgumentError: num_kv_heads = 3: must be a divisor of num_heads 8
    """

    alibi_slopes: tuple[float, ...] | None = None
    sinks: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._freeze_per_head("alibi_slopes", "finite", math.isfinite)
        self._freeze_per_head("sinks", "finite, or -inf for no sink", lambda sink: sink < math.inf)

    def _freeze_per_head(self, name: str, required: str, allowed: Callable[[float], bool]) -> None:
        """Store a per-head sequence as a tuple of floats, so that the dataclass stays hashable."""
        given: Sequence[float] | None = getattr(self, name)
        if given is None:
            return
        if len(given) != self.num_heads:
            raise ReferenceArgumentError(name, given, f"one number for each of {self.num_heads} query heads")
        values = tuple(float(value) for value in given)
        if not all(allowed(value) for value in values):
            raise ReferenceArgumentError(name, values, required)
        object.__setattr__(self, name, values)


@dataclass(frozen=True)
class Precision:
    """The roundings of the reference; the code path is the same for all of them.

    compute: dtype of scores, softmax, accumulation, lse and of the returned tensors.
    prob: the softmax numerators ``P`` are rounded to this dtype before ``P @ V``, and kept in ``compute``. The row sum
        uses them unrounded. ``None``: not rounded.
    prob_factor: ``P`` times this number is rounded, and then divided by it.
    max_from_sinks: whether the running maximum of the scores starts at the sink. ``P`` is relative to that maximum.
    out: the output is rounded to this dtype, and kept in ``compute``. ``None``: not rounded. The lse is never rounded.

    Float32 products on a GPU follow torch's TF32 setting, which the caller must set.

    The default computes the truth in float64. ``Precision.kernel(torch.bfloat16)`` makes the roundings of a good
    kernel. The error budget of backends derives from its distance to the truth.

    >>> Precision.kernel(torch.bfloat16)
    Precision(compute=torch.float32, prob=torch.bfloat16, out=torch.bfloat16, prob_factor=1.0, max_from_sinks=False)
    """

    compute: torch.dtype = torch.float64
    prob: torch.dtype | None = None
    out: torch.dtype | None = None
    prob_factor: float = 1.0
    max_from_sinks: bool = False

    def __post_init__(self) -> None:
        for name in ("compute", "prob", "out"):
            dtype = getattr(self, name)
            is_allowed = dtype in _FLOAT_DTYPES or (name != "compute" and dtype is None)
            if not is_allowed and (name, dtype) != ("prob", torch.float8_e4m3fn):
                allowed = "float64, float32, bfloat16 or float16" + ("" if name == "compute" else ", or None")
                raise ReferenceArgumentError(f"precision.{name}", dtype, allowed)
        if not 0 < self.prob_factor < math.inf:
            raise ReferenceArgumentError("precision.prob_factor", self.prob_factor, "a finite number above 0")

    @classmethod
    def kernel(cls, dtype: torch.dtype) -> "Precision":
        """Return the roundings of a good kernel for ``dtype``: float32 inside, ``P`` and output in ``dtype``."""
        return cls(torch.float32, dtype, dtype)

    def round_prob(self, p: Tensor) -> Tensor:
        """Return softmax numerators rounded to ``prob``."""
        if self.prob_factor == 1:
            return _rounded(p, self.prob)
        return _rounded(self.prob_factor * p, self.prob) / self.prob_factor

    def round_out(self, out: Tensor) -> Tensor:
        """Return the output rounded to ``out``."""
        return _rounded(out, self.out)


def window_pair(sliding_window: int | None, *, bidirectional: bool = False) -> tuple[int, int]:
    """Return the inclusive distances for vLLM's ``sliding_window``, the most keys a query sees, its own included.

    A causal layer looks back only. An encoder layer, or a causal layer called without the causal mask, looks both ways
    (vLLM mirrors the pair). ``None``: no window.

    >>> window_pair(4), window_pair(4, bidirectional=True), window_pair(1), window_pair(None)
    ((3, 0), (3, 3), (0, 0), (-1, -1))
    """
    if sliding_window is None:
        return (-1, -1)
    if not (_is_int(sliding_window) and sliding_window > 0):
        raise ReferenceArgumentError("sliding_window", sliding_window, "an integer >= 1, or None for no window")
    left = sliding_window - 1
    return (left, left) if bidirectional else (left, 0)


def visible(params: LayerParams, q_pos: Tensor, k_pos: Tensor) -> Tensor:
    """Return whether the row at ``q_pos`` sees the key at ``k_pos``: bool, of their broadcast shape.

    Positions are absolute and counted from the first token of the request. ``q_pos`` may be negative (a row before the
    first key). Lengths are not checked: the caller passes positions of existing keys only. Defined by::

        (not causal or j <= q)
        and (left  < 0 or q - j <= left)
        and (right < 0 or j - q <= right)
        and (no chunk size C, or 0 <= floor(q / C) - floor(j / C) <= lookback)

    For two new rows at the end of five keys (positions 3 and 4; a row sees its own key), x for visible::

        causal          window (1, -1)     window (2, 0)      chunks of 2
        x x x x .       . . x x x          . x x x .          . . x x .
        x x x x x       . . . x x          . . x x x          . . . . x

    (``window`` is drawn without the causal mask, ``chunks`` with it.)

    >>> layer = AttentionParams(1, 1, 8, causal=True, attn_chunk_size=2)
    >>> visible(layer, torch.tensor([[3], [4]]), torch.arange(5)).int()
    tensor([[0, 0, 1, 1, 0],
            [0, 0, 0, 0, 1]], dtype=torch.int32)
    """
    q_pos, k_pos = q_pos.to(torch.int64), k_pos.to(torch.int64)
    distance = q_pos - k_pos
    sees = torch.ones_like(distance, dtype=torch.bool)
    if params.causal:
        sees &= distance >= 0
    left, right = params.window
    if left >= 0:
        sees &= distance <= left
    if right >= 0:
        sees &= distance >= -right
    if params.attn_chunk_size is not None:
        chunk = params.attn_chunk_size
        chunks_back = q_pos.div(chunk, rounding_mode="floor") - k_pos.div(chunk, rounding_mode="floor")
        sees &= (chunks_back >= 0) & (chunks_back <= params.attn_chunk_lookback)
    return sees


def chosen_keys(topk_indices: Tensor, num_keys: int) -> Tensor:
    """Return which of the first ``num_keys`` keys each row of ``topk_indices [q, K]`` names: bool ``[q, num_keys]``.

    Negative indices name no key, nor do those of keys that do not exist. A key that is named twice is seen once.

    >>> chosen_keys(torch.tensor([[2, -1, 0], [1, 1, 9]]), 4).int()
    tensor([[1, 0, 1, 0],
            [0, 1, 0, 0]], dtype=torch.int32)
    """
    index = topk_indices.to(torch.int64)
    index = torch.where((index < 0) | (index >= num_keys), num_keys, index)
    named = torch.zeros(len(index), num_keys + 1, dtype=torch.bool, device=index.device)
    return named.scatter_(1, index, True)[:, :num_keys]


@dataclass(frozen=True)
class PrefixMask:
    """The keys that the rows of one request see besides those of :func:`visible`: image spans, and its first keys.

    A row at position ``q`` also sees the key at ``j`` if::

        first <= q <= last and first <= j <= last       for one of mm_req_doc_ranges
        or (j <= q and j < rswa_prefix_len)

    So a span is seen whole by its own rows, with later keys, and beyond the left edge of a window. This is vLLM's
    ``(causal AND window) OR mm_prefix`` and ``causal AND (key < prefix_len OR q - key < rswa_window)``, from
    ``compute_kv_seq_mask`` in ``v1/attention/ops/triton_attention_helpers.py`` of vLLM 0.32. For image spans, its
    FlexAttention and FA4 masks have the same order. It is vLLM's default; with ``mm_prefix_clamp_sliding_window``, as
    for Gemma 4, the window also bounds image spans, which is not expressed here. Keys behind the last key of the
    request do not exist, so a span that a chunk cuts has only the keys up to the end of the chunk.

    mm_req_doc_ranges: inclusive positions ``(first, last)``, as in vLLM's common metadata.
    rswa_prefix_len: number of first keys, for a layer whose ``window`` is ``(rswa_window - 1, 0)``.

    >>> PrefixMask(((1, 2),), 1).sees(torch.tensor([[0], [1], [2], [3]]), torch.arange(4)).int()
    tensor([[1, 0, 0, 0],
            [1, 1, 1, 0],
            [1, 1, 1, 0],
            [1, 0, 0, 0]], dtype=torch.int32)
    """

    mm_req_doc_ranges: tuple[tuple[int, int], ...] = ()
    rswa_prefix_len: int = 0

    def sees(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """Return whether the row at ``q_pos`` sees the key at ``k_pos``: bool, of their broadcast shape."""
        seen = (k_pos <= q_pos) & (k_pos < self.rswa_prefix_len)
        for first, last in self.mm_req_doc_ranges:
            of_rows = (q_pos >= first) & (q_pos <= last)
            seen = seen | (of_rows & (k_pos >= first) & (k_pos <= last))
        return seen

    def reach(self, first: int, last: int) -> "Span | None":
        """Return a span that contains every such key of the rows ``first .. last``; None if there is none."""
        ends = [(lo, hi + 1) for lo, hi in self.mm_req_doc_ranges if lo <= last and hi >= first]
        if self.rswa_prefix_len:
            ends.append((0, self.rswa_prefix_len))
        return (min(lo for lo, _ in ends), max(hi for _, hi in ends)) if ends else None


def layer_params(layer: LayerSpec, *, causal: bool | None = None) -> AttentionParams:
    """Return the parameters of a layer spec. ``causal`` overrides the layer's own flag for one call.

    The window of ``rswa_window`` is one to the left; see :class:`PrefixMask` for the keys that are seen beyond it.
    The window follows ``causal``: vLLM passes ``causal`` in the metadata of each call, and mirrors the window of a
    causal layer when it is False. Raise :class:`~attncheck.errors.ReferenceArgumentError` for latent attention
    (``layer.mla``), whose parameters are :class:`~attncheck.reference.attention.mla.MLAParams`.

    >>> layer = LayerSpec(num_heads=8, num_kv_heads=2, head_size=64, sliding_window=16)
    >>> layer_params(layer).window, layer_params(layer, causal=False).window
    ((15, 0), (15, 15))
    """
    if layer.mla is not None:
        raise ReferenceArgumentError("layer.mla", layer.mla, "None: latent attention has parameters of its own")
    is_causal = layer.is_causal if causal is None else causal
    return AttentionParams(
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_size=layer.head_size,
        head_size_v=layer.head_size_v,
        scale=layer.softmax_scale,
        causal=is_causal,
        window=window_pair(layer.sliding_window or layer.rswa_window, bidirectional=not is_causal),
        logits_soft_cap=layer.soft_cap,
        alibi_slopes=layer.alibi_slopes,
        sinks=layer.sink_logits,
        attn_chunk_size=layer.attn_chunk_size,
    )


def require_params(params: object) -> None:
    """Raise if ``params`` is not an :class:`AttentionParams`."""
    if not isinstance(params, AttentionParams):
        raise ReferenceArgumentError("params", params, "AttentionParams")


def _rounded(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return ``x`` with its values rounded to ``dtype``, in its own dtype."""
    return x if dtype is None else x.to(dtype).to(x.dtype)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


MaskFunction = Callable[[int, Tensor, Tensor], Tensor]
"""``(request, q_pos [a, 1], k_pos [1, b]) -> bool [a, b]``."""

Span = tuple[int, int]
"""Positions ``lo <= j < hi``; empty if ``lo >= hi``."""


def row_span(params: AttentionParams, q: int, span: Span) -> Span:
    """Return the keys within ``span`` that the row at position ``q`` sees: exactly those with ``visible`` true.

    >>> row_span(AttentionParams(1, 1, 8, window=(2, 0)), 5, (0, 9))
    (3, 6)
    """
    lo, hi = span
    if params.causal:
        hi = min(hi, q + 1)
    left, right = params.window
    if left >= 0:
        lo = max(lo, q - left)
    if right >= 0:
        hi = min(hi, q + right + 1)
    if params.attn_chunk_size is not None:
        chunk = q // params.attn_chunk_size
        lo = max(lo, (chunk - params.attn_chunk_lookback) * params.attn_chunk_size)
        hi = min(hi, (chunk + 1) * params.attn_chunk_size)
    return lo, hi


@dataclass(frozen=True)
class Visibility:
    """Visibility between the rows and keys of one request.

    A row's visible keys under :func:`visible` are one span. Both ends of that span are non-decreasing in the row's
    position. So for rows ``first .. last``::

        q = first   . # # # # . . . .
                    . . # # # # . . .        reach: from the start of first's span to the end of last's; no row
        q = last    . . . # # # # . .               sees a key outside of it
                        ^ ^                  common: from the start of last's span to the end of first's; every row
                        common                      sees every key inside, so no mask is needed there

    Mask functions are arbitrary, so their reach is the whole span and a mask is needed everywhere. A tree mask needs a
    mask for all keys of the new rows.

    ``span``: positions of the existing keys. ``context_len``: position of the first row (the tree's root, if there is
    one). ``tree_mask``: bool ``[Q, Q]`` on the device of the positions, ANDed for keys from ``context_len`` on.
    ``mask_fn``: replaces the base predicate. ``prefix``: the keys that are seen besides those of the base predicate.
    ``chosen``: bool ``[Q, S]``, ANDed: which keys the rows from ``context_len`` on may see.
    """

    params: AttentionParams
    span: Span
    context_len: int
    request: int = 0
    tree_mask: Tensor | None = None
    mask_fn: MaskFunction | None = None
    prefix: PrefixMask | None = None
    chosen: Tensor | None = None

    def reach(self, first: int, last: int) -> Span:
        """Return a span that contains every key seen by any row of ``first .. last``."""
        if self.mask_fn is not None:
            return self.span
        lo, hi = row_span(self.params, first, self.span)[0], row_span(self.params, last, self.span)[1]
        more = None if self.prefix is None else self.prefix.reach(first, last)
        if more is None:
            return lo, hi
        return max(min(lo, more[0]), self.span[0]), min(max(hi, more[1]), self.span[1])

    def common(self, first: int, last: int) -> Span:
        """Return a span whose keys are seen by every row of ``first .. last``."""
        if self.mask_fn is not None or self.chosen is not None:
            return self.span[0], self.span[0]
        lo, hi = row_span(self.params, last, self.span)[0], row_span(self.params, first, self.span)[1]
        return lo, hi if self.tree_mask is None else min(hi, self.context_len)

    def mixed(self, first: int, last: int, keys: Span) -> list[Span]:
        """Return the parts of ``keys`` that only some rows of ``first .. last`` may see; most tiles have none."""
        lo, hi = keys
        common_lo, common_hi = self.common(first, last)
        left_end = min(max(common_lo, lo), hi)
        right_begin = min(max(common_hi, left_end), hi)
        parts = [(lo, left_end), (right_begin, hi)] if left_end < right_begin else [(lo, hi)]
        return [(begin, end) for begin, end in parts if begin < end]

    def key_positions(self, lo: int, hi: int, device: torch.device) -> Tensor:
        """Return the positions ``[1, b]`` of the keys ``lo .. hi - 1``, numbered as in ``reach`` and ``common``."""
        return torch.arange(lo, hi, device=device).unsqueeze(0)

    def mask(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """Return the mask, bool ``[a, b]``, for row positions ``[a, 1]`` and key positions ``[1, b]``."""
        if self.mask_fn is None:
            sees = visible(self.params, q_pos, k_pos)
            if self.prefix is not None:
                sees = sees | self.prefix.sees(q_pos, k_pos)
        else:
            sees = self.mask_fn(self.request, q_pos, k_pos)
            want = (q_pos.shape[0], k_pos.shape[1])
            if sees.dtype != torch.bool or tuple(sees.shape) != want:
                raise ReferenceArgumentError(
                    "mask_fn(...)", f"{sees.dtype} {list(sees.shape)}", f"a bool tensor {list(want)}"
                )
        if self.tree_mask is not None:
            row, node = q_pos - self.context_len, k_pos - self.context_len
            sees = sees & (self.tree_mask[row, node.clamp(min=0)] | (node < 0))
        return sees if self.chosen is None else sees & self.chosen[q_pos - self.context_len, k_pos]
