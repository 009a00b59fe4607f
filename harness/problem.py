"""A case made into tensors, laid out as a serving engine would: the same bits on every machine.

A :class:`Problem` is the question alone: rows, keys and where they lie in a pool of pages. Random physical pages out of
a pool larger than needed, page 0 never owned, shared prefixes where the case asks, table entries past the end naming
pages of others. Must not know: backends, truths, checks. All tensors are on the CPU; the runner moves copies.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attncheck.cases.model import Case
from attncheck.errors import SpecError
from attncheck.harness.coordinates import CHANNELS, sign
from attncheck.harness.inputs import RequestGeometry, biting_queries
from attncheck.harness.randomness import Stream
from attncheck.reference.spec import AttentionType, CacheSpec, LayerSpec, RequestSpec

DEFAULT_INPUTS = frozenset({"needles", "large_scores", "equal_scores", "coordinates", "views"})
"""Bites planted where a case names none."""

TORCH_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Request:
    """One request of the batch: ``rows`` new query rows, ``num_keys`` keys, of which the first ``cached`` are old."""

    rows: int
    num_keys: int
    cached: int
    first_row: int
    base: int
    pages: tuple[int, ...]

    @property
    def first_position(self) -> int:
        """Position of the first query row: rows are aligned to the end of the keys."""
        return self.num_keys - self.rows


@dataclass(frozen=True)
class Problem:
    """A case as tensors. ``T`` real rows, ``N`` keys of all requests behind one another, dtype of the layer."""

    case: Case
    seed: int
    requests: tuple[Request, ...]
    query: Tensor
    """``[T, H, D]``"""
    keys: Tensor
    """``[N, Hkv, D]``: request r's keys stand at ``base .. base + num_keys - 1``."""
    values: Tensor
    """``[N, Hkv, Dv]``"""
    block_table: Tensor
    """int32 ``[R, M]``, without padding requests; entries past a request's end name pages it does not own."""
    key_slots: Tensor
    """int64 ``[N]``: where each key lies in the pool, -1 where there is no pool."""
    num_blocks: int

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
        return TORCH_DTYPES[self.layer.dtype]

    @property
    def has_pool(self) -> bool:
        """Whether the layer attends over a paged cache; encoders do not."""
        return self.layer.attn_type in (AttentionType.DECODER, AttentionType.ENCODER_DECODER)

    @property
    def is_cross(self) -> bool:
        """Whether decoder rows attend to an encoder's keys."""
        return self.layer.attn_type == AttentionType.ENCODER_DECODER

    @property
    def inputs(self) -> frozenset[str]:
        """The bites planted in this problem."""
        return DEFAULT_INPUTS if self.case.inputs is None else frozenset(self.case.inputs)

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
            before = torch.full((max(0, -r.first_position) if not self.is_cross else 0,), -1)
            parts += [before, torch.arange(r.base + r.cached, r.base + r.num_keys)]
        return torch.cat(parts)

    @cached_property
    def old_keys(self) -> Tensor:
        """int64: indices into ``keys`` of what stands in the cache before the step."""
        return torch.cat([torch.arange(r.base, r.base + r.cached) for r in self.requests])

    @cached_property
    def owned_slots(self) -> Tensor:
        """Sorted int64: every slot some request's key lies in."""
        return self.key_slots.unique() if self.has_pool else self.key_slots.new_empty(0)

    def row_name(self, row: int) -> str:
        """How a person would name a query row."""
        for index, r in enumerate(self.requests):
            if r.first_row <= row < r.first_row + r.rows:
                return f"request {index}, position {r.first_position + row - r.first_row}"
        return "padding"

    def slot_name(self, slot: int) -> str:
        """How a person would name a slot: its page and offset, and who owns it."""
        block, offset = divmod(slot, self.cache.block_size)
        owner = "owned by no request"
        (hits,) = torch.nonzero(self.key_slots == slot, as_tuple=True)
        if len(hits):
            request = int(torch.searchsorted(self.cu_seqlens_k, hits[0], right=True)) - 1
            owner = f"request {request}, position {int(hits[0]) - self.requests[request].base}"
        return f"slot {slot} (page {block}, offset {offset}; {owner})"


