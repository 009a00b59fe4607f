# Type checkers read the names here, and ``lazy_exports`` reads the module of each.

from attncheck.reference.attention.cache import (
    compute_slot_mapping as compute_slot_mapping,
    copy_blocks as copy_blocks,
    dequantize_fp8 as dequantize_fp8,
    kv_cache_views as kv_cache_views,
    quantize_fp8 as quantize_fp8,
    quantize_fp8_group as quantize_fp8_group,
    reshape_and_cache as reshape_and_cache,
    swap_blocks as swap_blocks,
)
from attncheck.reference.attention.indexer import (
    index_scores as index_scores,
    sparse_attn_indexer as sparse_attn_indexer,
)
from attncheck.reference.attention.mla import (
    MLAParams as MLAParams,
    mla_attention_absorbed as mla_attention_absorbed,
    mla_attention_chunked as mla_attention_chunked,
    mla_attention_naive as mla_attention_naive,
    mla_latent_attention as mla_latent_attention,
    mla_params as mla_params,
    mla_write_cache as mla_write_cache,
)
from attncheck.reference.attention.online_softmax import (
    merge_attn_states as merge_attn_states,
    merge_many as merge_many,
)
from attncheck.reference.attention.paged import (
    dcp_rank_attention as dcp_rank_attention,
    paged_attention as paged_attention,
)
from attncheck.reference.attention.params import (
    AttentionParams as AttentionParams,
    Precision as Precision,
    PrefixMask as PrefixMask,
    chosen_keys as chosen_keys,
    layer_params as layer_params,
    visible as visible,
    window_pair as window_pair,
)
from attncheck.reference.attention.short_convolution import (
    causal_conv1d as causal_conv1d,
)
from attncheck.reference.attention.varlen import (
    varlen_attention as varlen_attention,
)
from attncheck.reference.spec import (
    AttentionCGSupport as AttentionCGSupport,
    AttentionType as AttentionType,
    LayerSpec as LayerSpec,
)
from attncheck.reference.step_spec import BatchSpec as BatchSpec, CacheSpec as CacheSpec
from attncheck.reference.utilities.batch_order import (
    reorder_batch_to_split_decodes_and_prefills as reorder_batch_to_split_decodes_and_prefills,
    reshape_attn_output_for_spec_decode as reshape_attn_output_for_spec_decode,
    reshape_query_for_spec_decode as reshape_query_for_spec_decode,
    split_decodes_and_prefills as split_decodes_and_prefills,
    split_decodes_prefills_and_extends as split_decodes_prefills_and_extends,
    split_prefill_chunks as split_prefill_chunks,
)
from attncheck.reference.utilities.builder import (
    AttentionMetadataBuilder as AttentionMetadataBuilder,
    KVCacheLayoutType as KVCacheLayoutType,
    M as M,
    PerLayerParameters as PerLayerParameters,
    _KV_CACHE_LAYOUT_OVERRIDE as _KV_CACHE_LAYOUT_OVERRIDE,
    get_kv_cache_layout as get_kv_cache_layout,
    get_per_layer_parameters as get_per_layer_parameters,
    infer_global_hyperparameters as infer_global_hyperparameters,
    is_valid_kv_cache_layout as is_valid_kv_cache_layout,
    logger as logger,
    set_kv_cache_layout as set_kv_cache_layout,
    subclass_attention_backend as subclass_attention_backend,
    subclass_attention_metadata as subclass_attention_metadata,
)
from attncheck.reference.utilities.metadata import (
    CommonAttentionMetadata as CommonAttentionMetadata,
    PAD_SLOT_ID as PAD_SLOT_ID,
    PrefillingMetadata as PrefillingMetadata,
    SparseMetadata as SparseMetadata,
    compute_causal_conv1d_metadata as compute_causal_conv1d_metadata,
    compute_mm_prefix_range_tensor as compute_mm_prefix_range_tensor,
    fill_mm_prefix_query_ranges as fill_mm_prefix_query_ranges,
    get_dcp_local_seq_lens as get_dcp_local_seq_lens,
    mamba_get_block_table_tensor as mamba_get_block_table_tensor,
)
from attncheck.reference.utilities.ubatch import (
    UBatchSlice as UBatchSlice,
    _make_metadata_with_slice as _make_metadata_with_slice,
    is_last_ubatch_empty as is_last_ubatch_empty,
    maybe_create_ubatch_slices as maybe_create_ubatch_slices,
    slice_query_start_locs as slice_query_start_locs,
    split_attn_metadata as split_attn_metadata,
)
from attncheck.reference.utilities.virtual_batches import (
    KVSharingFastPrefillMetadata as KVSharingFastPrefillMetadata,
    KV_SHARING_FAST_PREFILL_METADATA_FIELDS as KV_SHARING_FAST_PREFILL_METADATA_FIELDS,
    create_fast_prefill_custom_backend as create_fast_prefill_custom_backend,
    make_kv_sharing_fast_prefill_common_attn_metadata as make_kv_sharing_fast_prefill_common_attn_metadata,
    make_local_attention_virtual_batches as make_local_attention_virtual_batches,
)
