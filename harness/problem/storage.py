"""What a cache can hold of keys and values: rows made exactly storable, and what stands for them in exact numbers.

A cache of another dtype than the layer's, or of codes, rounds what it is given. A problem's keys and values are rounded
beforehand, so that every right writer stores the same bytes, and the truth is taken from what stands in the cache.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from attncheck.backends.dtypes import DTYPES, FP8_DTYPES, cache_dtype
from attncheck.harness.problem.float8 import alike, nearest_code, numbers_of, truncated_code
from attncheck.harness.problem.signatures import SMALLEST
from attncheck.reference.attention.quant import quantize_fp8
from attncheck.reference.spec import CacheSpec, LayerSpec

_NEAR_CODES = 3
"""How far from a code another one is looked for that careless rounding leaves alone."""


@dataclass(frozen=True)
class Storage:
    """How one of K and V is held. ``rows`` below are ``[n, Hkv, D]`` in the layer's dtype.

    dtype: the layer's. held: the cache's, float8 for codes, which mean ``code * scale``. scale: float32 ``[1, 1]`` or
    ``[Hkv, 1]``, what the backend is told.
    """

    dtype: torch.dtype
    held: torch.dtype
    scale: Tensor

    @property
    def is_fp8(self) -> bool:
        """Whether codes are held; without codes the scale means nothing."""
        return self.held.itemsize == 1

    @property
    def smallest(self) -> Tensor:
        """Float64 ``[1 or Hkv, 1]``: a magnitude whose sign the cache keeps."""
        least = torch.finfo(self.held).tiny * self.scale.double() if self.is_fp8 else torch.zeros_like(self.scale)
        return least.clamp(min=SMALLEST)

    def storable(self, numbers: Tensor) -> Tensor:
        """Float64 ``numbers`` as rows that come out of the cache as they went in; those no row can hold become 0."""
        if not self.is_fp8:
            return numbers.to(self.held).to(self.dtype)
        heads = torch.arange(numbers.shape[1], device=numbers.device)[:, None] % len(self.scale)
        sturdy = self._sturdy_codes.to(numbers.device)
        return self.usable_rows(sturdy[heads, self.codes(numbers).long()])

    @cached_property
    def _sturdy_codes(self) -> Tensor:
        """uint8 ``[1 or Hkv, 256]``: the nearest code that a writer keeps which cuts the mantissa off; else the code.

        The layer's dtype rounds ``code * scale``, and such a writer stores the code below where it rounds towards 0.
        """
        codes = torch.arange(256, dtype=torch.uint8).expand(len(self.scale), -1)
        rows = self.rows_of(codes).float()
        quotients = rows / self.scale, rows * (1 / self.scale)
        kept = self.holds(codes)
        for quotient in quotients:
            kept &= alike(truncated_code(quotient.double(), self.held), self.held) == alike(codes, self.held)
        nearest = codes.clone()
        for step in range(_NEAR_CODES, 0, -1):
            for moved in (codes.long() + step, codes.long() - step):
                other = moved.clamp(0, 255)
                is_code = (moved == other) & (other // 128 == codes // 128) & kept.gather(1, other)
                nearest = torch.where(is_code, other.to(torch.uint8), nearest)
        return torch.where(kept, codes, nearest)

    def codes(self, rows: Tensor) -> Tensor:
        """The codes (uint8) of rows, on their device."""
        return quantize_fp8(rows, self.scale.to(rows.device), self.held).view(torch.uint8)

    def rows_of(self, codes: Tensor) -> Tensor:
        """Rows whose codes (uint8) these are, as far as the layer's dtype can say: see :meth:`holds`."""
        return (numbers_of(codes, self.held) * self.scale.to(codes.device).double()).to(self.dtype)

    def holds(self, codes: Tensor) -> Tensor:
        """Whether :meth:`rows_of` leads back to the codes: not where the layer's dtype rounds more, or ends earlier."""
        rows, numbers = self.rows_of(codes).double(), numbers_of(codes, self.held)
        again = numbers_of(nearest_code(rows / self.scale.to(codes.device).double(), self.held), self.held)
        return torch.isnan(numbers) | ((again == numbers) & torch.isfinite(rows))

    def usable_rows(self, codes: Tensor) -> Tensor:
        """Rows whose codes (uint8) these are; 0 in place of infinities, NaN, and what the layer's dtype cannot say."""
        usable = torch.isfinite(numbers_of(codes, self.held)) & self.holds(codes)
        return self.rows_of(codes.masked_fill(~usable, 0)) + 0.0  # not -0, of which kernels make what they like

    def exact(self, rows: Tensor) -> Tensor:
        """What rows mean in the cache: ``code * scale`` in float64; rows as they are without codes."""
        if not self.is_fp8:
            return rows
        return numbers_of(self.codes(rows), self.held) * self.scale.to(rows.device).double()


def key_storage(layer: LayerSpec, cache: CacheSpec) -> Storage:
    """How keys are held."""
    return _storage(layer, cache, cache.k_scale)


def value_storage(layer: LayerSpec, cache: CacheSpec) -> Storage:
    """How values are held; in a latent cache the rotated parts, which share the latent rows' scale."""
    return _storage(layer, cache, cache.v_scale if layer.mla is None else cache.k_scale)


def _storage(layer: LayerSpec, cache: CacheSpec, scale: float | tuple[float, ...]) -> Storage:
    dtype = DTYPES[layer.dtype]
    held = FP8_DTYPES.get(cache.kv_cache_dtype, cache_dtype(layer, cache)) if layer.has_cache else dtype
    return _storage_of(dtype, held, scale if isinstance(scale, tuple) else (scale,))


@lru_cache(maxsize=64)
def _storage_of(dtype: torch.dtype, held: torch.dtype, scales: tuple[float, ...]) -> Storage:
    return Storage(dtype, held, torch.tensor(scales, dtype=torch.float32)[:, None])
