"""Which keys a run of rows can see, as spans of positions: what lets the tiled computation skip and trim its tiles.

A row's visible keys under the base predicate (:func:`attncheck.reference.attention.params.visible`) are one span, and
both ends of that span never fall as the row moves right. So for rows ``first .. last``::

    q = first   . # # # # . . . .
                . . # # # # . . .        reach: from the start of first's span to the end of last's; no key outside
    q = last    . . . # # # # . .               of it matters to any of the rows
                    ^ ^                  common: from the start of last's span to the end of first's; every row sees
                    common                      every key inside, so no mask is needed there

Trees and mask functions see what they like: they reach everywhere and need their mask everywhere they may differ.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.attention.params import AttentionParams, visible

MaskFunction = Callable[[int, Tensor, Tensor], Tensor]
"""``(request, q_pos [a, 1], k_pos [1, b]) -> bool [a, b]``."""

Span = tuple[int, int]
"""Positions ``lo <= j < hi``; empty where ``lo >= hi``."""


def row_span(params: AttentionParams, q: int, span: Span) -> Span:
    """The keys within ``span`` that the row at position ``q`` sees; exactly those where ``visible`` is true.

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
    """Who sees whom in one request.

    ``span``: the keys there are. ``context_len``: position of the first row (of the tree's root, where there is one).
    ``tree_mask``: bool ``[Q, Q]`` on the device of the positions, ANDed for keys from ``context_len`` on.
    ``mask_fn``: replaces the base predicate.
    """

    params: AttentionParams
    span: Span
    context_len: int
    request: int = 0
    tree_mask: Tensor | None = None
    mask_fn: MaskFunction | None = None

    def reach(self, first: int, last: int) -> Span:
        """Keys outside of this span are seen by no row of ``first .. last``."""
        if self.mask_fn is not None:
            return self.span
        return row_span(self.params, first, self.span)[0], row_span(self.params, last, self.span)[1]

    def common(self, first: int, last: int) -> Span:
        """Keys inside of this span are seen by every row of ``first .. last``."""
        if self.mask_fn is not None:
            return self.span[0], self.span[0]
        lo, hi = row_span(self.params, last, self.span)[0], row_span(self.params, first, self.span)[1]
        return lo, hi if self.tree_mask is None else min(hi, self.context_len)

    def mixed(self, first: int, last: int, keys: Span) -> list[Span]:
        """The parts of ``keys`` that some rows of ``first .. last`` may see and others not; most tiles have none."""
        lo, hi = keys
        common_lo, common_hi = self.common(first, last)
        left_end = min(max(common_lo, lo), hi)
        right_begin = min(max(common_hi, left_end), hi)
        parts = [(lo, left_end), (right_begin, hi)] if left_end < right_begin else [(lo, hi)]
        return [(begin, end) for begin, end in parts if begin < end]

    def key_positions(self, lo: int, hi: int, device: torch.device) -> Tensor:
        """The positions ``[1, b]`` of the keys ``lo .. hi - 1``, counted as ``reach`` and ``common`` count them."""
        return torch.arange(lo, hi, device=device).unsqueeze(0)

    def mask(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """Bool ``[a, b]`` for row positions ``[a, 1]`` and key positions ``[1, b]``."""
        if self.mask_fn is None:
            sees = visible(self.params, q_pos, k_pos)
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
        return sees
