"""Writes and reads caches that scale each row by itself, for candidates that use plain tensors.

This is float32 arithmetic, as in kernels, and deliberately not the codec with which the harness examines it. The
layout is that of :func:`~attncheck.backends.caches.packings.coded_rows_shape`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from attncheck.reference.step_spec import ROW_FORMATS, RowFormat

_SMALLEST_SCALE = 1e-6
_FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class CodedCache:
    """A cache ``[blocks, num_kv_heads, block size, bytes]`` of any strides, and how it stores keys and values.

    sizes: head size of keys and of values. units: the layer's scales, in which the scales of groups are stored.
    """

    kv_cache: Tensor
    kv_cache_dtype: str
    sizes: tuple[int, int]
    units: tuple[Tensor, Tensor]

    @property
    def row_format(self) -> RowFormat:
        """The format of the rows."""
        return ROW_FORMATS[self.kv_cache_dtype]

    def write(self, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """Store row ``t`` of key and value at slot ``slot_mapping[t]``; skip negative slots and extra rows."""
        rows = (slot_mapping >= 0).nonzero().squeeze(1)
        slots = slot_mapping[rows]
        block_size = self.kv_cache.shape[2]
        page, offset = slots // block_size, slots % block_size
        for new, (codes_at, scales_at), unit in zip((key, value), self._places(), self.units, strict=True):
            numbers = self._grouped(new[rows].float())
            scales = self._scales(numbers, unit)
            quotients = numbers / self._divisors(scales, unit)[..., None]
            codes = encode(quotients.flatten(-2), self.row_format)
            self._bytes[page, :, offset, codes_at] = codes
            self._bytes[page, :, offset, scales_at] = scales.view(torch.uint8)

    def read(self) -> tuple[Tensor, Tensor]:
        """Return all keys and values, float32 ``[blocks, block size, num_kv_heads, head size]``."""
        found = []
        for (codes_at, scales_at), unit in zip(self._places(), self.units, strict=True):
            numbers = self._grouped(decode(self._bytes[..., codes_at], self.row_format))
            scales = self._bytes[..., scales_at].contiguous().view(self._scale_dtype).float()
            rows = numbers * self._factors(scales, unit)[..., None]
            found.append(rows.flatten(-2).transpose(1, 2))
        return found[0], found[1]

    @property
    def _bytes(self) -> Tensor:
        return self.kv_cache.view(torch.uint8)

    @property
    def _scale_dtype(self) -> torch.dtype:
        return torch.float32 if self.row_format.group is None else torch.float8_e4m3fn

    def _places(self) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
        """Return where the codes and the scales of a key lie in the bytes of a row, and those of a value."""
        key_codes = self.row_format.code_bytes(self.sizes[0])
        key_end = self.row_format.row_bytes(self.sizes[0])
        value_codes = key_end + self.row_format.code_bytes(self.sizes[1])
        value_end = key_end + self.row_format.row_bytes(self.sizes[1])
        return (
            (slice(0, key_codes), slice(key_codes, key_end)),
            (slice(key_end, value_codes), slice(value_codes, value_end)),
        )

    def _grouped(self, rows: Tensor) -> Tensor:
        """Return ``[..., groups, numbers that share a scale]``."""
        groups: Tensor = rows.unflatten(-1, (-1, self.row_format.group or rows.shape[-1]))
        return groups

    def _scales(self, numbers: Tensor, unit: Tensor) -> Tensor:
        """Return the scales that are stored, ``[rows, num_kv_heads, groups]``, in their dtype."""
        absmax = numbers.abs().amax(dim=-1)
        scales = absmax / self.row_format.largest
        if self.row_format.group is None:
            return scales.clamp(min=_SMALLEST_SCALE)
        return (scales / unit).clamp(max=448.0).to(torch.float8_e4m3fn)

    def _divisors(self, scales: Tensor, unit: Tensor) -> Tensor:
        used = self._factors(scales.float(), unit)
        return used.masked_fill(used == 0, 1.0)  # of a group of zeros

    def _factors(self, scales: Tensor, unit: Tensor) -> Tensor:
        """Return what the numbers of codes are multiplied by; only the scales of groups have a unit."""
        return scales if self.row_format.group is None else scales * unit


def encode(numbers: Tensor, row_format: RowFormat) -> Tensor:
    """Return the codes of ``numbers``, rounded to the nearest, as bytes."""
    numbers = numbers.clamp(-row_format.largest, row_format.largest)
    if row_format.code == "float8_e4m3fn":
        return numbers.to(torch.float8_e4m3fn).view(torch.uint8)
    if row_format.code == "float4_e2m1fn":
        codes = _float4_codes(numbers)
    else:
        codes = torch.round(numbers).to(torch.int8).view(torch.uint8)
    return pack(codes) if row_format.bits == 4 else codes


def decode(codes: Tensor, row_format: RowFormat) -> Tensor:
    """Return the numbers of codes, float32: the inverse of :func:`encode`."""
    if row_format.code == "float8_e4m3fn":
        return codes.view(torch.float8_e4m3fn).float()
    if row_format.bits == 8:
        return codes.view(torch.int8).float()
    nibbles = unpack(codes)
    if row_format.code == "float4_e2m1fn":
        return _float4_numbers(nibbles)
    return torch.where(nibbles < 8, nibbles, nibbles - 16).float()


def pack(codes: Tensor) -> Tensor:
    """Return bytes of two codes each: the even ones in the low four bits, the odd ones in the high four."""
    even, odd = codes[..., 0::2], codes[..., 1::2]
    return (even & 15) | (odd & 15) << 4


def unpack(packed: Tensor) -> Tensor:
    """Return the codes that share bytes, int32."""
    even, odd = packed & 15, packed >> 4
    return torch.stack([even, odd], dim=-1).flatten(-2).int()


def _float4_codes(numbers: Tensor) -> Tensor:
    table = torch.tensor(_FLOAT4, device=numbers.device)
    distance = (numbers.abs()[..., None] - table).abs()
    return (distance.argmin(dim=-1) + 8 * (numbers < 0)).to(torch.uint8)


def _float4_numbers(codes: Tensor) -> Tensor:
    table = torch.tensor(_FLOAT4, device=codes.device)
    sign = torch.where(codes < 8, 1.0, -1.0)
    return table[codes % 8] * sign
