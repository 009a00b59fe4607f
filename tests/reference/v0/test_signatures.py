"""Parameters of the first generation's functions and of what subclasses override: vLLM's names, order and defaults."""

import inspect
from operator import attrgetter

import pytest

from attncheck.reference import v0

BUILD = "self seq_lens query_lens cuda_graph_pad_size batch_size"
CAPTURE = "self batch_size is_encoder_decoder_model=False"
BUFFERS = "self attn_metadata is_encoder_decoder_model=False"
REFILL = "self input_buffers attn_metadata is_encoder_decoder_model=False"
OUTPUTS = "output=None output_scale=None output_block_scale=None"
SIGNATURES = {
    "AttentionImpl.__init__": "self num_heads head_size scale num_kv_heads=None alibi_slopes=None sliding_window=None "
    "kv_cache_dtype=auto logits_soft_cap=None attn_type=decoder kv_sharing_target_layer_name=None",
    "AttentionImpl.forward": f"self layer query key value kv_cache attn_metadata {OUTPUTS}",
    "MLAAttentionImpl.__init__": "self num_heads head_size scale num_kv_heads alibi_slopes sliding_window "
    "kv_cache_dtype logits_soft_cap attn_type kv_sharing_target_layer_name q_lora_rank kv_lora_rank qk_nope_head_dim "
    "qk_rope_head_dim qk_head_dim v_head_dim kv_b_proj",
    "MLAAttentionImpl.forward": f"self layer hidden_states_or_cq kv_c_normed k_pe kv_cache attn_metadata {OUTPUTS}",
    "AttentionLayer.forward": "self query key value kv_cache attn_metadata",
    "is_block_tables_empty": "block_tables",
    "compute_slot_mapping_start_idx": "is_prompt query_len context_len sliding_window",
    "compute_slot_mapping": "is_profile_run slot_mapping seq_id seq_len context_len start_idx block_size block_tables",
    "_compute_slot_mapping_numpy": "slot_mapping block_table range_start range_end block_size",
    "_compute_slot_mapping_python": "slot_mapping block_table range_start range_end block_size",
    "get_mla_dims": "model_config",
    "MLADims": "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim",
    "IndexMap": "src dest",
    "MultiModalPlaceholderMap": "",
    "MultiModalPlaceholderMap.extend": "self other",
    "get_num_prefill_decode_query_kv_tokens": "attn_metadata attn_type",
    "get_seq_len_block_table_args": "attn_metadata is_prompt attn_type",
    "is_all_encoder_attn_metadata_set": "attn_metadata",
    "is_all_cross_attn_metadata_set": "attn_metadata",
    "AttentionMetadataBuilder.__init__": "self input_builder",
    "AttentionMetadataBuilder.build": BUILD,
    "CommonMetadataBuilder.__init__": "self input_builder",
    "CommonMetadataBuilder._add_seq_group": "self inter_data chunked_prefill_enabled",
    "CommonMetadataBuilder.build": BUILD,
    "AttentionState.graph_capture": "self max_batch_size",
    "AttentionState.graph_clone": "self batch_size",
    "AttentionState.graph_capture_get_metadata_for_batch": CAPTURE,
    "AttentionState.get_graph_input_buffers": BUFFERS,
    "AttentionState.prepare_graph_input_buffers": REFILL,
    "AttentionState.begin_forward": "self model_input",
    "CommonAttentionState.__init__": "self runner",
    "CommonAttentionState.graph_capture_get_metadata_for_batch": CAPTURE,
    "CommonAttentionState.get_graph_input_buffers": BUFFERS,
    "CommonAttentionState.prepare_graph_input_buffers": REFILL,
    "CommonAttentionState._update_captured_metadata_for_enc_dec_model": "self batch_size attn_metadata",
    "CommonAttentionState._add_additional_input_buffers_for_enc_dec_model": "self attn_metadata input_buffers",
    "CommonAttentionState._prepare_input_buffers_for_enc_dec_model": "self attn_metadata input_buffers",
    "AttentionBackend.get_kv_cache_shape": "num_blocks block_size num_kv_heads head_size",
    "AttentionBackend.swap_blocks": "src_kv_cache dst_kv_cache src_to_dst",
    "AttentionBackend.copy_blocks": "kv_caches src_to_dists",
    "AttentionMetadata.asdict_zerocopy": "self skip_fields=None",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_parameters(name):
    parameters = inspect.signature(attrgetter(name)(v0)).parameters.values()
    spelled = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
    assert " ".join(spelled) == SIGNATURES[name]
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
