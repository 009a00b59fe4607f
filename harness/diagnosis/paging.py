"""Faults of pages and slots, for readers and for writers of a cache, and faults of single paths."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations

import torch
from torch import Tensor

from attncheck.harness.problem.pages import Request
from attncheck.harness.problem.problem import (
    STALE_ROWS,
    Problem,
    RowsInPool,
    ranks_of,
    rows_in_pool,
    stale_rows,
)
from attncheck.harness.problem.storage import key_storage
from attncheck.harness.truth.faults import Hypothesis, altered, is_before, is_behind, of_parts
from attncheck.harness.truth.truth import Truth
from attncheck.harness.truth.unpaged import HiddenKeys, UnpagedAttention
from attncheck.reference import AttentionParams, merge_many, visible
from attncheck.reference.step_spec import FP8_CACHES, FastPrefillOptions, MicroBatchOptions, PCPOptions

# A wrong slot holds a key of another position or request, or a stale row. Its contents are known, so the output of such
# a kernel can be computed.

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


def paging_explanations(problem: Problem, truth: Truth) -> Iterator[Hypothesis]:
    """Yield the faults of a paged cache.

    There are none for layers without a pool, for latent attention, and for problems split into parts.
    """
    params, rows = truth.params, truth.rows
    if not problem.has_pool or problem.parts or problem.layer.mla is not None:
        return
    for meaning, hidden in _unread_keys(problem):
        yield altered(meaning, rows, params, hidden=hidden)
    if key_storage(problem.layer, problem.cache).is_fp8:
        return  # the codes of a stale row depend on the backend's rounding
    read = rows_in_pool(problem)
    for meaning, slots in _wrong_slots(problem):
        found = None if slots is None or torch.equal(slots, problem.key_slots) else read(slots)
        if found is not None:
            for part, made in of_parts(rows, *(each.to(rows.keys) for each in found)):
                yield altered(f"{meaning}, for {part} alone" if part else meaning, made, params)
    new = problem.written_keys
    if len(new):
        for part, made in of_parts(rows, *_with_stale(problem, rows, new)):
            meaning = "the cache is read before this step's keys and values are written"
            yield altered(f"of {part} alone: {meaning}" if part else meaning, made, params)
    yield from _keys_behind(problem, truth, read)


def _with_stale(problem: Problem, rows: UnpagedAttention, new: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = rows.keys.clone(), rows.values.clone()
    for part, stale in zip((keys, values), stale_rows(problem), strict=True):
        part[new.to(part.device)] = stale.to(part)[torch.arange(len(new)) % STALE_ROWS]
    return keys, values


def _keys_behind(problem: Problem, truth: Truth, read: RowsInPool) -> Iterator[Hypothesis]:
    """Yield the faults of reading slots after the last key.

    These are seen by every row, or counted as keys of the request.
    """
    params, rows = truth.params, truth.rows
    if params.attn_chunk_size is not None or rows.tree is not None or not rows.is_plain:
        return
    size, num_keys = problem.cache.block_size, rows.num_keys.tolist()
    width = problem.block_table.shape[1] * size
    room = [-(-n // size) * size - n for n in num_keys]
    one = [min(1, width - n) for n in num_keys]
    page = [size if n % size == 0 and n + size <= width else 0 for n in num_keys]
    meaning = "where the last page is full, the next one is seen by every row"
    yield from _longer(problem, truth, read, meaning, page)
    yield from _longer(problem, truth, read, "seq_lens is taken to be one larger", one, seen_by_all=False)
    yield from _longer(problem, truth, read, "the slot behind the last key is seen by every row", one)
    if room != one:
        meaning = "the slots behind the last key are seen by every row, to the end of the page"
        yield from _longer(problem, truth, read, meaning, room)


def _longer(
    problem: Problem,
    truth: Truth,
    read: RowsInPool,
    meaning: str,
    extra: list[int],
    *,
    seen_by_all: bool = True,
) -> Iterator[Hypothesis]:
    """Yield the fault of reading ``extra`` more keys for each request, from the slots after its own."""
    params, rows = truth.params, truth.rows
    size = problem.cache.block_size
    table = problem.block_table.long()
    num_keys = rows.num_keys.tolist()
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
        yield altered(meaning, longer, params)
        return

    def hidden(r: int, q: Tensor, k: Tensor) -> Tensor:
        # Rows are aligned to the end of the keys, which has moved by the extra ones.
        end: int = num_keys[r]
        return ~(visible(params, q - extra[r], k) | (k >= end))

    yield altered(meaning, longer, replace(params, causal=False, window=(-1, -1)), hidden=hidden)


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
        before = (request - 1).clamp(min=0)
        after = (request + 1).clamp(max=len(lengths) - 1)
        yield "every request reads the block table of the request before it", slots(before, page, offset)
        yield "every request reads the block table of the next request", slots(after, page, offset)
    after = position + 1
    before = (position - 1).clamp(min=0)
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


Places = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""``(request, row positions, key positions)`` -> the positions that a faulty mask uses instead."""


