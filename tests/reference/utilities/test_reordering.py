"""Short requests to the front of a batch."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attncheck.reference import reorder_batch_to_split_decodes_and_prefills


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
        ([5, 1, 7, 1, 1], 1, True, "ebdca", [(0, 4), (2, 3)]),
        ([5, 6, 7, 1, 1, 1], 1, True, "fedcba", [(0, 5), (1, 4), (2, 3)]),
        ([6, 2, 3, 1, 8, 1], 2, True, "fbdcea", [(0, 5), (2, 3)]),
        ([4, 4, 1], 1, True, "cba", [(0, 2)]),
        ([1, 1, 5, 9], 1, False, "abcd", []),
        ([9, 8], 1, False, "ab", []),
        ([1, 1], 1, False, "ab", []),
        ([], 1, False, "", []),
        ([3, 1, 1, 5], 3, False, "abcd", []),
        ([2, 0], 1, True, "ba", [(0, 1)]),
    ],
)
def test_order_and_swaps(counts, threshold, moved, order, swaps):
    result = reorder(counts, threshold)
    assert result == (moved, order, swaps)
    assert type(result[0]) is bool


def test_by_default_short_is_one_token():
    batch = Batch("ab")
    assert reorder_batch_to_split_decodes_and_prefills(batch, SimpleNamespace(num_scheduled_tokens={"a": 2, "b": 1}))
    assert batch.req_ids == ["b", "a"]


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
