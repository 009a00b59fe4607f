import math
import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")

from attncheck.backends.candidates.triton_unified.merging import merge_attn_states

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF = math.inf


def one(lse_a, lse_b, out_a=3.0, out_b=-1.0):
    """Of states of a single number."""
    outs = [torch.tensor([[[out]]], device=DEVICE) for out in (out_a, out_b)]
    lses = [torch.tensor([[lse]], device=DEVICE) for lse in (lse_a, lse_b)]
    out, lse = merge_attn_states(outs[0], lses[0], outs[1], lses[1])
    return out.item(), lse.item()


def test_a_logarithm_that_is_nan_is_no_mark():
    for lses in ((math.nan, 0.0), (0.0, math.nan), (math.nan, -INF)):
        assert all(math.isnan(x) for x in one(*lses))


def test_more_rows_than_one_program_takes():
    out = torch.arange(700.0, device=DEVICE).view(700, 1, 1)
    lse = torch.zeros(700, 1, device=DEVICE)
    merged, log = merge_attn_states(out, lse, torch.full_like(out, torch.nan), torch.full_like(lse, -INF))
    assert torch.equal(merged, out)
    assert torch.equal(log, lse)


def test_no_rows_are_no_rows_and_what_does_not_fit_is_refused():
    state = torch.zeros(9, 3, 40, device=DEVICE), torch.zeros(9, 3, device=DEVICE)
    out, lse = merge_attn_states(*(x[:0] for x in (*state, *state)))
    assert (out.shape, lse.shape) == ((0, 3, 40), (0, 3))
    for place, wrong, message in (
        (0, torch.zeros(2, 3), "out_a has shape (2, 3), not [T, H, Dv]; lse_a has shape (9, 3), not (2, 3)"),
        (1, torch.zeros(9, 1), "lse_a has shape (9, 1), not (9, 3)"),
        (2, torch.zeros(9, 3, 1), "out_b has shape (9, 3, 1), not (9, 3, 40)"),
        (3, torch.zeros(9, 3, dtype=torch.int32), "lse_b has dtype torch.int32"),
    ):
        given = [*state, *state]
        given[place] = wrong
        with pytest.raises(ValueError, match=f"^merge_attn_states: {re.escape(message)}"):
            merge_attn_states(*given)


def test_fake_tensors_have_the_shapes():
    with FakeTensorMode():
        out, lse = torch.zeros(4, 2, 8, dtype=torch.float16), torch.zeros(4, 2)
        merged, log = merge_attn_states(out, lse, out, lse)
    assert (merged.shape, merged.dtype, log.shape, log.dtype) == ((4, 2, 8), torch.float16, (4, 2), torch.float32)
