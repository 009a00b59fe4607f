"""A case made into tensors, laid out as a serving engine would: the same bits on every machine.

A :class:`Problem` is the question alone: rows, keys and where they lie in a pool of pages. All tensors are on the CPU;
the driver moves copies.
"""

from collections.abc import Iterator
from dataclasses import dataclass
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

    ``query_len``: its tokens in this step; more than ``rows`` where only the last ones are asked (fast prefill).
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
    """A case as tensors. ``T`` real rows, ``N`` keys of all requests behind one another, dtype of the layer."""

    case: Case
    seed: int
    requests: tuple[Request, ...]
    query: Tensor
    """``[T, H, D]``; of a latent cache ``[T, H, P + E]``"""
    keys: Tensor
    """``[N, Hkv, D]``: request r's keys stand at ``base .. base + num_keys - 1``; of a latent cache ``[N, 1, L]``."""
    values: Tensor
    """``[N, Hkv, Dv]``; of a latent cache ``[N, 1, E]``, the rotated parts"""
    layout: PageLayout
    up_projections: UpProjections | None = None
    """What makes keys and values of latent rows; None for every other layer."""

    @property
    def block_table(self) -> Tensor:
        """int32 ``[R, M]``, without padding requests; entries past a request's end name pages it does not own."""
        return self.layout.block_table

    @property
    def key_slots(self) -> Tensor:
        """int64 ``[N]``: where each key lies in the pool, -1 where there is no pool."""
        return self.layout.key_slots

    @property
    def num_blocks(self) -> int:
        """Pages in the pool."""
        return self.layout.num_blocks

    @property
    def parts(self) -> tuple[KeyPart, ...]:
        """The parts whose results are merged; none where one call sees all keys."""
        return self.layout.parts

    @cached_property
    def tree(self) -> Tensor | None:
        """Bool ``[Q, Q]``: which new key each row may see where drafts form a tree; None: no tree."""
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
        """Whether the layer reads a cache that another layer fills."""
        return shares_cache(self.case)

    @property
    def inputs(self) -> frozenset[str]:
        """The bites planted in this problem."""
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
        """int64: indices into ``keys`` of what stands in the cache before the step."""
        return torch.from_numpy(np.concatenate([np.arange(r.base, r.base + r.cached) for r in self.requests]))

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


def build_problem(case: Case, seed: int, rows_of: Problem | None = None) -> Problem:
    """The tensors of ``case`` under ``seed``. Raises SpecError where the pool cannot hold the batch.

    ``rows_of``: a problem of the same layer and cache, among whose queries, keys and values those of the new one are
    drawn. This takes a fraction of the time, but no query points at a key: it is for steps that are not judged.
    """
    # To hash a case takes as long as all else where no rows are drawn.
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
    """Whether the layer reads a cache that another layer fills; the layers of fast prefill do."""
    return case.layer.kv_sharing or isinstance(case.batch.path.options, FastPrefillOptions)


def place_requests(case: Case) -> Iterator[Request]:
    """The requests of the batch, still without pages: their rows and keys lie behind one another."""
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