def build_problem(case: Case, seed: int) -> Problem:
    """The tensors of ``case`` under ``seed``. Raises SpecError where the pool cannot hold the batch."""
    stream = Stream(seed, case.hash)
    layer, cache = case.layer, case.cache
    specs = list(case.batch)
    paged = layer.attn_type in (AttentionType.DECODER, AttentionType.ENCODER_DECODER)
    pages: list[tuple[int, ...]] = [()] * len(specs)
    num_blocks = 0
    if paged:
        pages, num_blocks = _lay_out(specs, case, stream)
    requests = tuple(_place(specs, pages, layer))
    dtype = TORCH_DTYPES[layer.dtype]
    inputs = DEFAULT_INPUTS if case.inputs is None else frozenset(case.inputs)
    total = sum(r.num_keys for r in requests)
    keys = _draw(stream, "key", requests, (total, layer.num_kv_heads, layer.head_size), inputs).to(dtype)
    values = _draw(stream, "value", requests, (total, layer.num_kv_heads, layer.value_head_size), inputs).to(dtype)
    _share_prefixes(specs, requests, keys, values)
    geometry = [RequestGeometry(r.rows, r.first_position, r.num_keys, r.base, r.first_row) for r in requests]
    # A batch without any key (all rows see nothing) still needs something to point at.
    needles = keys if len(keys) else keys.new_ones(1, layer.num_kv_heads, layer.head_size)
    query = biting_queries(layer, needles.double(), geometry, cache.block_size, inputs)
    return Problem(
        case=case,
        seed=seed,
        requests=requests,
        query=query.to(dtype),
        keys=keys,
        values=values,
        block_table=_block_table(requests, num_blocks, stream) if paged else torch.zeros(len(requests), 1).int(),
        key_slots=_key_slots(requests, cache.block_size) if paged else torch.full((total,), -1),
        num_blocks=num_blocks,
    )


def _place(specs: list[RequestSpec], pages: list[tuple[int, ...]], layer: LayerSpec) -> Iterator[Request]:
    row, base = 0, 0
    for spec, owned in zip(specs, pages, strict=True):
        num_keys = _num_keys(spec, layer)
        if layer.attn_type == AttentionType.ENCODER_DECODER:
            # Encoder rows are written on the request's first decoder step, when it has no context yet.
            cached = num_keys if spec.context_len > 0 else 0
        else:
            cached = max(0, spec.context_len)
        yield Request(spec.query_len, num_keys, cached, row, base, owned)
        row, base = row + spec.query_len, base + num_keys


def _num_keys(spec: RequestSpec, layer: LayerSpec) -> int:
    if layer.attn_type == AttentionType.ENCODER_DECODER:
        return spec.encoder_len or 0
    return spec.total_len


def _lay_out(specs: list[RequestSpec], case: Case, stream: Stream) -> tuple[list[tuple[int, ...]], int]:
    """Physical pages of every request, and the size of the pool."""
    size = case.cache.block_size
    counts = [-(-_num_keys(spec, case.layer) // size) for spec in specs]
    shared = [spec.shared_prefix // size for spec in specs]
    prefix = max(shared)
    needed = prefix + sum(c - s for c, s in zip(counts, shared, strict=True))
    first = case.cache.first_block or 1
    num_blocks = case.cache.num_blocks or first + needed + needed // 2 + 3
    if num_blocks - first < needed:
        raise SpecError(
            f"the batch needs {needed} pages from page {first} on",
            field="num_blocks",
            value=num_blocks,
            allowed=f"at least {first + needed}",
        )
    # Of a very large pool only a window is drawn from: shuffling millions of ids would say no more.
    choice = min(num_blocks - first, 2 * needed + 64)
    ids = (stream.permutation(choice)[:needed] + first).tolist()
    common, free = ids[:prefix], ids[prefix:]
    pages = []
    for count, own in zip(counts, shared, strict=True):
        take = count - own
        pages.append(tuple(common[:own] + free[:take]))
        free = free[take:]
    return pages, num_blocks


def _block_table(requests: tuple[Request, ...], num_blocks: int, stream: Stream) -> Tensor:
    width = max(len(r.pages) for r in requests) + 2
    foreign = stream.integers(len(requests) * width, num_blocks).reshape(len(requests), width)
    for row, request in enumerate(requests):
        # An id of its own in the slack would make a read past the end invisible.
        own = torch.tensor(sorted(request.pages), dtype=torch.int64)
        foreign[row][torch.isin(foreign[row], own)] = 0
        foreign[row, : len(request.pages)] = torch.tensor(request.pages, dtype=torch.int64)
    return foreign.int()


def _key_slots(requests: tuple[Request, ...], block_size: int) -> Tensor:
    parts = []
    for r in requests:
        position = torch.arange(r.num_keys)
        pages = torch.tensor(r.pages or (0,), dtype=torch.int64)
        parts.append(pages[position // block_size] * block_size + position % block_size)
    return torch.cat(parts)


def _draw(
    stream: Stream, kind: str, requests: tuple[Request, ...], shape: tuple[int, int, int], inputs: frozenset[str]
) -> Tensor:
    rows = stream.uniform(*shape)
    if "coordinates" in inputs and shape[-1] >= CHANNELS:
        request = torch.repeat_interleave(
            torch.arange(len(requests)), torch.tensor([r.num_keys for r in requests], dtype=torch.int64)
        )
        position = torch.cat([torch.arange(r.num_keys) for r in requests])
        sign(rows, kind, request, position)
    return rows


def _share_prefixes(specs: list[RequestSpec], requests: tuple[Request, ...], keys: Tensor, values: Tensor) -> None:
    """Requests that share pages share what stands in them: the longest prefix's rows, in place."""
    source = max(range(len(specs)), key=lambda i: specs[i].shared_prefix)
    origin = requests[source].base
    for spec, request in zip(specs, requests, strict=True):
        n = spec.shared_prefix
        for rows in (keys, values):
            rows[request.base : request.base + n] = rows[origin : origin + n].clone()


def _starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)
