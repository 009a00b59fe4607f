"""A codec for caches that scale each row by itself, with the scales behind the codes in the row's own bytes.

The layout is that of :func:`~attncheck.backends.caches.packings.coded_rows_shape`. A backend that uses it returns
:func:`row_codec` from ``kv_cache_codec``. Arithmetic is float64, rounded where a number is stored.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from attncheck.backends.caches.packings import CacheGeometry, has_coded_rows
from attncheck.reference.spec import LayerSpec
from attncheck.reference.step_spec import ROW_FORMATS, CacheSpec, RowFormat

SMALLEST_SCALE = 1e-6
"""Lower limit of the scale of a whole row, as in vLLM. It is the scale of a row of zeros."""

FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of float4_e2m1fn that are not negative, by code; the sign is the highest of the four bits."""


@dataclass(frozen=True)
class RowCodec:
    """A codec (:class:`~attncheck.backends.caches.codecs.KVCacheCodec`) for rows of one format.

    sizes: head size of keys and of values. units: what the stored scales of keys and of values are multiples of; only
    the scales of groups have one.
    """

    row_format: RowFormat
    sizes: tuple[int, int]
    units: tuple[float, float]

    def write(self, kv_cache: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """See :class:`~attncheck.backends.caches.codecs.KVCacheCodec`."""
        rows = [encode_rows(rows, self.row_format, unit) for rows, unit in zip((key, value), self.units, strict=True)]
        block_size = kv_cache.shape[2]
        memory = kv_cache.view(torch.uint8)
        memory[slots // block_size, :, slots % block_size] = torch.cat(rows, dim=-1).to(memory.device)

    def read(self, kv_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return the contents of ``slots`` without rounding, float64."""
        block_size = kv_cache.shape[2]
        rows = kv_cache.view(torch.uint8)[slots // block_size, :, slots % block_size]
        widths = [self.row_format.row_bytes(size) for size in self.sizes]
        key, value = (
            decode_rows(part, self.row_format, size, unit)
            for part, size, unit in zip(rows.split(widths, dim=-1), self.sizes, self.units, strict=True)
        )
        return key, value


def row_codec(backend: CacheGeometry, layer: LayerSpec, cache: CacheSpec) -> RowCodec | None:
    """Return the codec of a cache of ``ROW_FORMATS`` in the usual shape, or None."""
    if (
        not has_coded_rows(backend, layer, cache)
        or isinstance(cache.k_scale, tuple)
        or isinstance(cache.v_scale, tuple)
    ):
        return None
    row_format = ROW_FORMATS[cache.kv_cache_dtype]
    units = (1.0, 1.0) if row_format.group is None else (cache.k_scale, cache.v_scale)
    return RowCodec(row_format, (layer.head_size, layer.value_head_size), units)


def encode_rows(rows: Tensor, row_format: RowFormat, unit: float = 1.0) -> Tensor:
    """Return the bytes of ``rows`` ``[..., D]``, uint8 ``[..., row bytes]``; a row with NaN or Inf is read as NaN."""
    size = rows.shape[-1]
    groups = rows.double().unflatten(-1, (-1, row_format.group or size))
    scales = groups.abs().amax(dim=-1, keepdim=True) / row_format.largest / unit
    if row_format.group is None:
        stored = scales.clamp(min=SMALLEST_SCALE).float()
    else:
        stored = scales.clamp(max=torch.finfo(torch.float8_e4m3fn).max).to(torch.float8_e4m3fn)
    used = stored.double() * unit
    numbers = (groups / used.masked_fill(used == 0, 1.0)).clamp(-row_format.largest, row_format.largest)
    codes = _codes(numbers.nan_to_num(nan=0.0).flatten(-2), row_format)
    broken = ~torch.isfinite(scales)
    stored = torch.where(broken, torch.nan, stored.double()).to(stored.dtype)
    return torch.cat([codes, stored.flatten(-2).view(torch.uint8)], dim=-1)


def decode_rows(stored: Tensor, row_format: RowFormat, size: int, unit: float = 1.0) -> Tensor:
    """Return the rows ``[..., size]`` of their bytes, float64."""
    codes, scale_bytes = stored.split([row_format.code_bytes(size), stored.shape[-1] - row_format.code_bytes(size)], -1)
    scale_dtype = torch.float32 if row_format.group is None else torch.float8_e4m3fn
    scales = scale_bytes.contiguous().view(scale_dtype).double() * unit
    groups = _numbers(codes.contiguous(), row_format).unflatten(-1, (scales.shape[-1], -1))
    rows: Tensor = (groups * scales[..., None]).flatten(-2)
    return rows


def _codes(numbers: Tensor, row_format: RowFormat) -> Tensor:
    """Return the codes of finite numbers within the format's range, uint8, two in a byte if they have four bits."""
    match row_format.code:
        case "float8_e4m3fn":
            return numbers.to(torch.float8_e4m3fn).view(torch.uint8)
        case "float4_e2m1fn":
            table = torch.tensor(FLOAT4, dtype=torch.float64, device=numbers.device)
            size = numbers.abs()
            codes = torch.searchsorted((table[1:] + table[:-1]) / 2, size.contiguous())
            codes = (codes | (numbers < 0).long() << 3).to(torch.uint8)
        case "int":
            codes = numbers.round().to(torch.int8).view(torch.uint8)
    if row_format.bits == 8:
        return codes
    low, high = codes.unflatten(-1, (-1, 2)).unbind(dim=-1)
    packed: Tensor = low & 0xF | (high & 0xF) << 4
    return packed


def _numbers(codes: Tensor, row_format: RowFormat) -> Tensor:
    """Return the numbers of codes, float64: the inverse of :func:`_codes`."""
    if row_format.code == "float8_e4m3fn":
        return codes.view(torch.float8_e4m3fn).double()
    if row_format.bits == 8:
        return codes.view(torch.int8).double()
    nibbles = torch.stack([codes & 0xF, codes >> 4], dim=-1).flatten(-2).long()
    if row_format.code == "int":
        return (nibbles - 16 * (nibbles >> 3)).double()
    table = torch.tensor((*FLOAT4, *(-number for number in FLOAT4)), dtype=torch.float64, device=codes.device)
    return table[nibbles]
