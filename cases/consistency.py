"""Checks of layer, cache and batch together: combinations that are undefined.

Each spec checks itself; this module checks what depends on two of them. Errors are :class:`SpecError` with ``field`` as
a dotted path from the case (``batch.requests.2.shared_prefix``).
"""

from attncheck.cases.paths import check_path
from attncheck.errors import SpecError
from attncheck.reference.spec import (
    MODIFIERS,
    AttentionType,
    BatchSpec,
    BlockTableSpec,
    CacheSpec,
    LayerSpec,
    RequestSpec,
)

_ROWS_HAVE_KEYS = (
    "cross",
    "spec_decode",
    "tree",
    "fast_prefill",
    "local",
    "cascade",
    "split_kv",
    "dcp",
    "micro_batch",
)
"""Paths on which every new token has its own key."""


_ONE_CALL = ("paged", "spec_decode", "tree", "mla", "local")
"""Paths on which a step is one call over a cache, with a slot for each token."""


def check_meaning(layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> None:
    """Raise :class:`SpecError` for the first invalid combination; the path is that of ``batch``."""
    _check_mla(layer)
    _check_scales(layer, cache)
    check_path(layer, cache, batch)
    for index, request in enumerate(batch.requests):
        _check_request(cache, batch.path.name, request, f"batch.requests.{index}")
    _check_sharing(batch)
    _check_surroundings(layer, cache, batch)
    _check_pool(layer, cache, batch)


def pages_needed(layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> int:
    """Return the number of pages the batch owns, shared pages counted once; 0 without a cache."""
    if not layer.has_cache:
        return 0
    cross = layer.attn_type == AttentionType.ENCODER_DECODER
    pages = 0
    sharers = [r for r in batch.requests if r.shared_prefix]
    for request in batch.requests:
        length = (request.encoder_len or 0) if cross else request.total_len
        pages += request.count * -(-length // cache.block_size)
    if sharers:
        shared = min(r.shared_prefix for r in sharers) // cache.block_size
        pages -= shared * (sum(r.count for r in sharers) - 1)
    return pages


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
    for name in ("head_size_v", *MODIFIERS, "kv_sharing"):
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
    if layer.kv_sharing and layer.attn_type != AttentionType.DECODER:
        raise SpecError(
            f"a layer of type {layer.attn_type} has no cache of a decoder to share",
            field="layer.kv_sharing",
            value=True,
            allowed="leave kv_sharing out",
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
        if request.shared_prefix % cache.block_size:
            raise SpecError(
                f"shared_prefix must be whole pages of {cache.block_size} tokens",
                field=f"{where}.shared_prefix",
                value=request.shared_prefix,
                allowed=f"give a multiple of {cache.block_size}",
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
    first = 1 if cache.first_block is None else cache.first_block
    needed = pages_needed(layer, cache, batch)
    if first + needed > cache.num_blocks:
        raise SpecError(
            f"the batch owns {needed} pages from page {first} on (page 0 is never owned)",
            field="cache.num_blocks",
            value=cache.num_blocks,
            allowed=f"give at least {first + needed}",
        )
