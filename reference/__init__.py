"""The right answers: a pure-torch ground truth of every attention path, float64 unless told otherwise.

Everything public is importable from here and loaded on first use (PEP 562), so that a module which wants only the
shared words of ``attncheck.reference.spec`` loads no torch.
The first generation of the metadata utilities stands apart, in ``attncheck.reference.v0``.

>>> from attncheck.reference import AttentionParams, paged_attention
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attncheck.reference.attention.cache import (
        compute_slot_mapping,
        copy_blocks,
        kv_cache_views,
        reshape_and_cache,
        swap_blocks,
    )
    from attncheck.reference.attention.dcp import dcp_rank_attention
    from attncheck.reference.attention.merge import merge_attn_states, merge_many
    from attncheck.reference.attention.mla_absorbed import mla_attention_absorbed, mla_latent_attention
    from attncheck.reference.attention.mla_cache import mla_write_cache
    from attncheck.reference.attention.mla_layer import MLAParams, mla_params
    from attncheck.reference.attention.mla_naive import mla_attention_chunked, mla_attention_naive
    from attncheck.reference.attention.paged import paged_attention
    from attncheck.reference.attention.params import AttentionParams, Precision, layer_params, visible, window_pair
    from attncheck.reference.attention.quant import dequantize_fp8, quantize_fp8, quantize_fp8_group
    from attncheck.reference.attention.short_convolution import causal_conv1d
    from attncheck.reference.attention.varlen import varlen_attention
    from attncheck.reference.spec import AttentionCGSupport, AttentionType, BatchSpec, CacheSpec, LayerSpec
    from attncheck.reference.utilities.batch_order import (
        reorder_batch_to_split_decodes_and_prefills,
        split_decodes_and_prefills,
    )
    from attncheck.reference.utilities.builder import AttentionMetadataBuilder, M
    from attncheck.reference.utilities.context_parallel import get_dcp_local_seq_lens
    from attncheck.reference.utilities.conv1d_metadata import compute_causal_conv1d_metadata
    from attncheck.reference.utilities.fast_prefill import (
        KV_SHARING_FAST_PREFILL_METADATA_FIELDS,
        KVSharingFastPrefillMetadata,
        create_fast_prefill_custom_backend,
        make_kv_sharing_fast_prefill_common_attn_metadata,
    )
    from attncheck.reference.utilities.kv_cache_layout import (
        KVCacheLayoutType,
        get_kv_cache_layout,
        is_valid_kv_cache_layout,
        logger,
        set_kv_cache_layout,
    )
    from attncheck.reference.utilities.layer_parameters import (
        PerLayerParameters,
        get_per_layer_parameters,
        infer_global_hyperparameters,
    )
    from attncheck.reference.utilities.local_attention import make_local_attention_virtual_batches
    from attncheck.reference.utilities.metadata import PAD_SLOT_ID, CommonAttentionMetadata
    from attncheck.reference.utilities.spec_decode import (
        reshape_attn_output_for_spec_decode,
        reshape_query_for_spec_decode,
    )
    from attncheck.reference.utilities.subclassing import subclass_attention_backend, subclass_attention_metadata
    from attncheck.reference.utilities.ubatch import UBatchSlice, slice_query_start_locs, split_attn_metadata

_HOME = {
    "AttentionCGSupport": "spec",
    "AttentionMetadataBuilder": "utilities.builder",
    "AttentionParams": "attention.params",
    "AttentionType": "spec",
    "BatchSpec": "spec",
    "CacheSpec": "spec",
    "CommonAttentionMetadata": "utilities.metadata",
    "KVCacheLayoutType": "utilities.kv_cache_layout",
    "KVSharingFastPrefillMetadata": "utilities.fast_prefill",
    "KV_SHARING_FAST_PREFILL_METADATA_FIELDS": "utilities.fast_prefill",
    "LayerSpec": "spec",
    "M": "utilities.builder",
    "MLAParams": "attention.mla_layer",
    "PAD_SLOT_ID": "utilities.metadata",
    "PerLayerParameters": "utilities.layer_parameters",
    "Precision": "attention.params",
    "UBatchSlice": "utilities.ubatch",
    "causal_conv1d": "attention.short_convolution",
    "compute_causal_conv1d_metadata": "utilities.conv1d_metadata",
    "compute_slot_mapping": "attention.cache",
    "copy_blocks": "attention.cache",
    "create_fast_prefill_custom_backend": "utilities.fast_prefill",
    "dcp_rank_attention": "attention.dcp",
    "dequantize_fp8": "attention.quant",
    "get_dcp_local_seq_lens": "utilities.context_parallel",
    "get_kv_cache_layout": "utilities.kv_cache_layout",
    "get_per_layer_parameters": "utilities.layer_parameters",
    "infer_global_hyperparameters": "utilities.layer_parameters",
    "is_valid_kv_cache_layout": "utilities.kv_cache_layout",
    "kv_cache_views": "attention.cache",
    "layer_params": "attention.params",
    "logger": "utilities.kv_cache_layout",
    "make_kv_sharing_fast_prefill_common_attn_metadata": "utilities.fast_prefill",
    "make_local_attention_virtual_batches": "utilities.local_attention",
    "merge_attn_states": "attention.merge",
    "merge_many": "attention.merge",
    "mla_attention_absorbed": "attention.mla_absorbed",
    "mla_attention_chunked": "attention.mla_naive",
    "mla_attention_naive": "attention.mla_naive",
    "mla_latent_attention": "attention.mla_absorbed",
    "mla_params": "attention.mla_layer",
    "mla_write_cache": "attention.mla_cache",
    "paged_attention": "attention.paged",
    "quantize_fp8": "attention.quant",
    "quantize_fp8_group": "attention.quant",
    "reorder_batch_to_split_decodes_and_prefills": "utilities.batch_order",
    "reshape_and_cache": "attention.cache",
    "reshape_attn_output_for_spec_decode": "utilities.spec_decode",
    "reshape_query_for_spec_decode": "utilities.spec_decode",
    "set_kv_cache_layout": "utilities.kv_cache_layout",
    "slice_query_start_locs": "utilities.ubatch",
    "split_attn_metadata": "utilities.ubatch",
    "split_decodes_and_prefills": "utilities.batch_order",
    "subclass_attention_backend": "utilities.subclassing",
    "subclass_attention_metadata": "utilities.subclassing",
    "swap_blocks": "attention.cache",
    "varlen_attention": "attention.varlen",
    "visible": "attention.params",
    "window_pair": "attention.params",
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

_UNLISTED = {"_KV_CACHE_LAYOUT_OVERRIDE": "utilities.kv_cache_layout", "_make_metadata_with_slice": "utilities.ubatch"}
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
