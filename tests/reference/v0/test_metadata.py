"""First-generation classes and metadata, and the slots of one sequence."""

from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.v0 import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionState,
    AttentionType,
    CommonAttentionState,
    CommonMetadataBuilder,
    MLAAttentionImpl,
    MLADims,
    _compute_slot_mapping_numpy,
    _compute_slot_mapping_python,
    compute_slot_mapping,
    compute_slot_mapping_start_idx,
    get_mla_dims,
    get_num_prefill_decode_query_kv_tokens,
    get_seq_len_block_table_args,
    is_all_cross_attn_metadata_set,
    is_all_encoder_attn_metadata_set,
    is_block_tables_empty,
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
    for each in (attn_type, AttentionType(attn_type)):
        assert get_num_prefill_decode_query_kv_tokens(batch, each) == TOKENS[attn_type]
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


ABSTRACT = {
    AttentionBackend: "get_name get_impl_cls get_metadata_cls get_builder_cls get_state_cls get_kv_cache_shape "
    "swap_blocks copy_blocks",
    AttentionImpl: "__init__ forward",
    MLAAttentionImpl: "__init__ forward",
    AttentionMetadata: "prefill_metadata decode_metadata",
    AttentionMetadataBuilder: "__init__ prepare build",
    AttentionState: "__init__ graph_capture graph_clone graph_capture_get_metadata_for_batch get_graph_input_buffers "
    "prepare_graph_input_buffers begin_forward",
    CommonAttentionState: "",
    CommonMetadataBuilder: "",
}


@pytest.mark.parametrize("kind", ABSTRACT)
def test_what_a_subclass_must_bring(kind):
    assert kind.__abstractmethods__ == set(ABSTRACT[kind].split())


@dataclass
class Batch(AttentionMetadata):
    a: int = 1
    b: Any = None
    _kept: Any = None

    @property
    def prefill_metadata(self):
        return None

    @cached_property
    def decode_metadata(self):
        return SimpleNamespace()


BASE = [
    "num_prefills",
    "num_prefill_tokens",
    "num_decode_tokens",
    "slot_mapping",
    "multi_modal_placeholder_index_maps",
    "enable_kv_scales_calculation",
]


class Backend(AttentionBackend):
    get_name = get_impl_cls = get_builder_cls = get_state_cls = staticmethod(lambda: None)
    get_kv_cache_shape = swap_blocks = copy_blocks = staticmethod(lambda *args: None)

    @staticmethod
    def get_metadata_cls():
        return Batch


def test_a_backends_defaults():
    assert Backend.accept_output_buffer is False
    assert Backend.full_cls_name() == (__name__, "Backend")
    with pytest.raises(NotImplementedError):
        Backend.get_kv_cache_stride_order()
    assert Backend.make_metadata(1, 2, 3, None, None, True, b=7) == Batch(1, 2, 3, None, None, True, b=7)
    assert AttentionImpl.fused_output_quant_supported(None, quant_key=(torch.float8_e4m3fn, True)) is False


def test_asdict_copies_nothing_and_skips_what_is_named():
    slots, nested = torch.arange(3), [Batch(0, 0, 0, None, None, False)]
    batch = Batch(1, 2, 3, slots, None, True, b=nested)
    batch.handle = object()
    assert batch.decode_metadata is batch.decode_metadata
    found = batch.asdict_zerocopy()
    assert list(found) == [*BASE, "a", "b", "_kept"]
    assert found["slot_mapping"] is slots
    assert found["b"] is nested
    skipped = {"a", "unknown", "_kept", *BASE}
    assert batch.asdict_zerocopy(skipped) == {"b": nested}
    assert skipped == {"a", "unknown", "_kept", *BASE}


TABLE = [7, 2, 5]


def slots(seq_len, context_len, start_idx, table=TABLE, block_size=4):
    """What a call appends behind a first element; the id of the sequence is 3."""
    mapping = [99]
    assert compute_slot_mapping(False, mapping, 3, seq_len, context_len, start_idx, block_size, {3: table}) is None
    assert mapping.pop(0) == 99
    return mapping


def test_a_table_may_repeat_a_block_and_what_is_not_needed_may_be_anything():
    assert slots(10, 0, 2, [7, 2, 7]) == [-1, -1, 30, 31, 8, 9, 10, 11, 28, 29]
    assert slots(10, 10, 10, []) == []
    assert slots(2, 0, 0, [7, -1, -5]) == [28, 29]
    assert slots(10, 6, 0, [-1, 2, 5]) == [10, 11, 20, 21]
    mapping = [5]
    compute_slot_mapping(True, mapping, 3, 5, 2, 0, 4, None)
    assert mapping == [5, -1, -1, -1, -1, -1], "a profile run"
    found = slots(np.int64(10), np.int64(8), np.int64(0), np.array(TABLE, dtype=np.int32), np.int64(4))
    assert {type(slot) for slot in found} == {int}


