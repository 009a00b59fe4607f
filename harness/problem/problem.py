"""The problem of a case: tensors, pages and requests that a backend is given."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from attncheck.backends.dtypes import DTYPES
from attncheck.cases.model import Case
from attncheck.harness.problem.chosen_keys import draw_topk_indices
from attncheck.harness.problem.pages import (
    KeyPart,
    KeyPlaces,
    PageLayout,
    RandomStream,
    Request,
    key_places,
    lay_out,
    lay_out_rank,
    no_pool,
    visible_span,
)
from attncheck.harness.problem.queries import CHANNELS, LEVEL_CHANNEL, ancestors, needle_queries, sign
from attncheck.harness.problem.sizes import SMALL_POOL, naive_layer, stored_sizes
from attncheck.harness.problem.storage import (
    Storage,
    UpProjections,
    key_storage,
    make_up_projections,
    query_storage,
    value_storage,
)
from attncheck.reference import PrefixMask, layer_params
from attncheck.reference.spec import AttentionType, LayerSpec
from attncheck.reference.step_spec import (
    CacheSpec,
    DCPOptions,
    FastPrefillOptions,
    PaddingSpec,
    RequestSpec,
    TreeOptions,
)

DEFAULT_INPUTS = frozenset({"needles", "large_scores", "equal_scores", "coordinates", "views"})
"""Input patterns planted if a case names none."""


class Rows(NamedTuple):
    """The rows of a batch in the layer's dtype, with the shapes of ``Problem``."""

    query: Tensor
    keys: Tensor
    values: Tensor
    up_projections: UpProjections | None
    topk_indices: Tensor | None = None


def planted_inputs(case: Case) -> frozenset[str]:
    """Return the names of the input patterns planted in the problems of ``case``."""
    return DEFAULT_INPUTS if case.inputs is None else frozenset(case.inputs)


def draw_rows(case: Case, requests: Sequence[Request], places: KeyPlaces, stream: RandomStream) -> Rows:
    """Return new keys and values, and queries aligned to the keys. ``places``: request and position of each key."""
    layer, inputs = case.layer, planted_inputs(case)
    shape = len(places.request), layer.num_kv_heads
    keys, values = (
        _draw(stream, kind, places, (*shape, size), inputs, storage(layer, case.cache))
        for kind, size, storage in zip(("key", "value"), stored_sizes(layer), (key_storage, value_storage), strict=True)
    )
    if "negative_scores" in inputs:
        leveled, storage = (keys, key_storage) if layer.mla is None else (values, value_storage)
        level = torch.full_like(leveled[..., -1:], LEVEL_CHANNEL, dtype=torch.float64)
        leveled[..., -1:] = storage(layer, case.cache).storable(level)
    _share_prefixes(case, requests, keys, values)
    up_projections = make_up_projections(layer, DTYPES[layer.dtype])
    naive = naive_layer(layer)
    needles = keys if up_projections is None else up_projections.keys(keys, values)
    if not len(keys):  # queries need a key even if no row sees one
        needles = needles.new_ones(1, naive.num_kv_heads, naive.head_size)
    options = case.batch.path.options
    tree = ancestors(options.parents) if isinstance(options, TreeOptions) else None
    topk_indices = _chosen_keys(case, requests, stream)
    query = needle_queries(naive, needles, requests, case.cache.block_size, inputs, tree, topk_indices)
    return Rows(query_storage(layer, case.cache).storable(query), keys, values, up_projections, topk_indices)


def mix_rows(given: Rows, case: Case, requests: Sequence[Request], stream: RandomStream) -> Rows:
    """Return as many rows as ``case`` needs, drawn from ``given``, the rows of a batch of the same layer and cache."""
    num_rows, num_keys = (sum(sizes) for sizes in zip(*((r.rows, r.num_keys) for r in requests), strict=True))
    query, keys, values = (
        rows.index_select(0, stream.integers(count, len(rows)))
        for rows, count in ((given.query, num_rows), (given.keys, num_keys), (given.values, num_keys))
    )
    _share_prefixes(case, requests, keys, values)
    return Rows(query, keys, values, given.up_projections, _chosen_keys(case, requests, stream))


def _chosen_keys(case: Case, requests: Sequence[Request], stream: RandomStream) -> Tensor | None:
    index_topk = case.layer.index_topk
    return None if index_topk is None else draw_topk_indices(requests, index_topk, case.cache.block_size, stream)


