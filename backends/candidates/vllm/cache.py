"""The cache of a layer: vLLM's spec of it, its shape and its layouts.

Two generations of vLLM are supported. Now the spec gives the shape (blocks, heads, tokens, content) and the class the
layouts that it reads. Before, two methods of the class gave the shape and its memory order.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from attncheck.backends.candidates.vllm import package
from attncheck.backends.contract import KVCacheSpec, MultipleOf
from attncheck.reference.spec import AttentionType
from attncheck.reference.step_spec import ROW_FORMATS

THEIR_LAYOUTS: Mapping[str, str] = MappingProxyType({"HND": "LBHNC", "NHD": "LBNHC"})
"""The contract's layouts, with vLLM's names for the order layer, block, then the rest."""

_ORDERS: Mapping[str, tuple[int, ...]] = MappingProxyType({"HND": (0, 1, 2, 3), "NHD": (0, 2, 1, 3)})
"""Memory orders of the four dimensions (blocks, heads, tokens, content)."""

_ITEM = torch.bfloat16


def their_spec(layer: Any, their_backend: type[Any], config: Any, spec: KVCacheSpec) -> Any:
    """Return vLLM's spec of the cache of ``layer`` with pages of ``spec.block_size``, as the backend packs it.

    layer: a layer of vLLM's, or None if only the contract's ``spec`` is known, which is then used alone. Encoders have
    no cache, but a spec that states this.
    """
    specs = package.module("vllm.v1.kv_cache_interface")
    kind = AttentionType(getattr(layer, "attn_type", AttentionType.DECODER))
    sizes = {
        "block_size": spec.block_size,
        "num_kv_heads": spec.num_kv_heads,
        "head_size": spec.head_size,
        "dtype": spec.dtype,
    }
    if spec.head_size_v != spec.head_size:
        sizes["head_size_v"] = spec.head_size_v
    if not kind.has_cache:
        return specs.EncoderOnlyAttentionSpec(**sizes)
    if kind == AttentionType.ENCODER_DECODER:
        made = specs.CrossAttentionSpec(**sizes)
    elif layer is not None and hasattr(layer, "get_kv_cache_spec"):
        made = replace(layer.get_kv_cache_spec(config), block_size=spec.block_size)
    elif spec.sliding_window is not None:
        made = specs.SlidingWindowSpec(**sizes, sliding_window=spec.sliding_window)
    else:
        made = specs.FullAttentionSpec(**sizes)
    return customized(their_backend, made)


def customized(their_backend: type[Any], spec: Any) -> Any:
    """Return ``spec`` as changed by the backend's ``customize_spec``, if it has one."""
    return their_backend.customize_spec(spec) if hasattr(their_backend, "customize_spec") else spec


def cache_shape(
    their_backend: type[Any],
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    head_size_v: int,
    kv_cache_dtype: str = "auto",
) -> tuple[int, ...]:
    """Return the logical shape of one layer's cache. ``kv_cache_dtype``: one of ``ROW_FORMATS``, or any other.

    Raises:
        ValueError: the backend's kernels do not support this block size; vLLM's runner refuses it at the same place.
    """
    sizes = kernel_block_sizes(their_backend)
    if not any(block_size % s.base == 0 if isinstance(s, MultipleOf) else block_size == s for s in sizes):
        taken = ", ".join(map(str, sizes))
        raise ValueError(f"block_size {block_size}: kernels of {their_backend.get_name()} take {taken}")
    is_coded = kv_cache_dtype in ROW_FORMATS
    if hasattr(their_backend, "get_kv_cache_shape"):
        named = {"cache_dtype_str": kv_cache_dtype} if is_coded else {}
        return tuple(their_backend.get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, **named))
    specs = package.module("vllm.v1.kv_cache_interface")
    item = torch.uint8 if is_coded else _ITEM
    coded = {"kv_quant_mode": specs.get_kv_quant_mode(kv_cache_dtype)} if is_coded else {}
    spec = customized(
        their_backend,
        specs.FullAttentionSpec(
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            head_size_v=head_size_v,
            dtype=item,
            **coded,
        ),
    )
    return num_blocks, spec.num_heads, spec.num_states, spec.state_content_size_bytes // item.itemsize


def kernel_block_sizes(their_backend: type[Any]) -> list[int | MultipleOf]:
    """Return the page sizes of the backend's kernels."""
    if not hasattr(their_backend, "get_supported_kernel_block_sizes"):
        return [MultipleOf(1)]
    sizes = their_backend.get_supported_kernel_block_sizes()
    return [size if isinstance(size, int) else MultipleOf(size.base) for size in sizes] or [MultipleOf(1)]


def layouts(their_backend: type[Any]) -> tuple[str, ...]:
    """Return the contract's layouts that the backend's kernels read, the preferred one first."""
    if hasattr(their_backend, "get_kv_cache_shape"):
        return ("NHD",)  # the older method's layout; another would have to be set for the whole process
    declared = getattr(their_backend, "supported_kv_cache_layouts", None)
    found = None if declared is None else declared()
    if found is None:
        return ("NHD", "HND")
    ours = {theirs: name for name, theirs in THEIR_LAYOUTS.items()}
    return tuple(ours[layout.name] for layout in found if layout.name in ours)


def stride_order(their_backend: type[Any], cache_layout: str) -> tuple[int, ...]:
    """Return the physical order of :func:`cache_shape`'s dimensions.

    Raises:
        ValueError: the backend's kernels do not read that layout; vLLM raises as well if set to use it.
    """
    read = layouts(their_backend)
    if cache_layout not in read:
        raise ValueError(f"layout {cache_layout}: kernels of {their_backend.get_name()} read {', '.join(read)}")
    if hasattr(their_backend, "get_kv_cache_shape"):
        return tuple(their_backend.get_kv_cache_stride_order())
    return _ORDERS[cache_layout]