def test_what_counts_as_no_tables():
    for empty in (None, {}, {3: None}, OrderedDict({3: None})):
        assert is_block_tables_empty(empty) is True
    for tables in ({3: []}, {3: None, 4: [1]}, [], MappingProxyType({})):
        assert is_block_tables_empty(tables) is False


def test_the_first_position_worth_storing():
    """A prompt's positions before its window are not worth it; decodes and chunks have none."""
    assert compute_slot_mapping_start_idx(True, 10, 0, None) == 0
    assert compute_slot_mapping_start_idx(True, 10, 0, 8) == 2
    assert compute_slot_mapping_start_idx(False, 10, 0, 8) == 0
    assert compute_slot_mapping_start_idx(True, 10, 32, 8) == 2
    for is_prompt in (True, False):
        with pytest.raises(ReferenceArgumentError, match="sliding_window = 0"):
            compute_slot_mapping_start_idx(is_prompt, 10, 0, 0)


@st.composite
def sequences(draw):
    """(block size, table without repetition, context length, sequence length)."""
    block_size = draw(st.integers(1, 9))
    table = draw(st.lists(st.integers(0, 400), min_size=1, max_size=60, unique=True))
    seq_len = draw(st.integers(0, block_size * len(table)))
    return block_size, table, draw(st.integers(0, seq_len)), seq_len


@given(sequences(), st.data())
def test_every_new_token_is_masked_or_in_its_slot(sequence, data):
    block_size, table, context_len, seq_len = sequence
    start_idx = data.draw(st.integers(0, seq_len))
    flat = [block * block_size + offset for block in table for offset in range(block_size)]
    want = [flat[position] if position >= start_idx else -1 for position in range(context_len, seq_len)]
    assert slots(seq_len, context_len, start_idx, table, block_size) == want


@pytest.mark.parametrize("fill", [_compute_slot_mapping_python, _compute_slot_mapping_numpy])
def test_either_half_appends_a_range_of_positions(fill):
    mapping = [1]
    fill(mapping, [*TABLE, -3], 3, 10, 4)
    assert mapping == [1, 31, 8, 9, 10, 11, 20, 21]
    assert {type(slot) for slot in mapping} == {int}
    fill(mapping, [], 3, 3, 4)
    assert len(mapping) == 8


@pytest.mark.parametrize("fill", [_compute_slot_mapping_python, _compute_slot_mapping_numpy])
@pytest.mark.parametrize(
    ("table", "start", "end", "block_size", "message"),
    [
        (TABLE, 0, 13, 4, r"at least 4 blocks long for positions 0 to 12 .* length is 3"),
        ([7, -2, 5], 2, 5, 4, "it has -2"),
        (TABLE, -1, 5, 4, "range_start = -1"),
    ],
)
def test_either_half_refuses_before_it_appends(fill, table, start, end, block_size, message):
    mapping = [1]
    with pytest.raises(ReferenceArgumentError, match=message):
        fill(mapping, table, start, end, block_size)
    assert mapping == [1]


GOOD = {"seq_len": 10, "context_len": 0, "start_idx": 2, "block_size": 4, "block_tables": {3: TABLE, 8: [1]}}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"seq_len": 13}, r"block_tables\[3\] = \[7, 2, 5\]: .* at least 4 blocks .* 2 to 12 .* length is 3"),
        ({"block_tables": {3: None, 8: [1]}}, r"block_tables\[3\] = None"),
        ({"block_tables": None}, r"block_tables = None: .* sequence 3"),
        ({"block_size": 0}, "block_size = 0"),
        ({"context_len": 11}, "seq_len = 10: .* context_len 11"),
        ({"start_idx": 11}, "start_idx = 11: .* seq_len 10"),
        ({"block_tables": {3: [7, -2, 5]}}, r"block_tables\[3\] .* negative .* it has -2"),
    ],
)
def test_what_means_nothing_is_refused_before_anything_is_appended(wrong, message):
    mapping = [99]
    compute_slot_mapping(False, mapping, 3, **GOOD)
    before = list(mapping)
    assert len(before) == 11
    with pytest.raises(ReferenceArgumentError, match=message):
        compute_slot_mapping(False, mapping, 3, **{**GOOD, **wrong})
    assert mapping == before
