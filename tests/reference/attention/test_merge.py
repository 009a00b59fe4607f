"""Split KV, cascade and the merge of states: any partition of the keys, merged in any order, is the whole."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.reference import Precision, merge_attn_states, merge_many

ENDLESS = 10**9


def merged(states):
    return merge_many([out for out, _ in states], [lse for _, lse in states])


@settings(max_examples=40)
@given(data=st.data())
def test_parts_merge_to_the_whole_in_any_order_and_grouping(data, layers, batches, tiles, same_state):
    """Consecutive key ranges, empty ones included; the sinks are in one of them."""
    params = data.draw(layers())
    batch = data.draw(batches(params, fitting=False))
    edges = [0, *sorted(data.draw(st.lists(st.integers(0, 26), max_size=5))), ENDLESS]
    carrier = data.draw(st.integers(0, len(edges) - 2))
    states = [
        batch.attend(params, kv_range=pair, include_sinks=i == carrier, **data.draw(tiles))
        for i, pair in enumerate(pairwise(edges))
    ]
    whole = batch.attend(params)
    same_state(merged(data.draw(st.permutations(states))), whole, tolerance=1e-10)
    while len(states) > 1:
        first = states.pop(data.draw(st.integers(0, len(states) - 1)))
        other = states.pop(data.draw(st.integers(0, len(states) - 1)))
        states.append(merge_attn_states(*first, *other))
    same_state(states[0], whole, tolerance=1e-10)


def state(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((3, 2, 4), (3, 2))]


@pytest.mark.parametrize("mark", [-math.inf, math.inf])
@pytest.mark.parametrize("rubbish", [0.0, 1e30, math.inf, math.nan])
def test_an_empty_state_counts_for_nothing(same_state, mark, rubbish):
    out, lse = state()
    empty = torch.full_like(out, rubbish), torch.full_like(lse, mark)
    same_state(merge_attn_states(out, lse, *empty), (out, lse))
    same_state(merge_attn_states(*empty, out, lse), (out, lse))
    nothing, none = merge_attn_states(*empty, *empty)
    assert torch.equal(nothing, torch.zeros_like(out))
    assert (none == -math.inf).all()


@pytest.mark.parametrize("far", [0.0, 40.0, 95.0, 745.0, 1400.0])
def test_weights_far_apart(far):
    """The closed form of two states: out = a + (b - a) * sigmoid(lse_b - lse_a)."""
    (a, _), (b, _) = state(seed=1), state(seed=2)
    for base in (-700.0, 0.0, 700.0):
        lse_a = torch.full((3, 2), base, dtype=torch.float64)
        out, lse = merge_attn_states(a, lse_a, b, lse_a - far)
        share = 1 / (1 + math.exp(far)) if far < 700 else 0.0
        assert torch.allclose(out, a + (b - a) * share, rtol=0, atol=1e-14)
        assert torch.allclose(lse, lse_a + math.log1p(math.exp(-far)), rtol=1e-14, atol=1e-15)


def test_a_nan_lse_is_data():
    (a, lse_a), (b, lse_b) = state(seed=1), state(seed=2)
    lse_b[0] = math.nan
    out, lse = merge_attn_states(a, lse_a, b, lse_b)
    assert out[0].isnan().all()
    assert lse[0].isnan().all()
    assert out[1:].isfinite().all()


def test_arguments_stay_and_dtypes_mix():
    given_states = [*state(seed=1), *state(seed=2)]
    copies = [x.clone() for x in given_states]
    low, _ = merge_attn_states(*given_states, precision=Precision.kernel(torch.bfloat16))
    assert low.dtype == torch.float32
    assert torch.equal(low, low.bfloat16().float())
    assert all(torch.equal(x, copy) for x, copy in zip(given_states, copies, strict=True))
    a, lse_a, b, lse_b = given_states
    out, lse = merge_attn_states(a.half(), lse_a.float(), b.bfloat16(), lse_b.float())
    assert out.dtype == lse.dtype == torch.float64
