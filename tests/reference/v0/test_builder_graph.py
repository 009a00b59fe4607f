"""The builder for a captured graph: padding, and tables in the runner's persistent array."""

import numpy as np
import pytest
import torch

from attncheck.reference.v0.builder import padded_block_tables


def build(builder, *arguments):
    builder.prepare()
    return builder.build(*arguments)


def test_two_decodes_in_a_graph_of_four(builder, decodes, array):
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


def test_no_padding_is_still_a_graph(builder, decodes, array):
    metadata = build(builder(decodes, array=array), [9, 14], [1, 1], 0, 2)
    assert metadata.use_cuda_graph is True
    assert metadata.num_decode_tokens == 2
    assert metadata.slot_mapping.tolist() == [20, 49]
    assert metadata.block_tables.tolist() == [[2, 0, 5, 93, 94], [6, 7, 11, 12, 99]]
    assert array[2:].tolist() == [[*range(100, 105)], [*range(105, 110)]]


def test_an_empty_row_leaves_the_array_alone(builder, group, seq, array):
    metadata = build(builder(group(True, seq(0, 5, 0, None), tables=None), array=array), [5, 1], [5], 1, 2)
    assert metadata.block_tables.tolist() == np.arange(90, 100).reshape(2, 5).tolist()
    assert metadata.slot_mapping.tolist() == [-1] * 6


def test_a_row_may_fill_the_array(builder, group, seq, array):
    metadata = build(builder(group(False, seq(0, 20, 19, [1, 2, 3, 4, 5])), array=array), [20], [1], 0, 1)
    assert metadata.block_tables.tolist() == [[1, 2, 3, 4, 5]]


def test_what_an_earlier_step_left_stays_behind_the_next_ones_rows(builder, group, decodes, seq, array):
    instance = builder(decodes, array=array)
    build(instance, [9, 14, 1, 1], [1, 1], 2, 4)
    instance.input_builder.inter_data_list = [group(False, seq(30, 3, 2, [13]))]
    later = build(instance, [3, 1], [1], 1, 2)
    assert later.block_tables.tolist() == [[13, 0, 5, 93, 94], [6, 7, 11, 12, 99]]
    assert later.slot_mapping.tolist() == [54, -1]


def test_metadata_outlives_the_next_step(builder, group, decodes, seq, array):
    instance = builder(decodes, array=array)
    first = build(instance, [9, 14], [1, 1], 0, 2)
    kept = first.block_tables.clone()
    instance.input_builder.inter_data_list = [group(False, seq(30, 3, 2, [13]))]
    build(instance, [3], [1], 0, 1)
    assert torch.equal(first.block_tables, kept)


def test_the_arrays_dtype_is_kept(builder, decodes):
    metadata = build(builder(decodes, array=np.zeros((2, 4), dtype=np.int64)), [9, 14], [1, 1], 0, 2)
    assert metadata.block_tables.dtype == torch.int64


def test_without_a_graph_the_array_is_not_looked_at(builder, decodes):
    metadata = build(builder(decodes, array=None), [9, 14], [1, 1], -1, 2)
    assert metadata.block_tables.tolist() == [[2, 0, 5, 0], [6, 7, 11, 12]]


@pytest.mark.parametrize(
    ("rows", "tables"),
    [([], (0, 0)), ([[]], (1, 0)), ([[], []], (2, 0)), ([[5], [], (6, 7)], [[5, 0], [0, 0], [6, 7]])],
)
def test_padded_tables(rows, tables):
    found = padded_block_tables(rows)
    assert found.dtype == np.int32
    assert (found.shape if isinstance(tables, tuple) else found.tolist()) == tables
