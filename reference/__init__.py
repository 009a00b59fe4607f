"""The right answers: a pure-torch ground truth of every attention path, float64 unless told otherwise.

Everything public is importable from here and loaded on first use (PEP 562), so that a module which wants only the
shared words of ``attncheck.reference.spec`` loads no torch.

>>> from attncheck.reference import AttentionParams, paged_attention
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attncheck.reference.builder import AttentionMetadataBuilder
    from attncheck.reference.cache import (
        compute_slot_mapping,
        copy_blocks,
        kv_cache_views,
        reshape_and_cache,
        swap_blocks,
    )
    from attncheck.reference.merge import merge_attn_states, merge_many
    from attncheck.reference.metadata import CommonAttentionMetadata
    from attncheck.reference.paged import paged_attention
    from attncheck.reference.params import AttentionParams, Precision, layer_params, visible, window_pair
    from attncheck.reference.quant import dequantize_fp8, quantize_fp8
    from attncheck.reference.spec import AttentionCGSupport, AttentionType, BatchSpec, CacheSpec, LayerSpec
    from attncheck.reference.varlen import varlen_attention

_HOME = {
    "AttentionCGSupport": "spec",
    "AttentionMetadataBuilder": "builder",
    "AttentionParams": "params",
    "AttentionType": "spec",
    "BatchSpec": "spec",
    "CacheSpec": "spec",
    "CommonAttentionMetadata": "metadata",
    "LayerSpec": "spec",
    "Precision": "params",
    "compute_slot_mapping": "cache",
    "copy_blocks": "cache",
    "dequantize_fp8": "quant",
    "kv_cache_views": "cache",
    "layer_params": "params",
    "merge_attn_states": "merge",
    "merge_many": "merge",
    "paged_attention": "paged",
    "quantize_fp8": "quant",
    "reshape_and_cache": "cache",
    "swap_blocks": "cache",
    "varlen_attention": "varlen",
    "visible": "params",
    "window_pair": "params",
}
"""Where each public name lives. A test holds this table, the imports above and the modules together."""

__all__ = [
    "AttentionCGSupport",
    "AttentionMetadataBuilder",
    "AttentionParams",
    "AttentionType",
    "BatchSpec",
    "CacheSpec",
    "CommonAttentionMetadata",
    "LayerSpec",
    "Precision",
    "compute_slot_mapping",
    "copy_blocks",
    "dequantize_fp8",
    "kv_cache_views",
    "layer_params",
    "merge_attn_states",
    "merge_many",
    "paged_attention",
    "quantize_fp8",
    "reshape_and_cache",
    "swap_blocks",
    "varlen_attention",
    "visible",
    "window_pair",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
