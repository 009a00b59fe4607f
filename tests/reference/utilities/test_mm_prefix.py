"""Bidirectional ranges of prompts as kernels take them."""

import numpy as np
import pytest
import torch

from attncheck.errors import ReferenceArgumentError
from attncheck.reference import compute_mm_prefix_range_tensor, fill_mm_prefix_query_ranges

CPU = torch.device("cpu")


def test_a_table_has_a_row_a_request_and_is_filled_up():
    ranges = compute_mm_prefix_range_tensor({0: [(1, 3), (5, 9)], 2: [(0, 4)]}, 3, CPU)
    assert ranges.dtype == torch.int32
    assert ranges.tolist() == [[[1, 3], [5, 9]], [[0, 0], [0, 0]], [[0, 4], [0, 0]]]


@pytest.mark.parametrize("ranges", [None, {}, {1: []}])
def test_no_ranges_make_no_table(ranges):
    assert compute_mm_prefix_range_tensor(ranges, 2, CPU) is None


def rows(ranges, query_lens, seq_lens, size):
    out = np.full((size, 2), 7, dtype=np.int32)
    starts = torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32)
    count = fill_mm_prefix_query_ranges(out, ranges, starts, torch.tensor(seq_lens, dtype=torch.int32))
    return count, out.tolist()


def test_a_row_holds_the_range_of_its_token():
    # positions 2 3 4, and 0 1
    count, out = rows({0: [(3, 6)], 1: [(0, 1)]}, [3, 2], [5, 2], 6)
    assert count == 5
    assert out == [[-1, -1], [3, 6], [3, 6], [0, 1], [0, 1], [7, 7]]


@pytest.mark.parametrize("ranges", [None, {}, {0: [(0, 1)]}, {0: [(3, 3)]}, {1: []}])
def test_a_buffer_is_left_alone_where_no_token_has_a_range(ranges):
    assert rows(ranges, [3, 2], [5, 2], 5) == (0, [[7, 7]] * 5)


def test_too_small_a_buffer_is_refused():
    with pytest.raises(ReferenceArgumentError, match=r"out\.shape"):
        rows({0: [(0, 9)]}, [3, 2], [5, 2], 4)
