"""How keys and values share one KV cache tensor: the usual packings, recognising them, and allocating in a layout.

A packing is the logical shape (which axis is what); a layout is the memory order of a page (NHD: tokens before heads,
HND: heads before tokens). The logical shape of a packing never changes with the layout, only the strides do. Written
for block size 4, two heads of size 8:

============  =======================  ==========================================
packing       logical shape            what lies where
============  =======================  ==========================================
split_first   ``(2, blocks, 4, 2, 8)``   all keys, then all values
split_second  ``(blocks, 2, 4, 2, 8)``   per block: keys, then values
content       ``(blocks, 2, 4, 16)``     per head and token: key | value
plane         ``(blocks, 2, 8, 8)``      per block and head: keys, then values
latent        ``(blocks, 4, 8)``         per token: latent row | rotated part
============  =======================  ==========================================

``latent`` is the cache of multi-head latent attention and of nothing else: it has no heads, and no layout but one.
"""

import inspect
import math
import mmap
import os
import sys
from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from attncheck.backends.dtypes import cache_dtype
from attncheck.reference.spec import CacheSpec, LayerSpec

Packing = Literal["split_first", "split_second", "content", "plane", "latent"]
PACKINGS: tuple[Packing, ...] = ("split_first", "split_second", "content", "plane")
"""Those that hold keys and values."""

_PROBE_BLOCKS = 1009
_PROBE_HEADS = (13, 17, 19)
"""Primes, so that no axis of the answer can be taken for another; more than one, in case a size of the case is one."""

_RESERVED = 2**26
"""Bytes from which on memory of the host is reserved, and taken as it is touched."""

_SWAPPED_ORDER: dict[Packing, tuple[int, ...]] = {
    "split_first": (0, 1, 3, 2, 4),
    "split_second": (0, 1, 3, 2, 4),
    "content": (0, 2, 1, 3),
    "plane": (0, 2, 1, 3),
}
"""The order in which tokens and heads trade places, the rest staying as in the logical shape."""


class CacheGeometry(Protocol):
    """The part of an ``AttentionBackend`` class that says how its cache is laid out; the contract describes it."""

    def get_name(self) -> str: ...

    def get_kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]: ...

    def get_kv_cache_stride_order(self) -> tuple[int, ...]: ...


def packed_shape(
    packing: Packing, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, head_size_v: int
) -> tuple[int, ...]:
    """The logical shape of a packing. Only ``content`` can hold values of another size than keys: ``ValueError``."""
    if packing != "content" and head_size_v != head_size:
        raise ValueError(f"head_size_v {head_size_v} beside head_size {head_size}: packing {packing} needs them equal")
    match packing:
        case "split_first":
            return (2, num_blocks, block_size, num_kv_heads, head_size)
        case "split_second":
            return (num_blocks, 2, block_size, num_kv_heads, head_size)
        case "content":
            return (num_blocks, num_kv_heads, block_size, head_size + head_size_v)
        case "plane":
            return (num_blocks, num_kv_heads, 2 * block_size, head_size)
        case "latent":
            return (num_blocks, block_size, head_size)


def kv_cache_shape(
    backend: CacheGeometry,
    layer: LayerSpec,
    block_size: int,
    num_blocks: int,
    num_kv_heads: int | None = None,
) -> tuple[int, ...]:
    """``backend.get_kv_cache_shape`` for a layer, ``head_size_v`` handed over only where it differs."""
    heads = layer.num_kv_heads if num_kv_heads is None else num_kv_heads
    extra = {} if layer.value_head_size == layer.head_size else {"head_size_v": layer.value_head_size}
    shape = backend.get_kv_cache_shape(num_blocks, block_size, heads, layer.head_size, **extra)
    return tuple(int(extent) for extent in shape)


