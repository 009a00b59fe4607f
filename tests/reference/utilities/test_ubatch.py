"""Cutting a batch into micro-batches."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attncheck.errors import ReferenceArgumentError
from attncheck.reference import (
    UBatchSlice,
    _make_metadata_with_slice,
    is_last_ubatch_empty,
    maybe_create_ubatch_slices,
    slice_query_start_locs,
    split_attn_metadata,
)


def piece(requests, tokens):
    return UBatchSlice(slice(*requests), slice(*tokens))


def test_a_slice_has_a_length_and_may_be_empty():
    assert not piece((0, 2), (0, 5)).is_empty()
    assert piece((1, 1), (0, 5)).is_empty()
    assert piece((0, 2), (4, 4)).is_empty()
    assert piece((0, 2), (3, 8)).num_tokens == 5
    assert piece((0, 2), (3, 8)) == piece((0, 2), (3, 8)) != piece((0, 2), (3, 9))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("starts", "requests", "expected"),
    [
        ([0, 3, 5, 9, 10], (0, 3), [0, 3, 5, 9]),
        ([0, 3, 5, 9, 10], (2, 4), [0, 4, 5]),
        ([0, 3, 5, 9, 10], (1, 1), [0]),
        ([0, 3, 5, 9, 10], (4, 4), [0]),
        ([7, 9, 12], (0, 2), [0, 2, 5]),
    ],
)
def test_start_locations_of_some_requests(starts, requests, expected, dtype, unchanged, same_storage):
    starts = torch.tensor(starts, dtype=dtype)
    with unchanged(starts):
        result = slice_query_start_locs(starts, slice(*requests))
    assert result.tolist() == expected
    assert result.dtype == dtype
    assert not same_storage(result, starts)


@pytest.mark.parametrize("part", [slice(3, 9), slice(7, 7), slice(2, 1), slice(-1, 2), slice(0, None), slice(0, 2, 2)])
def test_requests_outside_the_batch_are_refused(part):
    with pytest.raises(ReferenceArgumentError, match="request_slice"):
        slice_query_start_locs(torch.tensor([0, 3, 5, 9, 10]), part)


@pytest.mark.parametrize("starts", [torch.tensor([]).int(), torch.tensor(3), torch.tensor([0.0, 2.0])])
def test_start_locations_are_a_list_of_integers(starts):
    with pytest.raises(ReferenceArgumentError, match="query_start_loc"):
        slice_query_start_locs(starts, slice(0, 0))


CUTS = [  # of q 3, 4, 5 and s 8, 4, 15: requests, tokens, start locations, lengths, computed, longest query and length
    ((0, 2), (0, 7), [0, 3, 7], [8, 4], [5, 0], 4, 8),
    ((0, 2), (0, 5), [0, 3, 5], [8, 2], [5, 0], 3, 8),
    ((1, 3), (5, 12), [0, 2, 7], [4, 15], [2, 10], 5, 15),
    ((0, 3), (1, 10), [0, 2, 6, 9], [8, 4, 13], [6, 0, 10], 4, 13),
    ((2, 3), (8, 11), [0, 3], [14], [11], 3, 14),
    ((1, 3), (3, 9), [0, 4, 6], [4, 12], [0, 10], 4, 12),
    ((0, 3), (0, 12), [0, 3, 7, 12], [8, 4, 15], [5, 0, 10], 5, 15),
]


@pytest.mark.parametrize("one_object", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("requests", "tokens", "starts", "lens", "computed", "max_q", "max_s"), CUTS)
def test_a_piece(
    requests, tokens, starts, lens, computed, max_q, max_s, dtype, one_object, common, unchanged, same_storage
):
    batch = common([3, 4, 5], [8, 4, 15], dtype=dtype, one_object=one_object)
    with unchanged(batch):
        got = _make_metadata_with_slice(piece(requests, tokens), batch)
    assert got.query_start_loc.tolist() == got.query_start_loc_cpu.tolist() == starts
    assert got.seq_lens.tolist() == got.seq_lens_cpu.tolist() == lens
    assert got.num_computed_tokens_cpu.tolist() == computed
    counts = (got.num_reqs, got.num_actual_tokens, got.max_query_len, got.max_seq_len)
    assert counts == (requests[1] - requests[0], tokens[1] - tokens[0], max_q, max_s)
    assert all(type(count) is int for count in counts)
    assert got.block_table_tensor.tolist() == [[10 * r + k for k in range(4)] for r in range(*requests)]
    assert got.slot_mapping.tolist() == [100 + t for t in range(*tokens)]
    index = ("query_start_loc", "query_start_loc_cpu", "seq_lens", "seq_lens_cpu", "num_computed_tokens_cpu")
    assert {getattr(got, name).dtype for name in index} == {dtype}
    assert same_storage(got.block_table_tensor, batch.block_table_tensor)
    assert same_storage(got.slot_mapping, batch.slot_mapping)
    assert not same_storage(got.query_start_loc, got.query_start_loc_cpu)
    assert not same_storage(got.seq_lens, got.seq_lens_cpu)
    for name in index[:2]:
        assert not same_storage(getattr(got, name), getattr(batch, name))


def test_a_padded_tail_belongs_to_the_last_piece(batch_p, plain):
    assert plain(_make_metadata_with_slice(piece((1, 4), (2, 8)), batch_p)) == {
        "query_start_loc": [0, 3, 3, 3],
        "query_start_loc_cpu": [0, 3, 3, 3],
        "seq_lens": [9, 0, 0],
        "seq_lens_cpu": [9, 0, 0],
        "num_computed_tokens_cpu": [6, 0, 0],
        "num_reqs": 3,
        "num_actual_tokens": 6,
        "max_query_len": 3,
        "max_seq_len": 9,
        "block_table_tensor": [[10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33]],
        "slot_mapping": [102, 103, 104, -1, -1, -1],
        "causal": True,
        "logits_indices_padded": None,
        "num_logits_indices": None,
        "encoder_seq_lens": None,
        "dcp_local_seq_lens": None,
    }


def test_causal_is_kept_and_the_optional_fields_are_not(common):
    lens = torch.tensor([8, 4, 15])
    options = {"logits_indices_padded": lens, "num_logits_indices": 3, "dcp_local_seq_lens": lens}
    batch = common([3, 4, 5], [8, 4, 15], causal=False, encoder_seq_lens=lens.numpy(), **options)
    got = _make_metadata_with_slice(piece((0, 1), (0, 3)), batch)
    assert got.causal is False
    assert [getattr(got, name) for name in (*options, "encoder_seq_lens")] == [None] * 4


@pytest.mark.parametrize(
    ("requests", "tokens"),
    [
        ((1, 1), (3, 5)),
        ((0, 2), (4, 4)),
        ((0, 2), (3, 7)),  # starts past request 0
        ((1, 2), (2, 7)),  # starts before request 1
        ((0, 1), (0, 5)),  # reaches into request 1
        ((0, 2), (0, 3)),  # request 1 has no token
        ((0, 4), (0, 12)),
        ((0, 3), (0, 13)),
        ((-1, 2), (0, 5)),
        ((2, 1), (0, 5)),
        ((0, None), (0, 12)),
        ((0, 3), (0.0, 12.0)),
    ],
)
def test_pieces_that_are_none_are_refused(requests, tokens, batch_a, unchanged):
    with unchanged(batch_a), pytest.raises(ReferenceArgumentError, match="ubatch_slice"):
        _make_metadata_with_slice(piece(requests, tokens), batch_a)


def test_a_request_without_a_token_is_named_as_the_batch_counts_it(batch_a):
    with pytest.raises(ReferenceArgumentError, match=r"token_slice.stop = 7: .*above 7, where request 2 "):
        _make_metadata_with_slice(piece((1, 3), (3, 7)), batch_a)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("query_start_loc_cpu", torch.tensor([0, 3, 2, 12])),
        ("query_start_loc_cpu", torch.tensor([0, 3, 7])),
        ("seq_lens_cpu", torch.tensor([8, 4])),
        ("seq_lens", torch.tensor([8, 4])),
        ("block_table_tensor", torch.zeros(2, 4)),
        ("slot_mapping", torch.arange(6)),
        ("num_reqs", 0),
    ],
)
def test_a_batch_that_contradicts_itself_is_refused(field, value, common):
    batch = common([3, 4, 5], [8, 4, 15], **{field: value})
    with pytest.raises(ReferenceArgumentError, match=field):
        _make_metadata_with_slice(piece((0, 2), (0, 7)), batch)


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "pieces", "expected"),
    [
        ([1, 7], [6, 7], [((0, 2), (0, 4)), ((1, 2), (4, 8))], [([0, 1, 4], [6, 3], [5, 0]), ([0, 4], [7], [3])]),
        (
            [2, 8, 2],
            [4, 10, 2],
            [((0, 2), (0, 4)), ((1, 2), (4, 8)), ((1, 3), (8, 12))],
            [([0, 2, 4], [4, 4], [2, 2]), ([0, 4], [8], [4]), ([0, 2, 4], [10, 2], [8, 0])],
        ),
        ([1, 7], [6, 7], [], []),
        ([2], [2], [((0, 1), (0, 2)), ((0, 1), (1, 2))], [([0, 2], [2], [0]), ([0, 1], [2], [1])]),
    ],
)
def test_splitting_keeps_the_order(query_lens, seq_lens, pieces, expected, common, unchanged):
    batch = common(query_lens, seq_lens, one_object=True)
    with unchanged(batch):
        got = split_attn_metadata([piece(*bounds) for bounds in pieces], batch)
    found = [(m.query_start_loc.tolist(), m.seq_lens.tolist(), m.num_computed_tokens_cpu.tolist()) for m in got]
    assert found == expected


@given(
    requests=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), min_size=1, max_size=5),
    cuts=st.sets(st.integers(1, 29)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 3)),
)
def test_pieces_together_are_the_batch(requests, cuts, padding, common):
    """Every token keeps its request and its position, and a piece ends at its last token."""
    padded_requests, padded_tokens = padding
    query_lens = [q for q, _ in requests] + [0] * padded_requests
    seq_lens = [q + c for q, c in requests] + [0] * padded_requests
    batch = common(query_lens, seq_lens, extra_tokens=padded_tokens)
    tokens = [(r, c + k) for r, (q, c) in enumerate(requests) for k in range(q)]
    bounds = [0, *sorted(cut for cut in cuts if cut < len(tokens)), len(tokens)]
    walked = []
    for first, end in pairwise(bounds):
        last = end == len(tokens)
        r0, r1 = tokens[first][0], len(query_lens) if last else tokens[end - 1][0] + 1
        part = _make_metadata_with_slice(piece((r0, r1), (first, end + padded_tokens * last)), batch)
        starts = part.query_start_loc.tolist()
        assert starts[-1] == end - first
        lens, computed = part.seq_lens.tolist(), part.num_computed_tokens_cpu.tolist()
        for i in range(part.num_reqs):
            length = starts[i + 1] - starts[i]
            assert lens[i] == computed[i] + length
            walked += [(r0 + i, computed[i] + k) for k in range(length)]
    assert walked == tokens


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 4), st.integers(0, 3))
def test_pieces_cover_the_tokens_and_have_the_requests_of_their_tokens(counts, pieces, spare):
    total, reqs = sum(counts), len(counts) + spare
    size = (total + spare) // pieces
    if not size or size * (pieces - 1) >= total:
        with pytest.raises(ReferenceArgumentError, match="num_ubatches"):
            maybe_create_ubatch_slices(True, np.array(counts), total + spare, reqs, pieces)
        return
    slices, padded = maybe_create_ubatch_slices(True, np.array(counts), total + spare, reqs, pieces)
    owners = [request for request, count in enumerate(counts) for _ in range(count)]
    assert [token for each in slices for token in range(total)[each.token_slice]] == list(range(total))
    assert all(each.num_tokens == size for each in slices[:-1])
    for each in slices:
        own = owners[each.token_slice]
        assert each.request_slice == slice(own[0], own[-1] + 1)
    assert padded[:-1] == slices[:-1]
    assert padded[-1] == piece((slices[-1].request_slice.start, reqs), (slices[-1].token_slice.start, total + spare))


def test_pieces_of_a_given_size_and_none_at_all():
    slices, _ = maybe_create_ubatch_slices(True, np.array([3, 4]), 7, 2, 2, split_point=5)
    assert slices == [piece((0, 2), (0, 5)), piece((1, 2), (5, 7))]
    assert maybe_create_ubatch_slices(False, np.array([3, 4]), 7, 2, 2) == (None, None)


@pytest.mark.parametrize(("real", "empty"), [(7, True), (8, True), (9, False), (16, False)])
def test_the_last_of_equal_pieces_may_be_padding_alone(real, empty):
    assert is_last_ubatch_empty(real, 16, 2) is empty
