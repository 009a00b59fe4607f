"""Where the prefills of an ordered batch begin."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attncheck.errors import ReferenceArgumentError
from attncheck.reference import (
    PrefillingMetadata,
    split_decodes_and_prefills,
    split_decodes_prefills_and_extends,
    split_prefill_chunks,
)
from attncheck.reference.utilities.batch_order import split_finished_prompts

TABLE = [  # query lengths, threshold, uniform, padding tokens, counts
    ([1, 1, 1], 1, False, 0, (3, 0, 3, 0)),
    ([1, 1, 1], 1, True, 0, (3, 0, 3, 0)),
    ([1, 1, 5, 7], 1, False, 0, (2, 2, 2, 12)),
    ([1, 1, 5, 7], 1, True, 0, (2, 2, 2, 12)),
    ([4, 1, 1], 1, False, 0, (0, 3, 0, 6)),
    ([1, 6, 1, 1], 1, False, 0, (1, 3, 1, 8)),
    ([1, 2, 3, 9], 3, False, 0, (3, 1, 6, 9)),
    ([3, 2, 2], 3, False, 0, (3, 0, 7, 0)),
    ([3, 2, 2], 3, True, 0, (1, 2, 3, 4)),
    ([2, 2, 1, 9], 3, True, 0, (2, 2, 4, 10)),
    ([2, 2, 3, 9], 3, True, 0, (2, 2, 4, 12)),
    ([2, 2, 2], 3, True, 0, (3, 0, 6, 0)),
    ([1, 1, 6], 1, False, 8, (2, 1, 2, 14)),
    ([1, 1], 1, False, 6, (2, 0, 8, 0)),
    ([1, 1, 0, 0], 1, False, 0, (4, 0, 2, 0)),
    ([1, 1, 0], 1, True, 0, (3, 0, 2, 0)),
    ([9], 1, False, 0, (0, 1, 0, 9)),
    ([1], 1, False, 0, (1, 0, 1, 0)),
    ([2, 2, 0, 0], 2, True, 4, (4, 0, 8, 0)),
    ([2, 0, 5], 2, True, 0, (2, 1, 2, 5)),
    ([0, 0], 0, False, 0, (2, 0, 0, 0)),
    ([1, 1], 0, False, 0, (0, 2, 0, 2)),
]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("query_lens", "threshold", "uniform", "padding", "expected"), TABLE)
def test_counts(query_lens, threshold, uniform, padding, expected, dtype, common, unchanged):
    batch = common(query_lens, query_lens, extra_tokens=padding, dtype=dtype)
    with unchanged(batch):
        counts = split_decodes_and_prefills(batch, threshold, uniform)
    assert counts == expected
    assert all(type(count) is int for count in counts)


def test_by_default_decodes_are_single_tokens(common):
    assert split_decodes_and_prefills(common([1, 2], [1, 2])) == (1, 1, 1, 2)


def test_an_upper_bound_of_the_longest_changes_nothing_and_a_lower_one_is_believed(common):
    assert split_decodes_and_prefills(common([1, 1], [1, 1], max_query_len=4)) == (2, 0, 2, 0)
    assert split_decodes_and_prefills(common([1, 5], [1, 5], max_query_len=1)) == (2, 0, 6, 0)


def test_no_device_tensor_is_read(common):
    batch = common([1, 3], [4, 4], query_start_loc=None, seq_lens=None, block_table_tensor=None, slot_mapping=None)
    assert split_decodes_and_prefills(batch) == (1, 1, 1, 3)


@pytest.mark.parametrize(
    ("fields", "threshold", "name"),
    [
        ({"num_reqs": 0, "query_start_loc_cpu": torch.tensor([0])}, 1, "num_reqs"),
        ({"query_start_loc_cpu": torch.tensor([0, 1])}, 1, "query_start_loc_cpu"),
        ({"query_start_loc_cpu": torch.tensor([0, 4, 3])}, 1, "query_start_loc_cpu"),
        ({"query_start_loc_cpu": torch.tensor([0, 4, 3])}, 9, "query_start_loc_cpu"),
        ({"query_start_loc_cpu": torch.tensor([[0, 1, 4]])}, 1, "query_start_loc_cpu"),
        ({"query_start_loc_cpu": torch.tensor([0.0, 1.0, 4.0])}, 1, "query_start_loc_cpu"),
        ({"query_start_loc_cpu": torch.zeros(3, dtype=torch.int32, device="meta")}, 1, "query_start_loc_cpu"),
        ({}, -1, "decode_threshold"),
        ({}, 1.5, "decode_threshold"),
    ],
)
def test_refusals_name_the_argument(fields, threshold, name, common):
    with pytest.raises(ReferenceArgumentError) as refusal:
        split_decodes_and_prefills(common([1, 3], [1, 3], **fields), threshold)
    assert refusal.value.argument.startswith(name)


def test_the_refusal_names_the_entry_that_falls(common):
    batch = common([1, 0, 3], [1, 0, 3], query_start_loc_cpu=torch.tensor([0, 1, 1, 0]))
    with pytest.raises(ReferenceArgumentError, match=r"query_start_loc_cpu = \[1, 0\]: .*entry 3"):
        split_decodes_and_prefills(batch)


@given(
    query_lens=st.lists(st.integers(0, 4), min_size=1, max_size=8),
    threshold=st.integers(0, 4),
    uniform=st.booleans(),
    padding=st.integers(0, 3),
)
def test_counts_add_up_and_follow_a_loop(query_lens, threshold, uniform, padding, common):
    batch = common(query_lens, query_lens, extra_tokens=padding)
    decodes, prefills, decode_tokens, prefill_tokens = split_decodes_and_prefills(batch, threshold, uniform)
    assert decodes + prefills == len(query_lens)
    assert decode_tokens + prefill_tokens == sum(query_lens) + padding
    if prefills:
        assert decode_tokens == sum(query_lens[:decodes])
    mixed_is_fine = not uniform or (threshold <= 1 and max(query_lens) <= threshold)
    expected = 0
    for q in query_lens:
        if q > threshold or not (mixed_is_fine or q in {0, query_lens[0]}):
            break
        expected += 1
    assert decodes == expected
    if not uniform:
        assert split_decodes_and_prefills(batch, threshold + 1)[0] >= decodes


@pytest.mark.parametrize(
    ("query_lens", "unfinished", "uniform", "expected"),
    [
        ([1, 1, 1], [0, 0, 0], False, (3, 0, 3, 0)),
        ([1, 1, 1], [0, 1, 0], False, (1, 2, 1, 2)),
        ([2, 2, 1, 5], [0, 0, 1, 1], False, (2, 2, 4, 6)),
        ([2, 2, 1, 5], [0, 1, 1, 1], True, (1, 3, 2, 8)),
        ([2, 2, 0], [0, 0, 0], True, (3, 0, 4, 0)),
        ([1, 1], [1, 0], False, (0, 2, 0, 2)),
        ([5, 1], [0, 0], False, (0, 2, 0, 6)),
    ],
)
def test_short_extends_as_prefills(query_lens, unfinished, uniform, expected, common):
    batch = common(query_lens, query_lens)
    flagged = PrefillingMetadata(**vars(batch), is_prefilling=torch.tensor(unfinished, dtype=torch.bool))
    assert split_finished_prompts(flagged, 2, uniform, False) == expected
    assert split_finished_prompts(flagged, 2, uniform) == split_decodes_and_prefills(batch, 2, uniform)


def test_short_extends_without_flags_are_refused(batch_a):
    with pytest.raises(ReferenceArgumentError, match="is_prefilling"):
        split_finished_prompts(batch_a, treat_short_extends_as_decodes=False, decode_threshold=9)


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "padding", "expected"),
    [
        ([1, 1], [4, 5], 0, (2, 0, 0, 2, 0, 0)),
        ([1, 1], [4, 5], 3, (2, 0, 0, 5, 0, 0)),
        ([1, 4, 5], [4, 9, 5], 0, (1, 1, 1, 1, 4, 5)),
        ([1, 4, 5], [4, 9, 5], 2, (1, 1, 1, 1, 4, 7)),
        ([1, 4, 5], [4, 9, 8], 2, (1, 2, 0, 1, 11, 0)),
        ([4, 5], [4, 5], 0, (0, 0, 2, 0, 0, 9)),
        ([1, 4], [1, 9], 0, (1, 1, 0, 1, 4, 0)),
    ],
)
def test_decodes_extends_and_first_chunks(query_lens, seq_lens, padding, expected, common):
    batch = common(query_lens, seq_lens, extra_tokens=padding)
    assert split_decodes_prefills_and_extends(batch) == expected
    batch.max_query_len += 3
    assert split_decodes_prefills_and_extends(batch) == expected


@given(st.lists(st.integers(0, 9), max_size=9), st.integers(9, 25))
def test_chunks_fit_and_the_next_request_would_not(lens, size):
    chunks = split_prefill_chunks(torch.tensor(lens, dtype=torch.int32), size, request_offset=5)
    edges = [0, *(stop - 5 for _, stop in chunks)]
    assert [first - 5 for first, _ in chunks] == edges[:-1]
    assert edges[-1] == len(lens)
    for first, stop in pairwise(edges):
        assert sum(lens[first:stop]) <= size
        assert stop == len(lens) or sum(lens[first : stop + 1]) > size


def test_a_request_beyond_the_workspace_is_refused():
    with pytest.raises(ReferenceArgumentError, match="lengths of 0 to 8"):
        split_prefill_chunks(torch.tensor([3, 9], dtype=torch.int32), 8)
