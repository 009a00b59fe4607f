"""The keys that a run of rows can see, as spans of positions, so that the tiled computation can skip and trim tiles.

A row's visible keys under the base predicate (:func:`attncheck.reference.attention.params.visible`) are one span. Both
ends of that span are non-decreasing in the row's position. So for rows ``first .. last``::

    q = first   . # # # # . . . .
                . . # # # # . . .        reach: from the start of first's span to the end of last's; no row
    q = last    . . . # # # # . .               sees a key outside of it
                    ^ ^                  common: from the start of last's span to the end of first's; every row sees
                    common                      every key inside, so no mask is needed there

Mask functions are arbitrary, so their reach is the whole span and a mask is needed everywhere. A tree mask needs a mask
for all keys of the new rows.
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

    ``span``: positions of the existing keys. ``context_len``: position of the first row (the tree's root, if there is
    one). ``tree_mask``: bool ``[Q, Q]`` on the device of the positions, ANDed for keys from ``context_len`` on.
    ``mask_fn``: replaces the base predicate.
    """

    params: AttentionParams
    span: Span
    context_len: int
    request: int = 0
    tree_mask: Tensor | None = None
    mask_fn: MaskFunction | None = None

    def reach(self, first: int, last: int) -> Span:
        """Return a span that contains every key seen by any row of ``first .. last``."""
        if self.mask_fn is not None:
            return self.span
        return row_span(self.params, first, self.span)[0], row_span(self.params, last, self.span)[1]

    def common(self, first: int, last: int) -> Span:
        """Return a span whose keys are seen by every row of ``first .. last``."""
        if self.mask_fn is not None:
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