def _draw(
    stream: RandomStream,
    kind: str,
    places: KeyPlaces,
    shape: tuple[int, int, int],
    inputs: frozenset[str],
    storage: Storage,
) -> Tensor:
    """Return rows in the layer's dtype that the cache can store exactly."""
    rows = stream.uniform(*shape, dtype=torch.float64 if storage.is_fp8 or storage.coded_rows else torch.float32)
    if "coordinates" in inputs and shape[-1] >= CHANNELS:
        sign(rows, kind, *places, storage.smallest)
    return storage.storable(rows)


def _share_prefixes(case: Case, requests: Sequence[Request], keys: Tensor, values: Tensor) -> None:
    """Copy the rows of the longest shared prefix to all requests that share its pages, in place."""
    shared = [spec.shared_prefix for spec in case.batch]
    origin = requests[shared.index(max(shared))].base
    for n, request in zip(shared, requests, strict=True):
        if not n or request.base == origin:
            continue
        for rows in (keys, values):
            rows[request.base : request.base + n] = rows[origin : origin + n].clone()


# A case as tensors, laid out as by a serving engine, and bitwise equal on every machine.
#
# A :class:`Problem` is the input alone: rows, keys and their slots in a pool of pages. All tensors are on the CPU; the
# driver copies them to the device.


