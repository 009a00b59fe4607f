"""Slots of the pool that must not affect any row of a step, and the plausible stale rows in them.

The driver fills a pool with these rows. The explanation of a wrong output reads them at wrong slots.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from attncheck.harness.problem.layer_sizes import naive_layer, stored_sizes
from attncheck.harness.problem.memory_estimate import SMALL_POOL
from attncheck.harness.problem.problem import Problem
from attncheck.harness.problem.random_stream import RandomStream
from attncheck.harness.problem.visible_span import visible_span
from attncheck.reference import layer_params

STALE_ROWS = 64
"""Number of distinct stale rows: slot ``i`` of a region holds row ``i % STALE_ROWS``."""


def stale_rows(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return keys ``[STALE_ROWS, Hkv, D]`` and values in the layer's dtype, as an earlier step could have left them."""
    key, value = (_stale_rows(problem.layer.num_kv_heads, size, problem.dtype) for size in stored_sizes(problem.layer))
    return key, value


@lru_cache(maxsize=16)
def _stale_rows(heads: int, size: int, dtype: torch.dtype) -> Tensor:
    return RandomStream("stale rows").int8(STALE_ROWS, heads, size).to(dtype) / 64


RowsInPool = Callable[[Tensor], tuple[Tensor, Tensor] | None]
"""From slots, int64 ``[n]``, to the keys and values ``[n, Hkv, D]`` in them; None if a slot is outside the pool."""


def rows_in_pool(problem: Problem) -> RowsInPool:
    """Return the reader of the rows that attention finds in the pool.

    Slots of a large pool that are not filled hold 0.
    """
    regions = list(foreign_slots(problem).values())
    # Keys come first: they are written last, and searchsorted finds the first of equal slots.
    filled, order = torch.cat([problem.key_slots, *regions]).sort(stable=True)
    stale = [torch.arange(len(region)) % STALE_ROWS for region in regions]
    source = torch.cat([torch.arange(len(problem.keys)) + STALE_ROWS, *stale])[order]
    keys, values = (
        torch.cat([old, own, own.new_zeros(1, *own.shape[1:])])
        for old, own in zip(stale_rows(problem), (problem.keys, problem.values), strict=True)
    )

    def read(slots: Tensor) -> tuple[Tensor, Tensor] | None:
        if bool(((slots < 0) | (slots >= problem.num_blocks * problem.cache.block_size)).any()):
            return None
        place = torch.searchsorted(filled, slots).clamp(max=len(filled) - 1)
        index = torch.where(filled[place] == slots, source[place], STALE_ROWS + len(problem.keys))
        return keys[index], values[index]

    return read


def foreign_slots(problem: Problem) -> dict[str, Tensor]:
    """Return, by region name, the slots that must not affect any query row; regions are disjoint and not empty."""
    if not problem.has_pool:
        return {}
    size = problem.cache.block_size
    owned = problem.owned_slots
    owned_pages = (owned // size).unique()
    pages = _pages_of_interest(problem, owned_pages)
    regions = {
        "the null page": _slots(torch.tensor([0]), size),
        "the unused tail of a last page": _difference(_slots(owned_pages, size), owned),
        "pages of no request": _slots(_difference(pages[pages > 0], owned_pages), size),
        "pages the window has left behind": _freed_slots(problem),
    }
    return {name: slots for name, slots in regions.items() if len(slots)}


def _pages_of_interest(problem: Problem, owned_pages: Tensor) -> Tensor:
    if problem.num_blocks * problem.cache.block_size <= SMALL_POOL:
        return torch.arange(problem.num_blocks)
    size = problem.cache.block_size
    wrapped = [owned_pages % (1 << bits) for bits in (15, 16, 31)]
    wrapped.append(owned_pages * size % (1 << 32) // size)  # a slot number that overflows 32 bits
    per_page = size * problem.layer.num_kv_heads * problem.layer.head_size
    # Pages that an element offset overflowing 32 bits would reach, with keys and values separate or packed together.
    wrapped += [owned_pages * elements % (1 << 32) // elements for elements in (per_page, 2 * per_page)]
    near: Tensor = torch.cat([owned_pages - 1, owned_pages + 1, *wrapped]).unique()
    return near[(near >= 0) & (near < problem.num_blocks)]


def _freed_slots(problem: Problem) -> Tensor:
    """Return the slots in whole pages before every row's window or chunk: a cache manager may have reused them."""
    params, size = layer_params(naive_layer(problem.layer)), problem.cache.block_size
    positions = torch.tensor([request.first_position for request in problem.requests])
    lens = torch.tensor([request.num_keys for request in problem.requests])
    first, _ = visible_span(params, positions, lens)
    if not bool((first >= size).any()):
        return lens[:0]
    needed = [
        problem.key_slots[request.base + start : request.base + request.num_keys]
        for request, start in zip(problem.requests, (first // size * size).tolist(), strict=True)
    ]
    return _difference(problem.owned_slots, torch.cat(needed).sort().values)


def _slots(pages: Tensor, size: int) -> Tensor:
    return (pages[:, None] * size + torch.arange(size)).reshape(-1)


def _difference(a: Tensor, b: Tensor) -> Tensor:
    """Return the elements of ``a`` that are not in ``b``; ``b`` must be sorted."""
    if not len(b):
        return a
    return a[b[torch.searchsorted(b, a).clamp(max=len(b) - 1)] != a]
