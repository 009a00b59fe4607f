"""Attention over pages and over packed keys against two formulations: dense float64, and plain loops."""

import itertools
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.reference import AttentionParams, varlen_attention, visible


@st.composite
def questions(draw):
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    heads = kv_heads * group
    per_head = st.tuples(*[st.floats(-3, 3)] * heads)
    params = AttentionParams(
        heads,
        kv_heads,
        draw(st.sampled_from([1, 3, 8])),
        head_size_v=draw(st.sampled_from([None, 1, 6])),
        scale=draw(st.none() | st.floats(-2, 2)),
        causal=draw(st.booleans()),
        window=draw(st.tuples(st.integers(-1, 12), st.integers(-1, 12))),
        logits_soft_cap=draw(st.none() | st.floats(0.01, 30)),
        alibi_slopes=draw(st.none() | per_head),
        alibi_sqrt=draw(st.booleans()),
        sinks=draw(st.none() | per_head),
        attn_chunk_size=draw(st.none() | st.integers(1, 12)),
        attn_chunk_lookback=draw(st.integers(0, 2)),
    )
    requests = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 24)), min_size=1, max_size=4))
    tiles = {"q_tile": draw(st.integers(1, 9)), "kv_tile": draw(st.integers(1, 26))}
    places = {"block_size": draw(st.integers(1, 9)), "seed": draw(st.integers(0, 999))}
    places["gain"] = draw(st.sampled_from([1.0, 4.0]))
    return params, requests, tiles, places


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


@settings(max_examples=200)
@given(questions(), parts())
def test_random_questions(make_batch, dense, same_state, question, part):
    params, requests, tiles, places = question
    query_lens, seq_lens = zip(*requests, strict=True)
    batch = make_batch(query_lens, seq_lens, params, **places)
    same_state(batch.attend(params, **part, **tiles), dense(batch, params, **part))


@settings(max_examples=60)
@given(questions(), st.booleans())
def test_random_packed_sequences(make_batch, dense, same_state, question, include_sinks):
    params, requests, tiles, places = question
    query_lens, seq_lens = zip(*requests, strict=True)
    batch = make_batch(query_lens, seq_lens, params, **places)
    ends = torch.tensor([0, *seq_lens]).cumsum(0).int()
    behind = [x[0].new_full((3, *x[0].shape[1:]), torch.nan) for x in (batch.keys, batch.values)]
    keys, values = torch.cat([*batch.keys, behind[0]]), torch.cat([*batch.values, behind[1]])
    packed = (batch.query, keys, values, batch.query_start_loc.int(), ends, params)
    state = varlen_attention(*packed, include_sinks=include_sinks, **tiles)
    same_state(state, dense(batch, params, include_sinks=include_sinks))


@settings(max_examples=40)
@given(questions(), st.integers(1, 4))
def test_a_mask_function_replaces_the_rule(make_batch, dense, same_state, question, modulus):
    """It gets the request and the absolute position of every key once, also of keys outside of window and chunk."""
    params, requests, tiles, places = question
    query_lens, seq_lens = zip(*requests, strict=True)
    batch = make_batch(query_lens, seq_lens, params, **places)
    pairs = []

    def mask_fn(request, q_pos, k_pos):
        pairs.extend((request, q, k) for q in q_pos[:, 0].tolist() for k in k_pos[0].tolist())
        return (q_pos + k_pos + request) % modulus == 0

    state = batch.attend(params, mask_fn=mask_fn, **tiles)
    same_state(state, dense(batch, params, sees=lambda request, q, k: (q + k + request) % modulus == 0))
    spans = [(r, range(s - q, s), range(s)) for r, (q, s) in enumerate(requests)]
    assert sorted(pairs) == sorted((r, q, k) for r, rows, keys in spans for q, k in itertools.product(rows, keys))


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


def test_visible_gets_tiles_never_a_whole_prefill(make_batch):
    params = AttentionParams(2, 2, 4)
    batch = make_batch((50,), (70,), params)
    sizes = []

    def spy(request, q_pos, k_pos):
        sizes.append((q_pos.shape[0], k_pos.shape[1]))
        return visible(params, q_pos, k_pos)

    batch.attend(params, mask_fn=spy, q_tile=16, kv_tile=32)
    assert max(rows for rows, _ in sizes) == 16
    assert max(keys for _, keys in sizes) == 32