@dataclass(frozen=True)
class Problem:
    """A case as tensors: ``T`` rows without padding, ``N`` concatenated keys of all requests, in the layer's dtype."""

    case: Case
    seed: int
    requests: tuple[Request, ...]
    query: Tensor
    """``[T, H, D]``; of a latent cache ``[T, H, P + E]``. A layer with ``query_quant`` gets it as codes."""
    keys: Tensor
    """``[N, Hkv, D]``: request r's keys are ``base .. base + num_keys - 1``; of a latent cache ``[N, 1, L]``."""
    values: Tensor
    """``[N, Hkv, Dv]``; of a latent cache ``[N, 1, E]``, the rotated parts."""
    layout: PageLayout
    up_projections: UpProjections | None = None
    """The weights that turn latent rows into keys and values; None for every other layer."""
    topk_indices: Tensor | None = None
    """int32 ``[T, index_topk]``: positions of the keys that each row sees, -1 for none; None without an indexer."""
    dcp_local_seq_lens: tuple[int, ...] | None = None
    """How many keys of each request this rank holds; None unless the problem is that of one rank."""

    @property
    def block_table(self) -> Tensor:
        """int32 ``[R, M]``, without padding requests; entries beyond a request's end are pages it does not own."""
        return self.layout.block_table

    @property
    def key_slots(self) -> Tensor:
        """int64 ``[N]``: the slot of each key in the pool, -1 without a pool, or if another rank holds the key."""
        return self.layout.key_slots

    @property
    def num_blocks(self) -> int:
        """Pages in the pool."""
        return self.layout.num_blocks

    @property
    def parts(self) -> tuple[KeyPart, ...]:
        """The parts whose results are merged; empty if one call sees all keys."""
        return self.layout.parts

    @cached_property
    def tree(self) -> Tensor | None:
        """Bool ``[Q, Q]``: which new key each row may see if drafts form a tree; None without a tree."""
        options = self.case.batch.path.options
        return ancestors(options.parents) if isinstance(options, TreeOptions) else None

    @cached_property
    def prefixes(self) -> tuple[PrefixMask, ...]:
        """The image spans and first keys of each request; empty if none has any."""
        masks = tuple(request.prefix for request in self.requests)
        return masks if any(mask != PrefixMask() for mask in masks) else ()

    @property
    def layer(self) -> LayerSpec:
        """The case's layer."""
        return self.case.layer

    @property
    def cache(self) -> CacheSpec:
        """The case's cache."""
        return self.case.cache

    @property
    def dtype(self) -> torch.dtype:
        """The layer's dtype."""
        return DTYPES[self.layer.dtype]

    @property
    def output_size(self) -> int:
        """``Dv``: head size of the output."""
        return naive_layer(self.layer).value_head_size

    @property
    def has_pool(self) -> bool:
        """Whether the layer attends over a paged cache; encoders do not."""
        return self.layer.has_cache

    @property
    def is_cross(self) -> bool:
        """Whether decoder rows attend to an encoder's keys."""
        return self.layer.attn_type == AttentionType.ENCODER_DECODER

    @property
    def writes_nothing(self) -> bool:
        """Whether another layer fills the cache that this layer reads."""
        return shares_cache(self.case)

    @property
    def inputs(self) -> frozenset[str]:
        """Names of the input patterns planted in this problem."""
        return planted_inputs(self.case)

    @cached_property
    def cu_seqlens_q(self) -> Tensor:
        """int64 ``[R + 1]``: first row of each request, and the end."""
        return _starts([r.rows for r in self.requests])

    @cached_property
    def cu_seqlens_k(self) -> Tensor:
        """int64 ``[R + 1]``: first key of each request, and the end."""
        return _starts([r.num_keys for r in self.requests])

    @cached_property
    def new_keys(self) -> Tensor:
        """int64: indices into ``keys`` of what this step writes, in request order; -1 for rows before position 0."""
        parts = []
        for r in self.requests:
            before = np.full(0 if self.is_cross or self.writes_nothing else max(0, -r.first_position), -1)
            parts += [before, np.arange(r.base + r.cached, r.base + r.num_keys)]
        return torch.from_numpy(np.concatenate(parts))

    @cached_property
    def old_keys(self) -> Tensor:
        """int64: indices into ``keys`` of what is in the cache before the step."""
        return torch.from_numpy(np.concatenate([np.arange(r.base, r.base + r.cached) for r in self.requests]))

    @cached_property
    def owned_slots(self) -> Tensor:
        """Sorted int64: every slot that holds a request's key."""
        owned: Tensor = self.key_slots[self.key_slots >= 0].unique()
        return owned

    @cached_property
    def written_keys(self) -> Tensor:
        """int64: those of ``new_keys`` that have a slot in the pool."""
        new = self.new_keys[self.new_keys >= 0]
        return new[self.key_slots[new] >= 0]

    def passed_query(self, query: Tensor) -> Tensor:
        """Return query rows ``[n, H, D]`` in the layer's dtype as a backend gets them: as codes for ``query_quant``."""
        storage = query_storage(self.layer, self.cache)
        return storage.codes(query).view(storage.held) if storage.is_fp8 else query

    def in_pool_of(self, num_blocks: int) -> "Problem":
        """Return the problem over a pool of ``num_blocks`` pages; its requests keep their pages."""
        if num_blocks == self.num_blocks:
            return self
        return replace(self, layout=replace(self.layout, num_blocks=num_blocks))

    def row_name(self, row: int) -> str:
        """Return a readable name of a query row: its request and position, or "padding"."""
        for index, r in enumerate(self.requests):
            if r.first_row <= row < r.first_row + r.rows:
                return f"request {index}, position {r.first_position + row - r.first_row}"
        return "padding"

    def slot_name(self, slot: int) -> str:
        """Return a readable name of a slot: its page, offset and owner."""
        block, offset = divmod(slot, self.cache.block_size)
        owner = "owned by no request"
        (hits,) = torch.nonzero(self.key_slots == slot, as_tuple=True)
        if len(hits):
            request = int(torch.searchsorted(self.cu_seqlens_k, hits[0], right=True)) - 1
            owner = f"request {request}, position {int(hits[0]) - self.requests[request].base}"
        return f"slot {slot} (page {block}, offset {offset}; {owner})"


def build_problem(case: Case, seed: int, rows_of: Problem | None = None) -> Problem:
    """Return the problem of ``case`` for ``seed``. Raise SpecError if the pool cannot hold the batch.

    ``rows_of``: a problem of the same layer and cache, from which queries, keys and values are drawn. This takes a
    fraction of the time, but no query is aligned to a key: it is for steps whose results are not judged.
    """
    # Without drawing rows, hashing the case would take as long as everything else.
    stream = RandomStream(seed, *((case.hash,) if rows_of is None else (rows_of.case.hash, case.id)))
    layer = case.layer
    requests = tuple(place_requests(case))
    lengths = [request.num_keys for request in requests]
    places = key_places(lengths)
    finish_layout = (
        lay_out(case, lengths, places, stream) if layer.has_cache else lambda: no_pool(len(lengths), sum(lengths))
    )
    if rows_of is None or not len(rows_of.keys):
        rows = draw_rows(case, requests, places, stream)
    else:
        given = Rows(rows_of.query, rows_of.keys, rows_of.values, rows_of.up_projections)
        rows = mix_rows(given, case, requests, stream)
    layout = finish_layout()
    return Problem(
        case=case,
        seed=seed,
        requests=tuple(replace(r, pages=own) for r, own in zip(requests, layout.pages, strict=True)),
        query=rows.query,
        keys=rows.keys,
        values=rows.values,
        layout=layout,
        up_projections=rows.up_projections,
        topk_indices=rows.topk_indices,
    )


