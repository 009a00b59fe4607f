"""A codec that looks up where each element of a page lies, for layouts that no strided view can describe."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attncheck.backends.caches.codecs import Coding

_AT_ONCE = 1 << 22
"""Maximum elements addressed at once: an address takes several times the memory of its element."""


@dataclass(frozen=True, eq=False)
class ElementPlaces:
    """The places of all keys, or all values, in a cache's memory, counted in elements from its beginning.

    base: int64 ``[block_size, *row]``, the places in page 0, extrapolated to a pool without pages.
    growth: the same shape, the shift of these places per page of the pool.
    stride: distance from page to page.
    """

    base: Tensor
    growth: Tensor
    stride: int

    def of(self, slots: Tensor, num_blocks: int) -> Tensor:
        """Return the places of ``slots`` (int64 ``[n]``), int64 ``[n, *row]``, on their device."""
        block_size = len(self.base)
        page = (self.base + num_blocks * self.growth).to(slots.device)
        beginnings = (slots // block_size * self.stride).reshape(-1, *(1,) * (page.dim() - 1))
        return page[slots % block_size] + beginnings


@dataclass(frozen=True, eq=False)
class PlacedCodec:
    """A codec (:class:`~attncheck.backends.caches.codecs.KVCacheCodec`) for any layout whose pages are alike.

    page: elements per page. note: how the places were found, for readers of findings.
    """

    keys: ElementPlaces
    values: ElementPlaces
    page: int
    coding: Coding
    note: str

    def write(self, kv_cache: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """See :class:`~attncheck.backends.caches.codecs.KVCacheCodec`."""
        memory, num_blocks = self._memory(kv_cache)
        for places, rows in zip((self.keys, self.values), self.coding.encode(key, value), strict=True):
            for piece in self._pieces(len(slots)):
                memory[places.of(slots[piece].to(memory.device), num_blocks)] = rows[piece].to(memory)

    def read(self, kv_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`~attncheck.backends.caches.codecs.KVCacheCodec`."""
        memory, num_blocks = self._memory(kv_cache)
        pieces = [slots[piece].to(memory.device) for piece in self._pieces(len(slots))]
        key, value = (
            torch.cat([memory[places.of(piece, num_blocks)] for piece in pieces]) for places in (self.keys, self.values)
        )
        return self.coding.decode(key, value)

    def _memory(self, kv_cache: Tensor) -> tuple[Tensor, int]:
        return flat_memory(kv_cache, self.coding), kv_cache.numel() // self.page

    def _pieces(self, count: int) -> Iterator[slice]:
        """Yield slices over ``count`` slots; at least one, also if ``count`` is 0."""
        step = max(1, _AT_ONCE * len(self.keys.base) // self.page)
        for first in range(0, max(1, count), step):
            yield slice(first, first + step)


def flat_memory(kv_cache: Tensor, coding: Coding) -> Tensor:
    """Return the cache's memory as a flat view of elements, codes as uint8."""
    memory = kv_cache.as_strided((kv_cache.numel(),), (1,), kv_cache.storage_offset())
    return memory if coding.code_dtype is None else memory.view(torch.uint8)
