"""Metadata of single kernels: ranks, causal conv1d, multi-modal prefixes, speculated tokens, blocks of states."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from common_batches import refused, same_storage, unchanged
from hypothesis import example, given, settings
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


def test_by_default_one_rank_holds_all_and_the_axis_stays():
    assert get_dcp_local_seq_lens(torch.tensor([5, 6])).tolist() == [[5], [6]]
    assert get_dcp_local_seq_lens(torch.tensor([[3], [4]]), 2).tolist() == [[[2, 1]], [[2, 2]]]
    assert get_dcp_local_seq_lens(torch.tensor([]).int(), 2).shape == (0, 2)


@pytest.mark.parametrize(
    ("lens", "arguments", "name"),
    [
        ([5, -1], (), "seq_lens"),
        ([5], (0,), "dcp_size"),
        ([5], (1, None, 0), "cp_kv_cache_interleave_size"),
        ([5], (2, 2), "dcp_rank"),
        ([5], (2, rank_tensor(2)), "dcp_rank"),
        ([5], (2, torch.zeros(1, dtype=torch.int32, device="meta")), "dcp_rank"),
    ],
)
def test_refused_ranks_name_the_argument(lens, arguments, name):
    assert refused(get_dcp_local_seq_lens, torch.tensor(lens), *arguments).startswith(name)


@settings(max_examples=50)
@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=3),
    size=st.integers(1, 5),
    interleave=st.integers(1, 7),
    as_rank=st.sampled_from((int, np.int64, torch.tensor, rank_tensor)),
    dtype=st.sampled_from((torch.int32, torch.int64)),
)
def test_dealing_tokens_one_by_one(lengths, size, interleave, as_rank, dtype):
    """One more token raises the count of exactly the rank it is dealt to."""
    held = [[0] * size for _ in lengths]
    for row, length in zip(held, lengths, strict=True):
        for token in range(length):
            row[token // interleave % size] += 1
    lens = torch.tensor(lengths, dtype=dtype)
    with unchanged(lens):
        local = get_dcp_local_seq_lens(lens, size, None, interleave)
    assert (local.tolist(), local.dtype) == (held, torch.int32)
    assert not same_storage(local, lens)
    for rank in range(size):
        of_rank = get_dcp_local_seq_lens(lens, size, as_rank(rank), interleave)
        assert (of_rank.tolist(), of_rank.dtype) == ([row[rank] for row in held], torch.int32)


KEYS = ["nums", "tot", "mlist", "mlist_len", "offsetlist", "batch_ptr", "token_chunk_offset_ptr"]


def programs_of(lens):
    """(request, chunk of 8 tokens) of every program, in order."""
    return [(r, chunk) for r, length in enumerate(lens) for chunk in range(-(-length // 8))]


@settings(max_examples=50)
@given(lens=st.lists(st.integers(0, 40), max_size=8), dtype=st.sampled_from((torch.int32, torch.int64)))
@example(lens=[9000], dtype=torch.int32)
@example(lens=[8 * 1024], dtype=torch.int64)
def test_programs_cover_every_token_once_in_order(lens, dtype):
    """Lists of at least 2048 entries, or twice as many as there are programs; -1 behind the last."""
    starts = torch.tensor([sum(lens[:i]) for i in range(len(lens) + 1)], dtype=dtype)
    with unchanged(starts):
        by_size, batch_ptr, offset_ptr = compute_causal_conv1d_metadata(starts)
    programs = programs_of(lens)
    requests, chunks = [r for r, _ in programs], [chunk for _, chunk in programs]
    behind = [-1] * (max(2048, 2 * len(programs) if len(programs) > 1024 else 0) - len(programs))
    assert list(by_size) == [8]
    listing = by_size[8]
    assert list(listing) == KEYS
    assert listing["nums"].tolist() == [requests.count(r) for r in range(len(lens))]
    assert (listing["mlist"].tolist(), listing["offsetlist"].tolist()) == (requests, chunks)
    assert listing["tot"] == listing["mlist_len"] == len(programs)
    assert type(listing["tot"]) is type(listing["mlist_len"]) is int
    assert (batch_ptr.tolist(), offset_ptr.tolist()) == (requests + behind, chunks + behind)
    assert listing["batch_ptr"] is batch_ptr
    assert listing["token_chunk_offset_ptr"] is offset_ptr
    assert (listing["nums"].dtype, listing["mlist"].dtype) == (dtype, torch.int64)
    assert {listing["offsetlist"].dtype, batch_ptr.dtype, offset_ptr.dtype} == {torch.int32}
    assert not same_storage(listing["nums"], starts)


@pytest.mark.parametrize("starts", [[0, 5, 4], [], 3, [[0, 5]], [0.0, 5.0]], ids=str)
def test_start_locations_that_mean_nothing_are_refused(starts):
    assert refused(compute_causal_conv1d_metadata, torch.tensor(starts)).startswith("query_start_loc_p")


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
def test_a_query_is_cut_into_requests(shape, batch_size, expected):
    query = torch.arange(torch.Size(shape).numel()).view(shape)
    cut = reshape_query_for_spec_decode(query, batch_size)
    assert cut.shape == expected
    assert cut.data_ptr() == query.data_ptr()
    assert torch.equal(cut.flatten(), query.flatten())


def test_shapes_that_do_not_fit_are_refused():
    for shape, batch_size, name in (
        ((7, 2, 8), 3, "batch_size"),
        ((7, 2, 8), 0, "batch_size"),
        ((7, 8), 7, "query.shape"),
    ):
        assert refused(reshape_query_for_spec_decode, torch.zeros(shape), batch_size) == name
    for shape in ((6, 8), (1, 1, 1, 2, 8), ()):
        assert refused(reshape_attn_output_for_spec_decode, torch.zeros(shape)) == "attn_output.shape"


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
