"""The keys that an indexer chose for each row of a batch, drawn to show what kernels may do wrong with them.

``topk_indices`` are data of a problem, like its queries. They mean a set of keys for each row, in any order. No indexer
computes them here: a row may choose any of the keys that it may see, but as many of them as an indexer would. So it
names all of its keys if they are at most ``K``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from attncheck.harness.problem.pages import RandomStream, Request

NONE = -1
"""An entry that names no key."""

_KINDS = 3
"""Kinds of rows, drawn alike: of any keys, of page edges, of the last keys."""


def draw_topk_indices(requests: Sequence[Request], index_topk: int, block_size: int, stream: RandomStream) -> Tensor:
    """Return int32 ``[T, index_topk]``: positions of keys up to the row's own; a row of a request before them has none.

    A row with ``n`` keys names ``min(n, index_topk)`` of them, each once. Entries of -1 lie behind these.
    """
    positions = [r.first_position + row for r in requests for row in range(r.rows)]
    indices = torch.full((len(positions), index_topk), NONE, dtype=torch.int32)
    kinds = stream.integers(len(positions), _KINDS).tolist()
    for row, (position, kind) in enumerate(zip(positions, kinds, strict=True)):
        if position >= 0:
            indices[row] = _row_of(kind, position, index_topk, block_size, stream)
    return indices


def stale_row(requests: Sequence[Request], index_topk: int) -> Tensor:
    """Return the entries of rows behind those of a step, int32 ``[index_topk]``: the first keys of request 0."""
    return torch.arange(index_topk, dtype=torch.int32).clamp(max=requests[0].num_keys - 1)


def _row_of(kind: int, position: int, width: int, block_size: int, stream: RandomStream) -> Tensor:
    """Return the entries of one row, int64 ``[width]``."""
    order = stream.permutation(position + 1)
    if kind == 1:  # the last and the first keys of pages come first
        is_at_edge = ((order + 1) % block_size <= 1).int()
        order = order[is_at_edge.argsort(descending=True, stable=True)]
    if kind == 2:  # the last keys, own key first
        order = torch.arange(position, -1, -1)
    count = min(width, position + 1)
    entries = torch.full((width,), NONE)
    entries[:count] = order[:count]
    return entries


def loose_form(topk_indices: Tensor) -> Tensor:
    """Return entries ``[T, K]`` of another form that mean the same keys, for kernels that take any form.

    In half of the rows with unused entries, these lie between the others. In the rest, they repeat keys of the row,
    every second time the first of its keys. Every second pair of rows has its entries in reverse.
    """
    entries, width = topk_indices.clone(), topk_indices.shape[1]
    column = torch.arange(width)
    for row, own in enumerate(topk_indices):
        count = int((own >= 0).sum())
        if not 0 < count < width:
            continue
        if row % 2:
            repeated = torch.where(column % 2 == 0, own[:count].amin(), own[column % count])
            changed = torch.where(column < count, own, repeated)
        else:
            changed = torch.full_like(own, NONE)
            changed[torch.arange(count) * width // count] = own[:count]
        entries[row] = changed.flip(0) if row % 4 > 1 else changed
    return entries


def key_of_each_head(topk_indices: Tensor, positions: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
    """Return a key for each row and head, and a second one that the row sees: positions, int64 ``[q, H]`` each.

    topk_indices: ``[q, K]``. positions: int64 ``[q]``. number: int64 ``[q, H]``, which selects the key.

    Of five heads, two get a key that the row names, one the first key that it names, one a hidden key beside one of
    these, and one key 0, or the row's own key if it names key 0. A row without hidden keys gets keys that it names.
    """
    key = torch.arange(max(int(positions.max()) + 1, 1))
    named = times_named(topk_indices, len(key)) > 0
    hidden = (key <= positions[:, None]) & ~named
    beside = hidden & (_shifted(named, 1) | _shifted(named, -1))
    second = _nth(named, number + 1)
    wanted = torch.where(number % 5 == 0, named.int().argmax(dim=1)[:, None], _nth(named, number))
    near = torch.where(beside.any(1, keepdim=True), _nth(beside, number), second)
    end = torch.where(named[:, :1], positions.clamp(min=0)[:, None], 0).expand_as(number)
    return torch.where(number % 5 == 3, near, torch.where(number % 5 == 4, end, wanted)), second


def times_named(topk_indices: Tensor, num_keys: int) -> Tensor:
    """Return how often each row of ``topk_indices [q, K]`` names each key: int64 ``[q, num_keys]``."""
    index = torch.where(topk_indices < 0, num_keys, topk_indices).long()
    times = index.new_zeros(len(index), num_keys + 1)
    return times.scatter_add_(1, index, torch.ones_like(index))[:, :num_keys]


def _shifted(named: Tensor, by: int) -> Tensor:
    """Return where the key at distance ``by`` before is named."""
    moved = named.roll(by, dims=1)
    moved[:, 0 if by > 0 else -1] = False
    return moved


def _nth(marked: Tensor, n: Tensor) -> Tensor:
    """Return the position of the ``n``-th marked key of each row, modulo their number; 0 if there is none."""
    count = marked.long().cumsum(dim=1)
    wanted = n % count[:, -1:].clamp(min=1)
    place = (count[:, None, :] <= wanted[..., None]).sum(dim=-1)
    return place.clamp(max=marked.shape[1] - 1)
