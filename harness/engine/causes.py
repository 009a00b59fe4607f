"""Finds which wrong reading of the keys gives the same output as the engine."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from attncheck.harness.engine.events import LayerFacts, LayerRows
from attncheck.harness.engine.history import (
    NULL_BLOCK,
    ZERO_ROW,
    EngineHistory,
    FollowedRequest,
    Numbers,
    block_in_words,
    first_seen,
    positions_in_words,
    requests_in_words,
    spans,
)
from attncheck.harness.truth.unpaged import Budget, UnpagedAttention, share_of_budget
from attncheck.reports.analysis.phrases import plural

T = TypeVar("T")

_KEYS_AT_ONCE, _MOST_KEYS = 2**16, 2**21
"""Keys of readings that are computed together, and of all that are tried for one row."""

_ROWS = 4
"""Wrong rows of a request for which a reading must give the same output."""


@dataclass(frozen=True)
class RequestCall:
    """What a layer computes in a step for one request.

    group: the index of its KV-cache group. keys: the keys and values that it reads, as they are kept, by row number.
    """

    tensors: LayerRows
    facts: LayerFacts
    group: int
    block_size: int
    request: FollowedRequest
    keys: tuple[Tensor, Tensor]

    @property
    def page_size(self) -> int:
        """Tokens of a page of its cache."""
        return self.facts.page_size or self.block_size

    @property
    def table(self) -> list[int]:
        """The blocks of the request."""
        return self.request.block_ids[self.group]

    @property
    def numbers(self) -> Numbers:
        """The rows of the request's keys, by position."""
        return self.request.numbers[self.group]

    @property
    def seen(self) -> Numbers:
        """The rows of the keys that the step sees; whole chunks, which are counted from key 0."""
        first = first_seen(self.facts.params, self.request.done)
        return self.numbers[first - first % (self.facts.params.attn_chunk_size or 1) :]

    def slots(self, positions: Numbers) -> Numbers:
        """Return the slots of keys in the cache."""
        return np.array(self.table)[positions // self.block_size] * self.block_size + positions % self.block_size

    def kept(self, numbers: Numbers) -> tuple[Tensor, Tensor]:
        """Return the keys and values of some rows, as they are kept."""
        key, value = self.keys
        some = torch.from_numpy(numbers).to(key.device)
        return key[some], value[some]


@dataclass(frozen=True)
class WrongRows:
    """Wrong rows of a call, the worst first.

    positions: int64 ``[B]``. query, output: ``[B, H, D]``, ``[B, H, Dv]``; ``budget`` around the right output.
    """

    call: RequestCall
    positions: Numbers
    query: Tensor
    output: Tensor
    budget: Budget


Cause = tuple[str, int | None]
"""A wrong reading in words, and the number of the block that it concerns in the table, if any."""

Reading = tuple[Cause, Numbers]
"""A cause, and the rows whose keys one row sees with it, by position."""


def cause_of(wrong: WrongRows, lacking: Numbers | None, history: EngineHistory) -> Cause | None:
    """Return the reading that comes closest to the worst row, and gives the next ones too, or None if none does.

    ``lacking``: positions that the pages lack; None if they were not compared.
    """
    readings = Readings(wrong.call, lacking, history)
    fits: dict[Cause, float] | None = None
    for row, position in enumerate(wrong.positions[:_ROWS].tolist()):
        tried = (reading for reading in readings.of(position) if fits is None or reading[0] in fits)
        misses: dict[Cause, float] = {}
        for cause, miss in _misses(wrong, row, tried):
            if miss <= misses.get(cause, 1.0):
                misses[cause] = miss
        fits = misses if fits is None else {cause: miss for cause, miss in fits.items() if cause in misses}
    return min(fits, key=lambda cause: fits[cause]) if fits else None


def _misses(wrong: WrongRows, row: int, readings: Iterable[Reading]) -> Iterator[tuple[Cause, float]]:
    """Yield the cause of each reading with its distance from the output, in budgets."""
    params = replace(wrong.call.facts.params, window=(-1, -1), attn_chunk_size=None)  # a reading has what is seen
    tried = 0
    for part in in_parts(readings, lambda reading: len(reading[1]), _KEYS_AT_ONCE):
        key, value = wrong.call.facts.attended(*wrong.call.kept(np.concatenate([numbers for _, numbers in part])))
        ends = torch.tensor([0, *(len(numbers) for _, numbers in part)]).cumsum(0).to(key.device)
        query = wrong.query[row : row + 1].expand(len(part), -1, -1)
        one_each = torch.arange(len(part) + 1, device=key.device)
        out, _ = UnpagedAttention(query, key, value, one_each, ends).attend(params)
        missed = share_of_budget(wrong.output[row].double() - out, wrong.budget.of_rows(slice(row, row + 1)))
        yield from zip((cause for cause, _ in part), missed.amax(dim=1).tolist(), strict=True)
        tried += len(key)
        if tried > _MOST_KEYS:
            return


@dataclass(frozen=True)
class Readings:
    """What a faulty engine may have read for wrong rows. ``lacking``: as of :func:`cause_of`."""

    call: RequestCall
    lacking: Numbers | None
    history: EngineHistory

    def of(self, position: int) -> Iterator[Reading]:
        """Yield readings for a row: of pages that lack keys if some do, else of right pages."""
        params, right = self.call.facts.params, self.call.numbers[: position + 1]
        first = first_seen(params, position)
        whole: list[Iterator[Reading]] = []  # which have keys that the row does not see
        if self.lacking is None or len(self.lacking):
            whole.append(self._wrong_contents(first, right))
        if self.lacking is None or not len(self.lacking):
            yield from self._wrong_windows(params.window[0], first, right)
            whole += [self._wrong_lengths(right), self._wrong_tables(first, right)]
        for readings in whole:
            for cause, numbers in readings:
                yield cause, numbers[first_seen(params, len(numbers) - 1) :]

    def _wrong_contents(self, first: int, right: Numbers) -> Iterator[Reading]:
        """Yield readings of blocks with something else where they lack keys, or at any end if this is not known."""
        for index, low, high in spans(first, len(self.call.numbers), self.call.block_size):
            starts, end = list(range(low, high)), high
            if self.lacking is not None:
                lacks = self.lacking[(self.lacking >= low) & (self.lacking < high)].tolist()
                starts, end = lacks[:1], 1 + max(lacks, default=0)
            for start in starts:
                for what, content in self._contents(start, end):
                    words = f"from position {start} on, {block_in_words(self.call.table[index], index)} holds {what}"
                    if start < len(right):
                        yield (words, index), np.concatenate([right[:start], content, right[end:]])[: len(right)]

    def _contents(self, low: int, high: int) -> Iterator[tuple[str, Numbers]]:
        """Yield what the slots of positions ``low .. high - 1`` may hold, in words and as row numbers."""
        yield "zeros", np.full(high - low, ZERO_ROW)
        earlier = self._in_slots(low, high, is_earlier=True)
        if (earlier >= 0).all():
            owners = set(self.history.owners[earlier])
            is_draft = owners == {self.call.request.request_id}
            is_draft = is_draft and np.array_equal(self.history.positions[earlier], np.arange(low, high))
            yield "a rejected draft" if is_draft else f"old content of {requests_in_words(owners)}", earlier
        for other in self.history.requests.values():
            for start in range(other.done, other.step_end - (high - low) + 1):
                positions = range(start, start + high - low)
                words = f"keys of {requests_in_words([other.request_id])}, {positions_in_words(positions)}"
                if other is not self.call.request:
                    yield words, other.numbers[self.call.group][positions.start : positions.stop]

    def _wrong_windows(self, left: int, first: int, right: Numbers) -> Iterator[Reading]:
        """Yield readings without the window, and of one that is a key too short or too long."""
        if not 0 < left < len(right):
            return
        yield ("the window is ignored", None), right
        unseen = first // self.call.block_size  # blocks, which are given to others
        others = map(self._held, self.call.table[:unseen])
        yield ("the window is ignored", None), np.concatenate([*others, right[unseen * self.call.block_size :]])
        for num_keys, words in ((left, "short"), (left + 2, "long")):
            yield (f"the window is one key too {words} ({num_keys} keys)", None), right[-num_keys:]

    def _wrong_lengths(self, right: Numbers) -> Iterator[Reading]:
        """Yield readings that see too few or too many keys, or slots as they were before the step wrote them."""
        numbers, behind = self.call.numbers, len(right)
        for fewer in range(1, min(2 * self.call.block_size, behind - 1) + 1):
            yield (f"the row sees {plural(fewer, 'key')} too few", None), right[:-fewer]
        for more in range(1, len(numbers) - behind + 1):
            yield (f"the row sees {plural(more, 'key')} too many, behind its own", None), numbers[: behind + more]
        if len(numbers) > behind:
            yield ("the row sees all keys of the step, as without a causal mask", None), numbers
        elif behind // self.call.block_size < len(self.call.table):
            for held in _or_zeros(self._in_slots(behind, behind + 1)):
                yield ("the row sees 1 key too many, behind its own", None), np.append(right, held)
        begin = self.call.request.done
        for held in _or_zeros(self._in_slots(begin, behind, is_earlier=True)):
            yield ("the keys of the step are read before they are written", None), np.append(right[:begin], held)

    def _wrong_tables(self, first: int, right: Numbers) -> Iterator[Reading]:
        """Yield readings of each block and all behind it one page late, and of another block in place of one."""
        size = self.call.block_size
        own = self.call.table[: (len(right) - 1) // size + 1]
        for index in range(first // size, len(own) - 1):
            words = f"from number {index} of the table on, blocks are read one page late"
            for last in (own[-1], NULL_BLOCK):
                later = map(self._held, [*own[index + 1 :], last])
                yield (words, index), np.concatenate([right[: index * size], *later])[: len(right)]
        for index, low, high in reversed(list(spans(first // size * size, len(right), size))):
            for block_id, block in self.history.blocks.items():
                held = block.numbers[: high - low]
                if block_id == own[index] or block.group != self.call.group or (held < 0).any():
                    continue
                words = f"block {block_id}, which holds {self.history.contents(block_id)}, is read in place of "
                words += block_in_words(own[index], index)
                yield (words, index), np.concatenate([right[:low], held, right[high:]])

    def _in_slots(self, begin: int, end: int, *, is_earlier: bool = False) -> Numbers:
        """Return the rows in the slots of positions ``begin .. end - 1``, or those before; negative if not known."""
        parts = []
        for index, low, high in spans(begin, end, self.call.block_size):
            block = self.history.block(self.call.table[index], self.call.group)
            numbers = block.earlier if is_earlier else block.numbers
            parts.append(numbers[low - index * self.call.block_size : high - index * self.call.block_size])
        return np.concatenate(parts)

    def _held(self, block_id: int) -> Numbers:
        """Return the rows in a block; zeros where none is known."""
        return np.maximum(self.history.block(block_id, self.call.group).numbers, ZERO_ROW)


def _or_zeros(numbers: Numbers) -> tuple[Numbers, Numbers]:
    """Return the rows, with zeros where none is known, and zeros."""
    return np.maximum(numbers, ZERO_ROW), np.full(len(numbers), ZERO_ROW)


def in_parts(items: Iterable[T], size_of: Callable[[T], int], size: int) -> Iterator[list[T]]:
    """Yield successive items together, whose sizes are ``size`` or little more in all."""
    part, total = [], 0
    for item in items:
        part.append(item)
        total += size_of(item)
        if total >= size:
            yield part
            part, total = [], 0
    if part:
        yield part
