"""The right answers: a pure-torch ground truth of every attention path, float64 unless told otherwise.

Everything public is importable from here and loaded on first use (PEP 562), so that a module which wants only the
shared words of ``attncheck.reference.spec`` loads no torch.
The first generation of the metadata utilities stands apart, in ``attncheck.reference.v0``.

>>> from attncheck.reference import AttentionParams, paged_attention
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attncheck.reference.batch_order import reorder_batch_to_split_decodes_and_prefills, split_decodes_and_prefills
    from attncheck.reference.builder import AttentionMetadataBuilder, M
    from attncheck.reference.cache import (
        compute_slot_mapping,
        copy_blocks,
        kv_cache_views,
        reshape_and_cache,
        swap_blocks,
    )
    from attncheck.reference.context_parallel import get_dcp_local_seq_lens
    from attncheck.reference.conv1d_metadata import compute_causal_conv1d_metadata
    from attncheck.reference.dcp import dcp_rank_attention
    from attncheck.reference.fast_prefill import (
        KV_SHARING_FAST_PREFILL_METADATA_FIELDS,
        KVSharingFastPrefillMetadata,
        create_fast_prefill_custom_backend,
        make_kv_sharing_fast_prefill_common_attn_metadata,
    )
    from attncheck.reference.kv_cache_layout import (
        KVCacheLayoutType,
        get_kv_cache_layout,
        is_valid_kv_cache_layout,
        logger,
        set_kv_cache_layout,
    )
    from attncheck.reference.layer_parameters import (
        PerLayerParameters,
        get_per_layer_parameters,
        infer_global_hyperparameters,
    )
    from attncheck.reference.local_attention import make_local_attention_virtual_batches
    from attncheck.reference.merge import merge_attn_states, merge_many
    from attncheck.reference.metadata import PAD_SLOT_ID, CommonAttentionMetadata
    from attncheck.reference.mla_absorbed import mla_attention_absorbed, mla_latent_attention
    from attncheck.reference.mla_cache import mla_write_cache
    from attncheck.reference.mla_layer import MLAParams, mla_params
    from attncheck.reference.mla_naive import mla_attention_chunked, mla_attention_naive
    from attncheck.reference.paged import paged_attention
    from attncheck.reference.params import AttentionParams, Precision, layer_params, visible, window_pair
    from attncheck.reference.quant import dequantize_fp8, quantize_fp8, quantize_fp8_group
    from attncheck.reference.short_convolution import causal_conv1d
    from attncheck.reference.spec import AttentionCGSupport, AttentionType, BatchSpec, CacheSpec, LayerSpec
    from attncheck.reference.spec_decode import reshape_attn_output_for_spec_decode, reshape_query_for_spec_decode
    from attncheck.reference.subclassing import subclass_attention_backend, subclass_attention_metadata
    from attncheck.reference.ubatch import UBatchSlice, slice_query_start_locs, split_attn_metadata
    from attncheck.reference.varlen import varlen_attention

_HOME = {
    "AttentionCGSupport": "spec",
    "AttentionMetadataBuilder": "builder",
    "AttentionParams": "params",
    "AttentionType": "spec",
    "BatchSpec": "spec",
    "CacheSpec": "spec",
    "CommonAttentionMetadata": "metadata",
    "KVCacheLayoutType": "kv_cache_layout",
    "KVSharingFastPrefillMetadata": "fast_prefill",
    "KV_SHARING_FAST_PREFILL_METADATA_FIELDS": "fast_prefill",
    "LayerSpec": "spec",
    "M": "builder",
    "MLAParams": "mla_layer",
    "PAD_SLOT_ID": "metadata",
    "PerLayerParameters": "layer_parameters",
    "Precision": "params",
    "UBatchSlice": "ubatch",
    "causal_conv1d": "short_convolution",
    "compute_causal_conv1d_metadata": "conv1d_metadata",
    "compute_slot_mapping": "cache",
    "copy_blocks": "cache",
    "create_fast_prefill_custom_backend": "fast_prefill",
    "dcp_rank_attention": "dcp",
    "dequantize_fp8": "quant",
    "get_dcp_local_seq_lens": "context_parallel",
    "get_kv_cache_layout": "kv_cache_layout",
    "get_per_layer_parameters": "layer_parameters",
    "infer_global_hyperparameters": "layer_parameters",
    "is_valid_kv_cache_layout": "kv_cache_layout",
    "kv_cache_views": "cache",
    "layer_params": "params",
    "logger": "kv_cache_layout",
    "make_kv_sharing_fast_prefill_common_attn_metadata": "fast_prefill",
    "make_local_attention_virtual_batches": "local_attention",
    "merge_attn_states": "merge",
    "merge_many": "merge",
    "mla_attention_absorbed": "mla_absorbed",
    "mla_attention_chunked": "mla_naive",
    "mla_attention_naive": "mla_naive",
    "mla_latent_attention": "mla_absorbed",
    "mla_params": "mla_layer",
    "mla_write_cache": "mla_cache",
    "paged_attention": "paged",
    "quantize_fp8": "quant",
    "quantize_fp8_group": "quant",
    "reorder_batch_to_split_decodes_and_prefills": "batch_order",
    "reshape_and_cache": "cache",
    "reshape_attn_output_for_spec_decode": "spec_decode",
    "reshape_query_for_spec_decode": "spec_decode",
    "set_kv_cache_layout": "kv_cache_layout",
    "slice_query_start_locs": "ubatch",
    "split_attn_metadata": "ubatch",
    "split_decodes_and_prefills": "batch_order",
    "subclass_attention_backend": "subclassing",
    "subclass_attention_metadata": "subclassing",
    "swap_blocks": "cache",
    "varlen_attention": "varlen",
    "visible": "params",
    "window_pair": "params",
}
"""Where each public name lives. A test holds this table, the imports above and the modules together."""

__all__ = [
    "KV_SHARING_FAST_PREFILL_METADATA_FIELDS",
    "PAD_SLOT_ID",
    "AttentionCGSupport",
    "AttentionMetadataBuilder",
    "AttentionParams",
    "AttentionType",
    "BatchSpec",
    "CacheSpec",
    "CommonAttentionMetadata",
    "KVCacheLayoutType",
    "KVSharingFastPrefillMetadata",
    "LayerSpec",
    "M",
    "MLAParams",
    "PerLayerParameters",
    "Precision",
    "UBatchSlice",
    "causal_conv1d",
    "compute_causal_conv1d_metadata",
    "compute_slot_mapping",
    "copy_blocks",
    "create_fast_prefill_custom_backend",
    "dcp_rank_attention",
    "dequantize_fp8",
    "get_dcp_local_seq_lens",
    "get_kv_cache_layout",
    "get_per_layer_parameters",
    "infer_global_hyperparameters",
    "is_valid_kv_cache_layout",
    "kv_cache_views",
    "layer_params",
    "logger",
    "make_kv_sharing_fast_prefill_common_attn_metadata",
    "make_local_attention_virtual_batches",
    "merge_attn_states",
    "merge_many",
    "mla_attention_absorbed",
    "mla_attention_chunked",
    "mla_attention_naive",
    "mla_latent_attention",
    "mla_params",
    "mla_write_cache",
    "paged_attention",
    "quantize_fp8",
    "quantize_fp8_group",
    "reorder_batch_to_split_decodes_and_prefills",
    "reshape_and_cache",
    "reshape_attn_output_for_spec_decode",
    "reshape_query_for_spec_decode",
    "set_kv_cache_layout",
    "slice_query_start_locs",
    "split_attn_metadata",
    "split_decodes_and_prefills",
    "subclass_attention_backend",
    "subclass_attention_metadata",
    "swap_blocks",
    "varlen_attention",
    "visible",
    "window_pair",
]

_UNLISTED = {"_KV_CACHE_LAYOUT_OVERRIDE": "kv_cache_layout", "_make_metadata_with_slice": "ubatch"}
"""Names that vLLM marks as private and its callers use all the same. Never kept here: the override changes."""


def __getattr__(name: str) -> object:
    home = _HOME.get(name) or _UNLISTED.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    if name in _HOME:
        globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
