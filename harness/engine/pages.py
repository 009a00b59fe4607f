"""Compares the pages of a cache with what the layer itself writes for the same keys and values."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attncheck.harness.engine.events import WritePages
from attncheck.harness.engine.history import Numbers

# The layer writes the right keys and values to scratch pages, so that no layout has to be known. The scratch pages
# begin with every bit of the cache's pages inverted. So a byte that the layer writes rightly is then equal to that of
# the cache, and a byte that it does not write is still inverted; any other byte is wrong.

_SCRATCH_BYTES = 2**26
"""Bytes of scratch pages at once, if each key needs a page of its own."""


def lacking(
    write: WritePages, page_size: int, pages: Numbers, slots: Numbers, kept: tuple[Tensor, Tensor], kv_cache: Tensor
) -> Numbers:
    """Return which of the ``kept`` keys and values ``[N, ...]`` the cache lacks.

    ``write``: that of the layer. ``page_size``: keys of a page. ``slots``: of the keys. ``pages``: a number for each
    key, equal for neighbours that are compared in one page.
    """

    def differ(pages: Numbers, some: Numbers) -> NDArray[np.bool_]:
        """Return which pages lack bytes of some keys. ``pages``: 0, 1, ... of each."""
        first = np.unique(pages, return_index=True)[1]
        held = kv_cache[torch.from_numpy(slots[some[first]] // page_size).to(kv_cache.device)]
        inverted = held.view(torch.uint8).bitwise_not()
        scratch = _scratch(kv_cache, len(held))
        written = scratch.view(torch.uint8)
        written.copy_(inverted)
        own_slots = torch.from_numpy(pages * page_size + slots[some] % page_size).to(kv_cache.device)
        key, value = (each[torch.from_numpy(some).to(each.device)] for each in kept)
        write(key, value, scratch, own_slots)
        is_wrong = (written != held.view(torch.uint8)) & (written != inverted)
        found: NDArray[np.bool_] = is_wrong.flatten(1).any(dim=1).cpu().numpy()
        return found

    at_once = max(1, _SCRATCH_BYTES // max(1, kv_cache[:1].numel() * kv_cache.element_size()))
    found = [np.zeros(0, dtype=np.int64)]
    for begin in range(0, len(slots), at_once):
        some = np.arange(begin, min(begin + at_once, len(slots)))
        together = (np.diff(pages[some], prepend=-1) != 0).cumsum() - 1
        suspects = some[differ(together, some)[together]]
        if len(suspects):  # seldom: each key in a page of its own, to find which ones are wrong
            suspects = suspects[differ(np.arange(len(suspects)), suspects)]
        found.append(suspects)
    return np.concatenate(found)


def _scratch(kv_cache: Tensor, count: int) -> Tensor:
    """Return pages whose axes have the same order in memory as those of the cache."""
    strides = kv_cache.stride()
    order = sorted(range(1, kv_cache.dim()), key=lambda axis: -strides[axis])
    made = kv_cache.new_empty(count, *(kv_cache.shape[axis] for axis in order))
    return made.permute(0, *(1 + order.index(axis) for axis in range(1, kv_cache.dim())))
