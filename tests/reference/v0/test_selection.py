"""What attention of each type reads of the metadata."""

from types import SimpleNamespace

import pytest
import torch

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.v0 import (
    AttentionType,
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


@pytest.mark.parametrize("as_type", [str, AttentionType])
@pytest.mark.parametrize("attn_type", TOKENS)
def test_numbers_of_tokens(attn_type, as_type):
    batch = SimpleNamespace(num_prefill_tokens=12, num_decode_tokens=3, num_encoder_tokens=20)
    assert get_num_prefill_decode_query_kv_tokens(batch, as_type(attn_type)) == TOKENS[attn_type]


@pytest.mark.parametrize("attn_type", ["decoder", "encoder_only"])
def test_encoder_tokens_are_not_looked_at_where_they_mean_nothing(attn_type):
    batch = SimpleNamespace(num_prefill_tokens=12, num_decode_tokens=3)
    assert get_num_prefill_decode_query_kv_tokens(batch, attn_type) == (12, 12, 3)


@pytest.mark.parametrize("attn_type", ["encoder", "encoder_decoder"])
def test_encoder_tokens_are_demanded_where_they_are_needed(attn_type):
    batch = SimpleNamespace(num_prefill_tokens=12, num_decode_tokens=3, num_encoder_tokens=None)
    with pytest.raises(ReferenceArgumentError, match=f"num_encoder_tokens = None: .*'{attn_type}'"):
        get_num_prefill_decode_query_kv_tokens(batch, attn_type)
    batch.num_encoder_tokens = 0
    assert get_num_prefill_decode_query_kv_tokens(batch, attn_type)[1] == 0


def test_an_unknown_type_has_no_tokens():
    with pytest.raises(ReferenceArgumentError, match=r"attn_type = 'prefix': .*encoder_only"):
        get_num_prefill_decode_query_kv_tokens(SimpleNamespace(), "prefix")


LOOKUPS = {
    ("decoder", True): ("seq_lens_tensor", "max_prefill_seq_len", "block_tables"),
    ("decoder", False): ("seq_lens_tensor", "max_decode_seq_len", "block_tables"),
    ("encoder_decoder", True): ("encoder_seq_lens_tensor", "max_encoder_seq_len", "cross_block_tables"),
    ("encoder_decoder", False): ("encoder_seq_lens_tensor", "max_encoder_seq_len", "cross_block_tables"),
    ("encoder", True): ("encoder_seq_lens_tensor", "max_encoder_seq_len", None),
    ("encoder", False): ("encoder_seq_lens_tensor", "max_encoder_seq_len", None),
}


@pytest.mark.parametrize("as_type", [str, AttentionType])
@pytest.mark.parametrize("content", [object, lambda: None])
@pytest.mark.parametrize(("attn_type", "is_prompt"), LOOKUPS)
def test_lengths_longest_and_tables_are_the_metadatas_own(attn_type, is_prompt, content, as_type):
    fields = LOOKUPS[attn_type, is_prompt]
    batch = SimpleNamespace(**{name: content() for name in fields if name})
    found = get_seq_len_block_table_args(batch, is_prompt, as_type(attn_type))
    assert isinstance(found, tuple)
    assert len(found) == 3
    assert all(value is (getattr(batch, name) if name else None) for value, name in zip(found, fields, strict=True))


@pytest.mark.parametrize("attn_type", ["encoder_only", "prefix", AttentionType.ENCODER_ONLY])
def test_other_types_have_no_lookup(attn_type):
    with pytest.raises(AttributeError, match=f"'{attn_type}'"):
        get_seq_len_block_table_args(SimpleNamespace(), True, attn_type)


ENCODER = {"encoder_seq_lens": [], "encoder_seq_lens_tensor": torch.empty(0), "max_encoder_seq_len": 0}


def test_empty_encoder_fields_are_set():
    assert is_all_encoder_attn_metadata_set(SimpleNamespace(**ENCODER)) is True
    several = {"encoder_seq_lens": [3, 4], "encoder_seq_lens_tensor": torch.tensor([3, 4]), "max_encoder_seq_len": 4}
    assert is_all_encoder_attn_metadata_set(SimpleNamespace(**several)) is True


@pytest.mark.parametrize("missing", ENCODER)
def test_each_encoder_field_is_needed(missing):
    assert is_all_encoder_attn_metadata_set(SimpleNamespace(**{**ENCODER, missing: None})) is False


CROSS = {
    "is_all_encoder_attn_metadata_set": True,
    "cross_slot_mapping": torch.empty(0),
    "cross_block_tables": torch.empty(0, 0),
}


def test_cross_attention_reads_the_property():
    assert is_all_cross_attn_metadata_set(SimpleNamespace(**CROSS)) is True
    assert is_all_cross_attn_metadata_set(SimpleNamespace(**CROSS, **ENCODER)) is True
    refusing = SimpleNamespace(**{**CROSS, **ENCODER, "is_all_encoder_attn_metadata_set": False})
    assert is_all_cross_attn_metadata_set(refusing) is False


@pytest.mark.parametrize("missing", ["cross_slot_mapping", "cross_block_tables"])
def test_each_cross_field_is_needed(missing):
    assert is_all_cross_attn_metadata_set(SimpleNamespace(**{**CROSS, missing: None})) is False