def path_explanations(problem: Problem, truth: Truth) -> Iterator[Hypothesis]:
    """Yield the faults that the problem's path can have."""
    params, rows = truth.params, truth.rows
    if problem.layout.part_of_key is not None and len(problem.parts) > 1:
        yield from _part_explanations(problem.layout.part_of_key, params, rows)
    if problem.case.batch.path.name == "ranks":
        yield from _rank_explanations(problem, params, rows)
    if params.alibi_slopes is not None:
        return  # the faults below move only the mask; a kernel with such a fault would move the ALiBi bias, too
    context = [request.num_keys - request.query_len for request in problem.requests]
    if params.attn_chunk_size is not None:
        meaning = "chunks are counted from the first new row, not from position 0"
        yield _placed(meaning, rows, params, lambda r, q, k: (q - context[r], k - context[r]))
    match problem.case.batch.path.options:
        case MicroBatchOptions(cuts=cuts):
            yield _pieces_before(problem, cuts, params, rows)
        case FastPrefillOptions():
            left_out = [request.query_len - request.rows for request in problem.requests]
            meaning = "the rows are treated as the first new ones of their requests, not as the last"
            yield _placed(meaning, rows, params, lambda r, q, k: (q - left_out[r], k))
        case PCPOptions(size=size):
            yield from _chunk_explanations(problem, size, params, rows)
        case _:
            pass


