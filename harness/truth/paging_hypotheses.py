"""Faults of pages and splits: keys read at wrong slots, and parts of the keys never read.

A wrong slot holds a key of another position or request, or a stale row; what stands there is known, so that the answer
of such a kernel can be computed. They explain outputs, as :mod:`attncheck.harness.truth.hypotheses` does.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from attncheck.harness.problem.foreign_slots import rows_in_pool
from attncheck.harness.problem.problem import Problem
from attncheck.harness.problem.storage import key_storage
from attncheck.harness.truth.hypotheses import Hypothesis, masked
from attncheck.harness.truth.unpaged import HiddenKeys, UnpagedAttention
from attncheck.reference import AttentionParams

_PAGE_SIZES = (1, 8, 16, 32, 64, 128, 256)
"""Tokens a page may have in a kernel that does not take their number from the cache."""

_SPLITS = (2, 4, 8, 16)
"""Numbers of splits of the keys among programs."""

_SPLIT_KEYS = (64, 128, 256, 512, 1024)
"""Keys a split may have in a kernel that fixes them."""


def paging_explanations(problem: Problem, params: AttentionParams, rows: UnpagedAttention) -> Iterator[Hypothesis]:
    """The faults of a cache in pages; none for layers without one, and for questions that a path splits."""
    if not problem.has_pool or problem.parts or problem.layer.mla is not None:
        return
    for meaning, hidden in _unread_keys(problem):
        yield masked(meaning, rows, params, hidden)
    if key_storage(problem.layer, problem.cache).is_fp8:
        return  # a stale row is held as codes that depend on the backend's rounding
    for meaning, slots in _wrong_slots(problem):
        found = None if slots is None or torch.equal(slots, problem.key_slots) else rows_in_pool(problem, slots)
        if found is not None:
            keys, values = (part.to(rows.keys) for part in found)
            yield Hypothesis(meaning, partial(replace(rows, keys=keys, values=values).attend, params))


def _wrong_slots(problem: Problem) -> Iterator[tuple[str, Tensor | None]]:
    """(meaning, int64 ``[N]``: the slot at which each key is looked for; None where that cannot be said)."""
    size, table = problem.cache.block_size, problem.block_table.long()
    lengths = torch.tensor([request.num_keys for request in problem.requests])
    request = torch.arange(len(lengths)).repeat_interleave(lengths)
    position = torch.cat([torch.arange(n) for n in lengths.tolist()])

    def slots(owner: Tensor, column: Tensor, offset: Tensor, stride: int = size) -> Tensor | None:
        return None if bool((column >= table.shape[1]).any()) else table[owner, column] * stride + offset

    page, offset = position // size, position % size
    for other in _PAGE_SIZES:
        if other < size:  # of larger ones, some pages would begin behind the pool
            yield f"page p is read from slot {other} * p on, not {size} * p", slots(request, page, offset, other)
    yield "the block table is read one column too far right", slots(request, page + 1, offset)
    yield "the block table is read one column too far left", slots(request, (page - 1).clamp(min=0), offset)
    if len(lengths) > 1:
        yield "every request reads the block table of request 0", slots(torch.zeros_like(request), page, offset)
    after, before = position + 1, (position - 1).clamp(min=0)
    yield "keys and values are read one position too late", slots(request, after // size, after % size)
    yield "keys and values are read one position too early", slots(request, before // size, before % size)


def _unread_keys(problem: Problem) -> Iterator[tuple[str, HiddenKeys]]:
    """(meaning, which keys are never read)."""
    size = problem.cache.block_size
    lengths = [request.num_keys for request in problem.requests]
    pages = [-(-n // size) for n in lengths]
    cuts = [("page", [size] * len(lengths))]
    for number in _SPLITS:
        if max(pages) >= number:
            wide = [max(math.ceil(n / number), 1) * size for n in pages]
            cuts.append((f"of {number} splits of the keys", wide))
    cuts += [(f"split of {keys} keys", [keys] * len(lengths)) for keys in _SPLIT_KEYS if keys != size]
    for what, wide in cuts:
        if any(n > width for n, width in zip(lengths, wide, strict=True)):
            begins = [max(n - 1, 0) // width * width for n, width in zip(lengths, wide, strict=True)]
            yield f"only the first {what} is read", partial(_is_behind, wide)
            yield f"only the last {what} is read", partial(_is_before, begins)


def _is_behind(ends: Sequence[int], request: int, _rows: Tensor, keys: Tensor) -> Tensor:
    return keys >= ends[request]


def _is_before(begins: Sequence[int], request: int, _rows: Tensor, keys: Tensor) -> Tensor:
    return keys < begins[request]