def ranks_of(case: Case) -> DCPOptions:
    """Return the options of a case of the path ``ranks``. Raise TypeError for a path without ranks."""
    if not isinstance(case.batch.path.options, DCPOptions):
        raise TypeError(f"{case.key} has no ranks")
    return case.batch.path.options


def rank_problem(problem: Problem, rank: int) -> Problem:
    """Return the problem of one rank of the path ``ranks``: its query heads, all keys, and the slots of its keys.

    Raise SpecError if the pool cannot hold the batch.
    """
    case, options = problem.case, ranks_of(problem.case)
    heads = case.layer.num_heads // options.size
    case = replace(case, layer=replace(case.layer, num_heads=heads))
    lengths = [request.num_keys for request in problem.requests]
    stream = RandomStream(problem.seed, case.hash, "ranks")  # the same on every rank
    layout = lay_out_rank(case, options, rank, lengths, stream)
    held = [int((slots >= 0).sum()) for slots in layout.key_slots.split(lengths)]
    return replace(
        problem,
        case=case,
        query=problem.query[:, rank * heads : (rank + 1) * heads],
        requests=tuple(replace(r, pages=own) for r, own in zip(problem.requests, layout.pages, strict=True)),
        layout=layout,
        dcp_local_seq_lens=tuple(held),
    )


def shares_cache(case: Case) -> bool:
    """Return whether another layer fills the cache that the layer reads; always so in fast prefill."""
    return case.layer.kv_sharing or isinstance(case.batch.path.options, FastPrefillOptions)


def place_requests(case: Case) -> Iterator[Request]:
    """Yield the requests of the batch without pages; their rows and keys are concatenated."""
    row, base = 0, 0
    for spec in case.batch:
        request = replace(request_of(case, spec), first_row=row, base=base)
        yield request
        row = row + request.rows
        base = base + request.num_keys


def request_of(case: Case, spec: RequestSpec) -> Request:
    """Return one request as if it were the first of the batch, without pages."""
    num_keys = spec.num_keys(case.layer)
    if shares_cache(case):
        cached = num_keys
    elif case.layer.attn_type == AttentionType.ENCODER_DECODER:
        # Encoder rows are written on the request's first decoder step, when it has no context yet.
        cached = num_keys if spec.context_len > 0 else 0
    else:
        cached = max(0, spec.context_len)
    prefix = PrefixMask(spec.mm_req_doc_ranges, spec.rswa_prefix_len)
    return Request(spec.num_rows(case.batch.path), spec.query_len, num_keys, cached, first_row=0, base=0, prefix=prefix)


def _starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


# The requests of a problem arranged differently: reordered, a subset, in other pages, or under a wider block table.
#
# Rows and keys are the problem's own, so that its truth holds for them.


@dataclass(frozen=True)
class Arrangement:
    """How a batch is composed of the requests of a problem.

    ``which``: the requests, in order; a request may occur twice only with ``elsewhere``. ``elsewhere``: pages are drawn
    again; repeated requests need a larger pool. ``spare_columns``: columns appended to the block table, whose entries
    are the null page. ``padding`` and ``cache``: None for the problem's; another size of pages needs ``elsewhere``.
    """

    which: tuple[int, ...]
    elsewhere: bool = False
    spare_columns: int = 0
    padding: PaddingSpec | None = None
    cache: CacheSpec | None = None

    @classmethod
    def of_all(cls, problem: Problem, cache: CacheSpec | None = None) -> "Arrangement":
        """Return the arrangement of all requests in other pages, of the problem's cache or another one."""
        return cls(tuple(range(len(problem.requests))), elsewhere=True, cache=cache)

    def rows_of(self, problem: Problem) -> Tensor:
        """Return int64 ``[T]``: the problem's row at each row of the batch."""
        own = [problem.requests[i] for i in self.which]
        return _ranges([(request.first_row, request.rows) for request in own])


