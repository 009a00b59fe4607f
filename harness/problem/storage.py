"""How queries, keys, values and outputs are stored: float8 formats, scales, latent rows."""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from attncheck.backends.dtypes import DTYPES, FP8_DTYPES, cache_dtype
from attncheck.harness.problem.coded_rows import CodedRows
from attncheck.harness.problem.pages import RandomStream
from attncheck.harness.problem.queries import SMALLEST
from attncheck.reference.attention.cache import quantize_fp8
from attncheck.reference.spec import LayerSpec
from attncheck.reference.step_spec import ROW_FORMATS, CacheSpec

# Float8 formats as tables: their numbers, rounding to them, and the interval of numbers that round to a code.
#
# Independent of :mod:`attncheck.reference.attention.cache`: float64 throughout, and rounding by comparison with
# midpoints instead of a dtype conversion. Codes are bytes (uint8): a sign bit, then a magnitude that orders the finite
# numbers.

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
    infinity = middle.new_full((1,), torch.inf)
    below = -middle[:1]
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


# The error of a quantised output: the smallest distance between the right answer and the numbers behind its codes.
#
# A code represents every number that rounds to it. Its error is the distance of the right answer from that interval,
# and 0 inside. So the ordinary error budget applies, and rounding to a code alone is never an error.

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


# Storage of keys and values in a cache, and of FP8 queries: rows that are stored exactly, and their exact values.
#
# A cache in another dtype than the layer's, or of codes, rounds its input. A problem's keys and values are rounded
# beforehand, so that every correct writer stores the same bytes, and the truth is computed from the stored values.

_SPREAD_OF_KEYS, _SPREAD_OF_VALUES = 3, 6
"""Powers of two between the scales of rows, if each has its own. Much smaller keys would have no weight."""

_NEAR_CODES = 3
"""Search range, in codes, for a nearby code that truncation keeps."""


@dataclass(frozen=True)
class Storage:
    """The storage of K, V or Q. ``rows`` below are ``[n, Hkv, D]``, for Q ``[n, H, D]``, in the layer's dtype.

    dtype: the layer's. held: the cache's, or that of the query; float8 for codes with the value ``code * scale``.
    scale: float32 ``[1, 1]``, or one per head, ``[Hkv, 1]`` or ``[H, 1]``, as the backend gets it.
    coded_rows: how the cache scales each row by itself, or None. ``held`` is then the layer's dtype, because storable
    rows are stored exactly.
    """

    dtype: torch.dtype
    held: torch.dtype
    scale: Tensor
    coded_rows: CodedRows | None = None

    @property
    def is_fp8(self) -> bool:
        """Whether codes are stored; if not, the scale is unused."""
        return self.held.itemsize == 1

    @property
    def smallest(self) -> Tensor:
        """Float64 ``[1 or Hkv, 1]``: a magnitude whose sign the cache keeps."""
        if self.coded_rows is not None:
            return torch.full_like(self.scale, self.coded_rows.smallest, dtype=torch.float64)
        least = torch.finfo(self.held).tiny * self.scale.double() if self.is_fp8 else torch.zeros_like(self.scale)
        return least.clamp(min=SMALLEST)

    def storable(self, numbers: Tensor) -> Tensor:
        """Return float64 ``numbers`` as rows that the cache returns unchanged; 0 for numbers that no row can hold."""
        if self.coded_rows is not None:
            return self.coded_rows.storable(numbers).to(self.dtype)
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
        rows = self.rows_of(codes).double()
        numbers = numbers_of(codes, self.held)
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
    return _storage(layer, cache, cache.k_scale, _SPREAD_OF_KEYS)


def value_storage(layer: LayerSpec, cache: CacheSpec) -> Storage:
    """Return the storage of values; in a latent cache of the rotated parts, which share the latent rows' scale."""
    return _storage(layer, cache, cache.v_scale if layer.mla is None else cache.k_scale, _SPREAD_OF_VALUES)


def query_storage(layer: LayerSpec, cache: CacheSpec) -> Storage:
    """Return the storage of queries: codes of ``float8_e4m3fn`` for ``query_quant``, else the layer's dtype.

    A scale per KV head is repeated for the query heads of its group, as in vLLM.
    """
    dtype = DTYPES[layer.dtype]
    if not layer.query_quant:
        return _storage_of(dtype, dtype, (1.0,))
    scale = cache.q_scale if isinstance(cache.q_scale, tuple) else (cache.q_scale,)
    group = layer.num_heads // layer.num_kv_heads if len(scale) > 1 else 1
    return _storage_of(dtype, FP8_DTYPES["fp8_e4m3"], tuple(each for each in scale for _ in range(group)))


