"""What FlashAttention-2's kernels can do, whoever compiled them.

Read from ``csrc/flash_attn`` of flash-attn 2.8.3 and its copy in torch. Must not know: how the kernels are called.
"""

import torch

from attncheck.backends.declarations import MultipleOf

DTYPES = (torch.float16, torch.bfloat16)

HEAD_SIZES = tuple(range(8, 257, 8))
"""Those of keys and of values, which have one size."""

PAGE_SIZES = MultipleOf(256)
"""Of pages that the kernels read in place, through a block table."""

LOWEST_CAPABILITY = (8, 0)
"""Ampere."""


def scale_reasons(scale: float) -> list[str]:
    """Why the kernels cannot scale scores by ``scale``; empty: they can.

    They look for the greatest score before they scale, and subtract it scaled: with a negative factor the powers
    overflow, and with 0 what is masked becomes NaN.
    """
    return [] if scale > 0 else [f"scale {scale:g}: FlashAttention-2 needs one above 0"]
