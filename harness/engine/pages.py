"""Compares the pages of a cache with what the layer itself writes for the same keys and values."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attncheck.harness.engine.events import LayerFacts
from attncheck.harness.engine.history import Numbers

# The layer writes the right keys and values to scratch pages, so that no layout has to be known. The scratch pages
# begin with every bit of the cache's pages inverted. So a byte that the layer writes rightly is then equal to that of
# the cache, and a byte that it does not write is still inverted; any other byte is wrong.

_SCRATCH_BYTES = 2**26
"""Bytes of scratch pages at once."""


@dataclass(frozen=True)
class KeptKeys:
    """Keys that the pages of some requests must hold, ``[N]`` each, by request and then by position.

    owners: the request of each key, as a number. slots: of the cache. key, value: as the layer writes them.
    """

    owners: Numbers
    positions: Numbers
    slots: Numbers
    key: Tensor
    value: Tensor

    def part(self, rows: slice) -> "KeptKeys":
        """Return some of the keys."""
        return KeptKeys(self.owners[rows], self.positions[rows], self.slots[rows], self.key[rows], self.value[rows])


class PageChecks:
    """Compares pages; its scratch pages are used again."""

    def __init__(self) -> None:
        self._scratch: dict[object, Tensor] = {}

    def lacking(self, facts: LayerFacts, page_size: int, kept: KeptKeys, kv_cache: Tensor) -> tuple[Numbers, int]:
        """Return the places in ``kept`` of keys that the cache lacks, and how many pages were compared."""
        pages = np.stack([kept.owners, kept.positions // page_size])
        starts = np.flatnonzero((np.diff(pages, prepend=-1) != 0).any(axis=0))  # the first key of each page
        ends = np.append(starts[1:], len(kept.owners))
        at_once = max(1, _SCRATCH_BYTES // max(1, kv_cache[:1].numel() * kv_cache.element_size()))
        wrong = [np.zeros(0, dtype=np.int64)]
        for first in range(0, len(starts), at_once):
            some = slice(first, first + at_once)
            begin = starts[first]
            part = kept.part(slice(begin, ends[some][-1]))
            wrong.append(begin + self._lacking(facts, page_size, part, starts[some] - begin, kv_cache))
        return np.concatenate(wrong), len(starts)

    @staticmethod
    def fits(page_size: int, key: Tensor, value: Tensor, kv_cache: Tensor) -> bool:
        """Return whether a page has room for as many keys: else the layer would write behind the scratch pages."""
        return kv_cache[:1].numel() >= page_size * (key[:1].numel() + value[:1].numel())

    def _lacking(self, facts: LayerFacts, page_size: int, kept: KeptKeys, starts: Numbers, kv_cache: Tensor) -> Numbers:
        device = kv_cache.device
        counts = np.diff(np.append(starts, len(kept.slots)))
        own = np.repeat(np.arange(len(starts)), counts)
        held = kv_cache[torch.from_numpy(kept.slots[starts] // page_size).to(device)]
        slots = torch.from_numpy(own * page_size + kept.slots % page_size).to(device)
        differs = self._differs(facts, kept.key, kept.value, slots, held, kv_cache).cpu().numpy()
        if not differs.any():
            return np.zeros(0, dtype=np.int64)
        # Seldom: one key at a time, to find which ones are wrong.
        suspects = np.flatnonzero(differs[own])
        some = torch.from_numpy(suspects).to(device)
        alone = held[torch.from_numpy(own[suspects]).to(device)]
        offsets = torch.from_numpy(np.arange(len(suspects)) * page_size + kept.slots[suspects] % page_size)
        is_wrong = self._differs(facts, kept.key[some], kept.value[some], offsets.to(device), alone, kv_cache)
        found: Numbers = suspects[is_wrong.cpu().numpy()]
        return found

    def _differs(
        self, facts: LayerFacts, key: Tensor, value: Tensor, slots: Tensor, held: Tensor, like: Tensor
    ) -> Tensor:
        """Return bool ``[pages]``: whether ``held`` lacks bytes that the layer writes for these keys."""
        assert facts.write is not None
        scratch = self._pages(like, len(held))
        inverted = held.view(torch.uint8).bitwise_not()
        written = scratch.view(torch.uint8)
        written.copy_(inverted)
        facts.write(key, value, scratch, slots)
        return ((written != held.view(torch.uint8)) & (written != inverted)).flatten(1).any(dim=1)

    def _pages(self, like: Tensor, count: int) -> Tensor:
        """Return scratch pages whose axes have the same order in memory as those of ``like``."""
        strides = like.stride()
        order = sorted(range(1, like.dim()), key=lambda axis: -strides[axis])
        sizes = [like.shape[axis] for axis in order]
        key = (like.dtype, like.device, *order, *sizes)
        made = self._scratch.get(key)
        if made is None or len(made) < count:
            made = self._scratch[key] = torch.empty([2 * count, *sizes], dtype=like.dtype, device=like.device)
        back = [0] * like.dim()
        for at, axis in enumerate(order, start=1):
            back[axis] = at
        return made[:count].permute(back)
