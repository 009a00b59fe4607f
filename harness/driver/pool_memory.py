"""Copy a cache's memory: all of it, or only the pages that a step may reach if the cache is very large.

Most pages of a very large cache are reserved but never touched; copying all of it would take that memory.
"""

import torch
from torch import Tensor

from attncheck.harness.problem.memory_estimate import SMALL_POOL

_MOST_COPIED = 2**30
"""Bytes of a cache up to which all of it is copied if its shape does not show which axis counts pages."""


class PoolMemory:
    """The memory behind a cache of ``num_blocks`` pages. An image of it is a flat uint8 tensor.

    ``slots``: int64, the slots that a step may reach. If the cache has more than ``SMALL_POOL`` slots, an image holds
    only the pages of these. Raises MemoryError for a very large cache whose shape has no single axis of pages.
    """

    def __init__(self, kv_cache: Tensor, num_blocks: int, block_size: int, slots: Tensor) -> None:
        self._cache, self._block_size = kv_cache, block_size
        # Keep the memory order of the axes, because a codec may compute element offsets.
        self._order = sorted(range(kv_cache.dim()), key=kv_cache.stride().__getitem__, reverse=True)
        self._pages: Tensor | None = None
        if num_blocks * block_size <= SMALL_POOL:
            return
        axes = [axis for axis, extent in enumerate(kv_cache.shape) if extent == num_blocks]
        if len(axes) == 1:
            self._axis, self._pages = self._order.index(axes[0]), (slots // block_size).unique().to(kv_cache.device)
        elif kv_cache.nbytes > _MOST_COPIED:
            raise MemoryError(
                f"copies of {kv_cache.nbytes / 2**30:.1f} GiB: the shape {tuple(kv_cache.shape)} of the cache has no "
                f"single axis of {num_blocks} pages, so that some of them could be copied"
            )

    def bytes(self) -> Tensor:
        """Return the memory that an image copies: a view if that is all of it, else a copy."""
        if self._pages is None:
            return flat_bytes(self._cache)
        return self._physical().index_select(self._axis, self._pages).flatten().view(torch.uint8)

    def restore(self, image: Tensor) -> None:
        """Write an image back to the cache."""
        if self._pages is None:
            flat_bytes(self._cache).copy_(image)
        else:
            self._physical().index_copy_(self._axis, self._pages, self._shaped(image, self._pages))

    def view(self, image: Tensor) -> Tensor:
        """Return an image in the shape and memory order of the cache; it has fewer pages if the image has fewer."""
        if self._pages is not None:
            inverse = [self._order.index(axis) for axis in range(len(self._order))]
            return self._shaped(image, self._pages).permute(inverse)
        cache = self._cache
        whole = torch.empty(0, dtype=cache.dtype, device=cache.device)
        return whole.set_(image.untyped_storage(), cache.storage_offset(), cache.shape, cache.stride())

    def slots_in_image(self, slots: Tensor) -> Tensor:
        """Return the slots in :meth:`view` of ``slots`` (int64) of the cache, whose pages the image must hold."""
        if self._pages is None:
            return slots
        pages = torch.searchsorted(self._pages.to(slots.device), slots // self._block_size)
        return pages * self._block_size + slots % self._block_size

    def _physical(self) -> Tensor:
        return self._cache.permute(self._order)

    def _shaped(self, image: Tensor, pages: Tensor) -> Tensor:
        shape = list(self._physical().shape)
        shape[self._axis] = len(pages)
        return image.view(self._cache.dtype).view(shape)


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return a view of all memory behind a tensor as flat uint8, for any shape and strides."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
