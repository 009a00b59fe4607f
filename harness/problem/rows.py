"""Queries, keys and values of a batch: drawn for a case, or taken from another batch of the same layer."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attncheck.backends.dtypes import DTYPES
from attncheck.cases.model import Case
from attncheck.harness.problem.draft_trees import ancestors
from attncheck.harness.problem.latent import UpProjections, make_up_projections
from attncheck.harness.problem.layer_sizes import naive_layer, stored_sizes
from attncheck.harness.problem.page_layout import KeyPlaces
from attncheck.harness.problem.queries import RequestGeometry, needle_queries
from attncheck.harness.problem.random_stream import RandomStream
from attncheck.harness.problem.signatures import CHANNELS, sign
from attncheck.harness.problem.storage import Storage, key_storage, value_storage
from attncheck.reference.spec import TreeOptions

DEFAULT_INPUTS = frozenset({"needles", "large_scores", "equal_scores", "coordinates", "views"})
"""Input patterns planted if a case names none."""


class Rows(NamedTuple):
    """The rows of a batch in the layer's dtype, with the shapes of ``Problem``."""

    query: Tensor
    keys: Tensor
    values: Tensor
    up_projections: UpProjections | None


def planted_inputs(case: Case) -> frozenset[str]:
    """Return the names of the input patterns planted in the problems of ``case``."""
    return DEFAULT_INPUTS if case.inputs is None else frozenset(case.inputs)


def draw_rows(case: Case, geometry: list[RequestGeometry], places: KeyPlaces, stream: RandomStream) -> Rows:
    """Return new keys and values, and queries aligned to the keys. ``places``: request and position of each key."""
    layer, inputs = case.layer, planted_inputs(case)
    shape = len(places.request), layer.num_kv_heads
    keys, values = (
        _draw(stream, kind, places, (*shape, size), inputs, storage(layer, case.cache))
        for kind, size, storage in zip(("key", "value"), stored_sizes(layer), (key_storage, value_storage), strict=True)
    )
    _share_prefixes(case, geometry, keys, values)
    up_projections, naive = make_up_projections(layer, DTYPES[layer.dtype]), naive_layer(layer)
    needles = keys if up_projections is None else up_projections.keys(keys, values)
    if not len(keys):  # queries need a key even if no row sees one
        needles = needles.new_ones(1, naive.num_kv_heads, naive.head_size)
    options = case.batch.path.options
    tree = ancestors(options.parents) if isinstance(options, TreeOptions) else None
    query = needle_queries(naive, needles, geometry, case.cache.block_size, inputs, tree)
    return Rows(query.to(DTYPES[layer.dtype]), keys, values, up_projections)


def mix_rows(given: Rows, case: Case, geometry: Sequence[RequestGeometry], stream: RandomStream) -> Rows:
    """Return as many rows as ``case`` needs, drawn from ``given``, the rows of a batch of the same layer and cache."""
    num_rows, num_keys = (sum(sizes) for sizes in zip(*((r.rows, r.num_keys) for r in geometry), strict=True))
    query, keys, values = (
        rows.index_select(0, stream.integers(count, len(rows)))
        for rows, count in ((given.query, num_rows), (given.keys, num_keys), (given.values, num_keys))
    )
    _share_prefixes(case, geometry, keys, values)
    return Rows(query, keys, values, given.up_projections)


def _draw(
    stream: RandomStream,
    kind: str,
    places: KeyPlaces,
    shape: tuple[int, int, int],
    inputs: frozenset[str],
    storage: Storage,
) -> Tensor:
    """Return rows in the layer's dtype that the cache can store exactly."""
    rows = stream.uniform(*shape, dtype=torch.float64 if storage.is_fp8 else torch.float32)
    if "coordinates" in inputs and shape[-1] >= CHANNELS:
        sign(rows, kind, *places, storage.smallest)
    return storage.storable(rows)


def _share_prefixes(case: Case, geometry: Sequence[RequestGeometry], keys: Tensor, values: Tensor) -> None:
    """Copy the rows of the longest shared prefix to all requests that share its pages, in place."""
    shared = [spec.shared_prefix for spec in case.batch]
    origin = geometry[shared.index(max(shared))].base
    for n, request in zip(shared, geometry, strict=True):
        if not n or request.base == origin:
            continue
        for rows in (keys, values):
            rows[request.base : request.base + n] = rows[origin : origin + n].clone()
