"""The constants, types and enums beside the functions."""

import inspect
from types import SimpleNamespace
from typing import TypeVar, get_args

import pytest
import torch

from attncheck import reference
from attncheck.reference import AttentionCGSupport, CommonAttentionMetadata, PerLayerParameters

SIGNATURES = {
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


@pytest.mark.parametrize("name", SIGNATURES)
def test_parameters_have_vllms_names_order_and_defaults(name):
    parameters = inspect.signature(getattr(reference, name)).parameters.values()
    spelled = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
    assert " ".join(spelled) == SIGNATURES[name]
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


def test_constants():
    assert get_args(reference.KVCacheLayoutType) == ("NHD", "HND")
    assert reference.PAD_SLOT_ID == -1
    assert type(reference.PAD_SLOT_ID) is int
    assert isinstance(reference.M, TypeVar)
    assert reference.M.__name__ == "M"
    assert reference._KV_CACHE_LAYOUT_OVERRIDE is None
    reference.logger.info("a word about %s", "nothing")


def test_fast_prefill_fields_are_two_triples():
    (first, second) = reference.KV_SHARING_FAST_PREFILL_METADATA_FIELDS
    assert first == ("logits_indices_padded", torch.Tensor | None, None)
    assert second == ("num_logits_indices", int, 0)


def test_graph_support_has_four_unordered_levels():
    assert {level.name: level.value for level in AttentionCGSupport} == {
        "NEVER": 0,
        "UNIFORM_SINGLE_TOKEN_DECODE": 1,
        "UNIFORM_BATCH": 2,
        "ALWAYS": 3,
    }
    assert AttentionCGSupport(2) is AttentionCGSupport.UNIFORM_BATCH
    with pytest.raises(TypeError):
        _ = AttentionCGSupport.NEVER < AttentionCGSupport.ALWAYS
    with pytest.raises(ValueError, match="4"):
        AttentionCGSupport(4)


def test_a_dummy_batch_with_inconsistent_numbers_can_be_made(batch_a):
    dummy = CommonAttentionMetadata(*[torch.zeros(1)] * 5, 7, -3, 0, 0, "no table", None)
    assert (dummy.num_reqs, dummy.num_actual_tokens, dummy.block_table_tensor) == (7, -3, "no table")
    assert batch_a.causal is True


def test_verdicts_are_no_part_of_equality():
    assert PerLayerParameters(1, None, 0.5, False, True, True) == PerLayerParameters(1, None, 0.5)
    assert PerLayerParameters(1, None, 0.5) != PerLayerParameters(1, 0.0, 0.5)
    assert PerLayerParameters(1, None, 0.5) != PerLayerParameters(1, None, 0.5, has_sinks=True)
    changed = PerLayerParameters(1, None, 0.5)
    changed.window_left = 2
    assert changed.window_left == 2


def test_fast_prefill_metadata_is_known_by_its_attributes():
    protocol = reference.KVSharingFastPrefillMetadata
    assert isinstance(SimpleNamespace(logits_indices_padded=None, num_logits_indices=None), protocol)
    assert not isinstance(SimpleNamespace(num_logits_indices=1), protocol)
    assert not isinstance(SimpleNamespace(logits_indices_padded=None), protocol)
