"""Finds which wrong reading of the keys gives the same output as the engine."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
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
class LayerCall:
    """What a layer computes in a step, for all requests that are followed."""

    rows: LayerRows
    facts: LayerFacts
    group: int
    block_size: int
    requests: tuple[FollowedRequest, ...]

    @property
    def source(self) -> str:
        """The layer whose keys and values it reads."""
        return self.facts.kv_sharing_target or self.rows.layer


@dataclass(frozen=True)
class WrongRows:
    """Wrong rows of one request, layer and step, the worst first.

    positions: int64 ``[B]``. query, output: ``[B, H, D]``, ``[B, H, Dv]``; ``budget`` around the right output.
    kept: returns the kept keys and values of row numbers.
    """

    call: LayerCall
    request: FollowedRequest
    positions: Numbers
    query: Tensor
    output: Tensor
    budget: Budget
    kept: Callable[[Numbers], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Cause:
    """A wrong reading that gives the same output, and the number of the block that it concerns in the table."""

    meaning: str
    block_index: int | None = None


Reading = tuple[Cause, Numbers]
"""A cause, and the rows whose keys one row sees with it, by position."""


def cause_of(wrong: WrongRows, lacking: Numbers | None, history: EngineHistory) -> Cause | None:
    """Return the reading that comes closest to the output of all of the first wrong rows, or None if none fits.

    ``lacking``: positions that the pages lack; None if they were not compared.
    """
    readings = Readings(wrong, lacking, history)
    fits: dict[Cause, float] | None = None
    for row, position in enumerate(wrong.positions[:_ROWS].tolist()):
        misses: dict[Cause, float] = {}
        tried = (reading for reading in readings.of(position) if fits is None or reading[0] in fits)
        for cause, miss in _misses(wrong, row, tried):
            misses[cause] = min(miss, misses.get(cause, miss))
        if fits is None:
            fits = misses
        fits = {cause: miss for cause, miss in fits.items() if misses.get(cause, 2.0) <= 1}
    return min(fits, key=lambda cause: fits[cause]) if fits else None


def _misses(wrong: WrongRows, row: int, readings: Iterable[Reading]) -> Iterator[tuple[Cause, float]]:
    """Yield the cause of each reading with its distance from the output, in budgets."""
    params = replace(wrong.call.facts.params, window=(-1, -1), attn_chunk_size=None)  # a reading has what is seen
    tried = 0
    for part in in_parts(readings, lambda reading: len(reading[1]), _KEYS_AT_ONCE):
        key, value = wrong.call.facts.attended(*wrong.kept(np.concatenate([numbers for _, numbers in part])))
        ends = torch.tensor([0, *(len(numbers) for _, numbers in part)]).cumsum(0).to(key.device)
        query = wrong.query[row : row + 1].expand(len(part), -1, -1)
        one_each = torch.arange(len(part) + 1, device=key.device)
        out, _ = UnpagedAttention(query, key, value, one_each, ends).attend(params)
        missed = share_of_budget(wrong.output[row].double() - out, wrong.budget.of_rows(slice(row, row + 1)))
        yield from zip((cause for cause, _ in part), missed.amax(dim=1).tolist(), strict=True)
        tried += len(key)
        if tried > _MOST_KEYS:
            return


class Readings:
    """What a faulty engine may have read for wrong rows of a request."""

    def __init__(self, wrong: WrongRows, lacking: Numbers | None, history: EngineHistory) -> None:
        self._request, self._others = wrong.request, [each for each in wrong.call.requests if each is not wrong.request]
        self._lacking, self._history = lacking, history
        self._group, self._size, self._params = wrong.call.group, wrong.call.block_size, wrong.call.facts.params
        self._keys = wrong.request.keys[self._group]
        self._table = wrong.request.block_ids[self._group]

    def of(self, position: int) -> Iterator[Reading]:
        """Yield readings for a row: of pages that lack keys if some do, else of right pages."""
        first, base = first_seen(self._params, position), self._keys[: position + 1]
        whole: list[Iterator[Reading]] = []
        if self._lacking is None or len(self._lacking):
            whole.append(self._wrong_contents(first, base))
        if self._lacking is None or not len(self._lacking):
            yield from self._wrong_windows(base)
            whole += [self._wrong_lengths(base), self._wrong_tables(first, base)]
        for readings in whole:
            for cause, numbers in readings:
                yield cause, numbers[first_seen(self._params, len(numbers) - 1) :]

    def _wrong_contents(self, first: int, base: Numbers) -> Iterator[Reading]:
        """Yield readings of blocks that hold something else than was written to them."""
        for index, low, high in spans(first, len(self._keys), self._size):
            if low >= len(base):
                return
            words = block_in_words(self._table[index], index)
            for start, end in self._wrong_spans(low, high):
                for what, content in self._contents(start, end):
                    cause = Cause(f"from position {start} on, {words} holds {what}", index)
                    yield cause, np.concatenate([base[:start], content, base[end:]])[: len(base)]

    def _wrong_spans(self, low: int, high: int) -> Iterator[tuple[int, int]]:
        """Yield the positions of a block that may hold something else: those that it lacks, or any end of it."""
        if self._lacking is None:
            yield from ((start, high) for start in range(low, high))
            return
        lacking = self._lacking[(self._lacking >= low) & (self._lacking < high)]
        if len(lacking):
            yield int(lacking[0]), int(lacking[-1]) + 1

    def _contents(self, low: int, high: int) -> Iterator[tuple[str, Numbers]]:
        """Yield what the slots of positions ``low .. high - 1`` may hold, in words and as row numbers."""
        yield "zeros", np.full(high - low, ZERO_ROW)
        earlier = self._in_slots(low, high, is_earlier=True)
        if (earlier >= 0).all():
            owners = set(self._history.owners[earlier])
            is_draft = owners == {self._request.request_id}
            is_draft = is_draft and np.array_equal(self._history.positions[earlier], np.arange(low, high))
            yield "a rejected draft" if is_draft else f"old content of {requests_in_words(owners)}", earlier
        for other in self._others:
            for start in range(other.done, other.end - (high - low) + 1):
                positions = range(start, start + high - low)
                words = f"keys of {requests_in_words([other.request_id])}, {positions_in_words(positions)}"
                yield words, other.keys[self._group][positions.start : positions.stop]

    def _wrong_windows(self, base: Numbers) -> Iterator[Reading]:
        left = self._params.window[0]
        if not 0 < left < len(base):
            return
        ignored = Cause("the window is ignored")
        yield ignored, base
        unseen = first_seen(self._params, len(base) - 1) // self._size  # blocks, which are given to others
        yield ignored, np.concatenate([*map(self._held, self._table[:unseen]), base[unseen * self._size :]])
        for num_keys, words in ((left, "short"), (left + 2, "long")):
            yield Cause(f"the window is one key too {words} ({num_keys} keys)"), base[-num_keys:]

    def _wrong_lengths(self, base: Numbers) -> Iterator[Reading]:
        """Yield readings that see too few or too many keys, or slots as they were before the step wrote them."""
        for fewer in range(1, min(2 * self._size, len(base) - 1) + 1):
            yield Cause(f"the row sees {plural(fewer, 'key')} too few"), base[:-fewer]
        for more in range(1, len(self._keys) - len(base) + 1):
            cause = Cause(f"the row sees {plural(more, 'key')} too many, behind its own")
            yield cause, self._keys[: len(base) + more]
        if len(self._keys) > len(base):
            yield Cause("the row sees all keys of the step, as without a causal mask"), self._keys
        begin, behind = self._request.done, len(base)
        early = Cause("the keys of the step are read before they are written")
        for held in _or_zeros(self._in_slots(begin, behind, is_earlier=True)):
            yield early, np.concatenate([base[:begin], held])
        if behind == len(self._keys) and behind // self._size < len(self._table):
            for held in _or_zeros(self._in_slots(behind, behind + 1)):
                yield Cause("the row sees 1 key too many, behind its own"), np.append(base, held)

    def _in_slots(self, begin: int, end: int, *, is_earlier: bool = False) -> Numbers:
        """Return the rows in the slots of positions ``begin .. end - 1``, or those before; negative if not known."""
        parts = []
        for index, low, high in spans(begin, end, self._size):
            block = self._history.block(self._table[index], self._group)
            rows = block.earlier if is_earlier else block.rows
            parts.append(rows[low - index * self._size : high - index * self._size])
        return np.concatenate(parts)

    def _wrong_tables(self, first: int, base: Numbers) -> Iterator[Reading]:
        """Yield readings of each block and all behind it one place late, and of another block in place of one."""
        size, last = self._size, (len(base) - 1) // self._size
        own = self._table[: last + 1]
        for index in range(first // size, last):
            late = Cause(f"from number {index} of the table on, blocks are read one page late", index)
            for end in (own[-1], NULL_BLOCK):
                later = map(self._held, [*own[index + 1 :], end])
                yield late, np.concatenate([base[: index * size], *later])[: len(base)]
        for index, low, high in reversed(list(spans(first // size * size, len(base), size))):
            for block_id, block in self._history.blocks.items():
                held = block.rows[: high - low]
                if block_id == own[index] or block.group != self._group or (held < 0).any():
                    continue
                words = f"block {block_id}, which holds {self._history.contents(block_id)}, is read in place of "
                cause = Cause(words + block_in_words(own[index], index), index)
                yield cause, np.concatenate([base[:low], held, base[high:]])

    def _held(self, block_id: int) -> Numbers:
        """Return the rows in a block; zeros where none is known."""
        return np.maximum(self._history.block(block_id, self._group).rows, ZERO_ROW)


def _or_zeros(rows: Numbers) -> tuple[Numbers, Numbers]:
    """Return the rows, with zeros where none is known, and zeros."""
    return np.maximum(rows, ZERO_ROW), np.full(len(rows), ZERO_ROW)


def in_parts(items: Iterable[T], size_of: Callable[[T], int], size: int) -> Iterator[list[T]]:
    """Yield successive items together, whose sizes are about ``size`` in all."""
    total = 0

    def part(item: T) -> int:
        nonlocal total
        total += size_of(item)
        return total // size

    for _, together in groupby(items, part):
        yield list(together)
