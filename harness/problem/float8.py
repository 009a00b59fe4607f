"""Float8 formats as tables: the numbers they hold, rounding to them, and which numbers one code stands for.

A formulation of its own beside :mod:`attncheck.reference.attention.quant`: float64 throughout, rounding by comparison
with midpoints and not by a conversion. Codes are bytes (uint8): a sign bit and, below it, a magnitude that orders the
finite numbers.
"""

import torch
from torch import Tensor

NAN_CODE = 0x7F
"""A NaN in every format with a NaN at the top of its codes (``float8_e4m3fn``, ``float8_e5m2``)."""

_SIGN = 0x80


def magnitudes(dtype: torch.dtype) -> Tensor:
    """The finite numbers >= 0 that ``dtype`` holds, float64, ascending: the number at ``i`` has code ``i``."""
    numbers = torch.arange(_SIGN, dtype=torch.uint8).view(dtype).double()
    return numbers[torch.isfinite(numbers)]


def nearest_code(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The code of the number nearest to ``x`` (float64), ties to even, saturating; NaN for NaN."""
    numbers = magnitudes(dtype).to(x.device)
    middle = (numbers[1:] + numbers[:-1]) / 2
    size = x.abs().nan_to_num(nan=0.0)
    code = torch.searchsorted(middle, size.contiguous())
    is_tie = (code < len(middle)) & (size == middle[code.clamp(max=len(middle) - 1)])
    code = code + (is_tie & (code % 2 == 1)).long() + _SIGN * (x < 0).long()
    return torch.where(torch.isnan(x), NAN_CODE, code).to(torch.uint8)


def truncated_code(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The code of the largest number not above ``x`` (float64) in size, saturating: what careless conversions give."""
    numbers = magnitudes(dtype).to(x.device)
    code = torch.searchsorted(numbers, x.abs().nan_to_num(nan=0.0).contiguous(), right=True) - 1
    return torch.where(torch.isnan(x), NAN_CODE, code + _SIGN * (x < 0).long()).to(torch.uint8)


def numbers_of(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """What codes (uint8) mean, float64."""
    return codes.view(dtype).double()


def rounding_interval(codes: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The least and the largest number that a code (uint8) may stand for, float64; NaN for codes of NaN.

    Ends included, since a tie may be broken either way by whoever scales before rounding. Beyond the largest number
    lies everything, by saturation, and the two zeros stand for the same numbers.
    """
    numbers = magnitudes(dtype).to(codes.device)
    middle = (numbers[1:] + numbers[:-1]) / 2
    index = (codes & ~_SIGN & 0xFF).long()
    is_finite = index < len(numbers)
    infinity, below = middle.new_full((1,), torch.inf), -middle[:1]
    low, high = (
        ends[index.clamp(max=len(numbers) - 1)] for ends in (torch.cat([below, middle]), torch.cat([middle, infinity]))
    )
    negative = codes >= _SIGN
    low, high = torch.where(negative, -high, low), torch.where(negative, -low, high)
    nowhere = torch.full_like(low, torch.nan)
    return torch.where(is_finite, low, nowhere), torch.where(is_finite, high, nowhere)


def alike(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes (uint8) with one code for every NaN and one for both zeros, which kernels may choose freely."""
    is_nan = torch.isnan(numbers_of(codes, dtype))
    return codes.masked_fill(is_nan, NAN_CODE).masked_fill(codes == _SIGN, 0)
