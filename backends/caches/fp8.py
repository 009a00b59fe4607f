"""Float8 codes in plain torch, for candidates that have no kernel of their own for them.

On purpose not the reference's code, which these candidates are compared with. A scale is a float32 tensor of one
element or one a head, and the value of a code is ``code * scale``. Must not know: caches, attention.
"""

import torch
from torch import Tensor


def encode(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The codes of ``x`` (``[..., heads, size]``) in a float8 ``dtype``: rounded to nearest, saturating, NaN kept."""
    limit = torch.finfo(dtype).max
    return (x.to(torch.float32) / scale.reshape(-1, 1)).clamp(-limit, limit).to(dtype)


def decode(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """What codes (``[..., heads, size]``) mean, rounded to ``dtype``."""
    return (codes.to(torch.float32) * scale.reshape(-1, 1)).to(dtype)
