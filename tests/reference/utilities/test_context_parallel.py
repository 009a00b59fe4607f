"""Context a rank holds under decode context parallelism."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attncheck.errors import ReferenceArgumentError
from attncheck.reference import get_dcp_local_seq_lens


def rank_tensor(rank):
    return torch.tensor([rank], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("lens", "size", "interleave", "rank", "expected"),
    [
        ([10, 11, 7], 4, 1, None, [[3, 3, 2, 2], [3, 3, 3, 2], [2, 2, 2, 1]]),
        ([10, 11, 7], 4, 1, 2, [2, 3, 2]),
        ([10, 11, 7], 4, 1, rank_tensor(2), [2, 3, 2]),
        ([10, 11, 7], 4, 1, torch.tensor(2), [2, 3, 2]),
        ([10, 11, 7], *np.array([4, 1, 2]), [2, 3, 2]),
        ([10, 3, 0], 2, 4, None, [[6, 4], [3, 0], [0, 0]]),
        ([10, 3, 0], 2, 4, 1, [4, 0, 0]),
        ([5, 6], 1, 1, None, [[5], [6]]),
        ([5, 6], 1, 1, 0, [5, 6]),
        ([], 2, 1, None, []),
        ([[3], [4]], 2, 1, None, [[[2, 1]], [[2, 2]]]),
    ],
)
def test_local_lengths(lens, size, interleave, rank, expected, dtype, unchanged, same_storage):
    lens = torch.tensor(lens, dtype=dtype)
    with unchanged(lens):
        local = get_dcp_local_seq_lens(lens, size, rank, interleave)
    assert local.tolist() == expected
    assert local.dtype == torch.int32
    assert local.shape == (*lens.shape, size) if rank is None else local.shape == lens.shape
    assert lens.numel() == 0 or not same_storage(local, lens)


def test_by_default_one_rank_holds_all_and_the_axis_stays():
    assert get_dcp_local_seq_lens(torch.tensor([5, 6])).tolist() == [[5], [6]]


@pytest.mark.parametrize(
    ("lens", "arguments", "name"),
    [
        ([5, -1], {}, "seq_lens"),
        ([5.0], {}, "seq_lens"),
        ([5], {"dcp_size": 0}, "dcp_size"),
        ([5], {"cp_kv_cache_interleave_size": 0}, "cp_kv_cache_interleave_size"),
        ([5], {"dcp_size": 2, "dcp_rank": 2}, "dcp_rank"),
        ([5], {"dcp_size": 2, "dcp_rank": -1}, "dcp_rank"),
        ([5], {"dcp_size": 2, "dcp_rank": rank_tensor(2)}, "dcp_rank"),
        ([5], {"dcp_size": 2, "dcp_rank": torch.tensor([1.0])}, "dcp_rank"),
        ([5], {"dcp_size": 2, "dcp_rank": torch.tensor([0, 1], dtype=torch.int32)}, "dcp_rank"),
        ([5], {"dcp_size": 2, "dcp_rank": torch.zeros(1, dtype=torch.int32, device="meta")}, "dcp_rank"),
    ],
)
def test_refusals_name_the_argument(lens, arguments, name):
    with pytest.raises(ReferenceArgumentError) as refusal:
        get_dcp_local_seq_lens(torch.tensor(lens), **arguments)
    assert refusal.value.argument.startswith(name)


@given(length=st.integers(0, 60), size=st.integers(1, 5), interleave=st.integers(1, 7))
def test_dealing_tokens_one_by_one(length, size, interleave):
    """One more token raises the count of exactly the rank it is dealt to."""
    held = [0] * size
    for token in range(length):
        held[token // interleave % size] += 1
    lens = torch.tensor([length], dtype=torch.int32)
    assert get_dcp_local_seq_lens(lens, size, None, interleave)[0].tolist() == held
    by_rank = [int(get_dcp_local_seq_lens(lens, size, rank, interleave)) for rank in range(size)]
    assert by_rank == held
