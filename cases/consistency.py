"""Checks of layer, cache, batch and path together: combinations that are undefined, and the path that a layer implies.

Each spec checks itself; this module checks what depends on two of them. Errors are :class:`SpecError` with ``field`` as
a dotted path from the case (``batch.requests.2.shared_prefix``).
"""

import dataclasses
import itertools
import math
from collections.abc import Collection

from attncheck.errors import SpecError
from attncheck.reference.spec import MODIFIERS, AttentionType, LayerSpec
from attncheck.reference.step_spec import (
    CHANNEL_RULES,
    REGISTERED,
    BatchSpec,
    BlockTableSpec,
    CacheSpec,
    DCPOptions,
    FastPrefillOptions,
    IndexerOptions,
    InputName,
    MicroBatchOptions,
    PaddingSpec,
    PathSpec,
    PCPOptions,
    RecurrenceOptions,
    RequestSpec,
    SpecDecodeOptions,
    TreeOptions,
    row_format_of,
)

_CAUSAL_ONLY = ("local", "tree", "fast_prefill", "pcp")
"""Paths whose rewriting of the batch, or whose mask, requires a causal layer."""

_NOT_FOR_MLA = ("paged", "encoder_only", "cross", "local", "ranks")


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
    if path.name in ("split_kv", "dcp", "ranks"):
        _check_parts(layer, path.name)
    match path.options:
        case SpecDecodeOptions(num_speculative_tokens=drafts):
            _check_rows(batch, 1, 1 + drafts, f"{drafts} draft tokens allow at most {1 + drafts} new tokens a request")
        case TreeOptions(parents=parents):
            _check_tree(batch, parents)
        case FastPrefillOptions(rows=rows):
            _check_fast_prefill(batch, rows)
        case DCPOptions(size=size, interleave=interleave):
            _check_dcp(cache, batch, interleave)
            if path.name == "ranks":
                _check_ranks(layer, size)
        case PCPOptions() if batch.padding != PaddingSpec():
            raise SpecError(
                "the batch of a rank has the rows of its chunks alone",
                field="path",
                value=path.name,
                allowed="leave padding out, or give another path",
            )
        case MicroBatchOptions(cuts=cuts):
            _check_micro_batch(layer, batch, cuts)
        case RecurrenceOptions():
            _check_recurrence(layer, batch, path.options)
        case IndexerOptions():
            _check_rows_of_indexer(batch)
            _check_fp8_index(path.options)
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


def _check_recurrence(layer: LayerSpec, batch: BatchSpec, options: RecurrenceOptions) -> None:
    """Raise for a layer whose sizes the rule does not have, or whose features belong to attention."""
    sizes: dict[str, int] = {}
    if options.rule in CHANNEL_RULES:
        sizes = {"num_kv_heads": 1, "head_size_v": 1}
    elif options.rule == "linear":
        sizes = {"num_kv_heads": layer.num_heads}
    for name, size in sizes.items():
        if getattr(layer, name) != size:
            raise SpecError(
                f"a layer of the rule {options.rule} has {name} {size}",
                field=f"layer.{name}",
                value=getattr(layer, name),
                allowed=f"give {name}: {size}",
            )
    plain = LayerSpec(
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_size=layer.head_size,
        head_size_v=layer.head_size_v,
        dtype=layer.dtype,
        scale=None if options.rule in ("mamba1", "mamba2", "short_conv") else layer.scale,
    )
    for each in dataclasses.fields(LayerSpec):
        if getattr(layer, each.name) != getattr(plain, each.name):
            raise SpecError(
                f"a layer of the rule {options.rule} has no {each.name}",
                field=f"layer.{each.name}",
                value=getattr(layer, each.name),
                allowed=f"leave {each.name} out",
            )
    default = RecurrenceOptions(rule=options.rule)
    for option in ("state_dtype",) if options.rule == "short_conv" else ("activation", "bias"):
        if getattr(options, option) != getattr(default, option):
            raise SpecError(
                f"the rule {options.rule} has no {option}",
                field=f"path.recurrence.{option}",
                value=getattr(options, option),
                allowed=f"leave {option} out",
            )
    if options.rule == "short_conv" and layer.head_size < 2:
        raise SpecError(
            "a convolution with one tap has no state",
            field="layer.head_size",
            value=layer.head_size,
            allowed="give 2 taps or more",
        )
    keeps_blocks = options.mamba_cache_mode == "all"
    if keeps_blocks and options.num_speculative_tokens:
        raise SpecError(
            "decodes with mamba_cache_mode all have no drafts",
            field="path.recurrence.num_speculative_tokens",
            value=options.num_speculative_tokens,
            allowed="leave it out, or leave mamba_cache_mode out",
        )
    for index, request in enumerate(batch.requests):
        if request.shared_prefix and not keeps_blocks:
            raise SpecError(
                "requests share states with mamba_cache_mode all alone",
                field=f"batch.requests.{index}.shared_prefix",
                value=request.shared_prefix,
                allowed="leave shared_prefix out, or give mamba_cache_mode: all",
            )
        if request.context_len < 0:
            raise SpecError(
                f"the {request.query_len} new tokens count as tokens of the request",
                field=f"batch.requests.{index}.seq_len",
                value=request.seq_len,
                allowed=f"give {request.query_len} or more",
            )


