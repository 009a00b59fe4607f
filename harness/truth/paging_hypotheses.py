"""Faults of pages and splits: keys read at wrong slots, and parts of the keys that are never read.

A wrong slot holds a key of another position or request, or a stale row. Its contents are known, so the output of such a
kernel can be computed. Like :mod:`attncheck.harness.truth.hypotheses`, these explain wrong outputs.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations

import torch
from torch import Tensor

from attncheck.harness.problem.foreign_slots import STALE_ROWS, RowsInPool, rows_in_pool, stale_rows
from attncheck.harness.problem.problem import Problem
from attncheck.harness.problem.storage import key_storage
from attncheck.harness.truth.hypotheses import Hypothesis, is_before, is_behind, masked
from attncheck.harness.truth.unpaged import HiddenKeys, UnpagedAttention
from attncheck.reference import AttentionParams, visible

_PAGE_SIZES = (1, 8, 16, 32, 64, 128, 256)
"""Page sizes in tokens that a kernel may assume without reading the cache's."""

_COLUMNS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of block-table columns that a kernel may have room for."""

_FEW_PAGES = 4
"""Highest column index of the block table up to which every two columns are exchanged."""

_PAGE_BITS = (8, 15, 16, 24)
"""Numbers of bits that page numbers may be truncated to."""

_SPLITS = (2, 4, 8, 16)
"""Numbers of splits of the keys among programs."""

_SPLIT_KEYS = (64, 128, 256, 512, 1024)
"""Keys per split, in kernels that fix this number."""


def paging_explanations(problem: Problem, params: AttentionParams, rows: UnpagedAttention) -> Iterator[Hypothesis]:
    """Yield the faults of a paged cache.

    There are none for layers without a pool, for latent attention, and for problems split into parts.
    """
    if not problem.has_pool or problem.parts or problem.layer.mla is not None:
        return
    for meaning, hidden in _unread_keys(problem):
        yield masked(meaning, rows, params, hidden)
    if key_storage(problem.layer, problem.cache).is_fp8:
        return  # the codes of a stale row depend on the backend's rounding
    read = rows_in_pool(problem)
    for meaning, slots in _wrong_slots(problem):
        found = None if slots is None or torch.equal(slots, problem.key_slots) else read(slots)
        if found is not None:
            keys, values = (part.to(rows.keys) for part in found)
            yield Hypothesis(meaning, partial(replace(rows, keys=keys, values=values).attend, params))
            yield Hypothesis(f"{meaning}, for keys alone", partial(replace(rows, keys=keys).attend, params))
            yield Hypothesis(f"{meaning}, for values alone", partial(replace(rows, values=values).attend, params))
    yield from _stale_keys(problem, params, rows)
    yield from _keys_behind(problem, params, rows, read)


def _stale_keys(problem: Problem, params: AttentionParams, rows: UnpagedAttention) -> Iterator[Hypothesis]:
    """Yield the faults of reading the slots of this step's keys before they are written."""
    new = problem.new_keys[problem.new_keys >= 0]
    if not len(new):
        return
    made = []
    for own, stale in zip((rows.keys, rows.values), stale_rows(problem), strict=True):
        part = own.clone()
        part[new.to(own.device)] = stale.to(own)[torch.arange(len(new)) % STALE_ROWS]
        made.append(part)
    meaning = "the cache is read before this step's keys and values are written"
    for which, keys, values in (
        ("", made[0], made[1]),
        ("of keys alone: ", made[0], rows.values),
        ("of values alone: ", rows.keys, made[1]),
    ):
        yield Hypothesis(f"{which}{meaning}", partial(replace(rows, keys=keys, values=values).attend, params))


