"""The error of a quantised output: the smallest distance between the right answer and the numbers behind its codes.

A code represents every number that rounds to it. Its error is the distance of the right answer from that interval, and
0 inside. So the ordinary error budget applies, and rounding to a code alone is never an error.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from attncheck.backends.dtypes import FP8_DTYPES
from attncheck.harness.problem.float8 import nearest_code, numbers_of, rounding_interval
from attncheck.reference.spec import LayerSpec

_SLACK = 2.0**-22
"""Relative width added to an interval's ends: a kernel may divide by the scale or multiply by its reciprocal."""


@dataclass(frozen=True)
class OutputCodes:
    """The quantisation of an output: codes of ``dtype`` with the value ``code * scale``."""

    dtype: torch.dtype
    scale: float

    def of(self, out: Tensor) -> Tensor:
        """Return the codes of an exact answer (float64)."""
        return nearest_code(out / self.scale, self.dtype).view(self.dtype)

    def error(self, output: Tensor, out: Tensor) -> Tensor:
        """Return, in float64, the smallest signed error of ``output`` against ``out`` over its rounding interval."""
        low, high = (end * self.scale for end in rounding_interval(output.view(torch.uint8), self.dtype))
        return out.clamp(low - _SLACK * low.abs(), high + _SLACK * high.abs()) - out


def output_codes(layer: LayerSpec) -> OutputCodes | None:
    """Return the quantisation of the layer's output, with the float32 scale that a backend gets, or None."""
    quant = layer.output_quant
    if quant is None:
        return None
    return OutputCodes(FP8_DTYPES[quant.dtype], float(torch.tensor(quant.scale, dtype=torch.float32)))


def output_values(output: Tensor, codes: OutputCodes | None) -> Tensor:
    """Return the values of an output, in float64."""
    return output.double() if codes is None else numbers_of(output.view(torch.uint8), codes.dtype) * codes.scale


def output_error(output: Tensor, out: Tensor, codes: OutputCodes | None) -> Tensor:
    """Return ``output`` minus ``out`` (float64, same shape); for codes the smallest possible error."""
    return output.double() - out if codes is None else codes.error(output, out)
