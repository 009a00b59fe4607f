"""Recorded traffic as a suite of cases."""

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from attncheck.cases.consistency import check_meaning, implied_path
from attncheck.cases.model import Case
from attncheck.cases.yaml_text import suite_yaml
from attncheck.errors import QuestionError, SpecError
from attncheck.reference.spec import LayerSpec
from attncheck.reference.step_spec import (
    BatchSpec,
    BlockTableSpec,
    CacheSpec,
    PaddingSpec,
    PathSpec,
    RequestSpec,
    SpecDecodeOptions,
)

# Settings of a recording, passed to an engine's processes as environment variables.

FILE = "ATTNCHECK_RECORD"
"""Variable with the path of the file to write; if it is unset, nothing is recorded."""

EVERY = "ATTNCHECK_RECORD_EVERY"
CASES = "ATTNCHECK_RECORD_CASES"

DEFAULT_CASES = 100


@dataclass(frozen=True)
class RecordingSettings:
    """``every``: count at most one in this many batches. ``most_cases``: maximum distinct batches in the file."""

    path: Path
    every: int = 1
    most_cases: int = DEFAULT_CASES

    def __post_init__(self) -> None:
        for name, number in (("every", self.every), ("cases", self.most_cases)):
            if number < 1:
                raise QuestionError(f"recording: {name} is {number}; give a whole number above 0")

    def environment(self) -> dict[str, str]:
        """Return the settings as environment variables; the path is absolute, since processes change folders."""
        return {FILE: str(self.path.absolute()), EVERY: str(self.every), CASES: str(self.most_cases)}


def settings_of(environment: Mapping[str, str]) -> RecordingSettings | None:
    """Return the settings in these variables, or None if they request no recording.

    Raises:
        QuestionError: a number is not a whole number above 0.
    """
    if not environment.get(FILE):
        return None
    numbers = {}
    for name, default in ((EVERY, "1"), (CASES, str(DEFAULT_CASES))):
        text = environment.get(name, default)
        if not text.isdecimal():
            raise QuestionError(f"{name} is {text!r}; give a whole number above 0")
        numbers[name] = int(text)
    return RecordingSettings(Path(environment[FILE]), numbers[EVERY], numbers[CASES])


# Counts distinct batches in bounded memory.
#
# Two batches count as the same if their requests fall into the same buckets of lengths, in any order. The buckets
# double in width whenever there are too many distinct batches. Each distinct batch keeps one of the real batches it
# represents, sampled uniformly.

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
        self._random = random.Random(0)
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
    shared = 1
    beyond = int(full_pages[rows].min()) + 1
    while beyond - shared > 1:
        middle = (shared + beyond) // 2
        column = pages[rows, middle - 1]
        shared, beyond = (middle, beyond) if (column == column[0]).all() else (shared, middle)
    return shared, tuple(rows.tolist())


# Writes counted batches as a case file: a case with a weight for each, and a description of the recording.

_SPARE_COLUMNS = 2
"""Columns that a case's block table has by default after those of the longest request."""


def recorded_text(name: str, traffic: Traffic, most_cases: int, about: str) -> str:
    """Return the case file of the counted batches, or "" without cases; ``about``: the origin of the recording.

    A distinct batch that no case can express is left out, and the description of the file gives the reason.
    """
    widening, counted = traffic.counted(most_cases)
    left_out = dict(traffic.left_out)
    cases: list[Case] = []
    for each in counted[:most_cases]:
        found = _case(name, len(cases) + 1, each)
        if isinstance(found, Case):
            cases.append(found)
        else:
            left_out[found] = left_out.get(found, 0) + each.calls
    if beyond := sum(each.calls for each in counted[most_cases:]):
        left_out["beyond the maximum of cases"] = beyond
    calls = sum(each.calls for each in counted) + sum(traffic.left_out.values())
    description = " ".join([about, *_sentences(calls, len(cases), widening, left_out)])
    return suite_yaml(name, description, cases) if cases else ""


def _sentences(calls: int, cases: int, widening: int, left_out: dict[str, int]) -> Iterator[str]:
    per_octave = BUCKETS_PER_OCTAVE / 2**widening
    width = f"1/{per_octave:g} of an octave" if per_octave > 1 else f"{1 / per_octave:g} octaves"
    yield f"{calls} calls of forward, {cases} distinct batches; weight: how many calls a case represents."
    yield f"Lengths within {width.replace('1 octaves', 'an octave')} of each other count as the same;"
    yield "each case is one of the real batches that it counts."
    if left_out:
        reasons = "; ".join(f"{count} calls: {reason}" for reason, count in left_out.items())
        yield f"Not in this file: {reasons}."


def _case(suite: str, number: int, counted: Counted) -> Case | str:
    layer, cache, batch = counted.kind.layer, counted.kind.cache, counted.batch
    if not batch.causal and layer.is_causal:
        layer = replace(layer, causal=False)
    reason = ""
    for path in _paths(layer, batch):
        try:
            spec = _batch_spec(layer, cache, batch, path)
            check_meaning(layer, cache, spec)
        except SpecError as error:
            reason = reason or f"{error.field}: {error.reason}"
            continue
        return Case(
            suite=suite,
            id=f"{_kind_of_step(batch)}-{number:03d}",
            layer=layer,
            cache=cache,
            batch=spec,
            weight=counted.calls,
            description=f"graph mode {batch.graph_mode}" if batch.graph_mode else "",
        )
    return reason


def _paths(layer: LayerSpec, batch: Batch) -> Iterator[PathSpec]:
    """Yield the paths by which a case could run the batch, the most specific first."""
    if batch.cascade:
        yield PathSpec(name="cascade")
    if batch.drafts:
        drafts = SpecDecodeOptions(num_speculative_tokens=batch.drafts)
        yield PathSpec(name="spec_decode", options=drafts)
    yield implied_path(layer)


def _kind_of_step(batch: Batch) -> str:
    if (batch.query_lens == 1).all():
        return "decode"
    if batch.drafts and (batch.query_lens <= 1 + batch.drafts).all():
        return "verify"
    return "mixed" if (batch.query_lens == 1).any() else "prefill"


def _batch_spec(layer: LayerSpec, cache: CacheSpec, batch: Batch, path: PathSpec) -> BatchSpec:
    """Return the batch for a case; equal neighbouring requests become one entry with a count.

    Raises:
        SpecError: no case can express the batch.
    """
    requests: list[RequestSpec] = []
    is_cascade = path.name == "cascade"
    prefix = batch.cascade if is_cascade else batch.prefix
    sharers = set(range(batch.query_lens.size) if is_cascade else batch.sharers)
    for row, (query, total) in enumerate(zip(batch.query_lens.tolist(), batch.seq_lens.tolist(), strict=True)):
        shared = prefix if layer.has_cache and row in sharers else 0
        request = RequestSpec(query_len=query, seq_len=total, shared_prefix=shared)
        if requests and replace(requests[-1], count=1) == request:
            requests[-1] = replace(requests[-1], count=requests[-1].count + 1)
        else:
            requests.append(request)
    longest = -(-int(batch.seq_lens.max()) // cache.block_size)
    table = BlockTableSpec(
        extra_columns=max(0, batch.table_width - longest - _SPARE_COLUMNS),
        row_gap=max(0, batch.table_stride - batch.table_width),
        null_pages=batch.has_null_pages and bool(layer.key_limits),
    )
    return BatchSpec(
        requests=tuple(requests),
        padding=PaddingSpec(requests=batch.padding_requests, tokens=batch.padding_tokens),
        block_table=table if layer.has_cache and not is_cascade else BlockTableSpec(),
        path=path,
    )
