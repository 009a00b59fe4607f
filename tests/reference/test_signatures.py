"""The names that ``attncheck.reference`` exports, and their signatures."""

import ast
import inspect
from dataclasses import fields
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import pytest

from attncheck import reference
from attncheck.reference import spec, v0
from attncheck.reference.lazy_exports import homes
from attncheck.reference.spec import FEATURES, MODIFIERS, LayerSpec
from attncheck.reference.utilities import builder, ubatch

UTILITIES = {
    "slice_query_start_locs": "query_start_loc request_slice",
    "_make_metadata_with_slice": "ubatch_slice attn_metadata",
    "split_attn_metadata": "ubatch_slices common_attn_metadata",
    "split_decodes_and_prefills": "common_attn_metadata decode_threshold=1 require_uniform=False",
    "reorder_batch_to_split_decodes_and_prefills": "input_batch scheduler_output decode_threshold=1",
    "make_local_attention_virtual_batches": "attn_chunk_size common_attn_metadata block_size=0",
    "make_kv_sharing_fast_prefill_common_attn_metadata": "common_attn_metadata",
    "create_fast_prefill_custom_backend": "prefix underlying_attn_backend",
    "compute_causal_conv1d_metadata": "query_start_loc_p",
    "reshape_query_for_spec_decode": "query batch_size",
    "reshape_attn_output_for_spec_decode": "attn_output",
    "is_valid_kv_cache_layout": "value",
    "set_kv_cache_layout": "cache_layout",
    "get_kv_cache_layout": "",
    "get_per_layer_parameters": "vllm_config layer_names cls_",
    "infer_global_hyperparameters": "per_layer_params",
    "subclass_attention_backend": "name_prefix attention_backend_cls builder_cls",
    "subclass_attention_metadata": "name_prefix metadata_cls fields",
    "get_dcp_local_seq_lens": "seq_lens dcp_size=1 dcp_rank=None cp_kv_cache_interleave_size=1",
    "UBatchSlice": "request_slice token_slice",
    "PerLayerParameters": "window_left logits_soft_cap sm_scale has_sinks=False has_same_window_lefts=None "
    "has_same_all_params=None",
}
BUILD = "self seq_lens query_lens cuda_graph_pad_size batch_size"
CAPTURE = "self batch_size is_encoder_decoder_model=False"
BUFFERS = "self attn_metadata is_encoder_decoder_model=False"
REFILL = "self input_buffers attn_metadata is_encoder_decoder_model=False"
OUTPUTS = "output=None output_scale=None output_block_scale=None"
V0 = {
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


def spelled(function):
    words = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        default = parameter.default
        words.append(parameter.name if default is parameter.empty else f"{parameter.name}={default}")
    return " ".join(words)


@pytest.mark.parametrize("name", UTILITIES)
def test_parameters_of_a_utility(name):
    assert spelled(getattr(reference, name)) == UTILITIES[name]


@pytest.mark.parametrize("name", V0)
def test_parameters_of_the_first_generation(name):
    assert spelled(attrgetter(name)(v0)) == V0[name]


def test_attention_takes_tensors_by_position_and_options_by_keyword():
    for name in ("paged", "varlen", "dcp_rank", "mla_latent"):
        parameters = list(inspect.signature(getattr(reference, f"{name}_attention")).parameters.values())
        tensors = [parameter.name for parameter in parameters].index("params") + 1
        assert all(parameter.default is parameter.empty for parameter in parameters[:tensors])
        assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters[tensors:])


HALVES = {"_compute_slot_mapping_numpy", "_compute_slot_mapping_python"}  # private in vLLM, which its callers use
PRIVATE = {"_KV_CACHE_LAYOUT_OVERRIDE", "_make_metadata_with_slice", *HALVES}


@pytest.mark.parametrize("package", [reference, v0])
def test_every_name_is_there_and_listed(package):
    home = homes(package.__file__)
    assert package.__all__ == sorted(set(home) - PRIVATE)
    for name in package.__all__:
        value = getattr(package, name)
        assert value is getattr(import_module(home[name]), name)
        assert value is vars(package)[name]
        assert name in dir(package)
        if package is reference and (inspect.isclass(value) or inspect.isroutine(value)):
            assert value.__doc__


def test_generations_differ_and_share_the_words():
    assert v0.compute_slot_mapping is not reference.compute_slot_mapping
    assert v0.AttentionMetadataBuilder is not reference.AttentionMetadataBuilder
    assert v0.AttentionType is spec.AttentionType
    assert v0.PAD_SLOT_ID == -1
    assert v0.TAttentionMetadata.__bound__ is v0.AttentionMetadata
    assert v0.IndexMap is v0.MultiModalPlaceholderMap.IndexMap


@pytest.mark.parametrize("package", [reference, v0])
def test_type_checkers_see_each_name_once_and_as_public(package):
    stub = ast.parse(Path(package.__file__).with_suffix(".pyi").read_text())
    names = [alias for node in stub.body for alias in node.names]
    assert all(alias.asname == alias.name for alias in names)
    assert len({alias.name for alias in names}) == len(names)
    assert {alias.name for alias in names} == set(homes(package.__file__))


def test_private_names_are_read_from_their_module_each_time(monkeypatch):
    assert reference._make_metadata_with_slice is ubatch._make_metadata_with_slice
    assert reference._KV_CACHE_LAYOUT_OVERRIDE is None
    monkeypatch.setattr(builder, "_KV_CACHE_LAYOUT_OVERRIDE", "HND")
    assert reference._KV_CACHE_LAYOUT_OVERRIDE == "HND"
    assert not PRIVATE & {*vars(reference), *dir(reference)}


@pytest.mark.parametrize("package", [reference, v0])
def test_an_unknown_name_is_an_attribute_error(package):
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = package.no_such_thing


SIZES = {"num_heads": 2, "num_kv_heads": 1, "head_size": 16}
ON = {name: modifier.ordinary for name, modifier in MODIFIERS.items()}
OFF = {"sliding_window": None, "logits_soft_cap": 0.0, "alibi": False, "sinks": False, "attn_chunk_size": None}


def test_modifiers_are_fields_of_a_layer_and_have_features():
    assert set(MODIFIERS) <= {field.name for field in fields(LayerSpec)}
    assert {modifier.feature for modifier in MODIFIERS.values()} <= set(FEATURES)
    assert LayerSpec(**SIZES).modifiers == ()


@pytest.mark.parametrize("name", MODIFIERS)
def test_a_modifier_is_on_or_off(name):
    assert LayerSpec(**SIZES, **{name: ON[name]}).modifiers == (name,)
    assert LayerSpec(**SIZES, **(ON | {name: OFF.get(name)})).modifiers == tuple(other for other in ON if other != name)


def test_windows_slopes_and_chunks_depend_on_positions():
    assert LayerSpec(**SIZES, **ON).position_modifiers == ("sliding_window", "alibi", "attn_chunk_size")
    assert LayerSpec(**SIZES, **OFF).position_modifiers == ()