def _keys_behind(
    problem: Problem, params: AttentionParams, rows: UnpagedAttention, read: RowsInPool
) -> Iterator[Hypothesis]:
    """Yield the faults of reading slots after the last key.

    These are seen by every row, or counted as keys of the request.
    """
    if params.attn_chunk_size is not None or rows.tree is not None:
        return
    size, num_keys = problem.cache.block_size, rows.num_keys.tolist()
    width = problem.block_table.shape[1] * size
    room = [-(-n // size) * size - n for n in num_keys]
    one = [min(1, width - n) for n in num_keys]
    page = [size if n % size == 0 and n + size <= width else 0 for n in num_keys]
    meaning = "where the last page is full, the next one is seen by every row"
    yield from _longer(problem, params, rows, read, meaning, page)
    yield from _longer(problem, params, rows, read, "seq_lens is taken to be one larger", one, seen_by_all=False)
    yield from _longer(problem, params, rows, read, "the slot behind the last key is seen by every row", one)
    if room != one:
        meaning = "the slots behind the last key are seen by every row, to the end of the page"
        yield from _longer(problem, params, rows, read, meaning, room)


def _longer(
    problem: Problem,
    params: AttentionParams,
    rows: UnpagedAttention,
    read: RowsInPool,
    meaning: str,
    extra: list[int],
    *,
    seen_by_all: bool = True,
) -> Iterator[Hypothesis]:
    """Yield the fault of reading ``extra`` more keys for each request, from the slots after its own."""
    size, table, num_keys = problem.cache.block_size, problem.block_table.long(), rows.num_keys.tolist()
    slots = [
        table[r, position // size] * size + position % size
        for r, (n, more) in enumerate(zip(num_keys, extra, strict=True))
        for position in range(n, n + more)
    ]
    found = read(torch.stack(slots)) if slots else None
    if found is None:
        return
    keys, values = (
        torch.cat([part for pair in zip(own.split(num_keys), stale.to(own).split(extra), strict=True) for part in pair])
        for own, stale in zip((rows.keys, rows.values), found, strict=True)
    )
    starts = torch.tensor([0, *(n + more for n, more in zip(num_keys, extra, strict=True))]).cumsum(0)
    longer = replace(rows, keys=keys, values=values, cu_seqlens_k=starts.to(rows.cu_seqlens_k))
    if not seen_by_all:
        yield Hypothesis(meaning, partial(longer.attend, params))
        return

    def hidden(r: int, q: Tensor, k: Tensor) -> Tensor:
        # Rows are aligned to the end of the keys, which has moved by the extra ones.
        end: int = num_keys[r]
        return ~(visible(params, q - extra[r], k) | (k >= end))

    yield masked(meaning, longer, replace(params, causal=False, window=(-1, -1)), hidden)


def _wrong_slots(problem: Problem) -> Iterator[tuple[str, Tensor | None]]:
    """Yield (meaning, int64 ``[N]``: the slot read for each key, or None if a slot lies outside the block table)."""
    size, table = problem.cache.block_size, problem.block_table.long()
    lengths = torch.tensor([request.num_keys for request in problem.requests])
    request = torch.arange(len(lengths)).repeat_interleave(lengths)
    position = torch.cat([torch.arange(n) for n in lengths.tolist()])

    def slots(owner: Tensor, column: Tensor, offset: Tensor, stride: int = size) -> Tensor | None:
        return None if bool((column >= table.shape[1]).any()) else table[owner, column] * stride + offset

    page, offset = position // size, position % size

    def slots_of(other: Tensor) -> Tensor:
        return other[request, page] * size + offset

    behind = (table[request, 0] + page) % problem.num_blocks
    yield "pages are taken to lie behind one another, from the first of the request on", behind * size + offset
    for other in _PAGE_SIZES:
        if other < size:  # with larger ones, some pages would begin after the end of the pool
            yield f"page p is read from slot {other} * p on instead of {size} * p", slots(request, page, offset, other)
        if other != size:
            column, offset_in = position // other, position % other
            yield f"a page is taken to have {other} tokens instead of {size}", slots(request, column, offset_in, other)
            meaning = f"columns of the block table are counted in pages of {other} tokens, not of {size}"
            yield meaning, slots(request, column, offset_in)
    for number in _COLUMNS:
        meaning = f"only the first {number} columns of the block table are read, over and over"
        yield meaning, slots(request, page % number, offset)
        yield (
            f"the page of column {number - 1} is read for all later ones",
            slots(request, page.clamp(max=number - 1), offset),
        )
    last = (lengths[request] - 1) // size
    yield (
        "the last page is that of the column before",
        slots(request, torch.where(page == last, (page - 1).clamp(min=0), page), offset),
    )
    for which, exchanged in _exchanged_pages(page, last):
        yield f"{which} of the block table are exchanged", slots(request, exchanged, offset)
    yield "the block table is read one column too far right", slots(request, page + 1, offset)
    yield "the block table is read one column too far left", slots(request, (page - 1).clamp(min=0), offset)
    if len(lengths) > 1:
        yield "every request reads the block table of request 0", slots(torch.zeros_like(request), page, offset)
        before, after = (request - 1).clamp(min=0), (request + 1).clamp(max=len(lengths) - 1)
        yield "every request reads the block table of the request before it", slots(before, page, offset)
        yield "every request reads the block table of the next request", slots(after, page, offset)
    after, before = position + 1, (position - 1).clamp(min=0)
    yield "keys and values are read one position too late", slots(request, after // size, after % size)
    yield "keys and values are read one position too early", slots(request, before // size, before % size)
    for bits in (15, 16):
        short = position % 2**bits
        yield f"key positions are kept in {bits} bits", slots(request, short // size, short % size)
    spec = problem.case.batch.block_table
    if spec.row_gap:
        packed = torch.nn.functional.pad(table, (0, spec.row_gap)).flatten()[: table.numel()].view_as(table)
        yield "the width of the block table is taken for the distance of its rows", slots_of(packed)
    if spec.null_pages:
        packed = table.gather(1, (table == 0).sort(dim=1, stable=True).indices)
        yield "null pages of the block table are left out", slots_of(packed)
    for meaning, short in _short_numbers(problem, table[request, page]):
        yield meaning, short * size + offset


def _exchanged_pages(page: Tensor, last: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield (which pages are exchanged, int64 ``[N]``: the page read for each key).

    ``last``: the last page of its request.
    """

    def exchanged(one: Tensor, other: Tensor) -> Tensor:
        both = (one <= last) & (other <= last) & (one >= 0) & (other >= 0)
        moved = torch.where(page == one, other, torch.where(page == other, one, page))
        return torch.where(both, moved, page)

    longest = min(int(last.max()), _FEW_PAGES)
    columns = [torch.full_like(page, column) for column in range(longest + 1)]
    yield "the last two pages", exchanged(last, last - 1)
    yield "the first and the last page", exchanged(columns[0], last)
    yield "every two neighbouring pages", torch.where(page ^ 1 <= last, page ^ 1, page)
    yield "all pages, in reversed order,", last - page
    for one, other in combinations(range(longest + 1), 2):
        yield f"pages {one} and {other}", exchanged(columns[one], columns[other])


def _short_numbers(problem: Problem, pages: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield (meaning, int64 ``[N]``: the page read instead of each of ``pages``) if numbers have too few bits."""
    size, layer = problem.cache.block_size, problem.layer
    for bits in _PAGE_BITS:
        yield f"page numbers are kept in {bits} bits", pages % 2**bits
    units = {"slots": size}
    row = size * layer.num_kv_heads * layer.head_size
    itemsize = key_storage(layer, problem.cache).held.itemsize
    for where, planes in (("", 1), (" of keys beside values", 2)):
        units[f"offsets in elements{where}"] = row * planes
        units[f"offsets in bytes{where}"] = row * planes * itemsize
    for name, unit in units.items():
        yield f"{name} are kept in 32 bits", pages * unit % 2**32 // unit
        signed = ((pages * unit + 2**31) % 2**32 - 2**31) // unit
        yield f"{name} are kept in 32 bits, with a sign", signed % problem.num_blocks


def _unread_keys(problem: Problem) -> Iterator[tuple[str, HiddenKeys]]:
    """Yield (meaning, predicate of keys that are never read)."""
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
            yield f"only the first {what} is read", partial(is_behind, wide)
            yield f"only the last {what} is read", partial(is_before, begins)
