"""How keys and values share one KV cache tensor: the usual packings, their detection, and allocation in a layout.

A packing is the logical shape (the meaning of each axis). A layout is the memory order of a page (NHD: tokens before
heads, HND: heads before tokens). The logical shape of a packing never changes with the layout, nor with the order of a
pool that several layers share; only the strides do.
Shapes for block size 4 and two heads of size 8:

============  =======================  ==========================================
packing       logical shape            what lies where
============  =======================  ==========================================
split_first   ``(2, blocks, 4, 2, 8)``   all keys, then all values
split_second  ``(blocks, 2, 4, 2, 8)``   per block: keys, then values
content       ``(blocks, 2, 4, 16)``     per head and token: key | value
plane         ``(blocks, 2, 8, 8)``      per block and head: keys, then values
latent        ``(blocks, 4, 8)``         per token: latent row | rotated part
============  =======================  ==========================================

Only multi-head latent attention uses ``latent``: it has no heads, and a single layout.
"""

import inspect
import math
import mmap
import operator
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from attncheck.backends.dtypes import cache_dtype
from attncheck.reference.spec import LayerSpec
from attncheck.reference.step_spec import ROW_FORMATS, CacheSpec

Packing = Literal["split_first", "split_second", "content", "plane", "latent"]
PACKINGS: tuple[Packing, ...] = ("split_first", "split_second", "content", "plane")
"""The packings that hold keys and values."""

_PROBE_BLOCKS = 1009
_PROBE_HEADS = (13, 17, 19)
"""Primes, so that no axis of a shape is confused with another; several, in case one is a size of the case."""

_RESERVED = 2**26
"""Size in bytes from which host memory is reserved, and allocated only when touched."""

_PAGE_PADDING = 16
"""Elements by which a block with the pages of several layers is padded. Kernels that load several stay aligned."""

_SWAPPED_ORDER: dict[Packing, tuple[int, ...]] = {
    "split_first": (0, 1, 3, 2, 4),
    "split_second": (0, 1, 3, 2, 4),
    "content": (0, 2, 1, 3),
    "plane": (0, 2, 1, 3),
}
"""The physical order if tokens and heads swap places; the other dimensions keep their logical order."""


class CacheGeometry(Protocol):
    """The members of an ``AttentionBackend`` class that define its cache layout; the contract documents them."""

    def get_name(self) -> str: ...

    def get_kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]: ...

    def get_kv_cache_stride_order(self) -> tuple[int, ...]: ...


def packed_shape(
    packing: Packing, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, head_size_v: int
) -> tuple[int, ...]:
    """Return the logical shape of a packing.

    Raise ``ValueError`` if value and key sizes differ, except for ``content``.
    """
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
    kv_cache_dtype: str = "auto",
) -> tuple[int, ...]:
    """Return ``backend.get_kv_cache_shape`` for a layer.

    ``head_size_v`` is passed only if it differs, ``cache_dtype_str`` only for a cache of ``ROW_FORMATS``. Raise
    ``ValueError`` if an extent is no integer.
    """
    heads = layer.num_kv_heads if num_kv_heads is None else num_kv_heads
    extra: dict[str, Any] = {}
    if layer.value_head_size != layer.head_size:
        extra["head_size_v"] = layer.value_head_size
    if kv_cache_dtype in ROW_FORMATS:
        extra["cache_dtype_str"] = kv_cache_dtype
    shape = backend.get_kv_cache_shape(num_blocks, block_size, heads, layer.head_size, **extra)
    try:
        return tuple(map(operator.index, shape))
    except TypeError:
        name = backend.get_name()
        raise ValueError(f"{name}.get_kv_cache_shape() returned {shape!r}: every extent must be an integer") from None


def detect_packing(backend: CacheGeometry, layer: LayerSpec, cache: CacheSpec) -> Packing | None:
    """Return the packing of a backend's cache, or None if its shape fits none or several of them.

    The shape is queried with the case's block and head size, since kernels refuse others, but with distinctive numbers
    of blocks and heads. It is queried again with twice the block size, in case block and head size are equal. A backend
    that refuses the first query has no known packing.
    """
    if cache.kv_cache_dtype in ROW_FORMATS:
        return None
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


def has_coded_rows(backend: CacheGeometry, layer: LayerSpec, cache: CacheSpec) -> bool:
    """Return whether a cache of ``ROW_FORMATS`` has the shape of :func:`coded_rows_shape`; False for other caches."""
    if cache.kv_cache_dtype not in ROW_FORMATS or not layer.has_cache:
        return False
    sizes = (_PROBE_BLOCKS, cache.block_size, layer.num_kv_heads)
    wanted = coded_rows_shape(cache.kv_cache_dtype, *sizes, layer.head_size, layer.value_head_size)
    try:
        return _shape_of(backend, layer, cache, _PROBE_BLOCKS) == wanted
    except (ValueError, NotImplementedError):
        return False


def coded_rows_shape(
    kv_cache_dtype: str, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, head_size_v: int
) -> tuple[int, ...]:
    """Return the logical shape of a cache of ``ROW_FORMATS``, in bytes: ``[blocks, heads, tokens, bytes]``.

    The bytes of a token and head: codes of the key, scales of the key, codes of the value, scales of the value.
    """
    row_format = ROW_FORMATS[kv_cache_dtype]
    return num_blocks, num_kv_heads, block_size, row_format.row_bytes(head_size) + row_format.row_bytes(head_size_v)


