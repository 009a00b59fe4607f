"""Metadata of single kernels: ranks, causal conv1d, multi-modal prefixes, speculated tokens, blocks of states."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attncheck.errors import ReferenceArgumentError
from attncheck.reference import (
    compute_causal_conv1d_metadata,
    compute_mm_prefix_range_tensor,
    fill_mm_prefix_query_ranges,
    get_dcp_local_seq_lens,
    mamba_get_block_table_tensor,
    reshape_attn_output_for_spec_decode,
    reshape_query_for_spec_decode,
)


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
def test_refused_ranks_name_the_argument(lens, arguments, name):
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


@pytest.mark.parametrize(
    ("shape", "batch_size", "expected"),
    [((6, 2, 8), 3, (3, 2, 2, 8)), ((4, 2, 8), 1, (1, 4, 2, 8)), ((0, 2, 8), 3, (3, 0, 2, 8))],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_a_query_is_cut_into_requests(shape, batch_size, expected, dtype):
    query = torch.arange(torch.Size(shape).numel()).to(dtype).view(shape)
    cut = reshape_query_for_spec_decode(query, batch_size)
    assert cut.shape == expected
    assert cut.dtype == dtype
    assert cut.data_ptr() == query.data_ptr()
    length = expected[1]
    for row in range(shape[0]):
        assert torch.equal(cut[row // length, row % length], query[row])


@pytest.mark.parametrize(
    ("shape", "batch_size", "name"),
    [
        ((7, 2, 8), 3, "batch_size"),
        ((7, 2, 8), 0, "batch_size"),
        ((7, 2, 8), -7, "batch_size"),
        ((7, 8), 7, "query.shape"),
        ((7, 1, 2, 8), 7, "query.shape"),
    ],
)
def test_queries_that_do_not_divide_are_refused(shape, batch_size, name):
    with pytest.raises(ReferenceArgumentError) as refusal:
        reshape_query_for_spec_decode(torch.zeros(shape), batch_size)
    assert refusal.value.argument == name


def test_an_output_becomes_rows_of_the_same_memory():
    output = torch.zeros(3, 2, 2, 8)
    rows = reshape_attn_output_for_spec_decode(output)
    assert rows.shape == (6, 2, 8)
    assert rows.data_ptr() == output.data_ptr()
    rows[3] = 1.0
    assert output[1, 1].eq(1.0).all()
    assert reshape_attn_output_for_spec_decode(rows) is rows


def test_an_output_that_would_be_copied_is_refused_with_its_strides():
    output = torch.zeros(2, 3, 2, 8).transpose(0, 1)
    with pytest.raises(ReferenceArgumentError, match=r"stride.*\(16, 48, 8, 1\)"):
        reshape_attn_output_for_spec_decode(output)


@pytest.mark.parametrize("shape", [(6, 8), (1, 1, 1, 2, 8), ()])
def test_outputs_of_other_ranks_are_refused(shape):
    with pytest.raises(ReferenceArgumentError, match=r"attn_output\.shape"):
        reshape_attn_output_for_spec_decode(torch.zeros(shape))


BLOCKS = torch.arange(12, dtype=torch.int32).view(3, 4)
LENS = torch.tensor([0, 8, 9], dtype=torch.int32)


def blocks(mode, drafts=0, lens=LENS):
    spec = SimpleNamespace(block_size=4, num_speculative_blocks=drafts)
    return mamba_get_block_table_tensor(BLOCKS, lens, spec, mode)


def test_in_mode_none_it_is_the_table():
    assert blocks("none") is BLOCKS


@pytest.mark.parametrize(("drafts", "expected"), [(0, [[0], [5], [10]]), (1, [[0, 1], [5, 6], [10, 11]])])
def test_else_the_block_of_the_last_token_and_those_behind_it(drafts, expected):
    found = blocks("align", drafts)
    assert (found.dtype, found.tolist()) == (torch.int32, expected)


def test_too_narrow_a_table_is_refused():
    with pytest.raises(ReferenceArgumentError, match="above 4 columns"):
        blocks("align", 2)
