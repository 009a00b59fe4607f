"""Rows of caches that scale each row by itself: rows that they store exactly, and how far any other may be rounded.

The rows of a problem are stored exactly, so that every correct writer stores the same numbers, and the error budget has
no share of the cache. A row is a code times a power of two, with the largest code at its largest magnitude. Then the
scale that a writer derives is that power of two. Independent of the codec: float64, and tables of numbers.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attncheck.reference.step_spec import RowFormat

_SMALLEST_SCALE = 1e-6
"""Smallest scale of a whole row that a writer need keep: vLLM's limit, which also is the scale of a row of zeros."""

_SLACK = 2.0**-16
"""Relative error of a quotient: float32 arithmetic with a reciprocal of the scale loses less."""

_SCALE_ERROR = 2.0**-4
"""Relative error of a scale of a group, which is stored as float8_e4m3fn."""

_SCALE_STEP = 2.0**-9
"""Step of the smallest numbers of float8_e4m3fn."""


@dataclass(frozen=True)
class CodedRows:
    """Numbers of one format. ``rows`` below are ``[..., D]``.

    unit: what the stored scales are multiples of, a power of two. spread: powers of two by which scales of rows differ.
    """

    row_format: RowFormat
    unit: float
    spread: int

    @property
    def smallest(self) -> float:
        """A magnitude whose sign the cache keeps, in rows of magnitude up to 2."""
        return 2 * float(self._magnitudes[1]) / self.row_format.largest

    def storable(self, numbers: Tensor) -> Tensor:
        """Return float64 ``numbers`` rounded to rows that the cache returns unchanged, with magnitudes up to 2.

        The scales differ between tokens, heads and groups, by a hash of the row's codes.
        """
        groups = self.grouped(numbers.double())
        absmax = groups.abs().amax(dim=-1, keepdim=True)
        codes = self._nearest(groups.abs() / absmax.masked_fill(absmax == 0, 1.0) * self.row_format.largest)
        mixed = (codes * torch.arange(1, codes.shape[-1] + 1, device=codes.device) ** 2).sum(dim=-1, keepdim=True)
        exponent = -(mixed * 40503 // 64) % (self.spread + 1)
        scale = torch.ldexp(torch.full(exponent.shape, self._largest_scale, dtype=torch.float64), -exponent)
        magnitudes = self._magnitudes.to(codes.device)[codes]
        # 0 has no sign, because kernels treat -0 differently.
        return (torch.copysign(magnitudes * scale, groups) + 0.0).flatten(-2)

    def allowed_error(self, rows: Tensor) -> Tensor:
        """Return by how much a correct writer may change each element of ``rows``: float64, of the same shape.

        It is half the step between the codes around the element. If groups have scales of few bits, it is that of the
        worst such scale.
        """
        groups = self.grouped(rows.double())
        scale = groups.abs().amax(dim=-1, keepdim=True) / self.row_format.largest
        if self.row_format.group is None:
            used = scale.clamp(min=_SMALLEST_SCALE)
            quotients = groups.abs() / used
            return ((self._half_step(quotients) + _SLACK * quotients) * used).flatten(-2)
        error = torch.maximum(_SCALE_ERROR * scale, torch.full_like(scale, _SCALE_STEP * self.unit / 2))
        used = (scale + error).clamp(min=_SMALLEST_SCALE)
        least = (scale - error).clamp(min=_SMALLEST_SCALE)
        half = torch.maximum(self._half_step(groups.abs() / used), self._half_step(groups.abs() / least))
        return (half * used).flatten(-2)

    def truncated(self, rows: Tensor) -> Tensor:
        """Return the float64 rows that a cache returns if their codes are rounded towards 0."""
        groups = self.grouped(rows.double())
        scale = (groups.abs().amax(dim=-1, keepdim=True) / self.row_format.largest).clamp(min=_SMALLEST_SCALE)
        numbers = self._magnitudes.to(rows.device)
        below = torch.searchsorted(numbers, (groups.abs() / scale).contiguous(), right=True) - 1
        return torch.copysign(numbers[below] * scale, groups).flatten(-2)

    def extreme(self, rows: Tensor) -> Tensor:
        """Return rows ``[n, Hkv, D]`` of the shape and dtype of ``rows`` that expose how a writer rounds.

        They lie between codes, under scales of many magnitudes; each eighth is zero, each eighth has an outlier.
        """
        count, heads, size = rows.shape
        number = torch.arange(count * heads).reshape(count, heads, 1)
        element = torch.arange(size)
        place = (element * 7 + number * 3) % (len(self._magnitudes) - 1)
        low, high = self._magnitudes[place], self._magnitudes[place + 1]
        share = torch.tensor([0.3, 0.45, 0.55, 0.7, 0.9], dtype=torch.float64)[(element + number) % 5]
        sign = 1.0 - 2.0 * ((element + number) % 2)
        quotients = sign * (low + share * (high - low))
        group = self.row_format.group or size
        quotients[..., ::group] = self.row_format.largest
        # A scale of few bits has a small range.
        most, decades = (0.7 / self.row_format.largest, 4) if self.row_format.group is None else (1.3 * self.unit, 2)
        scale = most * 10.0 ** -(number % decades)
        made = quotients * scale
        has_outlier = (number % 8 == 3).squeeze(-1)
        made[..., -1] = torch.where(has_outlier, 200 * self.row_format.largest * most, made[..., -1])
        made = made.masked_fill(number % 8 == 5, 0.0)
        return made.to(rows.device, rows.dtype)

    @cached_property
    def _magnitudes(self) -> Tensor:
        """The numbers of codes that are not negative, float64, ascending."""
        match self.row_format.code:
            case "float8_e4m3fn":
                codes = torch.arange(127, dtype=torch.uint8)
                return codes.view(torch.float8_e4m3fn).double()
            case "float4_e2m1fn":
                return torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
            case "int":
                return torch.arange(self.row_format.largest + 1, dtype=torch.float64)

    @property
    def _largest_scale(self) -> float:
        """The largest power of two with which the largest code is at most 2."""
        return float(2.0 ** torch.tensor(2 / self.row_format.largest).log2().floor())

    def grouped(self, rows: Tensor) -> Tensor:
        """Return ``[..., groups, numbers that share a scale]``."""
        groups: Tensor = rows.unflatten(-1, (-1, self.row_format.group or rows.shape[-1]))
        return groups

    def _nearest(self, magnitudes: Tensor) -> Tensor:
        """Return the index of the nearest number of a code, int64."""
        middle = (self._magnitudes[1:] + self._magnitudes[:-1]) / 2
        return torch.searchsorted(middle.to(magnitudes.device), magnitudes.contiguous())

    def _half_step(self, magnitudes: Tensor) -> Tensor:
        """Return half the step between the codes around each magnitude; beyond the largest code, the last step."""
        numbers = self._magnitudes.to(magnitudes.device)
        above = torch.searchsorted(numbers, magnitudes.contiguous()).clamp(1, len(numbers) - 1)
        return (numbers[above] - numbers[above - 1]) / 2
