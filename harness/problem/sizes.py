"""Sizes of a layer, and estimates of the work and memory that a case needs. Imports no torch."""

from typing import TYPE_CHECKING

from attncheck.cases.model import Case
from attncheck.harness.device import accelerator_of
from attncheck.harness.host import free_host_bytes, free_own_bytes
from attncheck.reference.spec import LayerSpec
from attncheck.reference.step_spec import (
    FP8_CACHES,
    BatchSpec,
    CausalConv1dOptions,
    DCPOptions,
    RecurrenceOptions,
    SplitKVOptions,
    row_format_of,
)

if TYPE_CHECKING:
    import torch

ITEMSIZES = {"float16": 2, "bfloat16": 2, "float32": 4, **dict.fromkeys(FP8_CACHES, 1)}
"""Bytes per element, by dtype names of layers and caches."""


def naive_layer(layer: LayerSpec) -> LayerSpec:
    """Return the ordinary layer equivalent to a layer with ``mla``; any other layer is returned unchanged."""
    if layer.mla is None:
        return layer
    return LayerSpec(
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_heads,
        head_size=layer.mla.qk_nope_head_dim + layer.mla.qk_rope_head_dim,
        head_size_v=layer.mla.v_head_dim,
        dtype=layer.dtype,
        scale=layer.softmax_scale,
        causal=layer.causal,
    )


def stored_sizes(layer: LayerSpec) -> tuple[int, int]:
    """Return the widths of what a token stores in the cache: key and value, or latent row and rotated part."""
    if layer.mla is None:
        return layer.head_size, layer.value_head_size
    return layer.mla.kv_lora_rank, layer.mla.qk_rope_head_dim


def num_weights(layer: LayerSpec) -> int:
    """Return the number of elements in the up-projections of keys and of values; 0 without a latent cache."""
    if layer.mla is None:
        return 0
    return layer.mla.kv_lora_rank * layer.num_heads * (layer.mla.qk_nope_head_dim + layer.mla.v_head_dim)


def operations(case: Case, num_values: int) -> float:
    """Return the multiplications and additions of one attention.

    ``num_values``: 1 for the output alone, 2 for the output and its bound.
    """
    layer = naive_layer(case.layer)
    pairs = 0.0
    for each in case.batch.requests:
        unseen = (each.query_len - 1) / 2 if layer.is_causal else 0
        pairs += each.count * each.query_len * max(each.num_keys(case.layer) - unseen, 0)
    return 2 * pairs * layer.num_heads * (layer.head_size + num_values * layer.value_head_size)


_SMALL = 2**25
"""Operations of an attention, and of its bound, up to which a GPU waits for launches: 2 ms of one core."""


def judging_device(case: Case, device: "torch.device") -> "torch.device":
    """Return where results of ``case`` on ``device`` are compared with its truth: the CPU if the case is small.

    The result is then copied once. On the device, each of the many operators would need a launch.
    """
    import torch

    return torch.device("cpu") if operations(case, 2) <= _SMALL else device


_ROW_COPIES = 12
"""Float64 tensors of the output's size alive at once: truth, low-precision run, weights, errors, altered truths."""

_LARGEST_CHUNK = 64
"""Rows of the longest chunk of a low-precision run of a recurrence."""

_WEIGHT_COPIES = 3
"""Float64 tensors of the size of the up-projections alive at once."""

_POOL_COPIES = 8
"""The pool, its clean image, and the images before and after each of the three steps of containment, alive at once."""

SMALL_POOL = 1 << 18
"""Most slots of a pool that is filled, poisoned and copied whole. Of a larger pool, only pages near owned ones are."""

_NEAR = 8
"""Pages of interest per owned page: its neighbours, and the targets of page numbers that overflow fewer bits."""

_MOST_RESERVED = 2**37
"""Most bytes of a pool that a host can reserve without using memory; a larger pool counts in full."""


