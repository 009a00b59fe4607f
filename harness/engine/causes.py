"""Finds which wrong reading of the keys gives the same output as the engine."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from attncheck.harness.engine.history import (
    ZERO_ROW,
    Block,
    EngineHistory,
    Numbers,
    StepRows,
    block_in_words,
    first_needed,
    first_seen,
    positions_in_words,
    requests_in_words,
)
from attncheck.harness.truth.unpaged import Budget, UnpagedAttention, share_of_budget
from attncheck.reference import AttentionParams
from attncheck.reports.analysis.phrases import plural

_KEYS_AT_ONCE, _MOST_KEYS = 2**16, 2**21
"""Keys of readings that are computed together, and of all that are tried for one row."""

_ROWS = 4
"""Wrong rows of a request for which a reading must give the same output."""


@dataclass(frozen=True)
class WrongRows:
    """Wrong rows of one request, layer and step, the worst first.

    positions: int64 ``[B]``. query, output: ``[B, H, D]``, ``[B, H, Dv]``; ``budget`` around the right output.
    rows_of: returns key and value of row numbers. lacking: positions that the pages lack; None if not compared.
    others: what the step computed for other requests.
    """

    request: StepRows
    others: tuple[StepRows, ...]
    group: int
    block_size: int
    params: AttentionParams
    positions: Numbers
    query: Tensor
    output: Tensor
    budget: Budget
    rows_of: Callable[[Numbers], tuple[Tensor, Tensor]]
    lacking: Numbers | None

    @property
    def keys(self) -> Numbers:
        """The right row numbers, from position 0 on."""
        return self.request.keys_of(self.group)

    @property
    def table(self) -> Sequence[int]:
        """The block ids of the request."""
        return self.request.block_ids[self.group]


@dataclass(frozen=True)
class Cause:
    """A wrong reading that gives the same output, and the block that it concerns."""

    meaning: str
    block_id: int | None = None
    block_index: int | None = None


@dataclass(frozen=True)
class Reading:
    """The row numbers that a faulty engine may have read for one row, from position 0 up to the row itself.

    same: what the reading is, equal for rows that are read wrongly in the same way. window: the window to the left, -1
    for none. None means the layer's own window.
    """

    same: tuple[str | int, ...]
    cause: Cause
    numbers: Numbers
    window: int | None = None


def cause_of(wrong: WrongRows, history: EngineHistory) -> Cause | None:
    """Return the reading that comes closest to the output of all of the first wrong rows, or None if none fits."""
    fits: dict[tuple[str | int, ...], tuple[float, Cause]] = {}
    for reading, miss in _misses(wrong, 0, _readings(wrong, history, 0)):
        if miss <= 1 and miss < fits.get(reading.same, (2.0, reading.cause))[0]:
            fits[reading.same] = (miss, reading.cause)
    for row in range(1, min(_ROWS, len(wrong.positions))):
        same = (each for each in _readings(wrong, history, row) if each.same in fits)
        for reading, miss in _misses(wrong, row, same):
            if miss > 1:
                del fits[reading.same]
    if not fits:
        return None
    return min(fits.values(), key=lambda fit: fit[0])[1]


def _misses(wrong: WrongRows, row: int, readings: Iterator[Reading]) -> Iterator[tuple[Reading, float]]:
    """Yield each reading with its distance from the output, in budgets."""
    for part in _parts(_needed(wrong, reading) for reading in readings):
        params = _params_of(wrong, part[0])
        key, value = wrong.rows_of(np.concatenate([each.numbers for each in part]))
        ends = torch.tensor([0, *(len(each.numbers) for each in part)]).cumsum(0).to(key.device)
        query = wrong.query[row : row + 1].expand(len(part), -1, -1)
        one_each = torch.arange(len(part) + 1, device=key.device)
        out, _ = UnpagedAttention(query, key, value, one_each, ends).attend(params)
        missed = share_of_budget(wrong.output[row].double() - out, wrong.budget.of_rows(slice(row, row + 1)))
        yield from zip(part, missed.amax(dim=1).tolist(), strict=True)


def _params_of(wrong: WrongRows, reading: Reading) -> AttentionParams:
    if reading.window is None:
        return wrong.params
    return replace(wrong.params, window=(reading.window, wrong.params.window[1]))


def _needed(wrong: WrongRows, reading: Reading) -> Reading:
    """Return the reading without the keys before the window of its row."""
    first = first_needed(_params_of(wrong, reading), len(reading.numbers) - 1)
    return replace(reading, numbers=reading.numbers[first:])


def _parts(readings: Iterator[Reading]) -> Iterator[list[Reading]]:
    """Yield readings of one window that are computed together, until they have enough keys."""
    part: list[Reading] = []
    size = tried = 0
    for reading in readings:
        if part and (size > _KEYS_AT_ONCE or reading.window != part[0].window):
            yield part
            part, size = [], 0
        part.append(reading)
        size += len(reading.numbers)
        tried += len(reading.numbers)
        if tried > _MOST_KEYS:
            break
    if part:
        yield part


def _readings(wrong: WrongRows, history: EngineHistory, row: int) -> Iterator[Reading]:
    """Yield wrong readings for a row: of pages that lack keys if some do, else of right pages."""
    if wrong.lacking is None or len(wrong.lacking):
        yield from _wrong_contents(wrong, history, row)
    if wrong.lacking is None or not len(wrong.lacking):
        yield from _wrong_lengths(wrong, history, row)
        yield from _unwritten_slots(wrong, history, row)
        yield from _late_pages(wrong, history, row)
        yield from _wrong_pages(wrong, history, row)


def _wrong_contents(wrong: WrongRows, history: EngineHistory, row: int) -> Iterator[Reading]:
    """Yield readings of blocks that hold something else than was written to them."""
    position, size = int(wrong.positions[row]), wrong.block_size
    base = wrong.keys[: position + 1]
    first = first_seen(wrong.params, position)
    for index in range(first // size, position // size + 1):
        block_id = wrong.table[index]
        own = history.blocks.get(block_id)
        spans = _spans(wrong, max(first, index * size), min(position + 1, (index + 1) * size))
        for low, high in spans:
            for what, content in _contents(wrong, history, own, low, high):
                numbers = base.copy()
                numbers[low:high] = content
                meaning = f"from position {low} on, {block_in_words(block_id, index)} holds {what}"
                same = (what, index, low)
                yield Reading(same, Cause(meaning, block_id, index), numbers)


def _spans(wrong: WrongRows, low: int, high: int) -> Iterator[tuple[int, int]]:
    """Yield the positions of a block that may hold something else: those that it lacks, or any end of it."""
    if wrong.lacking is None:
        yield from ((start, high) for start in range(low, high))
        return
    lacking = wrong.lacking[(wrong.lacking >= low) & (wrong.lacking < high)]
    if len(lacking):
        yield int(lacking[0]), int(lacking[-1]) + 1


def _contents(
    wrong: WrongRows, history: EngineHistory, own: Block | None, low: int, high: int
) -> Iterator[tuple[str, Numbers]]:
    """Yield what the slots of positions ``low .. high - 1`` may hold, in words and as row numbers."""
    size = wrong.block_size
    slots = slice(low % size, low % size + high - low)
    yield "zeros", np.full(high - low, ZERO_ROW)
    if own is not None and (own.earlier[slots] >= 0).all():
        earlier = own.earlier[slots]
        owners = [history.numbers.owners[number] for number in earlier.tolist()]
        is_draft = set(owners) == {wrong.request.request_id}
        is_draft = is_draft and np.array_equal(history.numbers.positions[earlier], np.arange(low, high))
        yield "a rejected draft" if is_draft else f"old content of {requests_in_words(owners)}", earlier
    for other in wrong.others:
        numbers = other.keys[wrong.group]
        if numbers is None:
            continue
        for start in range(other.position, other.position + other.num_rows - (high - low) + 1):
            positions = positions_in_words(range(start, start + high - low))
            yield f"keys of {requests_in_words([other.request_id])}, {positions}", numbers[start : start + high - low]


def _wrong_lengths(wrong: WrongRows, history: EngineHistory, row: int) -> Iterator[Reading]:
    """Yield readings with another window, and those that see too few or too many keys."""
    position, size = int(wrong.positions[row]), wrong.block_size
    num_keys = position + 1
    base = wrong.keys[:num_keys]
    left = wrong.params.window[0]
    if left > 0 and position >= left:
        ignored = Cause("the window is ignored")
        yield Reading(("window", -1), ignored, base, window=-1)
        unseen = first_seen(wrong.params, position) // size * size
        reused = [_held_by(history.blocks.get(block_id), size) for block_id in wrong.table[: unseen // size]]
        if reused:  # blocks outside the window are given to others
            yield Reading(("window", -2), ignored, np.concatenate([*reused, base[unseen:]]), window=-1)
        for keys, words in ((left, "one key too short"), (left + 2, "one key too long")):
            yield Reading(("window", keys), Cause(f"the window is {words} ({keys} keys)"), base, window=keys - 1)
    for fewer in range(1, min(2 * size, num_keys - 1) + 1):
        cause = Cause(f"the row sees {plural(fewer, 'key')} too few")
        yield Reading(("fewer", fewer), cause, base[: num_keys - fewer])
    for more in range(1, len(wrong.keys) - num_keys + 1):
        cause = Cause(f"the row sees {plural(more, 'key')} too many, behind its own")
        yield Reading(("more", more), cause, wrong.keys[: num_keys + more])


def _unwritten_slots(wrong: WrongRows, history: EngineHistory, row: int) -> Iterator[Reading]:
    """Yield readings of slots before they are written: those of the step's own keys, and the one behind the last.

    They hold what was there before, or zeros.
    """
    position, begin = int(wrong.positions[row]), wrong.request.position
    behind = position + 1
    for is_zero in (False, True):
        earlier = [
            ZERO_ROW if is_zero else _held_at(wrong, history, at, is_earlier=True) for at in range(begin, behind)
        ]
        keys = np.append(wrong.keys[:begin], earlier)
        cause = Cause("the keys of the step are read before they are written")
        yield Reading(("early", is_zero), cause, keys)
        if behind == len(wrong.keys) and behind // wrong.block_size < len(wrong.table):
            held = ZERO_ROW if is_zero else _held_at(wrong, history, behind, is_earlier=False)
            cause = Cause("the row sees 1 key too many, from a slot that is not written yet")
            yield Reading(("more", 1), cause, np.append(wrong.keys, held))


def _held_at(wrong: WrongRows, history: EngineHistory, position: int, *, is_earlier: bool) -> int:
    """Return the row that the slot of a position holds, or held before this step; zeros if that is not known."""
    block = history.blocks.get(wrong.table[position // wrong.block_size])
    if block is None:
        return ZERO_ROW
    held = block.earlier if is_earlier else block.rows
    return max(ZERO_ROW, int(held[position % wrong.block_size]))


def _late_pages(wrong: WrongRows, history: EngineHistory, row: int) -> Iterator[Reading]:
    """Yield readings of each page from one on where the next page is; the last is read twice, or block 0."""
    position, size = int(wrong.positions[row]), wrong.block_size
    first = first_seen(wrong.params, position)
    last = position // size
    for index in range(first // size, last):
        for end in (wrong.table[last], 0):
            numbers = wrong.keys[: position + 1].copy()
            for at, block_id in enumerate([*wrong.table[index + 1 : last + 1], end], start=index):
                low, high = at * size, min(position + 1, (at + 1) * size)
                numbers[low:high] = _held_by(history.blocks.get(block_id), high - low)
            meaning = f"from number {index} of the table on, blocks are read one page late"
            cause = Cause(meaning, wrong.table[index], index)
            yield Reading(("late", index, end), cause, numbers)


def _held_by(block: Block | None, count: int) -> Numbers:
    """Return the rows in the first slots of a block; slots that were never written hold zeros."""
    if block is None:
        return np.full(count, ZERO_ROW)
    return np.where(block.rows[:count] >= 0, block.rows[:count], ZERO_ROW)


def _wrong_pages(wrong: WrongRows, history: EngineHistory, row: int) -> Iterator[Reading]:
    """Yield readings of another block in place of one of the request's own."""
    position, size = int(wrong.positions[row]), wrong.block_size
    base = wrong.keys[: position + 1]
    first = first_seen(wrong.params, position)
    for index in range(position // size, first // size - 1, -1):
        low, high = max(first, index * size), min(position + 1, (index + 1) * size)
        for block_id, block in history.blocks.items():
            if block_id == wrong.table[index] or block.group != wrong.group:
                continue
            found = block.rows[low % size : low % size + high - low]
            if (found < 0).any():
                continue
            numbers = base.copy()
            numbers[low:high] = found
            meaning = (
                f"block {block_id}, which holds {history.contents(block_id)}, is read in place of "
                f"{block_in_words(wrong.table[index], index)}"
            )
            cause = Cause(meaning, wrong.table[index], index)
            yield Reading(("page", block_id, index), cause, numbers)
