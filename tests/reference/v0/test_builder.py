"""The builder over worked batches: prompts, decodes, windows, prefix hits, profile runs, graphs, refusals."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.v0 import CommonMetadataBuilder


@dataclass(frozen=True)
class Seq:
    """One sequence of a group; ``windowed`` is its length under the sliding window, by default the whole."""

    seq_id: int
    seq_len: int
    context_len: int
    table: Sequence[int] | None
    windowed: int | None = None
    window_blocks: int = 0


def group(is_prompt, *seqs, hit=False, maps=None, tables=...):
    query_lens = [seq.seq_len - seq.context_len for seq in seqs]
    return SimpleNamespace(
        is_prompt=is_prompt,
        prefix_cache_hit=hit,
        block_tables={seq.seq_id: seq.table for seq in seqs} if tables is ... else tables,
        multi_modal_placeholder_maps=maps,
        seq_ids=[seq.seq_id for seq in seqs],
        input_tokens=[[7] * length for length in query_lens],
        orig_seq_lens=[seq.seq_len for seq in seqs],
        seq_lens=[seq.seq_len if seq.windowed is None else seq.windowed for seq in seqs],
        query_lens=query_lens,
        context_lens=[seq.context_len for seq in seqs],
        curr_sliding_window_blocks=[seq.window_blocks for seq in seqs],
    )


class Builder(CommonMetadataBuilder):
    """Metadata that is nothing but the keywords it was given."""

    _metadata_cls = SimpleNamespace


def builder(*groups, window=None, chunked=False, array=None, device="cpu", kind=Builder):
    runner = SimpleNamespace(device=torch.device(device), pin_memory=False, graph_block_tables=array)
    return kind(
        SimpleNamespace(
            runner=runner,
            sliding_window=window,
            block_size=4,
            inter_data_list=list(groups),
            chunked_prefill_enabled=chunked,
        )
    )


def image(src, src_len, dest, dest_len):
    return SimpleNamespace(src_ranges=[src], src_len=src_len, dest_ranges=[dest], dest_len=dest_len)


@pytest.fixture
def prompts():
    """Prompt A of 6 tokens; prompt B of 11 tokens, 8 of them cached, with an image."""
    maps = {"image": image(range(2), 2, range(1, 3), 3)}
    return [
        group(True, Seq(10, 6, 0, [3, 8])),
        group(True, Seq(11, 11, 8, [1, 4, 9]), hit=True, maps=maps),
    ]


@pytest.fixture
def decodes():
    """Two sequences that have come to 9 and 14 tokens."""
    return group(False, Seq(20, 9, 8, [2, 0, 5]), Seq(21, 14, 13, [6, 7, 11, 12]))


@pytest.fixture
def array():
    """A runner's 4 x 5 ``graph_block_tables``, 90 to 109: what earlier steps left."""
    return np.arange(90, 110, dtype=np.int32).reshape(4, 5)


INT32 = {"seq_lens_tensor", "query_start_loc", "seq_start_loc", "context_lens_tensor", "block_tables"}


def build(instance, *arguments):
    instance.prepare()
    return instance.build(*arguments)


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


def test_prompts_then_decodes(prompts, decodes):
    seq_lens, query_lens = [6, 11, 9, 14], [6, 3, 1, 1]
    metadata = build(builder(*prompts, decodes), seq_lens, query_lens, -1, 4)
    assert plain(metadata) == MIXED
    assert metadata.seq_lens is seq_lens
    assert metadata.slot_mapping.dtype == torch.int64
    assert {getattr(metadata, name).dtype for name in INT32} == {torch.int32}


def test_chunked_prefill_changes_tables_only_and_nothing_of_the_scheduler(prompts, decodes):
    groups, seq_lens, query_lens = [*prompts, decodes], [6, 11, 9, 14], [6, 3, 1, 1]
    before = copy.deepcopy(groups)
    metadata = build(builder(*groups, chunked=True), seq_lens, query_lens, -1, 4)
    tables = [[3, 8, 0, 0], [1, 4, 9, 0], [2, 0, 5, 0], [6, 7, 11, 12]]
    assert plain(metadata) == {**MIXED, "block_tables": tables}
    assert groups == before
    assert (seq_lens, query_lens) == ([6, 11, 9, 14], [6, 3, 1, 1])


