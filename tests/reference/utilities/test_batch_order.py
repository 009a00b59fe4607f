"""Where the prefills of an ordered batch begin, chunks of prefills, and short requests to the front of a batch."""

from collections import defaultdict
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from common_batches import common_metadata, refused, unchanged
from hypothesis import given
from hypothesis import strategies as st

from attncheck.errors import ReferenceArgumentError
from attncheck.reference import (
    PrefillingMetadata,
    reorder_batch_to_split_decodes_and_prefills,
    split_decodes_and_prefills,
    split_decodes_prefills_and_extends,
    split_prefill_chunks,
)
from attncheck.reference.utilities.batch_order import split_finished_prompts


def test_an_upper_bound_of_the_longest_changes_nothing_and_a_lower_one_is_believed():
    assert split_decodes_and_prefills(common_metadata([1, 1], [1, 1], max_query_len=4)) == (2, 0, 2, 0)
    assert split_decodes_and_prefills(common_metadata([1, 5], [1, 5], max_query_len=1)) == (2, 0, 6, 0)


@pytest.mark.parametrize(
    ("fields", "threshold", "name"),
    [
        ({"num_reqs": 0, "query_start_loc_cpu": torch.tensor([0])}, 1, "num_reqs"),
        ({"query_start_loc_cpu": torch.tensor([0, 1])}, 1, "query_start_loc_cpu"),
        ({"query_start_loc_cpu": torch.tensor([0, 4, 3])}, 1, "query_start_loc_cpu"),
        ({"query_start_loc_cpu": torch.zeros(3, dtype=torch.int32, device="meta")}, 1, "query_start_loc_cpu"),
        ({}, -1, "decode_threshold"),
    ],
)
def test_refusals_name_the_argument(fields, threshold, name):
    assert refused(split_decodes_and_prefills, common_metadata([1, 3], [1, 3], **fields), threshold).startswith(name)


@given(
    query_lens=st.lists(st.integers(0, 4), min_size=1, max_size=8),
    threshold=st.integers(0, 4),
    uniform=st.booleans(),
    padding=st.integers(0, 3),
    dtype=st.sampled_from((torch.int32, torch.int64)),
)
def test_counts_follow_a_loop(query_lens, threshold, uniform, padding, dtype):
    """Padding tokens belong to the prefills, or without any to the decodes."""
    batch = common_metadata(query_lens, query_lens, extra_tokens=padding, dtype=dtype)
    with unchanged(batch):
        counts = split_decodes_and_prefills(batch, threshold, uniform)
    mixed_is_fine = not uniform or (threshold <= 1 and max(query_lens) <= threshold)
    expected = 0
    for q in query_lens:
        if q > threshold or not (mixed_is_fine or q in {0, query_lens[0]}):
            break
        expected += 1
    prefills, tokens = len(query_lens) - expected, sum(query_lens) + padding
    decode_tokens = sum(query_lens[:expected]) if prefills else tokens
    assert counts == (expected, prefills, decode_tokens, tokens - decode_tokens)
    assert all(type(count) is int for count in counts)


@pytest.mark.parametrize(
    ("query_lens", "unfinished", "uniform", "expected"),
    [
        ([1, 1, 1], [0, 1, 0], False, (1, 2, 1, 2)),
        ([2, 2, 1, 5], [0, 0, 1, 1], False, (2, 2, 4, 6)),
        ([2, 2, 1, 5], [0, 1, 1, 1], True, (1, 3, 2, 8)),
        ([2, 2, 0], [0, 0, 0], True, (3, 0, 4, 0)),
        ([1, 1], [1, 0], False, (0, 2, 0, 2)),
    ],
)
def test_short_extends_as_prefills(query_lens, unfinished, uniform, expected):
    batch = common_metadata(query_lens, query_lens)
    flagged = PrefillingMetadata(**vars(batch), is_prefilling=torch.tensor(unfinished, dtype=torch.bool))
    assert split_finished_prompts(flagged, 2, uniform, False) == expected
    assert split_finished_prompts(flagged, 2, uniform) == split_decodes_and_prefills(batch, 2, uniform)


