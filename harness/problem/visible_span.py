"""The keys each row sees, as a span, from the causal mask, the window and the chunks.

No other harness module does this arithmetic, except the picture of ``attncheck show``. Candidates have their own, and
the reference has a predicate, :func:`attncheck.reference.visible`. Add a modifier that hides keys to all three; tests
compare them.
"""

import torch
from torch import Tensor

from attncheck.reference import AttentionParams


def visible_span(params: AttentionParams, positions: Tensor, num_keys: Tensor | int) -> tuple[Tensor, Tensor]:
    """Return the first and the last key that rows at ``positions`` see; last < first if a row sees none.

    positions: int64 ``[q]``; negative for a row before the first key. num_keys: of the rows' requests, one number or
    ``[q]``. Both results are non-decreasing in the position.

    >>> visible_span(AttentionParams(1, 1, 8, window=(2, 0)), torch.tensor([1, 5]), 9)
    (tensor([0, 3]), tensor([1, 5]))
    """
    left, right = params.window
    first = torch.zeros_like(positions)
    last = first + (num_keys - 1)
    if params.causal:
        last = torch.minimum(last, positions)
    if right >= 0:
        last = torch.minimum(last, positions + right)
    if left >= 0:
        first = torch.maximum(first, positions - left)
    if params.attn_chunk_size is not None:
        chunk = positions // params.attn_chunk_size
        first = torch.maximum(first, (chunk - params.attn_chunk_lookback) * params.attn_chunk_size)
        last = torch.minimum(last, (chunk + 1) * params.attn_chunk_size - 1)
    return first, last