def arranged(problem: Problem, how: Arrangement) -> Problem:
    """Return the problem of such a batch, with the same rows and keys. Raise SpecError if the pool is too small."""
    case, specs = problem.case, [replace(spec, count=1) for spec in problem.case.batch]
    batch = replace(
        case.batch,
        requests=tuple(specs[i] for i in how.which),
        padding=case.batch.padding if how.padding is None else how.padding,
    )
    # The case's own pool has no room for repeated requests if it fits the batch exactly.
    is_repeated = len(set(how.which)) < len(how.which)
    cache = how.cache or (case.cache.unplaced if is_repeated else case.cache)
    other = replace(case, batch=batch, cache=cache)
    own = [problem.requests[i] for i in how.which]
    rows = how.rows_of(problem)
    keys = _ranges([(request.base, request.num_keys) for request in own])
    layout = _selected(problem.layout, how.which, keys)
    if problem.has_pool and how.elsewhere:
        lengths = [request.num_keys for request in own]
        stream = RandomStream(problem.seed, case.hash, "elsewhere", how.which)
        layout = lay_out(other, lengths, key_places(lengths), stream)()
    if problem.has_pool and how.spare_columns and not layout.parts:
        spare = layout.block_table.new_zeros(len(own), how.spare_columns)
        layout = replace(layout, block_table=torch.cat([layout.block_table, spare], dim=1))
    placed = zip(place_requests(other), layout.pages, strict=True)
    return replace(
        problem,
        case=other,
        requests=tuple(replace(request, pages=pages) for request, pages in placed),
        query=problem.query[rows],
        keys=problem.keys[keys],
        values=problem.values[keys],
        layout=layout,
        topk_indices=None if problem.topk_indices is None else problem.topk_indices[rows],
    )


def _selected(layout: PageLayout, which: Sequence[int], keys: Tensor) -> PageLayout:
    index = list(which)
    return replace(
        layout,
        pages=tuple(layout.pages[i] for i in index),
        block_table=layout.block_table[index],
        key_slots=layout.key_slots[keys],
        parts=tuple(
            replace(part, table=part.table[index], lengths=tuple(part.lengths[i] for i in index))
            for part in layout.parts
        ),
        part_of_key=None if layout.part_of_key is None else layout.part_of_key[keys],
    )


def _ranges(spans: Sequence[tuple[int, int]]) -> Tensor:
    """Return int64: the concatenated ranges, each given by first number and count."""
    return torch.cat([torch.arange(first, first + count) for first, count in spans])


# Slots of the pool that must not affect any row of a step, and the plausible stale rows in them.
#
# The driver fills a pool with these rows. The explanation of a wrong output reads them at wrong slots.

STALE_ROWS = 64
"""Number of distinct stale rows: slot ``i`` of a region holds row ``i % STALE_ROWS``."""


