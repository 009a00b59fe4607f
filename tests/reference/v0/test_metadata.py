"""Beside the builder: what attention of each type reads of the metadata, placeholder maps, latent sizes."""

from types import SimpleNamespace

import pytest
import torch

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.v0 import (
    AttentionType,
    MLADims,
    get_mla_dims,
    get_num_prefill_decode_query_kv_tokens,
    get_seq_len_block_table_args,
    is_all_cross_attn_metadata_set,
    is_all_encoder_attn_metadata_set,
)

TOKENS = {
    "decoder": (12, 12, 3),
    "encoder": (20, 20, 0),
    "encoder_only": (12, 12, 3),
    "encoder_decoder": (12, 20, 3),
}


@pytest.mark.parametrize("attn_type", TOKENS)
def test_numbers_of_tokens(attn_type):
    batch = SimpleNamespace(num_prefill_tokens=12, num_decode_tokens=3, num_encoder_tokens=20)
    for given in (attn_type, AttentionType(attn_type)):
        assert get_num_prefill_decode_query_kv_tokens(batch, given) == TOKENS[attn_type]
    if 20 in TOKENS[attn_type]:
        batch.num_encoder_tokens = None
        with pytest.raises(ReferenceArgumentError, match=f"num_encoder_tokens = None: .*'{attn_type}'"):
            get_num_prefill_decode_query_kv_tokens(batch, attn_type)
        batch.num_encoder_tokens = 0
        assert get_num_prefill_decode_query_kv_tokens(batch, attn_type)[1] == 0


def test_an_unknown_type_has_no_tokens():
    with pytest.raises(ReferenceArgumentError, match=r"attn_type = 'prefix': .*encoder_only"):
        get_num_prefill_decode_query_kv_tokens(SimpleNamespace(), "prefix")


CROSS_LOOKUP = ("encoder_seq_lens_tensor", "max_encoder_seq_len", "cross_block_tables")
LOOKUPS = {
    ("decoder", True): ("seq_lens_tensor", "max_prefill_seq_len", "block_tables"),
    ("decoder", False): ("seq_lens_tensor", "max_decode_seq_len", "block_tables"),
    ("encoder_decoder", True): CROSS_LOOKUP,
    ("encoder_decoder", False): CROSS_LOOKUP,
    ("encoder", True): (*CROSS_LOOKUP[:2], None),
    ("encoder", False): (*CROSS_LOOKUP[:2], None),
}


@pytest.mark.parametrize(("attn_type", "is_prompt"), LOOKUPS)
def test_lengths_longest_and_tables_are_the_metadatas_own(attn_type, is_prompt):
    fields = LOOKUPS[attn_type, is_prompt]
    batch = SimpleNamespace(**{name: object() for name in fields if name})
    own = tuple(getattr(batch, name) if name else None for name in fields)
    assert get_seq_len_block_table_args(batch, is_prompt, attn_type) == own


@pytest.mark.parametrize("attn_type", ["encoder_only", "prefix"])
def test_other_types_have_no_lookup(attn_type):
    with pytest.raises(AttributeError, match=f"'{attn_type}'"):
        get_seq_len_block_table_args(SimpleNamespace(), True, attn_type)


ENCODER = {"encoder_seq_lens": [], "encoder_seq_lens_tensor": torch.empty(0), "max_encoder_seq_len": 0}
CROSS = {
    "is_all_encoder_attn_metadata_set": True,
    "cross_slot_mapping": torch.empty(0),
    "cross_block_tables": torch.empty(0, 0),
}


def test_each_field_of_encoders_and_cross_attention_is_needed_and_may_be_empty():
    assert is_all_encoder_attn_metadata_set(SimpleNamespace(**ENCODER)) is True
    for missing in ENCODER:
        assert is_all_encoder_attn_metadata_set(SimpleNamespace(**{**ENCODER, missing: None})) is False
    assert is_all_cross_attn_metadata_set(SimpleNamespace(**CROSS)) is True
    for name in CROSS:
        value = False if name == "is_all_encoder_attn_metadata_set" else None
        assert is_all_cross_attn_metadata_set(SimpleNamespace(**{**CROSS, **ENCODER, name: value})) is False


SIZES = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 96}


def config(**sizes):
    return SimpleNamespace(hf_text_config=SimpleNamespace(**sizes), hf_config=SimpleNamespace(kv_lora_rank=1))


def test_sizes_in_order_and_by_name():
    for query, rank in (({}, None), ({"q_lora_rank": None}, None), ({"q_lora_rank": 1536}, 1536)):
        assert get_mla_dims(config(**SIZES, **query)) == MLADims(rank, 512, 128, 64, 96)
    for missing in SIZES:
        with pytest.raises(AttributeError, match=missing):
            get_mla_dims(config(**{name: size for name, size in SIZES.items() if name != missing}))
