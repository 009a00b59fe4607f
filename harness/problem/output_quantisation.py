"""An output quantised on its way out: how far, at the least, what stands behind its codes is from the right answer.

A code stands for every number that rounds to it, so the error of a code is the distance of the right answer from that
interval: none if it lies inside. The ordinary budget then holds for it, and a code is never doubted for being a code.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from attncheck.backends.dtypes import FP8_DTYPES
from attncheck.harness.problem.float8 import nearest_code, numbers_of, rounding_interval
from attncheck.reference.spec import LayerSpec

_SLACK = 2.0**-22
"""Relative width added to an interval's ends: a kernel may divide by the scale, or multiply by its reciprocal."""


@dataclass(frozen=True)
class OutputCodes:
    """A quantised output: codes of ``dtype`` that mean ``code * scale``."""

    dtype: torch.dtype
    scale: float

    def of(self, out: Tensor) -> Tensor:
        """The codes of an exact answer (float64)."""
        return nearest_code(out / self.scale, self.dtype).view(self.dtype)

    def error(self, output: Tensor, out: Tensor) -> Tensor:
        """Float64: the least that ``output`` is off the answer ``out`` (float64), whatever stands behind its codes."""
        low, high = (end * self.scale for end in rounding_interval(output.view(torch.uint8), self.dtype))
        return out.clamp(low - _SLACK * low.abs(), high + _SLACK * high.abs()) - out


def output_codes(layer: LayerSpec) -> OutputCodes | None:
    """How the layer's output is quantised, the scale as a backend is told it (float32); None: it is not."""
    quant = layer.output_quant
    if quant is None:
        return None
    return OutputCodes(FP8_DTYPES[quant.dtype], float(torch.tensor(quant.scale, dtype=torch.float32)))


def output_values(output: Tensor, codes: OutputCodes | None) -> Tensor:
    """Float64: what an output says."""
    return output.double() if codes is None else numbers_of(output.view(torch.uint8), codes.dtype) * codes.scale


def output_error(output: Tensor, out: Tensor, codes: OutputCodes | None) -> Tensor:
    """Float64: ``output`` minus the answer ``out`` (float64, same shape); of codes the least it can be."""
    return output.double() - out if codes is None else codes.error(output, out)