def _chunk_explanations(
    problem: Problem, size: int, params: AttentionParams, rows: UnpagedAttention
) -> Iterator[Hypothesis]:
    """Yield the faults of a rank that gives a chunk of a prompt the length of something else."""

    def end_of(request: Request, number: Tensor) -> Tensor:
        length = -(-request.query_len // (2 * size))
        return (request.first_position + (number + 1) * length).clamp(max=request.num_keys)

    def moved(ends: Callable[[Request, Tensor], Tensor], r: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        request = problem.requests[r]
        number = (q - request.first_position) // -(-request.query_len // (2 * size))
        return q + ends(request, number) - end_of(request, number), k

    lengths: Mapping[str, Callable[[Request, Tensor], Tensor]] = {
        "both chunks of a request have the length of the first": lambda request, number: end_of(
            request, torch.minimum(number, 2 * size - 1 - number)
        ),
        "a chunk of a request has the length of the whole request": lambda request, number: torch.full_like(
            number, request.num_keys
        ),
    }
    for meaning, ends in lengths.items():
        yield _placed(meaning, rows, params, partial(moved, ends))


def _rank_explanations(problem: Problem, params: AttentionParams, rows: UnpagedAttention) -> Iterator[Hypothesis]:
    """Yield the faults of merging the context of the ranks; the new keys of a row are merged with the result."""
    options = ranks_of(problem.case)

    def state(rank: int) -> State:
        def is_elsewhere(r: int, _q: Tensor, k: Tensor) -> Tensor:
            is_new = k >= problem.requests[r].first_position
            return torch.where(is_new, options.size, k // options.interleave % options.size) != rank

        return rows.attend(params, hidden=is_elsewhere)

    def with_new(merge: Callable[[list[State]], State]) -> State:
        return _merged([merge([state(rank) for rank in range(options.size)]), state(options.size)])

    def added(states: list[State]) -> State:
        outs, lses = (torch.stack(each) for each in zip(*states, strict=True))
        return outs.sum(0), lses.logsumexp(0)

    def in_base_2(states: list[State]) -> State:
        out, lse = _merged(states, lambda lse: lse * math.log(2))
        return out, lse / math.log(2)

    def apart(states: list[State]) -> State:
        own = [tuple(x.chunk(options.size, dim=1)[rank] for x in each) for rank, each in enumerate(states)]
        out, lse = (torch.cat(each, dim=1) for each in zip(*own, strict=True))
        return out, lse

    merges = {
        "the outputs of the ranks are added without the weights of their LSEs": added,
        "natural LSEs of the ranks are merged with powers of 2": in_base_2,
        "each rank returns the attention to its own keys; their results are not merged": apart,
    }
    for meaning, merge in merges.items():
        yield Hypothesis(meaning, partial(with_new, merge))


def _part_explanations(part_of_key: Tensor, params: AttentionParams, rows: UnpagedAttention) -> Iterator[Hypothesis]:
    by_request = part_of_key.to(rows.keys.device).split(rows.num_keys.tolist())
    number = int(part_of_key.max()) + 1
    bare = replace(params, sinks=None)

    def state(part: int, how: AttentionParams) -> tuple[Tensor, Tensor]:
        return rows.attend(how, hidden=lambda r, _q, k: by_request[r][k] != part)

    def states() -> list[tuple[Tensor, Tensor]]:
        return [state(part, bare if part else params) for part in range(number)]

    def without(part: int) -> tuple[Tensor, Tensor]:
        return rows.attend(params if part else bare, hidden=lambda r, _q, k: by_request[r][k] == part)

    def twice(part: int) -> tuple[Tensor, Tensor]:
        return _merged([*states(), state(part, bare)])

    for part in range(number):
        yield Hypothesis(f"part {part} of the keys is missing", partial(without, part))
        yield Hypothesis(f"only part {part} of the keys is seen", partial(state, part, params))
        yield Hypothesis(f"part {part} of the keys is counted twice", partial(twice, part))
    if params.sinks is not None:
        meaning = "every part carries the sinks"
        yield Hypothesis(meaning, lambda: _merged([state(part, params) for part in range(number)]))
    yield Hypothesis(
        "the parts are merged by an LSE to base 2 (declare lse_base, or multiply by ln 2)",
        lambda: _merged(states(), lambda lse: lse / math.log(2)),
    )
    yield Hypothesis(
        "a part in which a row sees nothing is merged with an LSE of 0, not of -inf",
        lambda: _merged(states(), lambda lse: lse.masked_fill(torch.isneginf(lse), 0.0)),
    )
    yield Hypothesis(
        "the outputs of the parts are averaged, whatever their LSE", lambda: _merged(states(), torch.zeros_like)
    )


def _merged(
    states: Sequence[tuple[Tensor, Tensor]], wrong: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    return merge_many([out for out, _ in states], [lse if wrong is None else wrong(lse) for _, lse in states])


def _pieces_before(
    problem: Problem, cuts: tuple[int, ...], params: AttentionParams, rows: UnpagedAttention
) -> Hypothesis:
    """Return the fault of missing the keys of earlier micro-batches of the same request."""
    total, device = len(problem.query), rows.query.device
    edges = torch.tensor([0, *cuts, total], device=device)
    start = edges[torch.bucketize(torch.arange(total, device=device), edges[1:], right=True)]

    def before(r: int, q: Tensor, k: Tensor) -> Tensor:
        request = problem.requests[r]
        start_of_piece = start[q - request.first_position + request.first_row] - request.first_row
        return (k >= request.first_position) & (k < request.first_position + start_of_piece)

    return altered("the keys of the pieces before are missing", rows, params, hidden=before)


def _placed(meaning: str, rows: UnpagedAttention, params: AttentionParams, places: Places) -> Hypothesis:
    every = replace(params, causal=False, window=(-1, -1), attn_chunk_size=None)
    return altered(meaning, rows, every, hidden=lambda r, q, k: ~visible(params, *places(r, q, k)))


# Caches as faulty writers leave them: rows in other slots, permuted, rounded, scaled, or not written.

_MOSTLY = 0.98
"""Share of the wrong bytes that a fault must explain. It may be wrong in 2 % as many other bytes."""

State = tuple[Tensor, Tensor]
"""Output and LSE over some keys."""

Written = tuple[str, tuple[Tensor, Tensor], Tensor]
"""The fault in words, the keys and values that the writer writes, and the slots that it writes them to."""


def faulty_writes(problem: Problem, rows: tuple[Tensor, Tensor], held: tuple[Tensor, Tensor]) -> Iterator[Written]:
    """Yield faulty writes of a step's new keys and values (``rows``), likelier faults first.

    ``held``: the keys and values in their slots before the step.
    """
    new = problem.written_keys
    slots = problem.key_slots[new]
    key, value = (part.index_select(0, new.to(part.device)) for part in rows)
    both, one_size = (key, value), key.shape == value.shape
    if one_size:
        yield "keys and values are exchanged", (value, key), slots
        yield "values are written instead of keys too", (value, value), slots
        yield "keys are written instead of values too", (key, key), slots
    yield "the new keys are not written", (held[0], value), slots
    yield "the new values are not written", (key, held[1]), slots
    for meaning, other in _other_slots(problem, slots):
        yield meaning, both, other
    yield from ((meaning, made, slots) for meaning, made in _other_rows(key, value))
    yield from ((meaning, made, slots) for meaning, made in _other_numbers(problem, key, value))
    for count in (1, 2, 3):
        if len(slots) > count:
            meaning = f"rows at the end of the step are not written, {count} of them"
            yield meaning, both, _without(slots, slice(-count, None))
    yield "only the first row of the step is written", both, _without(slots, slice(1, None))
    for step in (4, 8, 16, 32, 64, 128):
        if len(slots) % step and len(slots) > step:
            whole = slice(len(slots) // step * step, None)
            yield f"only whole runs of {step} rows are written", both, _without(slots, whole)
        if len(slots) > step:
            yield f"only the first {step} rows of the step are written", both, _without(slots, slice(step, None))


def explains(expected: Tensor, got: Tensor, image: Tensor) -> bool:
    """Return whether ``image``, the cache after a fault, differs from ``got`` in few bytes.

    Few: at most 2 % of the bytes in which ``expected`` differs from ``got``.
    """
    wrong = int((expected != got).sum())
    return int((image != got).sum()) <= (1 - _MOSTLY) * wrong


def _without(slots: Tensor, left_out: slice) -> Tensor:
    kept = slots.clone()
    kept[left_out] = -1
    return kept


def _other_slots(problem: Problem, slots: Tensor) -> Iterator[tuple[str, Tensor]]:
    size = problem.cache.block_size
    total = problem.num_blocks * problem.cache.block_size
    page, offset = slots // size, slots % size
    found = {
        "every row is written one slot after its own": slots + 1,
        "every row is written one slot before its own": slots - 1,
        "the offset in the page is left out": page * size,
        "the page of a slot is left out": offset,
        "page and offset of a slot are exchanged": offset * problem.num_blocks + page,
        "every row is written one page after its own": slots + size,
        "slots are kept in 16 bits": slots % 2**16,
    }
    for other in (8, 16, 32, 64):
        found[f"a page is taken to have {other} tokens, not {size}"] = page * other + offset
    for meaning, written in found.items():
        if not torch.equal(written, slots) and bool(((written >= 0) & (written < total)).all()):
            yield meaning, written


def _other_rows(key: Tensor, value: Tensor) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    if len(key) > 1:
        yield "every slot holds the next row of the step", (key.roll(-1, 0), value.roll(-1, 0))
        yield "every slot holds the row before in the step", (key.roll(1, 0), value.roll(1, 0))
        yield "every slot holds the first row of the step", (key[:1].expand_as(key), value[:1].expand_as(value))
        yield "the rows are written in reversed order", (key.flip(0), value.flip(0))
    if key.shape[1] > 1:
        yield "the heads are written in reversed order", (key.flip(1), value.flip(1))
        yield "every head holds head 0", (key[:, :1].expand_as(key), value[:, :1].expand_as(value))
        tiled = [part.transpose(1, 2).reshape(part.shape) for part in (key, value)]
        yield "heads and channels are exchanged", (tiled[0], tiled[1])
    for name, parts in (("keys", (True, False)), ("values", (False, True)), ("keys and values", (True, True))):
        turned = [
            part.roll(part.shape[-1] // 2, -1) if turns else part
            for part, turns in zip((key, value), parts, strict=True)
        ]
        yield f"the halves of the channels of {name} are exchanged", (turned[0], turned[1])


def _other_numbers(problem: Problem, key: Tensor, value: Tensor) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    kinds = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
    coarse = [kind for kind in kinds if torch.finfo(kind).bits < torch.finfo(key.dtype).bits or kind != key.dtype]
    for kind in coarse:
        name = str(kind).removeprefix("torch.")
        rounded = [part.to(kind).to(part.dtype) for part in (key, value)]
        yield f"keys and values are rounded to {name}", (rounded[0], rounded[1])
        yield f"keys are rounded to {name}", (rounded[0], value)
        yield f"values are rounded to {name}", (key, rounded[1])
    for limit in (448.0, 57344.0, 65504.0):
        clamped = [part.clamp(-limit, limit) for part in (key, value)]
        yield f"numbers are clamped to {limit:g}", (clamped[0], clamped[1])
    scales = [
        torch.tensor(scale, dtype=torch.float32, device=key.device).reshape(-1, 1)
        for scale in (problem.cache.k_scale, problem.cache.v_scale)
    ]
    if any(bool((scale != 1).any()) for scale in scales):
        # The codec divides by the scales where the cache holds codes.
        words = (
            "keys and values are divided by k_scale and v_scale",
            "keys and values are multiplied by k_scale and v_scale",
        )
        if problem.cache.kv_cache_dtype in FP8_CACHES:
            words = ("k_scale and v_scale are applied twice", "k_scale and v_scale are left out")
        for meaning, power in zip(words, (-1, 1), strict=True):
            made = [
                (part.float() * scale**power).to(part.dtype) for part, scale in zip((key, value), scales, strict=True)
            ]
            yield meaning, (made[0], made[1])
