"""Paths: the path a layer implies, and checks of a path against layer, cache and batch.

Errors are :class:`SpecError` with ``field`` as a dotted path from the case.
"""

import itertools

from attncheck.errors import SpecError
from attncheck.reference.spec import (
    AttentionType,
    BatchSpec,
    CacheSpec,
    DCPOptions,
    FastPrefillOptions,
    LayerSpec,
    MicroBatchOptions,
    PathSpec,
    SpecDecodeOptions,
    TreeOptions,
)

_CAUSAL_ONLY = ("local", "tree", "fast_prefill")
"""Paths whose rewriting of the batch, or whose mask, requires a causal layer."""

_NOT_FOR_MLA = ("paged", "encoder_only", "cross", "local")


def implied_path(layer: LayerSpec) -> PathSpec:
    """Return the path of a case that names none. For a layer with chunks it is ``paged``, as the layer itself masks."""
    if not layer.has_cache:
        return PathSpec(name="encoder_only")
    if layer.attn_type == AttentionType.ENCODER_DECODER:
        return PathSpec(name="cross")
    return PathSpec(name="mla" if layer.mla is not None else "paged")


def check_path(layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> None:
    """Raise :class:`SpecError` if the batch's path does not fit the layer, the cache or the batch."""
    path = batch.path
    _check_against_layer(layer, path.name)
    if path.name == "local" and layer.attn_chunk_size is None:
        raise SpecError(
            "local attention needs the size of its chunks",
            field="path",
            value="local",
            allowed="give layer.attn_chunk_size, or another path",
        )
    if path.name == "cascade":
        _check_cascade(batch)
    if path.name in _CAUSAL_ONLY and not layer.is_causal:
        raise SpecError(
            f"the path {path.name} is defined for causal layers",
            field="layer.causal",
            value=False,
            allowed="leave causal out, or give another path",
        )
    if path.name in ("split_kv", "dcp"):
        _check_parts(layer, path.name)
    match path.options:
        case SpecDecodeOptions(num_speculative_tokens=drafts):
            _check_uniform(batch, 1 + drafts, f"{drafts} draft tokens need {1 + drafts} new tokens a request")
        case TreeOptions(parents=parents):
            _check_tree(batch, parents)
        case FastPrefillOptions(rows=rows):
            _check_fast_prefill(batch, rows)
        case DCPOptions(interleave=interleave):
            _check_dcp(cache, batch, interleave)
        case MicroBatchOptions(cuts=cuts):
            _check_micro_batch(layer, batch, cuts)
        case _:
            pass


def _check_against_layer(layer: LayerSpec, path: str) -> None:
    implied = implied_path(layer).name
    if path == implied:
        return
    if layer.attn_type != AttentionType.DECODER or path in ("encoder_only", "cross"):
        raise SpecError(
            f"a layer of type {layer.attn_type} needs the path {implied}",
            field="path",
            value=path,
            allowed=f"leave path out, or write path: {implied}",
        )
    if path == "mla":
        raise SpecError("the layer has no mla", field="path", value=path, allowed="give layer.mla, or another path")
    if layer.mla is not None and path in _NOT_FOR_MLA:
        raise SpecError(
            "a layer with a latent cache needs the path mla",
            field="path",
            value=path,
            allowed="leave path out, or leave layer.mla out",
        )


def _check_uniform(batch: BatchSpec, rows: int, reason: str) -> None:
    for index, request in enumerate(batch.requests):
        if request.query_len != rows:
            raise SpecError(
                reason,
                field=f"batch.requests.{index}.query_len",
                value=request.query_len,
                allowed=f"give query_len {rows}",
            )


def _check_tree(batch: BatchSpec, parents: tuple[int, ...]) -> None:
    if not parents:
        raise SpecError("a tree needs a node", field="path.tree.parents", value=(), allowed="give each row a parent")
    if parents[0] != -1 or -1 in parents[1:]:
        raise SpecError(
            "row 0 is the root, the last verified token, and the only one",
            field="path.tree.parents",
            value=parents,
            allowed="give -1 to row 0 and an earlier row to every other",
        )
    if parents == tuple(range(-1, len(parents) - 1)):
        raise SpecError(
            "a tree of one branch hides nothing that causality does not",
            field="path.tree.parents",
            value=parents,
            allowed="give two rows the same parent, or use the path spec_decode",
        )
    depths = _depths(parents)
    if depths != sorted(depths):
        raise SpecError(
            f"the rows have the depths {depths}",
            field="path.tree.parents",
            value=parents,
            allowed="list the rows by depth, as engines lay their trees out",
        )
    _check_uniform(batch, len(parents), f"the tree has {len(parents)} nodes, one for each new row of a request")


def _depths(parents: tuple[int, ...]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def _check_parts(layer: LayerSpec, path: str) -> None:
    for name in layer.position_modifiers:
        raise SpecError(
            f"a part of the keys is attended without the distance to the query, and the path {path} has such parts",
            field=f"layer.{name}",
            value=getattr(layer, name),
            allowed=f"leave {name} out, or give another path",
        )


def _check_fast_prefill(batch: BatchSpec, rows: int) -> None:
    if batch.max_query_len <= rows:
        raise SpecError(
            f"no request has more than {batch.max_query_len} rows, so none would be left out",
            field="path.fast_prefill.rows",
            value=rows,
            allowed="lower rows, or give a longer query",
        )


def _check_cascade(batch: BatchSpec) -> None:
    for index, request in enumerate(batch.requests):
        if not request.shared_prefix:
            raise SpecError(
                "a cascade needs a prefix that every request shares",
                field=f"batch.requests.{index}.shared_prefix",
                value=0,
                allowed="write the batch as a list, with shared_prefix in every request",
            )


def _check_dcp(cache: CacheSpec, batch: BatchSpec, interleave: int) -> None:
    if cache.block_size % interleave:
        raise SpecError(
            "a page lies on the ranks in whole runs",
            field="path.dcp.interleave",
            value=interleave,
            allowed=f"give a divisor of block_size {cache.block_size}",
        )
    for index, request in enumerate(batch.requests):
        if request.shared_prefix:
            raise SpecError(
                "ranks that share pages are not laid out",
                field=f"batch.requests.{index}.shared_prefix",
                value=request.shared_prefix,
                allowed="leave shared_prefix out",
            )


def _check_micro_batch(layer: LayerSpec, batch: BatchSpec, cuts: tuple[int, ...]) -> None:
    if not cuts:
        raise SpecError(
            "without a cut there is one piece",
            field="path.micro_batch.cuts",
            value=cuts,
            allowed="give a row to cut at",
        )
    edges = (0, *cuts, batch.num_tokens)
    if any(low >= high for low, high in itertools.pairwise(edges)):
        raise SpecError(
            f"the batch has {batch.num_tokens} rows",
            field="path.micro_batch.cuts",
            value=cuts,
            allowed=f"give increasing positions above 0 and below {batch.num_tokens}",
        )
    within = [cut for cut in cuts if not _is_between_requests(batch, cut)]
    if within and not layer.is_causal:
        raise SpecError(
            f"rows before the cut at {within[0]} would see no key behind it, and without causal they do",
            field="path.micro_batch.cuts",
            value=cuts,
            allowed="cut between requests, or leave causal out",
        )


def _is_between_requests(batch: BatchSpec, cut: int) -> bool:
    start = 0
    for request in batch.requests:
        end = start + request.count * request.query_len
        if cut <= end:
            return (cut - start) % request.query_len == 0
        start = end
    return False
