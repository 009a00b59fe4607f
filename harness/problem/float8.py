"""Float8 formats as tables: their numbers, rounding to them, and the interval of numbers that round to a code.

Independent of :mod:`attncheck.reference.attention.cache`: float64 throughout, and rounding by comparison with midpoints
instead of a dtype conversion. Codes are bytes (uint8): a sign bit, then a magnitude that orders the finite numbers.
"""

import torch
from torch import Tensor

NAN_CODE = 0x7F
"""A NaN in every format whose highest magnitude is a NaN (``float8_e4m3fn``, ``float8_e5m2``)."""

_SIGN = 0x80


def magnitudes(dtype: torch.dtype) -> Tensor:
    """Return the finite numbers >= 0 of ``dtype``, float64, ascending: the number at ``i`` has code ``i``."""
    numbers = torch.arange(_SIGN, dtype=torch.uint8).view(dtype).double()
    return numbers[torch.isfinite(numbers)]


def nearest_code(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the code of the number nearest to ``x`` (float64): ties to even, saturating; NaN for NaN."""
    numbers = magnitudes(dtype).to(x.device)
    middle = (numbers[1:] + numbers[:-1]) / 2
    size = x.abs().nan_to_num(nan=0.0)
    code = torch.searchsorted(middle, size.contiguous())
    is_tie = (code < len(middle)) & (size == middle[code.clamp(max=len(middle) - 1)])
    code = code + (is_tie & (code % 2 == 1)).long() + _SIGN * (x < 0).long()
    return torch.where(torch.isnan(x), NAN_CODE, code).to(torch.uint8)


def truncated_code(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the code of ``x`` (float64) rounded towards 0, saturating, as by a careless conversion."""
    numbers = magnitudes(dtype).to(x.device)
    code = torch.searchsorted(numbers, x.abs().nan_to_num(nan=0.0).contiguous(), right=True) - 1
    return torch.where(torch.isnan(x), NAN_CODE, code + _SIGN * (x < 0).long()).to(torch.uint8)


def numbers_of(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of codes (uint8), float64."""
    return codes.view(dtype).double()


def rounding_interval(codes: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest number that may round to a code (uint8), float64; NaN for codes of NaN.

    Both ends are included, because a kernel that scales before rounding may break a tie either way. The interval of the
    largest number is unbounded, because of saturation. Both zeros have the same interval.
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
    """Return the codes (uint8) with one code for every NaN and one for both zeros, which kernels may choose freely."""
    is_nan = torch.isnan(numbers_of(codes, dtype))
    return codes.masked_fill(is_nan, NAN_CODE).masked_fill(codes == _SIGN, 0)
