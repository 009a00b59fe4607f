"""Where tokens lie: the pages of requests, the keys that a row sees, and the random streams that choose them."""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from attncheck.cases.model import Case
from attncheck.errors import SpecError
from attncheck.harness.problem.sizes import naive_layer
from attncheck.reference import AttentionParams, PrefixMask, layer_params
from attncheck.reference.step_spec import DCPOptions, RequestSpec, SplitKVOptions

# Random integers that are equal on every machine and in every version of numpy and torch.
#
# Philox's raw 64-bit stream is fixed by its definition (Salmon et al. 2011), unlike the distributions drawn from it. So
# everything here derives from raw words by integer arithmetic.


class RandomStream:
    """A stream of random integers determined by ``parts`` (a run's seed, a case's hash, ...)."""

    def __init__(self, *parts: object) -> None:
        digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
        self._philox = np.random.Philox(key=int.from_bytes(digest[:16], "little"))

    def int8(self, *shape: int) -> Tensor:
        """Return an int8 tensor of the given shape, uniform over -127..127 (-128 becomes 0, so that the mean is 0)."""
        count = math.prod(shape)
        words = self._philox.random_raw((count + 7) // 8)
        values = np.asarray(words, dtype="<u8").view(np.int8)[:count].reshape(shape)
        return torch.from_numpy(np.where(values == -128, np.int8(0), values))

    def uniform(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return a tensor of the given shape, uniform over [-2, 2) in steps of 2**-30, to fill every tested mantissa.

        Float32 instead of float64 halves the memory; a half-precision dtype rounds both to the same numbers.
        """
        count = math.prod(shape)
        words = self._philox.random_raw((count + 1) // 2)
        values = np.asarray(words, dtype="<u8").view(np.int32)[:count].reshape(shape)
        return torch.from_numpy(values).to(dtype).mul_(2.0**-30)

    def integers(self, count: int, below: int) -> Tensor:
        """Return int64 ``[count]``, each in ``range(below)``."""
        words = np.asarray(self._philox.random_raw(count), dtype=np.uint64)
        # The bias of the remainder (below 2**-32) does not matter here.
        return torch.from_numpy((words >> np.uint64(1)).astype(np.int64) % below)

    def permutation(self, n: int) -> Tensor:
        """Return int64 ``[n]``: a random permutation of ``range(n)``."""
        words = np.asarray(self._philox.random_raw(n), dtype=np.uint64)
        return torch.from_numpy(np.argsort(words, kind="stable"))


# The keys each row sees, as a span, from the causal mask, the window and the chunks.
#
# No other harness module does this arithmetic, except the picture of `attncheck show`. Candidates have their own, and
# the reference has a predicate, :func:`attncheck.reference.visible`. Add a modifier that hides keys to all three; tests
# compare them.


def visible_span(
    params: AttentionParams,
    positions: Tensor,
    num_keys: Tensor | int,
    doc_range: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the first and the last key that rows at ``positions`` see; last < first if a row sees none.

    positions: int64 ``[q]``; negative for a row before the first key. num_keys: of the rows' requests, one number or
    ``[q]``. doc_range: first and last position of each row's own image span, ``[q]`` each; last < first without one.
    Both results are non-decreasing in the position. First keys beyond a window (``rswa_prefix_len``) are left out.

    >>> visible_span(AttentionParams(1, 1, 8, window=(2, 0)), torch.tensor([1, 5]), 9)
    (tensor([0, 3]), tensor([1, 5]))
    """
    left, right = params.window
    first = torch.zeros_like(positions)
    last = first + (num_keys - 1)
    if params.causal:
        last = torch.minimum(last, positions)
    if right >= 0:
        last = torch.minimum(last, positions + right)
    if left >= 0:
        first = torch.maximum(first, positions - left)
    if params.attn_chunk_size is not None:
        chunk = positions // params.attn_chunk_size
        first = torch.maximum(first, (chunk - params.attn_chunk_lookback) * params.attn_chunk_size)
        last = torch.minimum(last, (chunk + 1) * params.attn_chunk_size - 1)
    if doc_range is not None:
        start, end = doc_range
        has_range = start <= end
        first = torch.where(has_range, torch.minimum(first, start), first)
        last = torch.where(has_range, torch.maximum(last, end.clamp(max=num_keys - 1)), last)
    return first, last


@dataclass(frozen=True)
class Request:
    """One request of the batch: ``rows`` query rows at the end of ``num_keys`` keys, the first ``cached`` of them old.

    ``query_len``: its new tokens in this step; more than ``rows`` if only the last ones are computed (fast prefill).
    ``first_row`` and ``base``: indices of its first row and key in the batch. ``prefix``: its image spans and first
    keys.
    """

    rows: int
    query_len: int
    num_keys: int
    cached: int
    first_row: int
    base: int
    pages: tuple[int, ...] = ()
    prefix: PrefixMask = PrefixMask()  # noqa: RUF009 (frozen)

    @property
    def first_position(self) -> int:
        """Position of the first query row: rows are aligned to the end of the keys."""
        return self.num_keys - self.rows


# The page layout of a batch: pages drawn from a pool, block tables, and the parts into which a path cuts the keys.
#
# Pages are random, page 0 is never owned, and shared prefixes share pages. Table entries beyond a request's end are
# pages of others. A path that cuts the keys (common prefix, ranges, ranks) gives each part its own table over the one
# pool.

_SLACK = 2
"""Table entries after the longest request's pages."""


@dataclass(frozen=True)
class KeyPart:
    """Some keys of every request, attended in a separate call. ``is_aligned``: its last keys are those of the rows."""

    table: Tensor
    """int32 ``[R, M]``; entries beyond a request's end are pages that hold none of this part's keys."""
    lengths: tuple[int, ...]
    is_aligned: bool


@dataclass(frozen=True)
class PageLayout:
    """The page layout of a batch. The ``N`` keys of all requests are concatenated."""

    pages: tuple[tuple[int, ...], ...]
    """Every page a request owns."""
    block_table: Tensor
    """int32 ``[R, M]``"""
    key_slots: Tensor
    """int64 ``[N]``: the slot of each key in the pool, -1 without a pool."""
    num_blocks: int
    parts: tuple[KeyPart, ...] = ()
    """The parts to merge; empty if one call sees all keys."""
    part_of_key: Tensor | None = None
    """int64 ``[N]``: index into ``parts``."""


@dataclass(frozen=True)
class _Drawn:
    pages: tuple[tuple[int, ...], ...]
    num_blocks: int


class KeyPlaces(NamedTuple):
    """The request of each key and its position there, int64 ``[N]`` each."""

    request: Tensor
    position: Tensor


def key_places(lengths: Sequence[int]) -> KeyPlaces:
    """Return the places of the concatenated keys of requests with ``lengths`` keys; also usable for rows."""
    counts = np.asarray(lengths, dtype=np.int64)
    request = np.repeat(np.arange(len(counts)), counts)
    position = np.arange(len(request)) - np.repeat(counts.cumsum() - counts, counts)
    return KeyPlaces(torch.from_numpy(request), torch.from_numpy(position))


def no_pool(num_requests: int, num_keys: int) -> PageLayout:
    """Return the layout of a layer without a cache."""
    table = torch.zeros(num_requests, 1).int()
    slots = torch.full((num_keys,), -1)
    return PageLayout(((),) * num_requests, table, slots, 0)


def lay_out(case: Case, lengths: Sequence[int], places: KeyPlaces, stream: RandomStream) -> Callable[[], PageLayout]:
    """Draw the pages of requests with ``lengths`` keys; call the result to draw foreign page ids and get the layout.

    ``places``: those of the keys. Raise SpecError if the pool cannot hold the batch.
    """
    options = case.batch.path.options
    if isinstance(options, DCPOptions):
        return _lay_out_ranks(case, options, lengths, stream)
    size = case.cache.block_size
    specs = list(case.batch)
    shared = [spec.shared_prefix // size for spec in specs]
    drawn = _draw_pages(case, [-(-n // size) for n in lengths], shared, stream)

    def finish() -> PageLayout:
        table = _block_table(drawn, stream, case.batch.block_table.extra_columns)
        slots = table[places.request, places.position // size].long() * size + places.position % size
        if case.batch.block_table.null_pages:
            table = _without_freed_pages(case, table)
        parts, part_of_key = _page_parts(case, specs, lengths, table)
        return PageLayout(drawn.pages, table, slots, drawn.num_blocks, parts, part_of_key)

    return finish


def _draw_pages(case: Case, counts: Sequence[int], shared: Sequence[int], stream: RandomStream) -> _Drawn:
    """Draw ``counts`` pages for each request, the first ``shared`` of which are common to all requests that share."""
    run = case.cache.pages_per_block  # a request owns whole blocks, which are runs of pages
    counts, shared = ([-(-pages // run) for pages in each] for each in (counts, shared))
    prefix = max(shared)
    needed = prefix + sum(c - s for c, s in zip(counts, shared, strict=True))
    first = -(-(case.cache.first_block or 1) // run)
    pool = case.cache.num_blocks
    num_blocks = first + needed + needed // 2 + 3 if pool is None else pool // run
    if num_blocks - first < needed:
        raise SpecError(
            f"the batch needs {needed * run} pages from page {first * run} on",
            field="num_blocks",
            value=num_blocks * run,
            allowed=f"at least {(first + needed) * run}",
        )
    # Pages of a very large pool come from a window of it: shuffling millions of ids would test nothing more.
    choice = min(num_blocks - first, 2 * needed + 64)
    ids = (stream.permutation(choice)[:needed] + first).tolist()
    common = ids[:prefix]
    free = iter(ids[prefix:])
    blocks = ((*common[:own], *islice(free, count - own)) for count, own in zip(counts, shared, strict=True))
    pages = (tuple(block * run + page for block in own for page in range(run)) for own in blocks)
    return _Drawn(tuple(pages), num_blocks * run)


def _block_table(drawn: _Drawn, stream: RandomStream, extra_columns: int = 0) -> Tensor:
    width = max(map(len, drawn.pages)) + _SLACK + extra_columns
    table = stream.integers(len(drawn.pages) * width, drawn.num_blocks).reshape(len(drawn.pages), width)
    request, column = key_places([len(pages) for pages in drawn.pages])
    own = torch.tensor(list(chain.from_iterable(drawn.pages)), dtype=torch.int64)
    # A request's own page in the slack would hide a read beyond the end.
    first_id = torch.arange(len(table)) * drawn.num_blocks  # makes ids of different requests differ
    is_own = torch.isin(table + first_id[:, None], own + first_id[request])
    table.masked_fill_(is_own, 0)[request, column] = own
    return table.int()


def layout_of_layer(layout: PageLayout, case: Case) -> PageLayout:
    """Return the layout for a case with another layer; it differs only if the block table has null pages."""
    if not case.batch.block_table.null_pages:
        return layout
    table = layout.block_table.clone()
    for row, own in zip(table, layout.pages, strict=True):
        row[: len(own)] = row.new_tensor(own)
    return replace(layout, block_table=_without_freed_pages(case, table))


def _without_freed_pages(case: Case, table: Tensor) -> Tensor:
    """Return the table with page 0 instead of pages that lie before the window or chunk of every row and layer.

    A cache manager frees such pages and may give them to other requests.
    """
    lengths = torch.tensor([spec.total_len for spec in case.batch])
    first_rows = torch.tensor([spec.context_len for spec in case.batch])
    first_keys = torch.stack(
        [visible_span(layer_params(naive_layer(layer)), first_rows, lengths)[0] for layer in (case.layer, *case.layers)]
    ).amin(0)
    freed_blocks = first_keys // (case.cache.block_size * case.cache.pages_per_block)
    is_freed = torch.arange(table.shape[1]) < (freed_blocks * case.cache.pages_per_block)[:, None]
    return table.masked_fill(is_freed, 0)


def _slots(pages: Sequence[int], positions: Tensor, size: int) -> Tensor:
    own = torch.tensor(pages or (0,), dtype=torch.int64)
    return own[positions // size] * size + positions % size


def _page_parts(
    case: Case, specs: Sequence[RequestSpec], lengths: Sequence[int], table: Tensor
) -> tuple[tuple[KeyPart, ...], Tensor | None]:
    """Return the parts on whole-page boundaries; all but the last lie within the context of their request."""
    size, path = case.cache.block_size, case.batch.path
    if path.name == "cascade":
        common = min(spec.shared_prefix for spec in specs) // size
        edges = [[0, common] for _ in specs]
    elif isinstance(path.options, SplitKVOptions):
        n = path.options.parts
        whole = [max(0, spec.context_len) // size for spec in specs]
        edges = [[pages * i // n for i in range(n)] for pages in whole]
    else:
        return (), None
    number = len(edges[0])
    parts = []
    for part in range(number):
        is_last = part == number - 1
        ends = [-(-n // size) if is_last else edge[part + 1] for edge, n in zip(edges, lengths, strict=True)]
        starts = [edge[part] for edge in edges]
        counts = tuple(min(n, end * size) - start * size for n, start, end in zip(lengths, starts, ends, strict=True))
        parts.append(KeyPart(_columns(table, starts, ends), counts, is_last))
    part_of_key = [torch.full((n,), part) for part, n in _by_request([part.lengths for part in parts])]
    return tuple(parts), torch.cat(part_of_key)


def _by_request(lengths: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return (part, number of keys), request after request; ``lengths``: per part, then per request."""
    return [(part, own[request]) for request in range(len(lengths[0])) for part, own in enumerate(lengths)]


def _columns(table: Tensor, starts: Sequence[int], ends: Sequence[int]) -> Tensor:
    """Return columns ``start .. end - 1`` of each row, followed by page ids that are not among them."""
    width = max(end - start for start, end in zip(starts, ends, strict=True)) + _SLACK
    part = torch.zeros(len(table), width, dtype=table.dtype)
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        beyond = table[row, end:][: width - (end - start)]
        own = torch.cat([table[row, start:end], beyond])
        part[row, : len(own)] = own
    return part


def _lay_out_ranks(
    case: Case, options: DCPOptions, lengths: Sequence[int], stream: RandomStream
) -> Callable[[], PageLayout]:
    """Lay out context parallelism: rank ``(p // interleave) % size`` holds position ``p``, in the ``rank``-th pool.

    The ranks' pools are consecutive. A decode's own key is distributed like the others. If a request has more rows, or
    on the path ``ranks``, only its context is distributed. Its new keys are in an additional pool, for the rows that
    every rank attends to itself.
    """
    size, ranks, run = case.cache.block_size, options.size, options.interleave
    specs = list(case.batch)
    is_decode = case.batch.path.name == "dcp" and all(spec.query_len == 1 for spec in specs)
    spread = [n if is_decode else max(0, spec.context_len) for spec, n in zip(specs, lengths, strict=True)]
    new = [n - s for n, s in zip(lengths, spread, strict=True)]
    shards = [-(-_longest_shard(n, ranks, run) // size) for n in spread]
    counts = [own + -(-n // size) for own, n in zip(shards, new, strict=True)]
    drawn = _draw_pages(case, counts, [0] * len(specs), stream)

    def finish() -> PageLayout:
        table, area = _block_table(drawn, stream), drawn.num_blocks
        slots, owners, pages = [], [], []
        for own, count, n, added in zip(drawn.pages, shards, spread, new, strict=True):
            rank, local = _local(torch.arange(n), ranks, run)
            slots.append(_slots(own[:count], local, size) + rank * area * size)
            slots.append(_slots(own[count:], torch.arange(added), size) + ranks * area * size)
            owners += [rank, torch.full((added,), ranks)]
            pages.append(tuple(r * area + page for r in range(ranks) for page in own[:count]))
            pages[-1] += tuple(ranks * area + page for page in own[count:])
        part_of_key = torch.cat(owners)
        parts = [
            KeyPart(_columns(table, [0] * len(specs), shards) + r * area, _held(part_of_key, lengths, r), is_decode)
            for r in range(ranks)
        ]
        if not is_decode:
            ends = [len(own) for own in drawn.pages]
            parts.append(KeyPart(_columns(table, shards, ends) + ranks * area, tuple(new), is_aligned=True))
        return PageLayout(tuple(pages), parts[0].table, torch.cat(slots), len(parts) * area, tuple(parts), part_of_key)

    return finish


def lay_out_rank(
    case: Case, options: DCPOptions, rank: int, lengths: Sequence[int], stream: RandomStream
) -> PageLayout:
    """Return the layout on one rank, on which the keys of other ranks have slot -1.

    Every rank has the same block table: a page of the table has ``block_size`` keys on each rank.
    """
    size, ranks, run = case.cache.block_size, options.size, options.interleave
    counts = [-(-_longest_shard(n, ranks, run) // size) for n in lengths]
    drawn = _draw_pages(case, counts, [0] * len(counts), stream)
    table = _block_table(drawn, stream, case.batch.block_table.extra_columns)
    slots = []
    for own, n in zip(drawn.pages, lengths, strict=True):
        holder, local = _local(torch.arange(n), ranks, run)
        slots.append(torch.where(holder == rank, _slots(own, local, size), -1))
    return PageLayout(drawn.pages, table, torch.cat(slots), drawn.num_blocks)


def _local(positions: Tensor, ranks: int, run: int) -> tuple[Tensor, Tensor]:
    """Return (rank, index on that rank) of each position."""
    return positions // run % ranks, positions // (run * ranks) * run + positions % run


def _longest_shard(length: int, ranks: int, run: int) -> int:
    """Return the number of keys on the first rank, which holds the most."""
    return length // (run * ranks) * run + min(length % (run * ranks), run)


def _held(part_of_key: Tensor, lengths: Sequence[int], part: int) -> tuple[int, ...]:
    return tuple(int((keys == part).sum()) for keys in part_of_key.split(list(lengths)))