def _check_rows_of_indexer(batch: BatchSpec) -> None:
    """Raise for requests with more rows than keys, or whose keys belong to another request, too."""
    for index, request in enumerate(batch.requests):
        for name, is_wrong in (("seq_len", request.context_len < 0), ("shared_prefix", request.shared_prefix > 0)):
            if is_wrong:
                raise SpecError(
                    "each row of an indexer has a key of its own, in pages of its request",
                    field=f"batch.requests.{index}.{name}",
                    value=getattr(request, name),
                    allowed="leave shared_prefix out, and give no seq_len below query_len",
                )


def _check_fp8_index(options: IndexerOptions) -> None:
    """Raise if float32 scales behind the FP8 keys of a block are not aligned."""
    if options.index_cache_dtype != "auto" and options.index_head_dim % 4:
        raise SpecError(
            "the float32 scales behind the FP8 keys of a block are aligned",
            field="path.indexer.index_head_dim",
            value=options.index_head_dim,
            allowed="a multiple of 4",
        )


def _check_rows(batch: BatchSpec, least: int, most: int, reason: str) -> None:
    for index, request in enumerate(batch.requests):
        if not least <= request.query_len <= most:
            raise SpecError(
                reason,
                field=f"batch.requests.{index}.query_len",
                value=request.query_len,
                allowed=f"give query_len {most}" if least == most else f"give query_len {least} to {most}",
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
    nodes = len(parents)
    _check_rows(batch, nodes, nodes, f"the tree has {nodes} nodes, one for each new row of a request")


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


def _check_ranks(layer: LayerSpec, size: int) -> None:
    """Raise SpecError for a layer that vLLM would not distribute over ``size`` ranks, or that no case has so far."""
    of_kv_heads = "all ranks hold the same KV head, and each has some of its query heads"
    rules = [
        ("num_kv_heads", layer.num_kv_heads != 1, of_kv_heads, "give 1"),
        ("num_heads", layer.num_heads % size, f"{size} ranks have equally many query heads", f"a multiple of {size}"),
    ]
    rules += [
        (name, bool(getattr(layer, name)), f"the path ranks has no layers with {name}", "leave it out")
        for name in ("sinks", "kv_sharing", "output_quant")
    ]
    for name, is_wrong, reason, allowed in rules:
        if is_wrong:
            raise SpecError(reason, field=f"layer.{name}", value=getattr(layer, name), allowed=allowed)


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


_ROWS_HAVE_KEYS = (
    "cross",
    "spec_decode",
    "tree",
    "fast_prefill",
    "local",
    "cascade",
    "split_kv",
    "dcp",
    "ranks",
    "pcp",
    "micro_batch",
)
"""Paths on which every new token has its own key."""


_ONE_CALL = ("paged", "spec_decode", "tree", "mla", "local")
"""Paths on which a step is one call over a cache, with a slot for each token."""


def check_meaning(layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> None:
    """Raise :class:`SpecError` for the first invalid combination; the path is that of ``batch``."""
    _check_mla(layer)
    _check_scales(layer, cache)
    _check_row_format(layer, cache)
    check_path(layer, cache, batch)
    _check_geometry(layer, cache, batch.path.name)
    for index, request in enumerate(batch.requests):
        _check_request(cache, batch.path.name, request, f"batch.requests.{index}")
    _check_sharing(batch)
    _check_prefixes(layer, batch)
    _check_indexer(layer, batch)
    _check_surroundings(layer, cache, batch)
    _check_pool(layer, cache, batch)


def check_inputs(layer: LayerSpec, cache: CacheSpec, inputs: Collection[InputName] | None) -> None:
    """Raise :class:`SpecError` if the layer's keys cannot have the ``inputs``; None selects those of every layer."""
    if "negative_scores" in (inputs or ()) and layer.mla is not None and not layer.mla.qk_rope_head_dim:
        raise SpecError(
            "all scores of a row are negative through the last rotated channel, which this layer lacks",
            field="inputs",
            value="negative_scores",
            allowed="leave negative_scores out, or give qk_rope_head_dim",
        )
    if "negative_scores" in (inputs or ()) and row_format_of(cache.kv_cache_dtype) is not None:
        raise SpecError(
            f"keys whose last channels are equal cannot be stored exactly as {cache.kv_cache_dtype}",
            field="inputs",
            value="negative_scores",
            allowed="leave negative_scores out",
        )


def check_first_keys(layer: LayerSpec, batch: BatchSpec) -> None:
    """Raise :class:`SpecError` for ``rswa_window`` in a batch without first keys, where it is a sliding window."""
    if layer.rswa_window is not None and not any(request.rswa_prefix_len for request in batch.requests):
        raise SpecError(
            "no request has first keys that are seen beyond the window",
            field="layer.rswa_window",
            value=layer.rswa_window,
            allowed="give a request rswa_prefix_len, or write sliding_window",
        )


def pages_needed(layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> int:
    """Return the number of pages the batch owns, shared pages counted once; 0 without a cache."""
    if not layer.has_cache:
        return 0
    blocks = 0
    tokens = cache.block_size * cache.pages_per_block  # of a block of the cache manager
    sharers = [r for r in batch.requests if r.shared_prefix]
    for request in batch.requests:
        blocks += request.count * -(-request.num_keys(layer) // tokens)
    if sharers:
        shared = min(r.shared_prefix for r in sharers) // tokens
        blocks -= shared * (sum(r.count for r in sharers) - 1)
    return blocks * cache.pages_per_block


def _check_mla(layer: LayerSpec) -> None:
    if layer.mla is None:
        return
    if layer.attn_type != AttentionType.DECODER:
        raise SpecError(
            "a latent cache belongs to decoder layers",
            field="layer.attn_type",
            value=str(layer.attn_type),
            allowed="leave attn_type out",
        )
    for name in ("head_size_v", *MODIFIERS, "kv_sharing", "query_quant"):
        value = getattr(layer, name)
        if value not in (None, False):
            raise SpecError(
                "not defined for multi-head latent attention",
                field=f"layer.{name}",
                value=value,
                allowed=f"leave {name} out",
            )


def _check_scales(layer: LayerSpec, cache: CacheSpec) -> None:
    for name in ("k_scale", "v_scale", "q_scale"):
        scale = getattr(cache, name)
        if isinstance(scale, tuple) and len(scale) != layer.num_kv_heads:
            raise SpecError(
                f"{len(scale)} values for {layer.num_kv_heads} KV heads",
                field=f"cache.{name}",
                value=scale,
                allowed="give a number, or one per KV head",
            )
    if layer.query_quant and cache.kv_cache_dtype not in ("fp8", "fp8_e4m3"):
        raise SpecError(
            "vLLM's layer passes FP8 queries beside an E4M3 cache alone",
            field="layer.query_quant",
            value=True,
            allowed=f"leave query_quant out, or give cache.kv_cache_dtype fp8, not {cache.kv_cache_dtype}",
        )
    if layer.query_quant and not layer.has_cache:
        raise SpecError(
            f"a layer of type {layer.attn_type} has no cache, and so no FP8 query",
            field="layer.query_quant",
            value=True,
            allowed="leave query_quant out",
        )
    if layer.kv_sharing and layer.attn_type != AttentionType.DECODER:
        raise SpecError(
            f"a layer of type {layer.attn_type} has no cache of a decoder to share",
            field="layer.kv_sharing",
            value=True,
            allowed="leave kv_sharing out",
        )


def _check_row_format(layer: LayerSpec, cache: CacheSpec) -> None:
    row_format = row_format_of(cache.kv_cache_dtype)
    if row_format is None:
        return
    if layer.mla is not None:
        raise SpecError(
            "defined for caches of keys and values",
            field="cache.kv_cache_dtype",
            value=cache.kv_cache_dtype,
            allowed="leave kv_cache_dtype out, or leave layer.mla out",
        )
    for size in (layer.head_size, layer.value_head_size):
        if not row_format.divides(size):
            raise SpecError(
                f"a row of {cache.kv_cache_dtype} has no whole number of bytes and groups",
                field="layer.head_size",
                value=size,
                allowed=f"give a multiple of {row_format.group or 8 // row_format.bits}",
            )
    for name in ("k_scale", "v_scale"):
        scale = getattr(cache, name)
        uses_scale = row_format.group is not None or cache.kv_cache_dtype == REGISTERED
        if uses_scale and (isinstance(scale, tuple) or not _is_unit(scale)):
            raise SpecError(
                f"rows of {cache.kv_cache_dtype} with other scales cannot be stored exactly",
                field=f"cache.{name}",
                value=scale,
                allowed="give one power of two from 2**-10 to 2",
            )


def _is_unit(scale: float) -> bool:
    return math.frexp(scale)[0] == 0.5 and 2.0**-10 <= scale <= 2.0


def _check_geometry(layer: LayerSpec, cache: CacheSpec, path: str) -> None:
    if "H" in cache.pool_order and (cache.layout != "HND" or layer.mla is not None):
        raise SpecError(
            "its pages have the heads outside of the tokens",
            field="cache.pool_order",
            value=cache.pool_order,
            allowed="give LB or BL, or the layout HND without mla",
        )
    if cache.pages_per_block > 1 and path in ("cascade", "split_kv", "dcp", "ranks"):
        raise SpecError(
            f"the path {path} cuts the keys at pages, not at blocks of several pages",
            field="cache.manager_block_size",
            value=cache.manager_block_size,
            allowed="leave manager_block_size out",
        )


def _check_request(cache: CacheSpec, path: str, request: RequestSpec, where: str) -> None:
    if path == "cross" and request.encoder_len is None:
        raise SpecError(
            "in cross attention every request needs the length of its encoder",
            field=f"{where}.encoder_len",
            value=None,
            allowed="write the batch as a list, with encoder_len in every request",
        )
    if path != "cross" and request.encoder_len is not None:
        raise SpecError(
            "only cross attention reads an encoder",
            field=f"{where}.encoder_len",
            value=request.encoder_len,
            allowed="leave it out, or give the layer attn_type: encoder_decoder",
        )
    if path == "encoder_only" and request.context_len != 0:
        raise SpecError(
            f"an encoder has no cache, so seq_len must equal query_len ({request.query_len})",
            field=f"{where}.seq_len",
            value=request.total_len,
            allowed="leave seq_len out, or change query_len",
        )
    if path in _ROWS_HAVE_KEYS and request.context_len < 0:
        raise SpecError(
            f"{request.query_len} new tokens do not fit (rows that see no key belong to the path paged)",
            field=f"{where}.seq_len",
            value=request.total_len,
            allowed=f"give at least {request.query_len}",
        )
    if request.shared_prefix:
        if path in ("cross", "encoder_only"):
            raise SpecError(
                "pages of a decoder's context are shared, and this path reads none",
                field=f"{where}.shared_prefix",
                value=request.shared_prefix,
                allowed="leave shared_prefix out",
            )
        block = cache.manager_block_size or cache.block_size
        if request.shared_prefix % block:
            raise SpecError(
                f"shared_prefix must be whole {'blocks' if cache.manager_block_size else 'pages'} of {block} tokens",
                field=f"{where}.shared_prefix",
                value=request.shared_prefix,
                allowed=f"give a multiple of {block}",
            )


def _check_sharing(batch: BatchSpec) -> None:
    sharers = [(i, r) for i, r in enumerate(batch.requests) if r.shared_prefix]
    if len(sharers) == 1 and sharers[0][1].count == 1:
        index, request = sharers[0]
        raise SpecError(
            "no other request shares it",
            field=f"batch.requests.{index}.shared_prefix",
            value=request.shared_prefix,
            allowed="give shared_prefix to two requests, or a count",
        )


def _check_prefixes(layer: LayerSpec, batch: BatchSpec) -> None:
    """Raise for image spans, and first keys beyond a window, where no mask with them is defined."""
    ranges = [index for index, request in enumerate(batch.requests) if request.mm_req_doc_ranges]
    first_keys = [index for index, request in enumerate(batch.requests) if request.rswa_prefix_len]
    for index in ranges:
        _check_image_spans(layer, batch, index)
    if first_keys and layer.rswa_window is None:
        raise SpecError(
            "without a window, a row sees the first keys as it is",
            field=f"batch.requests.{first_keys[0]}.rswa_prefix_len",
            value=batch.requests[first_keys[0]].rswa_prefix_len,
            allowed="give layer.rswa_window, or leave rswa_prefix_len out",
        )
    if layer.rswa_window is not None and batch.path.name != "paged":
        raise SpecError(
            f"not defined for the path {batch.path.name}",
            field="layer.rswa_window",
            value=layer.rswa_window,
            allowed="leave rswa_window out, or give the path paged",
        )


_CHOSEN_KEYS = ("paged", "mla", "spec_decode", "micro_batch")
"""Paths on which an indexer may choose the keys: no call divides the keys of a row."""


def _check_indexer(layer: LayerSpec, batch: BatchSpec) -> None:
    """Raise for ``index_topk`` beside image spans, or on a path that divides the keys of a row."""
    if layer.index_topk is None:
        return
    obstacles = {
        f"not defined for the path {batch.path.name}": batch.path.name not in _CHOSEN_KEYS,
        "not defined beside mm_req_doc_ranges": any(request.mm_req_doc_ranges for request in batch.requests),
    }
    for reason, is_given in obstacles.items():
        if is_given:
            raise SpecError(
                reason,
                field="layer.index_topk",
                value=layer.index_topk,
                allowed=f"leave it out, or use one of the paths {', '.join(_CHOSEN_KEYS)}",
            )


def _check_image_spans(layer: LayerSpec, batch: BatchSpec, index: int) -> None:
    is_plain = layer.attn_type == AttentionType.DECODER and layer.is_causal and layer.mla is None
    obstacles = {
        "are defined for causal decoder layers": not is_plain,
        "are not defined beside chunks of local attention": layer.attn_chunk_size is not None,
        "are not defined beside rswa_window, which vLLM's kernels combine in different orders": layer.rswa_window,
        f"are not defined for the path {batch.path.name}": batch.path.name != "paged",
        "are not laid out beside null pages": batch.block_table.null_pages,
    }
    for reason, is_given in obstacles.items():
        if is_given:
            raise SpecError(
                f"image spans {reason}",
                field=f"batch.requests.{index}.mm_req_doc_ranges",
                value=batch.requests[index].mm_req_doc_ranges,
                allowed="leave mm_req_doc_ranges out",
            )


def _check_surroundings(layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> None:
    """Raise if padding behind tokens, or block-table options, are set on a path that is not one call over a cache."""
    given = (
        ("padding.unmapped_tokens", batch.padding.unmapped_tokens, 0),
        ("padding.key_rows", batch.padding.key_rows, 0),
        ("block_table", batch.block_table, BlockTableSpec()),
    )
    for name, value, default in given:
        if value != default and batch.path.name not in _ONE_CALL:
            raise SpecError(
                f"not defined for the path {batch.path.name}",
                field=f"batch.{name}",
                value=value,
                allowed=f"leave it out, or use one of the paths {', '.join(_ONE_CALL)}",
            )
    if batch.block_table.null_pages and not any(_frees_a_page(layer, cache, request) for request in batch.requests):
        raise SpecError(
            f"no request has a page of {cache.block_size} tokens that every row's window or chunk has left behind",
            field="batch.block_table.null_pages",
            value=True,
            allowed="lengthen a context, or give the layer a sliding_window or an attn_chunk_size",
        )


def _frees_a_page(layer: LayerSpec, cache: CacheSpec, request: RequestSpec) -> bool:
    left, chunk = layer.window[0], layer.attn_chunk_size
    by_window = request.context_len - left if left >= 0 else 0
    by_chunk = request.context_len // chunk * chunk if chunk else 0
    return max(by_window, by_chunk) >= cache.block_size


def _check_pool(layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> None:
    if cache.num_blocks is None:
        return
    run = cache.pages_per_block
    if cache.num_blocks % run:
        raise SpecError(
            f"a pool has whole blocks of the cache manager, of {run} pages",
            field="cache.num_blocks",
            value=cache.num_blocks,
            allowed=f"give a multiple of {run}",
        )
    first = -(-(cache.first_block or 1) // run) * run
    needed = pages_needed(layer, cache, batch)
    if first + needed > cache.num_blocks:
        raise SpecError(
            f"the batch owns {needed} pages from page {first} on (page 0 is never owned)",
            field="cache.num_blocks",
            value=cache.num_blocks,
            allowed=f"give at least {first + needed}",
        )
