"""The same code path with a kernel's roundings."""

import pytest
import torch

from attncheck.reference import AttentionParams, Precision, varlen_attention

PARAMS = AttentionParams(4, 2, 16, window=(40, 0), logits_soft_cap=5.0, sinks=(1.0, 0.0, -1.0, 2.0))
DTYPES = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_kernel_is_near_the_truth_and_its_output_is_rounded(make_batch, dtype):
    batch = make_batch((30, 1, 7), (90, 64, 7), PARAMS, dtype=dtype, unowned_rows=0)
    truth, truth_lse = batch.attend(PARAMS)
    out, lse = batch.attend(PARAMS, precision=Precision.kernel(dtype))
    assert truth.dtype == truth_lse.dtype == torch.float64
    assert out.dtype == lse.dtype == torch.float32
    assert torch.equal(out.to(dtype).float(), out)
    error = (out - truth).norm(dim=-1) / truth.norm(dim=-1)
    assert (error <= 3 * DTYPES[dtype] + 1e-6).all()
    assert error.max() >= DTYPES[dtype] / 16
    assert torch.allclose(lse.double(), truth_lse, rtol=1e-6, atol=1e-6)


def test_probabilities_are_rounded_but_not_their_sum():
    """Three keys of weights 1, w, w: the numerators are rounded where they meet V, the denominator is not."""
    w = 0.3  # not a bfloat16
    keys = torch.tensor([0.0, w, w], dtype=torch.float64).log().view(3, 1, 1)
    keys[0] = 0.0
    values = torch.eye(3, dtype=torch.float64).view(3, 1, 3)
    query, ends = torch.ones(1, 1, 1, dtype=torch.float64), torch.tensor([0, 1])
    params = AttentionParams(1, 1, 1, head_size_v=3, causal=False, scale=1.0)
    state = (query, keys, values, ends, torch.tensor([0, 3]), params)
    out, lse = varlen_attention(*state, precision=Precision(prob=torch.bfloat16))
    rounded = float(torch.tensor(w).bfloat16())
    assert rounded != w
    want = torch.tensor([1.0, rounded, rounded], dtype=torch.float64) / (1 + 2 * w)
    assert torch.allclose(out.flatten(), want, rtol=1e-15, atol=0)
    assert torch.allclose(lse, torch.tensor([[1 + 2 * w]], dtype=torch.float64).log(), rtol=1e-15, atol=0)


def test_output_rounding_alone(make_batch):
    batch = make_batch((5,), (20,), PARAMS)
    truth, truth_lse = batch.attend(PARAMS)
    out, lse = batch.attend(PARAMS, precision=Precision(out=torch.float16))
    assert torch.equal(out, truth.half().double())
    assert torch.equal(lse, truth_lse)


def test_positions_stay_exact_where_a_half_float_would_lose_them():
    """ALiBi between keys beyond 2048 (float16) and 256 (bfloat16): positions are subtracted as integers."""
    count = 5000
    zeros = torch.zeros(count, 1, 1)
    params = AttentionParams(1, 1, 1, alibi_slopes=(1.0,))
    ends = torch.tensor([0, count])
    _, lse = varlen_attention(zeros, zeros, zeros, ends, ends, params, precision=Precision(compute=torch.float32))
    want = torch.tensor([float(-d) for d in range(200)], dtype=torch.float64).logsumexp(0)
    assert torch.allclose(lse[-1].double(), want, rtol=1e-6, atol=0)
