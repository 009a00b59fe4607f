"""Compares the pages of a cache with what the layer itself writes for the same keys and values."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attncheck.harness.engine.events import LayerFacts
from attncheck.harness.engine.history import Numbers

# The layer writes the right keys and values to scratch pages, so that no layout has to be known. Bytes that are equal
# on pages of zeros and on pages of ones were written; the cache must have the same bytes there.

_SCRATCH_BYTES = 2**27
"""Bytes of scratch pages at once."""


@dataclass(frozen=True)
class KeptKeys:
    """Keys that the pages of one request must hold.

    positions: int64 ``[N]``, ascending. slots: of the cache, int64 ``[N]``. key, value: as the layer writes them.
    """

    positions: Numbers
    slots: Numbers
    key: Tensor
    value: Tensor


def lacking_positions(facts: LayerFacts, page_size: int, kept: KeptKeys, kv_cache: Tensor) -> tuple[Numbers, int]:
    """Return the positions whose key or value the cache lacks, and how many pages were compared."""
    page_of = kept.positions // page_size
    starts = np.flatnonzero(np.diff(page_of, prepend=-1))  # the first key of each page
    at_once = max(1, _SCRATCH_BYTES // max(1, 2 * kv_cache[:1].numel() * kv_cache.element_size()))
    wrong = []
    for first in range(0, len(starts), at_once):
        begin = starts[first]
        end = starts[first + at_once] if first + at_once < len(starts) else len(page_of)
        wrong += list(_wrong_positions(facts, page_size, _part(kept, slice(begin, end)), kv_cache))
    return np.array(wrong, dtype=np.int64), len(starts)


def _wrong_positions(facts: LayerFacts, page_size: int, kept: KeptKeys, kv_cache: Tensor) -> Iterator[int]:
    page_of = kept.positions // page_size
    starts = np.flatnonzero(np.diff(page_of, prepend=-1))
    page_ids = kept.slots[starts] // page_size
    own = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(page_of))))
    held = _bytes(kv_cache[torch.from_numpy(page_ids).to(kv_cache.device)])
    slots = torch.from_numpy(own * page_size + kept.slots % page_size).to(kv_cache.device)
    differs = _differs(facts, kept.key, kept.value, slots, held, kv_cache)
    for page in np.flatnonzero(differs.cpu().numpy()):
        rows = np.flatnonzero(own == page)
        for row in rows:  # seldom: one key at a time, to find which one
            one = slice(row, row + 1)
            offset = torch.tensor([int(kept.slots[row]) % page_size], device=kv_cache.device)
            alone = _differs(facts, kept.key[one], kept.value[one], offset, held[page : page + 1], kv_cache)
            if bool(alone[0]):
                yield int(kept.positions[row])


def _differs(facts: LayerFacts, key: Tensor, value: Tensor, slots: Tensor, held: Tensor, like: Tensor) -> Tensor:
    """Return bool ``[pages]``: whether ``held`` lacks bytes that the layer writes for these keys."""
    assert facts.write is not None
    written = []
    for fill in (0, 255):
        scratch = _scratch(like, len(held))
        _bytes(scratch).fill_(fill)
        facts.write(key, value, scratch, slots)
        written.append(_bytes(scratch))
    is_written = written[0] == written[1]
    return (is_written & (written[0] != held)).flatten(1).any(dim=1)


def _scratch(like: Tensor, pages: int) -> Tensor:
    """Return new pages whose axes have the same order in memory as those of ``like``."""
    strides = like.stride()
    order = sorted(range(1, like.dim()), key=lambda axis: -strides[axis])
    made = torch.empty([pages, *(like.shape[axis] for axis in order)], dtype=like.dtype, device=like.device)
    back = [0] * like.dim()
    for at, axis in enumerate(order, start=1):
        back[axis] = at
    return made.permute(back)


def _bytes(pages: Tensor) -> Tensor:
    """Return the bytes of pages, in any order of axes; a view if the last axis is dense."""
    return pages.view(torch.uint8)


def _part(kept: KeptKeys, rows: slice) -> KeptKeys:
    return KeptKeys(kept.positions[rows], kept.slots[rows], kept.key[rows], kept.value[rows])
