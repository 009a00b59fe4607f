# Type checkers read the names here, and ``lazy_exports`` reads the module of each.

from attncheck.reference.spec import (
    AttentionType as AttentionType,
)
from attncheck.reference.v0.builder import (
    CommonMetadataBuilder as CommonMetadataBuilder,
    PAD_SLOT_ID as PAD_SLOT_ID,
    _compute_slot_mapping_numpy as _compute_slot_mapping_numpy,
    _compute_slot_mapping_python as _compute_slot_mapping_python,
    compute_slot_mapping as compute_slot_mapping,
    compute_slot_mapping_start_idx as compute_slot_mapping_start_idx,
    is_block_tables_empty as is_block_tables_empty,
)
from attncheck.reference.v0.contract import (
    AttentionBackend as AttentionBackend,
    AttentionImpl as AttentionImpl,
    AttentionLayer as AttentionLayer,
    AttentionMetadataBuilder as AttentionMetadataBuilder,
    AttentionState as AttentionState,
    MLAAttentionImpl as MLAAttentionImpl,
)
from attncheck.reference.v0.metadata import (
    AttentionMetadata as AttentionMetadata,
    IndexMap as IndexMap,
    MLADims as MLADims,
    MultiModalPlaceholderMap as MultiModalPlaceholderMap,
    TAttentionMetadata as TAttentionMetadata,
    get_mla_dims as get_mla_dims,
    get_num_prefill_decode_query_kv_tokens as get_num_prefill_decode_query_kv_tokens,
    get_seq_len_block_table_args as get_seq_len_block_table_args,
    is_all_cross_attn_metadata_set as is_all_cross_attn_metadata_set,
    is_all_encoder_attn_metadata_set as is_all_encoder_attn_metadata_set,
)
from attncheck.reference.v0.state import (
    CommonAttentionState as CommonAttentionState,
    STR_NOT_IMPL_ENC_DEC_ROCM_HIP as STR_NOT_IMPL_ENC_DEC_ROCM_HIP,
)
