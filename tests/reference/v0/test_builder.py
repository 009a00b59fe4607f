"""The builder over worked batches: what becomes of prompts, decodes, windows, prefix hits, profile runs."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from attncheck.reference.v0 import MultiModalPlaceholderMap

KEYWORDS = {
    "num_prefills",
    "num_prefill_tokens",
    "num_decode_tokens",
    "slot_mapping",
    "seq_lens",
    "seq_lens_tensor",
    "max_query_len",
    "max_prefill_seq_len",
    "max_decode_seq_len",
    "query_start_loc",
    "seq_start_loc",
    "context_lens_tensor",
    "block_tables",
    "multi_modal_placeholder_index_maps",
    "enable_kv_scales_calculation",
    "use_cuda_graph",
}
INT32 = {"seq_lens_tensor", "query_start_loc", "seq_start_loc", "context_lens_tensor", "block_tables"}


def build(builder, *arguments):
    builder.prepare()
    return builder.build(*arguments)


def plain(metadata):
    """The keywords with tensors as lists."""
    return {name: x.tolist() if isinstance(x, torch.Tensor) else x for name, x in vars(metadata).items()}


MIXED = {
    "num_prefills": 2,
    "num_prefill_tokens": 9,
    "num_decode_tokens": 2,
    "slot_mapping": [12, 13, 14, 15, 32, 33, 36, 37, 38, 20, 49],
    "seq_lens": [6, 11, 9, 14],
    "seq_lens_tensor": [6, 11, 9, 14],
    "max_query_len": 6,
    "max_prefill_seq_len": 11,
    "max_decode_seq_len": 14,
    "query_start_loc": [0, 6, 9, 10, 11],
    "seq_start_loc": [0, 6, 17, 26, 40],
    "context_lens_tensor": [0, 8, 8, 13],
    "block_tables": [[0, 0, 0, 0], [1, 4, 9, 0], [2, 0, 5, 0], [6, 7, 11, 12]],
    "multi_modal_placeholder_index_maps": {"image": ([0, 1], [1, 2])},
    "enable_kv_scales_calculation": True,
    "use_cuda_graph": False,
}


def test_prompts_then_decodes(builder, prompts, decodes):
    seq_lens, query_lens = [6, 11, 9, 14], [6, 3, 1, 1]
    metadata = build(builder(*prompts, decodes), seq_lens, query_lens, -1, 4)
    assert vars(metadata).keys() == KEYWORDS
    assert plain(metadata) == MIXED
    assert metadata.seq_lens is seq_lens
    assert metadata.slot_mapping.dtype == torch.int64
    assert {getattr(metadata, name).dtype for name in INT32} == {torch.int32}


def test_chunked_prefill_changes_tables_only(builder, prompts, decodes):
    metadata = build(builder(*prompts, decodes, chunked=True), [6, 11, 9, 14], [6, 3, 1, 1], -1, 4)
    tables = [[3, 8, 0, 0], [1, 4, 9, 0], [2, 0, 5, 0], [6, 7, 11, 12]]
    assert plain(metadata) == {**MIXED, "block_tables": tables}


def test_a_window_shortens_rows_and_lengths_but_not_slots(builder, group, seq):
    windowed = group(False, seq(20, 9, 8, [2, 0, 5], 8, 2), seq(21, 14, 13, [6, 7, 11, 12], 8, 2))
    metadata = plain(build(builder(windowed, window=8), [8, 8], [1, 1], -1, 2))
    assert metadata["block_tables"] == [[0, 5], [11, 12]]
    assert metadata["slot_mapping"] == [20, 49]
    assert metadata["seq_lens_tensor"] == [8, 8]
    assert metadata["max_decode_seq_len"] == 8
    assert metadata["context_lens_tensor"] == [8, 13]


@pytest.mark.parametrize(("blocks", "row"), [(0, [6, 7, 11]), (1, [11]), (3, [6, 7, 11]), (9, [6, 7, 11])])
def test_as_many_window_blocks_as_there_are(builder, group, seq, blocks, row):
    metadata = build(builder(group(False, seq(1, 9, 8, [6, 7, 11], 4, blocks)), window=4), [4], [1], -1, 1)
    assert metadata.block_tables.tolist() == [row]


def test_a_prefix_hit_takes_the_whole_table_even_under_a_window(builder, group, seq):
    metadata = build(builder(group(True, seq(1, 11, 8, [1, 4, 9], 4, 1), hit=True), window=4), [4], [3], -1, 1)
    assert metadata.block_tables.tolist() == [[1, 4, 9]]


def test_a_prompts_window_masks_its_first_slots(builder, group, seq):
    metadata = build(builder(group(True, seq(3, 10, 0, [7, 2, 7], windowed=8)), window=8), [8], [10], -1, 1)
    assert metadata.slot_mapping.tolist() == [-1, -1, 30, 31, 8, 9, 10, 11, 28, 29]
    assert metadata.block_tables.shape == (1, 0)
    assert metadata.max_prefill_seq_len == 10
    assert metadata.seq_lens_tensor.tolist() == [8]


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("tables", [None, {0: None}, {}])
def test_without_a_cache_there_are_no_slots_and_no_rows(builder, group, seq, tables, chunked):
    metadata = build(builder(group(True, seq(0, 5, 0, None), tables=tables), chunked=chunked), [5], [5], -1, 1)
    assert metadata.slot_mapping.tolist() == [-1] * 5
    assert metadata.block_tables.shape == (1, 0)
    assert metadata.block_tables.dtype == torch.int32
    assert metadata.max_prefill_seq_len == 5
    assert metadata.max_decode_seq_len == 0


def test_decodes_alone_have_no_longest_prompt(builder, decodes):
    metadata = build(builder(decodes), [9, 14], [1, 1], -1, 2)
    assert (metadata.num_prefills, metadata.num_prefill_tokens, metadata.max_prefill_seq_len) == (0, 0, 0)
    assert metadata.multi_modal_placeholder_index_maps == {}


def test_the_longest_of_numpys_integers_are_plain_ones(builder, group, seq):
    six, nine, one = np.array([6, 9, 1])
    groups = [group(True, seq(1, six, 0, [1, 2])), group(False, seq(2, nine, 8, [3, 4, 5]))]
    metadata = build(builder(*groups), [six, nine], [six, one], -1, 2)
    longest = (metadata.max_query_len, metadata.max_prefill_seq_len, metadata.max_decode_seq_len)
    assert longest == (6, 6, 9)
    assert {type(length) for length in longest} == {int}


def test_maps_of_prompts_are_concatenated_by_modality(builder, group, seq, image):
    one = {"image": image(range(2), 2, range(1, 3), 5)}
    two = {"image": image(range(1, 4), 4, range(3), 3), "audio": image(range(1), 1, range(1), 3)}
    groups = [
        group(True, seq(1, 5, 0, [1, 2]), maps=one),
        group(True, seq(2, 3, 0, [3]), maps=two),
        group(False, seq(3, 2, 1, [4]), maps=one),
    ]
    metadata = build(builder(*groups), [5, 3, 2], [5, 3, 1], -1, 3)
    assert metadata.multi_modal_placeholder_index_maps == {
        "image": ([0, 1, 3, 4, 5], [1, 2, 5, 6, 7]),
        "audio": ([0], [0]),
    }


def test_a_map_is_appended_once_a_sequence_of_its_group(builder, group, seq, image):
    maps = {"image": image(range(1), 2, range(1), 3)}
    metadata = build(builder(group(True, seq(1, 3, 0, [1]), seq(2, 3, 0, [2]), maps=maps)), [3, 3], [3, 3], -1, 2)
    assert metadata.multi_modal_placeholder_index_maps == {"image": ([0, 2], [0, 3])}


def test_construction_reads_three_facts(builder_class):
    source = SimpleNamespace(runner=object(), sliding_window=7, block_size=16)
    instance = builder_class(source)
    assert instance.input_builder is source
    assert instance.runner is source.runner
    assert (instance.sliding_window, instance.block_size) == (7, 16)


def test_prepare_starts_afresh(builder, prompts, decodes):
    instance = builder(*prompts, decodes)
    instance.prepare()
    collected = ("slot_mapping", "prefill_seq_lens", "context_lens", "block_tables", "curr_seq_lens")
    assert [getattr(instance, name) for name in collected] == [[]] * 5
    instance.build([6, 11, 9, 14], [6, 3, 1, 1], -1, 4)
    old = instance.slot_mapping
    instance.prepare()
    assert instance.slot_mapping == []
    assert old
    assert [getattr(instance, name) for name in collected] == [[]] * 5
    assert (instance.num_prefills, instance.num_prefill_tokens, instance.num_decode_tokens) == (0, 0, 0)
    assert instance.multimodal_placeholder_maps == {}
    assert isinstance(instance.multimodal_placeholder_maps["video"], MultiModalPlaceholderMap)


def test_a_group_collected_by_itself(builder, prompts, decodes):
    instance = builder()
    instance.prepare()
    instance._add_seq_group(prompts[1], False)
    instance._add_seq_group(decodes, False)
    assert instance.context_lens == [8, 8, 13]
    assert instance.prefill_seq_lens == [11]
    assert instance.curr_seq_lens == [9, 14]
    assert instance.block_tables == [[1, 4, 9], [2, 0, 5], [6, 7, 11, 12]]
    assert instance.slot_mapping == [36, 37, 38, 20, 49]
    assert (instance.num_prefills, instance.num_prefill_tokens, instance.num_decode_tokens) == (1, 3, 2)
    assert instance.multimodal_placeholder_maps["image"].index_map() == ([0, 1], [1, 2])


def test_what_the_scheduler_owns_is_not_changed(builder, prompts, decodes):
    groups = [*prompts, decodes]
    before = copy.deepcopy(groups)
    seq_lens, query_lens = [6, 11, 9, 14], [6, 3, 1, 1]
    build(builder(*groups, chunked=True), seq_lens, query_lens, -1, 4)
    assert groups == before
    assert (seq_lens, query_lens) == ([6, 11, 9, 14], [6, 3, 1, 1])


@pytest.mark.parametrize("pad", [-1, 2])
def test_every_tensor_is_on_the_runners_device(builder, decodes, array, pad):
    metadata = build(builder(decodes, array=array, device="meta"), [9, 14, 1, 1], [1, 1], pad, 4)
    tensors = {name: x.device.type for name, x in vars(metadata).items() if isinstance(x, torch.Tensor)}
    assert tensors == dict.fromkeys(INT32 | {"slot_mapping"}, "meta")
