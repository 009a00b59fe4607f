"""How a tensor is quantised, as a value: vLLM's ``QuantKey`` and its parts.

The graph compiler asks an impl with such a key whether a quantisation that follows attention may be folded into it.
Must not know: how anything is quantised.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch


class GroupShape(NamedTuple):
    """The rows and columns that share one scale; -1 is the whole extent.

    Per tensor (-1, -1), per token (1, -1), per channel (-1, 1), blocks such as (1, 128).
    """

    row: int
    col: int


@dataclass(frozen=True)
class ScaleDesc:
    """A scale: its dtype, whether it is known beforehand (``static``) or taken from the data, and what shares one."""

    dtype: torch.dtype
    static: bool
    group_shape: GroupShape


@dataclass(frozen=True)
class QuantKey:
    """A quantised format; here static per-tensor FP8.

    >>> QuantKey(torch.float8_e4m3fn, ScaleDesc(torch.float32, True, GroupShape(-1, -1))).scale.static
    True
    """

    dtype: torch.dtype
    scale: ScaleDesc
    scale2: ScaleDesc | None = None
    symmetric: bool = True


STATIC_FP8 = QuantKey(torch.float8_e4m3fn, ScaleDesc(torch.float32, static=True, group_shape=GroupShape(-1, -1)))
"""Codes of ``float8_e4m3fn`` under one scale for the whole tensor, known beforehand."""