def _storage(layer: LayerSpec, cache: CacheSpec, scale: float | tuple[float, ...], spread: int) -> Storage:
    dtype = DTYPES[layer.dtype]
    row_format = ROW_FORMATS.get(cache.kv_cache_dtype)
    if row_format is not None and layer.has_cache:
        unit = 1.0 if row_format.group is None or isinstance(scale, tuple) else scale
        coded_rows = CodedRows(row_format, unit, spread)
        return replace(
            _storage_of(dtype, dtype, scale if isinstance(scale, tuple) else (scale,)), coded_rows=coded_rows
        )
    held = FP8_DTYPES.get(cache.kv_cache_dtype, cache_dtype(layer, cache)) if layer.has_cache else dtype
    return _storage_of(dtype, held, scale if isinstance(scale, tuple) else (scale,))


@lru_cache(maxsize=64)
def _storage_of(dtype: torch.dtype, held: torch.dtype, scales: tuple[float, ...]) -> Storage:
    return Storage(dtype, held, torch.tensor(scales, dtype=torch.float32)[:, None])


# Multi-head latent attention in a problem: its up-projections, and the equivalent ordinary attention.
#
# A problem of such a layer holds the contents of its cache: latent rows as `keys` (`[N, 1, L]`) and rotated parts as
# `values` (`[N, 1, E]`). The up-projections turn them into the keys (`[N, H, P + E]`) and values (`[N, H, V]`) of the
# naive form, with one KV head per query head. The weights depend on the layer's sizes and dtype alone, not on batch or
# seed, and differ between heads.
#
# The products are exact in float64 in any order of summation, and so equal on every machine. Cache rows are multiples
# of 2**-30 below 2, weights are multiples of 2**-16, and a sum below 2**7 fits 53 bits. Only if the cache holds codes
# may the last of these bits differ; queries derived from such keys are rounded to far fewer bits.

_STEP = 2.0**-16
"""Step between weights before rounding to the layer's dtype, finer than any coarser dtype can represent."""


@dataclass(frozen=True)
class UpProjections:
    """The two halves of ``kv_b_proj``, in the layer's dtype: ``w_uk [L, H, P]`` and ``w_uv [L, H, V]``."""

    w_uk: Tensor
    w_uv: Tensor

    def keys(self, latent: Tensor, rotary: Tensor) -> Tensor:
        """Return float64 keys of the naive form, ``[N, H, P + E]``: up-projected, then the part shared by all heads."""
        nope = torch.einsum("nl,lhp->nhp", latent[:, 0].double(), self.w_uk.double())
        return torch.cat([nope, rotary.double().expand(-1, nope.shape[1], -1)], dim=-1)

    def values(self, latent: Tensor) -> Tensor:
        """Return float64 values of the naive form, ``[N, H, V]``."""
        return torch.einsum("nl,lhv->nhv", latent[:, 0].double(), self.w_uv.double())

    def fused(self) -> Tensor:
        """Return the weight of ``kv_b_proj``, ``[H * (P + V), L]``: per head the rows for keys, then for values."""
        return torch.cat([self.w_uk, self.w_uv], dim=-1).flatten(1).T.contiguous()

    def to(self, device: torch.device) -> "UpProjections":
        """Return the same weights on a device."""
        return UpProjections(self.w_uk.to(device), self.w_uv.to(device))


def make_up_projections(layer: LayerSpec, dtype: torch.dtype) -> UpProjections | None:
    """Return the weights of a layer with ``mla``, else None; keys and values have the variance of other layers."""
    if layer.mla is None:
        return None
    rank, heads = layer.mla.kv_lora_rank, layer.num_heads
    sizes = (layer.mla.qk_nope_head_dim, layer.mla.v_head_dim)
    stream = RandomStream("up-projections", rank, heads, *sizes)
    # A uniform number in -most .. most has variance most**2 / 3, so a sum of ``rank`` products keeps the variance.
    most = round((3 / rank) ** 0.5 / _STEP)
    w_uk, w_uv = (
        ((stream.integers(rank * heads * size, 2 * most + 1) - most).double() * _STEP)
        .reshape(rank, heads, size)
        .to(dtype)
        for size in sizes
    )
    return UpProjections(w_uk, w_uv)