def test_a_window_takes_as_many_blocks_as_there_are_and_a_prefix_hit_the_whole_table():
    windowed = group(False, Seq(20, 9, 8, [2, 0, 5], 8, 2), Seq(21, 14, 13, [6, 7, 11, 12], 8, 2))
    metadata = plain(build(builder(windowed, window=8), [8, 8], [1, 1], -1, 2))
    assert metadata["block_tables"] == [[0, 5], [11, 12]]
    assert (metadata["slot_mapping"], metadata["context_lens_tensor"]) == ([20, 49], [8, 13])
    assert (metadata["num_prefills"], metadata["max_prefill_seq_len"], metadata["max_decode_seq_len"]) == (0, 0, 8)
    for blocks, row in ((0, [6, 7, 11]), (1, [11]), (9, [6, 7, 11])):
        metadata = build(builder(group(False, Seq(1, 9, 8, [6, 7, 11], 4, blocks)), window=4), [4], [1], -1, 1)
        assert metadata.block_tables.tolist() == [row]
    metadata = build(builder(group(True, Seq(1, 11, 8, [1, 4, 9], 4, 1), hit=True), window=4), [4], [3], -1, 1)
    assert metadata.block_tables.tolist() == [[1, 4, 9]]


def test_a_prompts_window_masks_its_first_slots():
    metadata = build(builder(group(True, Seq(3, 10, 0, [7, 2, 7], windowed=8)), window=8), [8], [10], -1, 1)
    assert metadata.slot_mapping.tolist() == [-1, -1, 30, 31, 8, 9, 10, 11, 28, 29]
    assert metadata.block_tables.shape == (1, 0)
    assert metadata.max_prefill_seq_len == 10
    assert metadata.seq_lens_tensor.tolist() == [8]


def test_without_a_cache_there_are_no_slots_and_no_rows():
    for chunked in (False, True):
        metadata = build(builder(group(True, Seq(0, 5, 0, None), tables=None), chunked=chunked), [5], [5], -1, 1)
        assert metadata.slot_mapping.tolist() == [-1] * 5
        assert metadata.block_tables.shape == (1, 0)
        assert metadata.block_tables.dtype == torch.int32
        assert (metadata.max_prefill_seq_len, metadata.max_decode_seq_len) == (5, 0)


def test_maps_of_prompts_are_concatenated_by_modality():
    one = {"image": image(range(2), 2, range(1, 3), 5)}
    two = {"image": image(range(1, 4), 4, range(3), 3), "audio": image(range(1), 1, range(1), 3)}
    groups = [
        group(True, Seq(1, 5, 0, [1, 2]), maps=one),
        group(True, Seq(2, 3, 0, [3]), Seq(4, 3, 0, [5]), maps=two),  # once for each sequence
        group(False, Seq(3, 2, 1, [4]), maps=one),
    ]
    metadata = build(builder(*groups), [5, 3, 3, 2], [5, 3, 3, 1], -1, 4)
    assert metadata.multi_modal_placeholder_index_maps == {
        "image": ([0, 1, 3, 4, 5, 7, 8, 9], [1, 2, 5, 6, 7, 8, 9, 10]),
        "audio": ([0, 1], [0, 3]),
    }


@pytest.mark.parametrize("pad", [-1, 2])
def test_every_tensor_is_on_the_runners_device(decodes, array, pad):
    metadata = build(builder(decodes, array=array, device="meta"), [9, 14, 1, 1], [1, 1], pad, 4)
    tensors = {name: x.device.type for name, x in vars(metadata).items() if isinstance(x, torch.Tensor)}
    assert tensors == dict.fromkeys(INT32 | {"slot_mapping"}, "meta")


def test_two_decodes_in_a_graph_of_four(decodes, array):
    metadata = build(builder(decodes, array=array), [9, 14, 1, 1], [1, 1], 2, 4)
    assert metadata.use_cuda_graph is True
    assert metadata.num_decode_tokens == 4
    assert metadata.slot_mapping.tolist() == [20, 49, -1, -1]
    assert metadata.slot_mapping.dtype == torch.int64
    assert metadata.seq_lens_tensor.tolist() == [9, 14, 1, 1]
    assert metadata.query_start_loc.tolist() == [0, 1, 2]
    assert metadata.seq_start_loc.tolist() == [0, 9, 23, 24, 25]
    assert metadata.context_lens_tensor.tolist() == [8, 13]
    expected = [[2, 0, 5, 93, 94], [6, 7, 11, 12, 99], [*range(100, 105)], [*range(105, 110)]]
    assert metadata.block_tables.tolist() == expected
    assert metadata.block_tables.dtype == torch.int32
    assert array.tolist() == expected


def test_a_later_step_keeps_what_it_does_not_write_and_metadata_outlives_it(decodes, array):
    instance = builder(decodes, array=array)
    first = build(instance, [9, 14, 1, 1], [1, 1], 2, 4)
    kept = first.block_tables.clone()
    instance.input_builder.inter_data_list = [group(False, Seq(30, 3, 2, [13]))]
    later = build(instance, [3, 1], [1], 1, 2)
    assert later.block_tables.tolist() == [[13, 0, 5, 93, 94], [6, 7, 11, 12, 99]]
    assert later.slot_mapping.tolist() == [54, -1]
    assert torch.equal(first.block_tables, kept)


