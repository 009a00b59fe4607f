"""A case as tensors, laid out as by a serving engine, and bitwise equal on every machine.

A :class:`Problem` is the input alone: rows, keys and their slots in a pool of pages. All tensors are on the CPU; the
driver copies them to the device.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from attncheck.backends.dtypes import DTYPES
from attncheck.cases.model import Case
from attncheck.harness.problem.draft_trees import ancestors
from attncheck.harness.problem.latent import UpProjections
from attncheck.harness.problem.layer_sizes import naive_layer
from attncheck.harness.problem.page_layout import KeyPart, PageLayout, key_places, lay_out, no_pool
from attncheck.harness.problem.queries import RequestGeometry
from attncheck.harness.problem.random_stream import RandomStream
from attncheck.harness.problem.rows import Rows, draw_rows, mix_rows, planted_inputs
from attncheck.reference.spec import (
    AttentionType,
    CacheSpec,
    FastPrefillOptions,
    LayerSpec,
    RequestSpec,
    TreeOptions,
)


@dataclass(frozen=True)
class Request:
    """One request of the batch: ``rows`` query rows at the end of ``num_keys`` keys, the first ``cached`` of them old.

    ``query_len``: its new tokens in this step; more than ``rows`` if only the last ones are computed (fast prefill).
    ``first_row`` and ``base``: indices of its first row and key in the batch.
    """

    rows: int
    query_len: int
    num_keys: int
    cached: int
    first_row: int
    base: int
    pages: tuple[int, ...] = ()

    @property
    def first_position(self) -> int:
        """Position of the first query row: rows are aligned to the end of the keys."""
        return self.num_keys - self.rows


@dataclass(frozen=True)
class Problem:
    """A case as tensors: ``T`` rows without padding, ``N`` concatenated keys of all requests, in the layer's dtype."""

    case: Case
    seed: int
    requests: tuple[Request, ...]
    query: Tensor
    """``[T, H, D]``; of a latent cache ``[T, H, P + E]``."""
    keys: Tensor
    """``[N, Hkv, D]``: request r's keys are ``base .. base + num_keys - 1``; of a latent cache ``[N, 1, L]``."""
    values: Tensor
    """``[N, Hkv, Dv]``; of a latent cache ``[N, 1, E]``, the rotated parts."""
    layout: PageLayout
    up_projections: UpProjections | None = None
    """The weights that turn latent rows into keys and values; None for every other layer."""

    @property
    def block_table(self) -> Tensor:
        """int32 ``[R, M]``, without padding requests; entries beyond a request's end are pages it does not own."""
        return self.layout.block_table

    @property
    def key_slots(self) -> Tensor:
        """int64 ``[N]``: the slot of each key in the pool, -1 without a pool."""
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
        return self.key_slots.unique() if self.has_pool else self.key_slots.new_empty(0)

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
    geometry = [RequestGeometry(r.rows, r.first_position, r.num_keys, r.base, r.first_row) for r in requests]
    if rows_of is None or not len(rows_of.keys):
        rows = draw_rows(case, geometry, places, stream)
    else:
        given = Rows(rows_of.query, rows_of.keys, rows_of.values, rows_of.up_projections)
        rows = mix_rows(given, case, geometry, stream)
    layout = finish_layout()
    return Problem(
        case=case,
        seed=seed,
        requests=tuple(Request(**vars(r) | {"pages": own}) for r, own in zip(requests, layout.pages, strict=True)),
        query=rows.query,
        keys=rows.keys,
        values=rows.values,
        layout=layout,
        up_projections=rows.up_projections,
    )


def shares_cache(case: Case) -> bool:
    """Return whether another layer fills the cache that the layer reads; always so in fast prefill."""
    return case.layer.kv_sharing or isinstance(case.batch.path.options, FastPrefillOptions)


def place_requests(case: Case) -> Iterator[Request]:
    """Yield the requests of the batch without pages; their rows and keys are concatenated."""
    row, base = 0, 0
    options, layer = case.batch.path.options, case.layer
    for spec in case.batch:
        num_keys = _num_keys(spec, layer)
        rows = min(options.rows, spec.query_len) if isinstance(options, FastPrefillOptions) else spec.query_len
        if shares_cache(case):
            cached = num_keys
        elif layer.attn_type == AttentionType.ENCODER_DECODER:
            # Encoder rows are written on the request's first decoder step, when it has no context yet.
            cached = num_keys if spec.context_len > 0 else 0
        else:
            cached = max(0, spec.context_len)
        yield Request(rows, spec.query_len, num_keys, cached, row, base)
        row, base = row + rows, base + num_keys


def _num_keys(spec: RequestSpec, layer: LayerSpec) -> int:
    if layer.attn_type == AttentionType.ENCODER_DECODER:
        return spec.encoder_len or 0
    return spec.total_len


def _starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)