def needed_bytes(case: Case, *, reserves: bool = False) -> int:
    """Return an upper estimate of the bytes held at once while examining ``case``, on the host or the device.

    ``reserves``: whether a large pool uses memory only where it is touched, as on a host.
    """
    layer, cache, batch = case.layer, case.cache, case.batch
    if isinstance(batch.path.options, CausalConv1dOptions):
        columns = batch.num_tokens + 2 * batch.num_requests * (batch.path.options.width + 3)
        return _ROW_COPIES * columns * batch.path.options.channels * 8
    if isinstance(batch.path.options, RecurrenceOptions):
        of_request = 1 + batch.path.options.num_speculative_tokens
        if batch.path.options.mamba_cache_mode == "all":
            of_request = -(-batch.max_seq_len // cache.block_size)
        slots = 2 * batch.num_requests * of_request + 4
        columns = layer.head_size + batch.path.options.num_speculative_tokens
        states = slots * layer.num_heads * columns * layer.value_head_size
        rows = (batch.num_tokens + batch.padding.tokens) * layer.num_heads * (layer.head_size + layer.value_head_size)
        chunk = _LARGEST_CHUNK**2 * layer.num_heads * layer.head_size
        return (_ROW_COPIES * (states + 2 * rows) + chunk) * 8
    if batch.path.name == "merge":
        return 2 * _ROW_COPIES * batch.num_tokens * layer.num_heads * layer.value_head_size * 8
    keys = sum(request.count * request.num_keys(layer) for request in batch.requests)
    itemsize = ITEMSIZES[layer.dtype]
    stored = layer.num_kv_heads * sum(stored_sizes(layer))
    naive = naive_layer(layer)
    exact = naive.num_kv_heads * (naive.head_size + naive.value_head_size)
    # With MLA, up-projected keys and values exist beside rounded ones, and each row also exists in the latent space.
    copies, width = (2, layer.head_size + layer.value_head_size) if layer.mla is None else (4, 2 * layer.head_size)
    if cache.kv_cache_dtype in FP8_CACHES or row_format_of(cache.kv_cache_dtype) is not None:
        copies += 4  # per number: its magnitude, its code as an index, and both ends of its rounding interval
    pools, parts = _pools_and_parts(batch)
    pages = keys // cache.block_size + 2 * batch.num_requests
    blocks = cache.num_blocks or (cache.first_block or 0) + 2 * pages
    page = cache.block_size * stored * itemsize
    pool = pools * blocks * page
    held = _POOL_COPIES * pool
    if blocks * cache.block_size > SMALL_POOL:
        held = _POOL_COPIES * _NEAR * pages * page + (0 if reserves and pool <= _MOST_RESERVED else pool)
    rows = batch.num_tokens * layer.num_heads * max(width, naive.head_size + naive.value_head_size) * 8
    held += keys * (stored * itemsize + exact * copies * 8) + (_ROW_COPIES + 2 * parts) * rows
    return held + _WEIGHT_COPIES * num_weights(layer) * 8


def _pools_and_parts(batch: BatchSpec) -> tuple[int, int]:
    """Return the number of consecutive pools, and the number of parts whose outputs are held until they are merged."""
    match batch.path.options:
        case DCPOptions(size=size):
            return size + 1, size + 1
        case SplitKVOptions(parts=parts):
            return 1, parts
        case _:
            return 1, 0


def shortage(case: Case, device: "torch.device") -> str | None:
    """Return why ``case`` does not fit ``device`` or the host right now, with the GiB it needs, or None if it fits."""
    needed = needed_bytes(case, reserves=device.type == "cpu")
    accelerator = accelerator_of(device)
    room = {
        "the host": free_host_bytes(),
        "the process": free_own_bytes(),
        str(device): None if accelerator is None else accelerator.free_bytes(),
    }
    for name, free in room.items():
        if free is not None and needed > 0.9 * free:
            return f"the case needs about {needed / 2**30:.1f} GiB, {name} has {free / 2**30:.1f} GiB free"
    return None
