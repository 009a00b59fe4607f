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

Mask = NDArray[np.bool_]


def lacking(write: WritePages, page_size: int, slots: Numbers, kept: tuple[Tensor, Tensor], kv_cache: Tensor) -> Mask:
    """Return which of the ``kept`` keys and values ``[N, ...]`` the cache lacks.

    ``write``: that of the layer. ``page_size``: keys of a page. ``slots``: of the keys, increasing within a request.
    """

    def differ(some: Numbers, pages: Numbers) -> Mask:
        """Return which scratch pages differ from the cache. ``pages``: 0, 1, ... of some keys."""
        first = np.unique(pages, return_index=True)[1]
        held = kv_cache[torch.from_numpy(slots[some[first]] // page_size).to(kv_cache.device)]
        inverted = held.view(torch.uint8).bitwise_not()
        written = inverted.clone()  # its axes have the order in memory of those of the cache
        own_slots = torch.from_numpy(pages * page_size + slots[some] % page_size).to(kv_cache.device)
        key, value = (each[torch.from_numpy(some).to(each.device)] for each in kept)
        write(key, value, written.view(kv_cache.dtype), own_slots)
        is_wrong = (written != held.view(torch.uint8)) & (written != inverted)
        found: Mask = is_wrong.flatten(1).any(dim=1).cpu().numpy()
        return found

    at_once = max(1, _SCRATCH_BYTES // (kv_cache[:1].numel() * kv_cache.element_size()))
    is_lacking = np.zeros(len(slots), dtype=bool)
    for begin in range(0, len(slots), at_once):
        some = np.arange(begin, min(begin + at_once, len(slots)))
        # A page that two requests have is compared for each.
        begins = (np.diff(slots[some] // page_size, prepend=-1) != 0) | (np.diff(slots[some], prepend=-1) <= 0)
        pages = begins.cumsum() - 1
        suspects = some[differ(some, pages)[pages]]
        if len(suspects):  # seldom: each key in a page of its own, to find which ones are wrong
            is_lacking[suspects] = differ(suspects, np.arange(len(suspects)))
    return is_lacking