def collected(instance):
    lists = [instance.slot_mapping, instance.prefill_seq_lens, instance.context_lens, instance.block_tables]
    counts = [instance.num_prefills, instance.num_prefill_tokens, instance.num_decode_tokens]
    maps = {modality: vars(ranges) for modality, ranges in instance.multimodal_placeholder_maps.items()}
    return copy.deepcopy([*lists, instance.curr_seq_lens, *counts, maps])


def changed(group, **changes):
    return SimpleNamespace(**{**vars(group), **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_lens": [1, 2]}, r"query_len = 2: .*1 for a decode \(sequence 21, length 14, context 13\)"),
        ({"context_lens": [8]}, r"len\(context_lens\) = 1: must be 2"),
        ({"curr_sliding_window_blocks": [0, -1]}, "curr_sliding_window_blocks = -1"),
        ({"block_tables": {20: [2, 0, 5]}}, r"seq_id = 21: .*\[20\]"),
        ({"block_tables": {20: [2, 0, 5], 21: [6, 7, 11]}}, r"block_tables\[21\] = .*positions 13 to 13.* length is 3"),
        ({"orig_seq_lens": [9, 12]}, "seq_len = 12: .*context_len 13"),
        ({"block_tables": None, "prefix_cache_hit": True}, r"block_tables = None"),
    ],
)
def test_a_group_is_collected_whole_or_not_at_all(prompts, decodes, changes, message):
    instance = builder()
    instance.prepare()
    for prompt in prompts:
        instance._add_seq_group(prompt, False)
    before = collected(instance)
    with pytest.raises(ReferenceArgumentError, match=message):
        instance._add_seq_group(changed(decodes, **changes), False)
    assert collected(instance) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([9, 14], [], -1, 2), r"query_lens = \[\]"),
        (([9, 14], [1, 1], -2, 2), "cuda_graph_pad_size = -2"),
        (([9, 14], [1, 1], 0, 3), "batch_size = 3: must be 2: 2 sequences and cuda_graph_pad_size 0"),
        (([9, 14], [1, 1], 3, 5), "batch_size = 5: must be at most 4"),
    ],
)
def test_lengths_and_sizes_that_do_not_fit(decodes, array, arguments, message):
    instance, before = builder(decodes, array=array), array.copy()
    instance.prepare()
    with pytest.raises(ReferenceArgumentError, match=message):
        instance.build(*arguments)
    assert (array == before).all()


def test_rows_and_maps_that_do_not_fit_leave_the_array(decodes, array):
    wide = group(False, Seq(1, 24, 23, [1, 2, 3, 4, 5, 6]))
    odd = group(True, Seq(1, 5, 0, [1, 2]), hit=True, maps={"image": image(range(2), 2, range(3), 3)})
    before = array.copy()
    for groups, arguments, message in (
        ([decodes, wide], ([9, 14, 24], [1, 1, 1], 0, 3), r"len\(block_tables\[2\]\) = 6: must be at most 5"),
        ([odd], ([5], [5], 0, 1), "2 rows"),
    ):
        with pytest.raises(ReferenceArgumentError, match=message):
            build(builder(*groups, array=array), *arguments)
        assert (array == before).all()


def test_every_batch_needs_a_prepare(decodes, array):
    instance, before = builder(decodes, array=array), array.copy()
    for attempt in (lambda: instance.build([9, 14], [1, 1], 0, 2), lambda: instance._add_seq_group(decodes, False)):
        with pytest.raises(RuntimeError, match=r"Builder: .*prepare"):
            attempt()
    assert (array == before).all()
    instance.prepare()
    instance.build([9, 14], [1, 1], -1, 2)
    with pytest.raises(RuntimeError, match="prepare"):
        instance.build([9, 14], [1, 1], -1, 2)
    instance.input_builder.inter_data_list = [decodes, changed(decodes, query_lens=[1, 3])]
    instance.prepare()
    with pytest.raises(ReferenceArgumentError, match="query_len = 3"):
        instance.build([9, 14, 9, 14], [1, 1, 1, 3], -1, 4)
    instance.input_builder.inter_data_list = [decodes]
    with pytest.raises(RuntimeError, match="prepare"):  # a batch that failed half way is not resumed
        instance.build([9, 14], [1, 1], -1, 2)


def test_a_subclass_without_a_metadata_class_is_named(decodes):
    instance = builder(decodes, kind=type("Nameless", (CommonMetadataBuilder,), {}))
    with pytest.raises(TypeError, match="Nameless does not set _metadata_cls"):
        build(instance, [9, 14], [1, 1], -1, 2)
