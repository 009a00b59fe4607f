"""Counts distinct batches in bounded memory.

Two batches count as the same if their requests fall into the same buckets of lengths, in any order. The buckets double
in width whenever there are too many distinct batches. Each distinct batch keeps one of the real batches it represents,
sampled uniformly.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from attncheck.reference.spec import CacheSpec, LayerSpec

BUCKETS_PER_OCTAVE = 4
"""Initial number of buckets between a length and its double."""

WIDEST = 6
"""Maximum number of times that buckets are widened: from a quarter of an octave to sixteen octaves."""

MOST_IN_MEMORY = 1024
"""Maximum distinct batches kept while an engine serves. Widening their buckets takes about 20 ms each time."""

_QUARTER_BIT, _QUARTERS_OF_ONE = 21, 127 << 2
"""Bit position of the second mantissa bit of a float32, and the value of 1.0 shifted right by it."""

Lengths = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True)
class LayerKind:
    """The layer and cache that layers of one kind share."""

    layer: LayerSpec
    cache: CacheSpec

    def __hash__(self) -> int:
        return self._hash  # cached: hashing all fields takes longer than counting a batch

    @cached_property
    def _hash(self) -> int:
        return hash((self.layer, self.cache))


class Batch(NamedTuple):
    """One step of the engine, from its attention metadata: lengths and sizes, no tokens and no tensors.

    A tuple rather than a dataclass, because one is created in each step.
    ``prefix``: number of leading tokens whose pages the requests ``sharers`` have in common.
    ``cascade``: length of the prefix for which attention is computed only once; 0 for none.
    ``drafts``: maximum draft tokens per request; 0 without speculation. ``graph_mode``: the mode of vLLM; empty if
    unknown.
    """

    query_lens: Lengths
    seq_lens: Lengths
    padding_requests: int = 0
    padding_tokens: int = 0
    table_width: int = 0
    table_stride: int = 0
    prefix: int = 0
    sharers: tuple[int, ...] = ()
    has_null_pages: bool = False
    cascade: int = 0
    drafts: int = 0
    causal: bool = True
    graph_mode: str = ""


def batch_key(batch: Batch, widening: int) -> tuple[object, ...]:
    """Return a key that is equal for batches that count as the same; ``widening``: how often buckets were widened."""
    queries = (_buckets(batch.query_lens) >> widening) + (batch.query_lens > 1)
    cells = (queries << 16) + (_buckets(batch.seq_lens) >> widening)
    cells.sort()
    if widening:
        ends = np.append(np.flatnonzero(cells[1:] != cells[:-1]) + 1, cells.size)
        counts = np.diff(ends, prepend=0).astype(np.int32)
        lengths = cells[ends - 1].tobytes() + (_buckets(counts) >> widening).tobytes()
    else:
        lengths = cells.tobytes()
    numbers = (batch.padding_requests, batch.padding_tokens, batch.prefix, len(batch.sharers), batch.cascade)
    wide = tuple([(n.bit_length() << 2) >> widening if n else -1 for n in numbers]) if any(numbers) else ()
    return lengths, wide, batch.has_null_pages, batch.drafts, batch.causal, batch.graph_mode


@dataclass(slots=True)
class _Tally:
    calls: int
    batch: Batch


@dataclass(frozen=True)
class Counted:
    """A distinct batch of one kind of layer. ``calls``: calls of ``forward`` with it, or with batches like it."""

    kind: LayerKind
    batch: Batch
    calls: int


class Traffic:
    """The batches counted so far; ``most``: maximum distinct batches kept."""

    def __init__(self, most: int = MOST_IN_MEMORY) -> None:
        self._most = most
        self._widening = 0
        self._tallies: dict[tuple[LayerKind, tuple[object, ...]], _Tally] = {}
        self._random = random.Random(0)  # noqa: S311 (which real batch represents others is no secret)
        self.left_out: dict[str, int] = {}
        """Reasons why calls were not counted, with their number."""

    def add(self, batch: Batch, kinds: Iterable[tuple[LayerKind, int]]) -> None:
        """Count one step: a call of ``forward`` for each layer of each kind."""
        key = batch_key(batch, self._widening)
        for kind, layers in kinds:
            self._put((kind, key), batch, layers)
        while len(self._tallies) > self._most and self._widening < WIDEST:
            self._widening += 1
            self._tallies = self._widened(self._widening)
        while len(self._tallies) > self._most:
            dropped = self._tallies.pop(min(self._tallies, key=lambda each: self._tallies[each].calls))
            self.leave_out("there were too many distinct batches", dropped.calls)

    def leave_out(self, reason: str, calls: int) -> None:
        """Count calls that no case can describe."""
        self.left_out[reason] = self.left_out.get(reason, 0) + calls

    def counted(self, most: int) -> tuple[int, list[Counted]]:
        """Return how often buckets were widened to get at most ``most`` distinct batches, and these.

        The most frequent come first. Even with the widest buckets there may be more than ``most``.
        """
        widening, tallies = self._widening, dict(self._tallies)  # a copy: the engine goes on
        while len(tallies) > most and widening < WIDEST:
            widening += 1
            tallies = self._widened(widening)
        found = [Counted(kind, tally.batch, tally.calls) for (kind, _), tally in tallies.items()]
        return widening, sorted(found, key=lambda each: -each.calls)

    def _put(self, key: tuple[LayerKind, tuple[object, ...]], batch: Batch, calls: int) -> None:
        tally = self._tallies.get(key)
        if tally is None:
            self._tallies[key] = _Tally(calls, batch)
            return
        tally.calls += calls
        if self._random.random() * tally.calls < calls:
            tally.batch = batch

    def _widened(self, widening: int) -> dict[tuple[LayerKind, tuple[object, ...]], _Tally]:
        wide = Traffic(self._most)
        for (kind, _), tally in self._tallies.items():
            wide._put((kind, batch_key(tally.batch, widening)), tally.batch, tally.calls)
        return wide._tallies


def _buckets(lengths: Lengths) -> Lengths:
    """Return the bucket of each length: 0 for 1, with :data:`BUCKETS_PER_OCTAVE` buckets per octave."""
    buckets: Lengths = (lengths.astype(np.float32).view(np.int32) >> _QUARTER_BIT) - _QUARTERS_OF_ONE
    return buckets


def shared_prefix(pages: Lengths, full_pages: Lengths) -> tuple[int, tuple[int, ...]]:
    """Return how many leading pages the largest group of requests shares, and the indices of these requests.

    ``pages``: a row of page numbers for each request. ``full_pages``: number of pages of each request before the step's
    own tokens. Page 0 is the null page, which is never shared. A page counts only if all pages before it are shared, as
    in engines.
    """
    first = np.where(full_pages > 0, pages[:, 0], 0)
    ordered = np.sort(first)
    ordered = ordered[ordered > 0]
    if not (ordered[1:] == ordered[:-1]).any():
        return 0, ()
    ends = np.append(np.flatnonzero(ordered[1:] != ordered[:-1]) + 1, ordered.size)
    page = ordered[ends[np.argmax(np.diff(ends, prepend=0))] - 1]
    rows = np.flatnonzero(first == page)
    shared, beyond = 1, int(full_pages[rows].min()) + 1
    while beyond - shared > 1:
        middle = (shared + beyond) // 2
        column = pages[rows, middle - 1]
        shared, beyond = (middle, beyond) if (column == column[0]).all() else (shared, middle)
    return shared, tuple(rows.tolist())


def iter_lengths(batch: Batch) -> Iterator[tuple[int, int, int]]:
    """Yield ``(query_len, seq_len, shared prefix)`` of each request, in tokens."""
    sharers = set(batch.sharers)
    lengths = zip(batch.query_lens.tolist(), batch.seq_lens.tolist(), strict=True)
    for row, (query, total) in enumerate(lengths):
        yield query, total, batch.prefix if row in sharers else 0
