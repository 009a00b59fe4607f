"""Storage of keys and values in a cache: rows that it can store exactly, and their exact values.

A cache in another dtype than the layer's, or of codes, rounds its input. A problem's keys and values are rounded
beforehand, so that every correct writer stores the same bytes, and the truth is computed from the stored values.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from attncheck.backends.dtypes import DTYPES, FP8_DTYPES, cache_dtype
from attncheck.harness.problem.float8 import alike, nearest_code, numbers_of, truncated_code
from attncheck.harness.problem.signatures import SMALLEST
from attncheck.reference.attention.cache import quantize_fp8
from attncheck.reference.spec import CacheSpec, LayerSpec

_NEAR_CODES = 3
"""Search range, in codes, for a nearby code that truncation keeps."""


@dataclass(frozen=True)
class Storage:
    """The storage of K or V. ``rows`` below are ``[n, Hkv, D]`` in the layer's dtype.

    dtype: the layer's. held: the cache's, float8 for codes with the value ``code * scale``.
    scale: float32 ``[1, 1]`` or ``[Hkv, 1]``, as the backend gets it.
    """

    dtype: torch.dtype
    held: torch.dtype
    scale: Tensor

    @property
    def is_fp8(self) -> bool:
        """Whether the cache holds codes; if not, the scale is unused."""
        return self.held.itemsize == 1

    @property
    def smallest(self) -> Tensor:
        """Float64 ``[1 or Hkv, 1]``: a magnitude whose sign the cache keeps."""
        least = torch.finfo(self.held).tiny * self.scale.double() if self.is_fp8 else torch.zeros_like(self.scale)
        return least.clamp(min=SMALLEST)

    def storable(self, numbers: Tensor) -> Tensor:
        """Return float64 ``numbers`` as rows that the cache returns unchanged; 0 for numbers that no row can hold."""
        if not self.is_fp8:
            return numbers.to(self.held).to(self.dtype)
        heads = torch.arange(numbers.shape[1], device=numbers.device)[:, None] % len(self.scale)
        sturdy = self._sturdy_codes.to(numbers.device)
        return self.usable_rows(sturdy[heads, self.codes(numbers).long()])

    @cached_property
    def _sturdy_codes(self) -> Tensor:
        """uint8 ``[1 or Hkv, 256]``: the nearest code that a writer that truncates the mantissa keeps, else the code.

        The layer's dtype rounds ``code * scale``. If it rounds towards 0, such a writer stores the code below.
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
        """Return the codes (uint8) of rows, on their device."""
        return quantize_fp8(rows, self.scale.to(rows.device), self.held).view(torch.uint8)

    def rows_of(self, codes: Tensor) -> Tensor:
        """Return rows with these codes (uint8), as far as the layer's dtype can represent them: see :meth:`holds`."""
        return (numbers_of(codes, self.held) * self.scale.to(codes.device).double()).to(self.dtype)

    def holds(self, codes: Tensor) -> Tensor:
        """Return whether :meth:`rows_of` leads back to the codes; not if the layer's dtype is coarser or overflows."""
        rows, numbers = self.rows_of(codes).double(), numbers_of(codes, self.held)
        again = numbers_of(nearest_code(rows / self.scale.to(codes.device).double(), self.held), self.held)
        return torch.isnan(numbers) | ((again == numbers) & torch.isfinite(rows))

    def usable_rows(self, codes: Tensor) -> Tensor:
        """Return rows with these codes (uint8); 0 for infinities, NaN, and what the layer's dtype cannot represent."""
        usable = torch.isfinite(numbers_of(codes, self.held)) & self.holds(codes)
        return self.rows_of(codes.masked_fill(~usable, 0)) + 0.0  # -0 becomes 0, because kernels treat -0 differently

    def exact(self, rows: Tensor) -> Tensor:
        """Return the values of rows in the cache: ``code * scale`` in float64; without codes the rows themselves."""
        if not self.is_fp8:
            return rows
        return numbers_of(self.codes(rows), self.held) * self.scale.to(rows.device).double()


def key_storage(layer: LayerSpec, cache: CacheSpec) -> Storage:
    """Return the storage of keys."""
    return _storage(layer, cache, cache.k_scale)


def value_storage(layer: LayerSpec, cache: CacheSpec) -> Storage:
    """Return the storage of values; in a latent cache of the rotated parts, which share the latent rows' scale."""
    return _storage(layer, cache, cache.v_scale if layer.mla is None else cache.k_scale)


def _storage(layer: LayerSpec, cache: CacheSpec, scale: float | tuple[float, ...]) -> Storage:
    dtype = DTYPES[layer.dtype]
    held = FP8_DTYPES.get(cache.kv_cache_dtype, cache_dtype(layer, cache)) if layer.has_cache else dtype
    return _storage_of(dtype, held, scale if isinstance(scale, tuple) else (scale,))


@lru_cache(maxsize=64)
def _storage_of(dtype: torch.dtype, held: torch.dtype, scales: tuple[float, ...]) -> Storage:
    return Storage(dtype, held, torch.tensor(scales, dtype=torch.float32)[:, None])
