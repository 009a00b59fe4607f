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


def gpu_reasons(device: str) -> list[str]:
    """Why the kernels cannot run on the GPU ``device`` names; empty for other devices, about which nothing is said."""
    if torch.device(device).type != "cuda":
        return []
    if torch.version.hip is not None:
        return ["the GPU is AMD's: FlashAttention is declared for NVIDIA's kernels only"]
    if not torch.cuda.is_available():
        return ["torch finds no GPU"]
    capability = torch.cuda.get_device_capability(device)
    if capability >= LOWEST_CAPABILITY:
        return []
    found, lowest = (".".join(map(str, pair)) for pair in (capability, LOWEST_CAPABILITY))
    return [f"compute capability {found}: FlashAttention-2 needs {lowest}"]


def scale_reasons(scale: float) -> list[str]:
    """Why the kernels cannot scale scores by ``scale``; empty: they can.

    They look for the greatest score before they scale, and subtract it scaled: with a negative factor the powers
    overflow, and with 0 what is masked becomes NaN.
    """
    return [] if scale > 0 else [f"scale {scale:g}: FlashAttention-2 needs one above 0"]
