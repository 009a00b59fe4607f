"""Attention over pages and over packed keys against a dense formulation in float64."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.reference import AttentionParams, varlen_attention


@st.composite
def parts(draw):
    """Which keys count: a range of positions, sinks, and a tree over the new keys."""
    low = draw(st.integers(0, 26))
    seed = draw(st.none() | st.integers(0, 99))
    return {
        "kv_range": draw(st.none() | st.just((low, low + draw(st.integers(0, 12)))) | st.just((low, 10**12))),
        "include_sinks": draw(st.booleans()),
        "tree_mask": None if seed is None else torch.rand(10, 10, generator=torch.Generator().manual_seed(seed)) < 0.6,
    }


@settings(max_examples=120)
@given(data=st.data(), part=parts())
def test_random_questions(data, part, layers, batches, tiles, dense, same_state):
    params = data.draw(layers())
    batch = data.draw(batches(params, fitting=False))
    same_state(batch.attend(params, **part, **data.draw(tiles)), dense(batch, params, **part))


@settings(max_examples=60)
@given(data=st.data(), include_sinks=st.booleans())
def test_random_packed_sequences(data, include_sinks, layers, batches, tiles, dense, same_state):
    params = data.draw(layers())
    batch = data.draw(batches(params, fitting=False))
    ends = torch.tensor([0, *map(len, batch.keys)]).cumsum(0).int()
    behind = [x[0].new_full((3, *x[0].shape[1:]), torch.nan) for x in (batch.keys, batch.values)]
    keys, values = torch.cat([*batch.keys, behind[0]]), torch.cat([*batch.values, behind[1]])
    packed = (batch.query, keys, values, batch.query_start_loc.int(), ends, params)
    state = varlen_attention(*packed, include_sinks=include_sinks, **data.draw(tiles))
    same_state(state, dense(batch, params, include_sinks=include_sinks))


@settings(max_examples=40)
@given(data=st.data(), modulus=st.integers(1, 4))
def test_a_mask_function_replaces_the_rule(data, modulus, layers, batches, tiles, dense, same_state):
    """It gets the request and the absolute position of every key once, also of keys outside of window and chunk."""
    params = data.draw(layers())
    batch = data.draw(batches(params, fitting=False))
    pairs = []

    def mask_fn(request, q_pos, k_pos):
        pairs.extend((request, q, k) for q in q_pos[:, 0].tolist() for k in k_pos[0].tolist())
        return (q_pos + k_pos + request) % modulus == 0

    state = batch.attend(params, mask_fn=mask_fn, **data.draw(tiles))
    same_state(state, dense(batch, params, sees=lambda request, q, k: (q + k + request) % modulus == 0))
    assert sorted(pairs) == sorted((r, q, k) for _, r, q in batch.places() for k in range(len(batch.keys[r])))


def test_no_requests_at_all(make_batch):
    params = AttentionParams(4, 2, 8)
    batch = make_batch((1,), (4,), params)
    none = torch.zeros(0, dtype=torch.int32)
    empty = replace(batch, block_table=none.view(0, 1), seq_lens=none, query_start_loc=none.new_zeros(1))
    out, lse = empty.attend(params)
    assert torch.equal(out, torch.zeros_like(out))
    assert (lse == -torch.inf).all()


def test_a_nan_that_is_data_is_not_hidden(make_batch):
    params = AttentionParams(4, 2, 8)
    batch = make_batch((2, 2), (8, 8), params, unowned_rows=0)
    batch.key_cache[batch.block_table[0, 0], 1] = torch.nan
    out, lse = batch.attend(params)
    assert out[:2].isnan().all()
    assert lse[:2].isnan().all()
    assert out[2:].isfinite().all()


def test_scores_up_to_ten_thousand(make_batch, dense, same_state):
    params = AttentionParams(4, 2, 8, scale=1.0)
    batch = make_batch((30, 2), (60, 47), params, gain=900.0)
    scores = torch.einsum("ihd,jhd->hij", batch.query[:30, ::2], batch.keys[0])
    assert scores.abs().max() > 1e4
    same_state(batch.attend(params, q_tile=8, kv_tile=16), dense(batch, params), tolerance=1e-10)
