"""Programs of the causal conv1d kernel."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attncheck.errors import ReferenceArgumentError
from attncheck.reference import compute_causal_conv1d_metadata

KEYS = ["nums", "tot", "mlist", "mlist_len", "offsetlist", "batch_ptr", "token_chunk_offset_ptr"]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("starts", "nums", "mlist", "offsets", "length"),
    [
        ([0, 5, 21, 29, 29], [1, 2, 1, 0], [0, 1, 1, 2], [0, 0, 1, 0], 2048),
        ([0, 17], [3], [0, 0, 0], [0, 1, 2], 2048),
        ([0, 8, 16], [1, 1], [0, 1], [0, 0], 2048),
        ([0, 0, 9], [0, 2], [1, 1], [0, 1], 2048),
        ([0], [], [], [], 2048),
        ([0, 8 * 1024], [1024], [0] * 1024, list(range(1024)), 2048),
        ([0, 9000], [1125], [0] * 1125, list(range(1125)), 2250),
    ],
)
def test_programs(starts, nums, mlist, offsets, length, dtype, unchanged, same_storage):
    starts = torch.tensor(starts, dtype=dtype)
    with unchanged(starts):
        by_size, batch_ptr, offset_ptr = compute_causal_conv1d_metadata(starts)
    assert list(by_size) == [8]
    listing = by_size[8]
    assert list(listing) == KEYS
    assert (listing["nums"].tolist(), listing["mlist"].tolist()) == (nums, mlist)
    assert listing["offsetlist"].tolist() == offsets
    assert listing["tot"] == listing["mlist_len"] == len(mlist)
    assert type(listing["tot"]) is type(listing["mlist_len"]) is int
    assert batch_ptr.tolist() == mlist + [-1] * (length - len(mlist))
    assert offset_ptr.tolist() == offsets + [-1] * (length - len(mlist))
    assert listing["batch_ptr"] is batch_ptr
    assert listing["token_chunk_offset_ptr"] is offset_ptr
    assert listing["nums"].dtype == dtype
    assert listing["mlist"].dtype == torch.int64
    assert {listing["offsetlist"].dtype, batch_ptr.dtype, offset_ptr.dtype} == {torch.int32}
    assert not same_storage(listing["nums"], starts)


def test_everything_is_new_on_every_call():
    starts = torch.tensor([0, 17])
    first, second = compute_causal_conv1d_metadata(starts), compute_causal_conv1d_metadata(starts)
    first[1].zero_()
    assert second[1][:4].tolist() == [0, 0, 0, -1]
    assert first[2][:4].tolist() == [0, 1, 2, -1]
    assert first[0][8]["mlist"].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "starts",
    [
        torch.tensor([0, 5, 4]),
        torch.tensor([], dtype=torch.int32),
        torch.tensor(3),
        torch.tensor([[0, 5]]),
        torch.tensor([0.0, 5.0]),
    ],
)
def test_start_locations_that_mean_nothing_are_refused(starts):
    with pytest.raises(ReferenceArgumentError, match="query_start_loc_p"):
        compute_causal_conv1d_metadata(starts)


@given(lens=st.lists(st.integers(0, 40), max_size=8))
def test_programs_cover_every_token_once_in_order(lens):
    starts = [sum(lens[:i]) for i in range(len(lens) + 1)]
    by_size, batch_ptr, offset_ptr = compute_causal_conv1d_metadata(torch.tensor(starts))
    tot = by_size[8]["tot"]
    programs = list(zip(batch_ptr[:tot].tolist(), offset_ptr[:tot].tolist(), strict=True))
    tokens = [(r, t) for r, chunk in programs for t in range(8 * chunk, min(8 * chunk + 8, lens[r]))]
    assert tokens == [(r, t) for r, length in enumerate(lens) for t in range(length)]
    assert all(8 * chunk < lens[r] for r, chunk in programs)
    assert set(batch_ptr[tot:].tolist()) == set(offset_ptr[tot:].tolist()) == {-1}
