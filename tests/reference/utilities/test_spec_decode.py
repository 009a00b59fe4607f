"""Views for the verification of speculated tokens."""

import numpy as np
import pytest
import torch

from attncheck.errors import ReferenceArgumentError
from attncheck.reference import reshape_attn_output_for_spec_decode, reshape_query_for_spec_decode


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


def test_any_strides_will_do():
    wide = torch.randn(6, 2, 16)
    query = wide[..., :8]
    assert query.stride() == (32, 16, 1)
    cut = reshape_query_for_spec_decode(query, 3)
    assert cut.stride() == (64, 32, 16, 1)
    assert reshape_query_for_spec_decode(query, np.int64(3)).stride() == cut.stride()
    cut[2, 1] = 5.0
    assert wide[5, :, :8].eq(5.0).all()
    assert reshape_query_for_spec_decode(torch.ones(1, 1, 1).expand(6, 2, 8), 2).shape == (2, 3, 2, 8)
    assert reshape_query_for_spec_decode(torch.randn(2, 6, 8).transpose(0, 1), 2).shape == (2, 3, 2, 8)


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


def test_an_axis_of_one_always_merges():
    assert reshape_attn_output_for_spec_decode(torch.zeros(5, 1, 2, 8).transpose(0, 1)).shape == (5, 2, 8)


def test_an_output_that_would_be_copied_is_refused_with_its_strides():
    output = torch.zeros(2, 3, 2, 8).transpose(0, 1)
    with pytest.raises(ReferenceArgumentError, match=r"stride.*\(16, 48, 8, 1\)"):
        reshape_attn_output_for_spec_decode(output)


@pytest.mark.parametrize("shape", [(6, 8), (1, 1, 1, 2, 8), ()])
def test_outputs_of_other_ranks_are_refused(shape):
    with pytest.raises(ReferenceArgumentError, match=r"attn_output\.shape"):
        reshape_attn_output_for_spec_decode(torch.zeros(shape))


@pytest.mark.parametrize(("requests", "length"), [(1, 1), (4, 3), (3, 0)])
def test_there_and_back(requests, length):
    query = torch.randn(requests * length, 2, 4)
    back = reshape_attn_output_for_spec_decode(reshape_query_for_spec_decode(query, requests))
    assert torch.equal(back, query)
    assert back.data_ptr() == query.data_ptr()