def test_short_extends_without_flags_are_refused():
    with pytest.raises(ReferenceArgumentError, match="is_prefilling"):
        split_finished_prompts(
            common_metadata([3, 4], [8, 4]), treat_short_extends_as_decodes=False, decode_threshold=9
        )


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "padding", "expected"),
    [
        ([1, 1], [4, 5], 3, (2, 0, 0, 5, 0, 0)),
        ([1, 4, 5], [4, 9, 5], 2, (1, 1, 1, 1, 4, 7)),
        ([1, 4, 5], [4, 9, 8], 2, (1, 2, 0, 1, 11, 0)),
        ([4, 5], [4, 5], 0, (0, 0, 2, 0, 0, 9)),
        ([1, 4], [1, 9], 0, (1, 1, 0, 1, 4, 0)),
    ],
)
def test_decodes_extends_and_first_chunks(query_lens, seq_lens, padding, expected):
    batch = common_metadata(query_lens, seq_lens, extra_tokens=padding)
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


class Batch:
    def __init__(self, ids):
        self.req_ids = list(ids)
        self.swaps = []

    def swap_states(self, i, j):
        assert type(i) is type(j) is int
        self.req_ids[i], self.req_ids[j] = self.req_ids[j], self.req_ids[i]
        self.swaps.append((i, j))


def reorder(counts, threshold=1):
    batch = Batch("abcdefghijklmnop"[: len(counts)])
    scheduled = dict(zip(batch.req_ids, counts, strict=True)) | {"another": 3}
    before = dict(scheduled)
    moved = reorder_batch_to_split_decodes_and_prefills(
        batch, SimpleNamespace(num_scheduled_tokens=scheduled), threshold
    )
    assert list(scheduled.items()) == list(before.items())
    return moved, "".join(batch.req_ids), batch.swaps


@pytest.mark.parametrize(
    ("counts", "threshold", "moved", "order", "swaps"),
    [
        ([6, 2, 3, 1, 8, 1], 2, True, "fbdcea", [(0, 5), (2, 3)]),
        ([2, 0], 1, True, "ba", [(0, 1)]),
    ],
)
def test_order_and_swaps(counts, threshold, moved, order, swaps):
    result = reorder(counts, threshold)
    assert result == (moved, order, swaps)
    assert type(result[0]) is bool


def test_an_id_without_a_count_is_refused_before_any_swap():
    batch = Batch("abc")
    for counts in ({"a": 5, "b": 1}, defaultdict(int, {"a": 5, "b": 1})):
        scheduled = SimpleNamespace(num_scheduled_tokens=counts)
        with pytest.raises(ValueError, match="num_scheduled_tokens = 'c'"):
            reorder_batch_to_split_decodes_and_prefills(batch, scheduled)
        assert batch.swaps == []
        assert counts == {"a": 5, "b": 1}


@given(counts=st.lists(st.integers(0, 4), max_size=12), threshold=st.integers(0, 4))
def test_a_partition_by_the_fewest_swaps(counts, threshold):
    ids = "abcdefghijklmnop"[: len(counts)]
    count_of = dict(zip(ids, counts, strict=True))
    moved, order, swaps = reorder(counts, threshold)
    assert sorted(order) == list(ids)
    short = sum(count <= threshold for count in counts)
    assert all((count_of[request] <= threshold) == (place < short) for place, request in enumerate(order))
    assert len(swaps) == sum(count <= threshold for count in counts[short:])
    assert moved == bool(swaps)
    swapped = {place for pair in swaps for place in pair}
    assert all(order[place] == request for place, request in enumerate(ids) if place not in swapped)
    assert reorder([count_of[request] for request in order], threshold)[0] is False
