"""Cutting a batch into micro-batches."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from common_batches import common_metadata, plain_values, refused, same_storage, unchanged
from hypothesis import given, settings
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

DTYPES = st.sampled_from((torch.int32, torch.int64))


def piece(requests, tokens):
    return UBatchSlice(slice(*requests), slice(*tokens))


def test_a_slice_has_a_length_and_may_be_empty():
    assert not piece((0, 2), (0, 5)).is_empty()
    assert piece((1, 1), (0, 5)).is_empty()
    assert piece((0, 2), (4, 4)).is_empty()
    assert piece((0, 2), (3, 8)).num_tokens == 5
    assert piece((0, 2), (3, 8)) == piece((0, 2), (3, 8)) != piece((0, 2), (3, 9))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_start_locations_of_some_requests(dtype):
    starts = torch.tensor([0, 3, 5, 9, 10], dtype=dtype)
    for first, stop, expected in ((0, 3, [0, 3, 5, 9]), (2, 4, [0, 4, 5]), (1, 1, [0]), (4, 4, [0])):
        with unchanged(starts):
            result = slice_query_start_locs(starts, slice(first, stop))
        assert result.tolist() == expected
        assert result.dtype == dtype
        assert not same_storage(result, starts)


def test_what_is_no_part_of_a_batch_is_refused():
    starts = torch.tensor([0, 3, 5, 9, 10])
    for part in (slice(3, 9), slice(7, 7), slice(2, 1), slice(-1, 2), slice(0, None), slice(0, 2, 2)):
        assert refused(slice_query_start_locs, starts, part).startswith("request_slice"), part
    for wrong in (torch.tensor([]).int(), torch.tensor(3), torch.tensor([0.0, 2.0])):
        assert refused(slice_query_start_locs, wrong, slice(0, 0)).startswith("query_start_loc"), wrong


@settings(max_examples=60)
@given(
    requests=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), min_size=1, max_size=5),
    cuts=st.sets(st.integers(1, 29)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 3)),
    dtype=DTYPES,
    one_object=st.booleans(),
    causal=st.booleans(),
)
def test_a_piece_describes_its_tokens(requests, cuts, padding, dtype, one_object, causal):
    """Every token keeps its request and its position; a piece ends at its last token; the last has the padding."""
    query_lens = [q for q, _ in requests] + [0] * padding[0]
    seq_lens = [q + c for q, c in requests] + [0] * padding[0]
    optional = torch.tensor([1])
    batch = common_metadata(
        query_lens,
        seq_lens,
        extra_tokens=padding[1],
        dtype=dtype,
        one_object=one_object,
        causal=causal,
        logits_indices_padded=optional,
        num_logits_indices=1,
        encoder_seq_lens=optional.numpy(),
        dcp_local_seq_lens=optional,
    )
    tokens = [(r, c + k) for r, (q, c) in enumerate(requests) for k in range(q)]
    bounds = [0, *sorted(cut for cut in cuts if cut < len(tokens)), len(tokens)]
    slices, expected = [], []
    for first, end in pairwise(bounds):
        last = end == len(tokens)
        stop = end + padding[1] * last
        owners = range(tokens[first][0], len(query_lens) if last else tokens[end - 1][0] + 1)
        places = [[position for r, position in tokens[first:end] if r == owner] for owner in owners]
        starts = [sum(map(len, places[:i])) for i in range(len(places) + 1)]
        lens = [own[-1] + 1 if own else 0 for own in places]
        slices.append(piece((owners.start, owners.stop), (first, stop)))
        expected.append(
            {
                "query_start_loc": starts,
                "query_start_loc_cpu": starts,
                "seq_lens": lens,
                "seq_lens_cpu": lens,
                "num_computed_tokens_cpu": [own[0] if own else 0 for own in places],
                "num_reqs": len(owners),
                "num_actual_tokens": stop - first,
                "max_query_len": max(map(len, places)),
                "max_seq_len": max(lens),
                "block_table_tensor": [[10 * r + page for page in range(4)] for r in owners],
                "slot_mapping": [100 + t if t < len(tokens) else -1 for t in range(first, stop)],
                "causal": causal,
                "logits_indices_padded": None,
                "num_logits_indices": None,
                "encoder_seq_lens": None,
                "dcp_local_seq_lens": None,
                "mm_req_doc_ranges": None,
                "rswa_prefix_lens": None,
            }
        )
    with unchanged(batch):
        parts = split_attn_metadata(slices, batch)
    assert [plain_values(part) for part in parts] == expected
    assert plain_values(_make_metadata_with_slice(slices[0], batch)) == expected[0]
    for part in parts:
        index = (part.query_start_loc, part.query_start_loc_cpu, part.seq_lens, part.seq_lens_cpu)
        assert {x.dtype for x in (*index, part.num_computed_tokens_cpu)} == {dtype}
        assert same_storage(part.block_table_tensor, batch.block_table_tensor)
        assert same_storage(part.slot_mapping, batch.slot_mapping)
        assert not same_storage(part.query_start_loc, part.query_start_loc_cpu)
        assert not same_storage(part.seq_lens, part.seq_lens_cpu)
        assert not same_storage(part.query_start_loc, batch.query_start_loc)


@pytest.mark.parametrize(
    ("requests", "tokens"),
    [
        ((1, 1), (3, 5)),
        ((0, 2), (4, 4)),
        ((0, 2), (3, 7)),  # starts past request 0
        ((0, 1), (0, 5)),  # reaches into request 1
        ((0, 2), (0, 3)),  # request 1 has no token
        ((0, 3), (0, 13)),
        ((-1, 2), (0, 5)),
        ((0, 3), (0.0, 12.0)),
    ],
)
def test_pieces_that_are_none_are_refused(requests, tokens):
    batch = common_metadata([3, 4, 5], [8, 4, 15])
    assert "ubatch_slice" in refused(_make_metadata_with_slice, piece(requests, tokens), batch)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("query_start_loc_cpu", torch.tensor([0, 3, 2, 12])),
        ("seq_lens_cpu", torch.tensor([8, 4])),
        ("block_table_tensor", torch.zeros(2, 4)),
        ("slot_mapping", torch.arange(6)),
    ],
)
def test_a_batch_that_contradicts_itself_is_refused(field, value):
    batch = common_metadata([3, 4, 5], [8, 4, 15], **{field: value})
    assert field in refused(_make_metadata_with_slice, piece((0, 2), (0, 7)), batch)


@settings(max_examples=60)
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


def test_the_last_of_equal_pieces_may_be_padding_alone():
    assert [is_last_ubatch_empty(real, 16, 2) for real in (7, 8, 9, 16)] == [True, True, False, False]