def _shape_of(backend: CacheGeometry, layer: LayerSpec, cache: CacheSpec, num_blocks: int) -> tuple[int, ...]:
    return kv_cache_shape(backend, layer, cache.block_size, num_blocks, kv_cache_dtype=cache.kv_cache_dtype)


def stride_order(backend: CacheGeometry, layer: LayerSpec, cache: CacheSpec) -> tuple[int, ...]:
    """Return the physical order of the cache's dimensions in the case's layout.

    The backend's ``get_kv_cache_stride_order`` is called, with ``cache_layout`` if it takes that; an override without
    it has one layout. If the method raises ``NotImplementedError``, the order follows from the packing, or is the
    logical order if the packing is unknown. Raise ``ValueError``, naming the order and the shape, if the result is no
    permutation of the dimensions.
    """
    shape = _shape_of(backend, layer, cache, _PROBE_BLOCKS)
    logical = tuple(range(len(shape)))
    method = backend.get_kv_cache_stride_order
    takes_layout = "cache_layout" in inspect.signature(method).parameters
    try:
        order = tuple(method(**({"cache_layout": cache.layout} if takes_layout else {})))
    except NotImplementedError:
        packing = "content" if has_coded_rows(backend, layer, cache) else detect_packing(backend, layer, cache)
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
    """Return a zeroed cache, allocated as a model runner does: flat bytes in physical order, in the logical view.

    Its memory is dense if ``cache.pool_order`` is LB; otherwise pages of other layers and a few elements lie between.
    The result for a layer without a cache is an empty tensor. Raise ``ValueError`` for an impossible shape or stride
    order, and whatever ``get_kv_cache_shape`` raises.
    """
    dtype = cache_dtype(layer, cache)
    if not layer.has_cache:
        return torch.empty(0, dtype=dtype, device=device)
    shape = _shape_of(backend, layer, cache, num_blocks)
    if not shape or min(shape) < 1:
        raise ValueError(f"{backend.get_name()}.get_kv_cache_shape() returned {shape}: every extent must be positive")
    if cache.pool_order != "LB":
        return _layer_of_pool(backend, layer, cache, num_blocks, torch.device(device))
    order = stride_order(backend, layer, cache)
    flat = zeroed_bytes(math.prod(shape) * dtype.itemsize, torch.device(device))
    physical = flat.view(dtype).view([shape[dimension] for dimension in order])
    return physical.permute(_inverse(order))


def pool_axes(
    backend: CacheGeometry, layer: LayerSpec, cache: CacheSpec, num_blocks: int
) -> tuple[list[int], list[int]]:
    """Return the axes of the shape that lie before and after the layers in ``cache.pool_order``.

    Raise ``ValueError`` if the shape has no axis of the pages (B) or of the heads (H) alone, and whatever
    ``get_kv_cache_shape`` raises.
    """
    axis_of = partial(_axis_of, backend, layer, cache, {"B": num_blocks, "H": layer.num_kv_heads})
    before, after = cache.pool_order.split("L")
    return list(map(axis_of, before)), list(map(axis_of, after))


def _axis_of(backend: CacheGeometry, layer: LayerSpec, cache: CacheSpec, counts: Mapping[str, int], letter: str) -> int:
    """Return the axis whose extent is the number of pages (B) or heads (H), if no other changes with that number."""
    count = counts[letter]
    numbers = ({**counts, letter: number} for number in (count, 2 * count))
    one, two = (
        kv_cache_shape(backend, layer, cache.block_size, each["B"], each["H"], cache.kv_cache_dtype) for each in numbers
    )
    changed = [axis for axis, extents in enumerate(zip(one, two, strict=False)) if extents[0] != extents[1]]
    if len(one) == len(two) and len(changed) == 1 and (one[changed[0]], two[changed[0]]) == (count, 2 * count):
        return changed[0]
    name = "pages" if letter == "B" else "heads"
    raise ValueError(f"pool_order {cache.pool_order}: the shape {one} has no axis of the {name} alone")


def _layer_of_pool(
    backend: CacheGeometry, layer: LayerSpec, cache: CacheSpec, num_blocks: int, device: torch.device
) -> Tensor:
    """Return the view of the second of three layers in a pool with the outermost axes of ``cache.pool_order``."""
    shape = _shape_of(backend, layer, cache, num_blocks)
    before, after = pool_axes(backend, layer, cache, num_blocks)
    within = [axis for axis in stride_order(backend, layer, cache) if axis not in (*before, *after)]
    outer = [shape[axis] for axis in before]
    inner = [shape[axis] for axis in (*after, *within)]
    width = math.prod(inner)
    row_width = 3 * width + _PAGE_PADDING
    dtype = cache_dtype(layer, cache)
    flat = zeroed_bytes(math.prod(outer) * row_width * dtype.itemsize, device)
    rows = flat.view(dtype).view(*outer, row_width)
    second: Tensor = rows[..., width : 2 * width].unflatten(-1, inner)
    return second.permute(_inverse([*before, *after, *within]))


def zeroed_bytes(count: int, device: torch.device) -> Tensor:
    """Return ``count`` zeros, uint8; large host buffers take no memory until they are touched.

    Raise OSError if the system does not reserve that many bytes.
    """
    if device.type != "cpu" or count < _RESERVED:
        return torch.zeros(count, dtype=torch.uint8, device=device)
    if sys.platform != "linux":
        return torch.frombuffer(mmap.mmap(-1, count), dtype=torch.uint8)
    file = os.memfd_create("kv_cache")  # unlike anonymous memory, it may be larger than the machine's
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
