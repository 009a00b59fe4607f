"""Finds which wrong reading of the keys gives the same output as the engine."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

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

    @cached_property
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


Cause = tuple[str, int | None]
"""A wrong reading in words, and the number of the block that it concerns in the table, if any."""

Reading = tuple[Cause, Numbers]
"""A cause, and the rows whose keys one row sees with it, by position."""


@dataclass(frozen=True)
class WrongRows:
    """Wrong rows of a call, the worst first, and what a faulty engine may have read for them.

    positions: int64 ``[B]``. query, output: ``[B, H, D]``, ``[B, H, Dv]``; ``budget`` around the right output.
    lacking: positions that the pages lack; None if they were not compared.
    """

    call: RequestCall
    history: EngineHistory
    positions: Numbers
    query: Tensor
    output: Tensor
    budget: Budget
    lacking: Numbers | None = None

    def cause(self) -> Cause | None:
        """Return the reading that comes closest to the worst row, and gives the next ones too, or None if none does."""
        worst, *others = self.positions[:_ROWS].tolist()
        fits = self._fitting(0, self._readings(worst))
        for row, position in enumerate(others, start=1):
            tried = (reading for reading in self._readings(position) if reading[0] in fits)
            found = self._fitting(row, tried)
            fits = {cause: miss for cause, miss in fits.items() if cause in found}
        return min(fits, key=lambda cause: fits[cause], default=None)

    def _fitting(self, row: int, readings: Iterator[Reading]) -> dict[Cause, float]:
        """Return the causes of readings that give the output of a row, with their distance from it in budgets."""
        fits: dict[Cause, float] = {}
        facts, num_keys = self.call.facts, len(self.call.seen)
        params = replace(facts.params, window=(-1, -1), attn_chunk_size=None)  # a reading has what is seen
        for _ in range(_MOST_KEYS // max(_KEYS_AT_ONCE, num_keys)):
            some = list(islice(readings, max(1, _KEYS_AT_ONCE // num_keys)))
            if not some:
                break
            key, value = facts.attended(*self.call.kept(np.concatenate([numbers for _, numbers in some])))
            ends = torch.tensor([0, *(len(numbers) for _, numbers in some)]).cumsum(0).to(key.device)
            query = self.query[row : row + 1].expand(len(some), -1, -1)
            one_each = torch.arange(len(some) + 1, device=key.device)
            out, _ = UnpagedAttention(query, key, value, one_each, ends).attend(params)
            misses = share_of_budget(self.output[row].double() - out, self.budget.of_rows(slice(row, row + 1)))
            for (cause, _), miss in zip(some, misses.amax(dim=1).tolist(), strict=True):
                if miss <= fits.get(cause, 1.0):
                    fits[cause] = miss
        return fits

    def _readings(self, position: int) -> Iterator[Reading]:
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
        size, slot = self.call.block_size, begin % self.call.block_size
        ids = self.call.table[begin // size : -(-end // size)]
        blocks = [self.history.block(block_id, self.call.group) for block_id in ids]
        numbers = np.concatenate([block.earlier if is_earlier else block.numbers for block in blocks])
        return numbers[slot : slot + end - begin]

    def _held(self, block_id: int) -> Numbers:
        """Return the rows in a block; zeros where none is known."""
        return np.maximum(self.history.block(block_id, self.call.group).numbers, ZERO_ROW)


def _or_zeros(numbers: Numbers) -> tuple[Numbers, Numbers]:
    """Return the rows, with zeros where none is known, and zeros."""
    return np.maximum(numbers, ZERO_ROW), np.full(len(numbers), ZERO_ROW)
