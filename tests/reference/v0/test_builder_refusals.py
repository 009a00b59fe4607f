"""What the builder refuses, and that the runner's array and what was collected are unchanged."""

import copy
from types import SimpleNamespace

import pytest

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.v0 import CommonMetadataBuilder

COLLECTED = (
    "slot_mapping",
    "prefill_seq_lens",
    "context_lens",
    "block_tables",
    "curr_seq_lens",
    "num_prefills",
    "num_prefill_tokens",
    "num_decode_tokens",
)


def collected(instance):
    maps = {modality: vars(ranges) for modality, ranges in instance.multimodal_placeholder_maps.items()}
    return copy.deepcopy([maps, *(getattr(instance, name) for name in COLLECTED)])


def changed(group, **changes):
    return SimpleNamespace(**{**vars(group), **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_lens": [1, 2]}, r"query_len = 2: .*1 for a decode \(sequence 21, length 14, context 13\)"),
        ({"query_lens": [0, 1]}, r"query_len = 0: .*sequence 20"),
        ({"context_lens": [8]}, r"len\(context_lens\) = 1: must be 2"),
        ({"seq_ids": [20, 21, 22]}, r"len\(input_tokens\) = 2: must be 3"),
        ({"input_tokens": [[7]]}, r"len\(input_tokens\) = 1: must be 2"),
        ({"curr_sliding_window_blocks": []}, r"len\(curr_sliding_window_blocks\) = 0: must be 2"),
        ({"curr_sliding_window_blocks": [0, -1]}, "curr_sliding_window_blocks = -1"),
        ({"block_tables": {20: [2, 0, 5]}}, r"seq_id = 21: .*\[20\]"),
        ({"block_tables": {20: [2, 0, 5], 21: None}}, r"block_tables\[21\] = None"),
        ({"block_tables": {20: [2, 0, 5], 21: [6, 7, 11]}}, r"block_tables\[21\] = .*positions 13 to 13.* length is 3"),
        ({"orig_seq_lens": [9, 12]}, "seq_len = 12: .*context_len 13"),
        ({"block_tables": None, "prefix_cache_hit": True}, r"block_tables = None"),
        ({"block_tables": {20: None, 21: None}, "prefix_cache_hit": True}, r"block_tables\[20\] = None"),
    ],
)
def test_a_group_is_collected_whole_or_not_at_all(builder, prompts, decodes, changes, message):
    instance = builder()
    instance.prepare()
    for prompt in prompts:
        instance._add_seq_group(prompt, False)
    before = collected(instance)
    with pytest.raises(ReferenceArgumentError, match=message):
        instance._add_seq_group(changed(decodes, **changes), False)
    assert collected(instance) == before


def test_a_window_of_nothing_is_refused(builder, decodes):
    instance = builder(decodes, window=0)
    instance.prepare()
    with pytest.raises(ReferenceArgumentError, match="sliding_window = 0"):
        instance.build([9, 14], [1, 1], -1, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([9, 14], [], -1, 2), r"query_lens = \[\]"),
        (([9, 14], [0, 0], -1, 2), r"query_lens = \[0, 0\]"),
        (([9, 14], [2, -1], -1, 2), r"query_lens = \[2, -1\]"),
        (([9, 14], [1, 1], -2, 2), "cuda_graph_pad_size = -2"),
        (([9, 14], [1, 1], 0, 3), "batch_size = 3: must be 2: 2 sequences and cuda_graph_pad_size 0"),
        (([9, 14], [1, 1], 2, 3), "batch_size = 3: must be 4"),
        (([9, 14], [1, 1], 0, 1), "batch_size = 1: must be 2"),
        (([9, 14], [1, 1], 3, 5), "batch_size = 5: must be at most 4"),
    ],
)
def test_lengths_and_sizes_that_do_not_fit(builder, decodes, array, arguments, message):
    instance, before = builder(decodes, array=array), array.copy()
    instance.prepare()
    with pytest.raises(ReferenceArgumentError, match=message):
        instance.build(*arguments)
    assert (array == before).all()


def test_a_row_wider_than_the_array(builder, group, decodes, seq, array):
    wide = group(False, seq(1, 24, 23, [1, 2, 3, 4, 5, 6]))
    instance, before = builder(decodes, wide, array=array), array.copy()
    instance.prepare()
    with pytest.raises(ReferenceArgumentError, match=r"len\(block_tables\[2\]\) = 6: must be at most 5"):
        instance.build([9, 14, 24], [1, 1, 1], 0, 3)
    assert (array == before).all()


def test_maps_that_do_not_pair_up_are_refused_before_the_array_changes(builder, group, seq, image, array):
    maps = {"image": image(range(2), 2, range(3), 3)}
    instance, before = builder(group(True, seq(1, 5, 0, [1, 2]), hit=True, maps=maps), array=array), array.copy()
    instance.prepare()
    with pytest.raises(ReferenceArgumentError, match="2 rows"):
        instance.build([5], [5], 0, 1)
    assert (array == before).all()


def test_every_batch_needs_a_prepare(builder, decodes, array):
    instance, before = builder(decodes, array=array), array.copy()
    for attempt in (lambda: instance.build([9, 14], [1, 1], 0, 2), lambda: instance._add_seq_group(decodes, False)):
        with pytest.raises(RuntimeError, match=r"Builder: .*prepare"):
            attempt()
    assert (array == before).all()
    instance.prepare()
    instance.build([9, 14], [1, 1], -1, 2)
    with pytest.raises(RuntimeError, match="prepare"):
        instance.build([9, 14], [1, 1], -1, 2)
    instance.prepare()
    assert instance.build([9, 14], [1, 1], -1, 2).num_decode_tokens == 2


def test_a_batch_that_failed_half_way_is_not_resumed(builder, decodes):
    instance = builder(decodes, changed(decodes, query_lens=[1, 3]))
    instance.prepare()
    with pytest.raises(ReferenceArgumentError, match="query_len = 3"):
        instance.build([9, 14, 9, 14], [1, 1, 1, 3], -1, 4)
    instance.input_builder.inter_data_list = [decodes]
    with pytest.raises(RuntimeError, match="prepare"):
        instance.build([9, 14], [1, 1], -1, 2)


def test_a_refused_argument_does_not_use_up_the_prepare(builder, decodes):
    instance = builder(decodes)
    instance.prepare()
    with pytest.raises(ReferenceArgumentError):
        instance.build([9, 14], [], -1, 2)
    assert instance.build([9, 14], [1, 1], -1, 2).slot_mapping.tolist() == [20, 49]


def test_a_subclass_without_a_metadata_class_is_named(builder, decodes):
    class Nameless(CommonMetadataBuilder):
        pass

    instance = builder(decodes, kind=Nameless)
    instance.prepare()
    with pytest.raises(TypeError, match="Nameless does not set _metadata_cls"):
        instance.build([9, 14], [1, 1], -1, 2)