def detect_packing(backend: CacheGeometry, layer: LayerSpec, cache: CacheSpec) -> Packing | None:
    """The packing of a backend's cache, found by asking for a shape that fits one packing only; None: none of them.

    Asked with the case's block and head size, since kernels refuse others, but with unmistakable numbers of blocks and
    heads; and once more with twice the block size, in case block and head size are equal. A backend that refuses the
    first question has no packing we know.
    """
    is_latent = layer.mla is not None
    heads = 1 if is_latent else next(n for n in _PROBE_HEADS if n not in (cache.block_size, layer.head_size))

    def matches(block_size: int) -> set[Packing] | None:
        try:
            shape = kv_cache_shape(backend, layer, block_size, _PROBE_BLOCKS, heads)
        except (ValueError, NotImplementedError):
            return None
        sizes = (_PROBE_BLOCKS, block_size, heads, layer.head_size, layer.value_head_size)
        split_values = layer.value_head_size != layer.head_size
        possible: tuple[Packing, ...] = ("content",) if split_values else PACKINGS
        if is_latent:
            possible = ("latent",)
        return {packing for packing in possible if shape == packed_shape(packing, *sizes)}

    found = matches(cache.block_size) or set()
    again = matches(2 * cache.block_size)
    if again is not None:
        found &= again
    return next(iter(found)) if len(found) == 1 else None


def stride_order(backend: CacheGeometry, layer: LayerSpec, cache: CacheSpec) -> tuple[int, ...]:
    """The physical order of the cache's dimensions in the case's layout.

    A backend whose ``get_kv_cache_stride_order`` takes ``cache_layout`` is asked; one that overrides the method without
    it has one layout; for the others the order follows from the packing, and is the logical one where that is unknown.
    ``ValueError`` names the order and the shape where the answer is no permutation of the shape's dimensions.
    """
    shape = kv_cache_shape(backend, layer, cache.block_size, _PROBE_BLOCKS)
    logical = tuple(range(len(shape)))
    method = backend.get_kv_cache_stride_order
    takes_layout = "cache_layout" in inspect.signature(method).parameters
    try:
        order = tuple(method(**({"cache_layout": cache.layout} if takes_layout else {})))
    except NotImplementedError:
        packing = detect_packing(backend, layer, cache)
        order = logical if packing is None else _packing_order(packing, cache.layout)
    if sorted(order) != list(logical):
        raise ValueError(
            f"{backend.get_name()}.get_kv_cache_stride_order() returned {order}, which is no permutation of the "
            f"{len(shape)} dimensions of its cache shape {shape}"
        )
    return order


def allocate_kv_cache(
    backend: CacheGeometry,
    layer: LayerSpec,
    cache: CacheSpec,
    num_blocks: int,
    device: torch.device | str,
) -> Tensor:
    """A zeroed cache as a model runner allocates it: flat bytes, in physical order, handed out as the logical view.

    Layers without a cache get an empty tensor. Raises what ``get_kv_cache_shape`` raises, and ``ValueError`` for a
    shape or a stride order that cannot be.
    """
    dtype = cache_dtype(layer, cache)
    if not layer.has_cache:
        return torch.empty(0, dtype=dtype, device=device)
    shape = kv_cache_shape(backend, layer, cache.block_size, num_blocks)
    if not shape or min(shape) < 1:
        raise ValueError(f"{backend.get_name()}.get_kv_cache_shape() returned {shape}: every extent must be positive")
    order = stride_order(backend, layer, cache)
    flat = zeroed_bytes(math.prod(shape) * dtype.itemsize, torch.device(device))
    physical = flat.view(dtype).view([shape[dimension] for dimension in order])
    return physical.permute(_inverse(order))


def zeroed_bytes(count: int, device: torch.device) -> Tensor:
    """Return ``count`` zeros, uint8. On the host many of them take no memory until they are touched.

    Raises OSError where the system does not let so many be reserved.
    """
    if device.type != "cpu" or count < _RESERVED:
        return torch.zeros(count, dtype=torch.uint8, device=device)
    if sys.platform != "linux":
        return torch.frombuffer(mmap.mmap(-1, count), dtype=torch.uint8)
    file = os.memfd_create("kv_cache")  # other than anonymous memory it may be larger than the machine's
    try:
        os.ftruncate(file, count)
        return torch.frombuffer(mmap.mmap(file, count), dtype=torch.uint8)
    finally:
        os.close(file)


def _packing_order(packing: Packing, layout: str) -> tuple[int, ...]:
    if packing == "latent":
        return (0, 1, 2)
    tokens_first = packing in ("split_first", "split_second")
    logical = tuple(range(len(_SWAPPED_ORDER[packing])))
    return logical if tokens_first == (layout == "NHD") else _SWAPPED_ORDER[packing]


def _inverse(order: Sequence[int]) -> list[int]:
    return [order.index(dimension) for dimension in range(len(order))]
