"""Split KV, cascade and the merge of their states."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.reference import AttentionParams, Precision, merge_attn_states, merge_many

PLAIN = AttentionParams(4, 2, 8)
LAYERS = {
    "plain": PLAIN,
    "window": replace(PLAIN, window=(7, 0)),
    "full": replace(PLAIN, causal=False),
    "modified": replace(PLAIN, logits_soft_cap=2.0, alibi_slopes=(0.5, 0.06, 0.25, 0.125)),
    "sinks": replace(PLAIN, sinks=(0.5, -1.0, 3.0, 1.0)),
}


def parts_of(batch, params, cuts):
    """States over consecutive key ranges; the last one carries the sinks."""
    edges = [0, *cuts, 10**9]
    last = len(edges) - 2
    return [
        batch.attend(params, kv_range=pair, include_sinks=i == last, kv_tile=4)
        for i, pair in enumerate(itertools.pairwise(edges))
    ]


def merged(states):
    return merge_many([out for out, _ in states], [lse for _, lse in states])


def state(rows=3, heads=2, size=4, seed=0, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    draw = [
        torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((rows, heads, size), (rows, heads))
    ]
    return draw[0], draw[1] * spread


@pytest.mark.parametrize("layer", LAYERS)
@settings(max_examples=20)
@given(cuts=st.lists(st.integers(0, 31), max_size=4).map(sorted))
def test_split_anywhere(make_batch, same_state, layer, cuts):
    params = LAYERS[layer]
    batch = make_batch((1, 6, 9), (30, 17, 9), params, unowned_rows=0)
    same_state(merged(parts_of(batch, params, cuts)), batch.attend(params))


def test_cascade_over_a_shared_prefix(make_batch, same_state):
    """Part one: all rows over one block row, not causal; part two: causal over the rest."""
    batch = make_batch((2, 5, 1), (14, 21, 11), PLAIN, block_size=4, unowned_rows=0)
    table = batch.block_table.clone()
    table[:, :2] = table[0, :2]
    batch = replace(batch, block_table=table)
    everyone = replace(batch, block_table=table[:1], seq_lens=torch.tensor([8]), query_start_loc=torch.tensor([0, 8]))
    prefix = everyone.attend(replace(PLAIN, causal=False))
    suffix = batch.attend(PLAIN, kv_range=(8, 10**9))
    same_state(merge_attn_states(*prefix, *suffix), batch.attend(PLAIN))
    same_state(merge_attn_states(*batch.attend(PLAIN, kv_range=(0, 8)), *suffix), batch.attend(PLAIN))


def test_a_sink_in_both_parts_would_show(make_batch):
    params = LAYERS["sinks"]
    batch = make_batch((4,), (20,), params, unowned_rows=0)
    twice = merged([batch.attend(params, kv_range=pair) for pair in ((0, 9), (9, 20))])
    assert (twice[0] - batch.attend(params)[0]).abs().max() > 1e-2


def test_commutative_associative_and_split_again(same_state):
    a, b, c = (state(seed=s, spread=3.0) for s in range(3))
    ab = merge_attn_states(*a, *b)
    same_state(merge_attn_states(*b, *a), ab)
    same_state(merge_attn_states(*ab, *c), merged([a, b, c]))
    same_state(merge_attn_states(*a, *merge_attn_states(*b, *c)), merged([c, a, b]))


def test_of_one_state_is_itself(same_state):
    same_state(merged([state()]), state())


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


def test_empty_in_some_rows_only(same_state):
    (a, lse_a), (b, lse_b) = state(seed=1), state(seed=2)
    a[0], lse_a[0] = math.nan, -math.inf
    b[1], lse_b[1] = math.nan, math.inf
    out, lse = merge_attn_states(a, lse_a, b, lse_b)
    same_state((out[0], lse[0]), (b[0], lse_b[0]))
    same_state((out[1], lse[1]), (a[1], lse_a[1]))
    assert (out[2] != a[2]).all()


@pytest.mark.parametrize("far", [0.0, 40.0, 95.0, 745.0, 1400.0])
def test_weights_far_apart(far):
    """The closed form of two states: out = a + (b - a) * sigmoid(lse_b - lse_a)."""
    (a, _), (b, _) = state(seed=1), state(seed=2)
    for base in (-700.0, 0.0, 700.0):
        lse_a, lse_b = (
            torch.full((3, 2), base, dtype=torch.float64),
            torch.full((3, 2), base - far, dtype=torch.float64),
        )
        out, lse = merge_attn_states(a, lse_a, b, lse_b)
        share = 1 / (1 + math.exp(far)) if far < 700 else 0.0
        assert torch.allclose(out, a + (b - a) * share, rtol=0, atol=1e-14)
        assert torch.allclose(lse, lse_a + math.log1p(math.exp(-far)), rtol=1e-14, atol=1e-15)


def test_an_average_or_base_two_weights_would_show():
    (a, lse_a), (b, lse_b) = state(seed=1, spread=3.0), state(seed=2, spread=3.0)
    out, _ = merge_attn_states(a, lse_a, b, lse_b)
    share = torch.sigmoid((lse_b - lse_a) * math.log(2)).unsqueeze(-1)
    assert (out - (a + b) / 2).abs().max() > 0.1
    assert (out - (a + (b - a) * share)).abs().max() > 0.05


def test_a_nan_lse_is_data(same_state):
    (a, lse_a), (b, lse_b) = state(seed=1), state(seed=2)
    lse_b[0] = math.nan
    out, lse = merge_attn_states(a, lse_a, b, lse_b)
    assert out[0].isnan().all()
    assert lse[0].isnan().all()
    assert out[1:].isfinite().all()


def test_arguments_stay_and_dtypes_mix():
    (a, lse_a), (b, lse_b) = state(seed=1), state(seed=2)
    copies = [x.clone() for x in (a, lse_a, b, lse_b)]
    out, lse = merge_attn_states(a.half(), lse_a.float(), b.bfloat16(), lse_b.float())
    assert out.dtype == lse.dtype == torch.float64
    low, _ = merge_attn_states(a, lse_a, b, lse_b, precision=Precision.kernel(torch.bfloat16))
    assert low.dtype == torch.float32
    assert torch.equal(low, low.bfloat16().float())
    merge_attn_states(a, lse_a, b, lse_b)
    for x, copy in zip((a, lse_a, b, lse_b), copies, strict=True):
        assert torch.equal(x, copy)