def stale_rows(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return keys ``[STALE_ROWS, Hkv, D]`` and values in the layer's dtype, as an earlier step could have left them."""
    key, value = (_stale_rows(problem.layer.num_kv_heads, size, problem.dtype) for size in stored_sizes(problem.layer))
    storages = key_storage(problem.layer, problem.cache), value_storage(problem.layer, problem.cache)
    if storages[0].coded_rows is not None:  # so that what the cache holds is known
        key, value = (storage.storable(rows.double()) for storage, rows in zip(storages, (key, value), strict=True))
    return key, value


@lru_cache(maxsize=16)
def _stale_rows(heads: int, size: int, dtype: torch.dtype) -> Tensor:
    return RandomStream("stale rows").int8(STALE_ROWS, heads, size).to(dtype) / 64


RowsInPool = Callable[[Tensor], tuple[Tensor, Tensor] | None]
"""From slots, int64 ``[n]``, to the keys and values ``[n, Hkv, D]`` in them; None if a slot is outside the pool."""


def rows_in_pool(problem: Problem) -> RowsInPool:
    """Return the reader of the rows that attention finds in the pool.

    Slots of a large pool that are not filled hold 0.
    """
    regions = list(foreign_slots(problem).values())
    # Keys come first: they are written last, and searchsorted finds the first of equal slots.
    filled, order = torch.cat([problem.key_slots, *regions]).sort(stable=True)
    stale = [torch.arange(len(region)) % STALE_ROWS for region in regions]
    source = torch.cat([torch.arange(len(problem.keys)) + STALE_ROWS, *stale])[order]
    keys, values = (
        torch.cat([old, own, own.new_zeros(1, *own.shape[1:])])
        for old, own in zip(stale_rows(problem), (problem.keys, problem.values), strict=True)
    )

    def read(slots: Tensor) -> tuple[Tensor, Tensor] | None:
        if bool(((slots < 0) | (slots >= problem.num_blocks * problem.cache.block_size)).any()):
            return None
        place = torch.searchsorted(filled, slots).clamp(max=len(filled) - 1)
        index = torch.where(filled[place] == slots, source[place], STALE_ROWS + len(problem.keys))
        return keys[index], values[index]

    return read


UNCHOSEN = "keys that no row chose"
"""Name of the region of :func:`unchosen_slots`."""


def unchosen_slots(problem: Problem) -> dict[str, Tensor]:
    """Return, by region name, the slots of old keys that no row of the batch chose; empty if there are none.

    They hold keys of the batch, so they are in no region of :func:`foreign_slots`. Poison in them must not matter.
    """
    indices = problem.topk_indices
    if indices is None or not problem.has_pool:
        return {}
    own = [(r, indices[r.first_row : r.first_row + r.rows]) for r in problem.requests]
    chosen = torch.cat([rows[rows >= 0] + r.base for r, rows in own]).long()
    unchosen = _difference(problem.key_slots[problem.old_keys].unique(), problem.key_slots[chosen].unique())
    return {UNCHOSEN: unchosen} if len(unchosen) else {}


def foreign_slots(problem: Problem) -> dict[str, Tensor]:
    """Return, by region name, the slots that must not affect any query row; regions are disjoint and not empty."""
    if not problem.has_pool:
        return {}
    size = problem.cache.block_size
    owned = problem.owned_slots
    owned_pages = (owned // size).unique()
    pages = _pages_of_interest(problem, owned_pages)
    regions = {
        "the null page": _slots(torch.tensor([0]), size),
        "the unused tail of a last page": _difference(_slots(owned_pages, size), owned),
        "pages of no request": _slots(_difference(pages[pages > 0], owned_pages), size),
        "pages the window has left behind": _freed_slots(problem),
    }
    return {name: slots for name, slots in regions.items() if len(slots)}


def _pages_of_interest(problem: Problem, owned_pages: Tensor) -> Tensor:
    if problem.num_blocks * problem.cache.block_size <= SMALL_POOL:
        return torch.arange(problem.num_blocks)
    size = problem.cache.block_size
    wrapped = [owned_pages % (1 << bits) for bits in (15, 16, 31)]
    wrapped.append(owned_pages * size % (1 << 32) // size)  # a slot number that overflows 32 bits
    per_page = size * problem.layer.num_kv_heads * problem.layer.head_size
    # Pages that an element offset overflowing 32 bits would reach, with keys and values separate or packed together.
    wrapped += [owned_pages * elements % (1 << 32) // elements for elements in (per_page, 2 * per_page)]
    near: Tensor = torch.cat([owned_pages - 1, owned_pages + 1, *wrapped]).unique()
    return near[(near >= 0) & (near < problem.num_blocks)]


def _freed_slots(problem: Problem) -> Tensor:
    """Return the slots in whole pages before every row's window or chunk: a cache manager may have reused them."""
    params, size = layer_params(naive_layer(problem.layer)), problem.cache.block_size
    positions = torch.tensor([request.first_position for request in problem.requests])
    lens = torch.tensor([request.num_keys for request in problem.requests])
    first, _ = visible_span(params, positions, lens)
    for index, request in enumerate(problem.requests):
        also_seen = request.prefix.reach(request.first_position, request.num_keys - 1)
        if also_seen is not None:
            first[index] = min(int(first[index]), also_seen[0])
    if not bool((first >= size).any()):
        return lens[:0]
    needed = [
        problem.key_slots[request.base + start : request.base + request.num_keys]
        for request, start in zip(problem.requests, (first // size * size).tolist(), strict=True)
    ]
    return _difference(problem.owned_slots, torch.cat(needed).sort().values)


def _slots(pages: Tensor, size: int) -> Tensor:
    return (pages[:, None] * size + torch.arange(size)).reshape(-1)


def _difference(a: Tensor, b: Tensor) -> Tensor:
    """Return the elements of ``a`` that are not in ``b``; ``b`` must be sorted."""
    if not len(b):
        return a
    return a[b[torch.searchsorted(b, a).clamp(max=len(b) - 1)] != a]
