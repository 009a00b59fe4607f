"""The tiled computation against two formulations that share nothing with it: dense float64, and plain loops."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.reference import AttentionParams, visible

SLOPES = (0.25, -0.5, 0.03, 0.7, 0.11, 0.4)
SINKS = (1.5, -2.0, 0.25, 4.0, -math.inf, 0.0)
QUERY_LENS = (1, 7, 20, 3, 1, 6, 2)
SEQ_LENS = (40, 33, 20, 8, 1, 0, 1)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("window", [(-1, -1), (5, 0), (0, 0), (3, 6), (-1, 2), (4, -1)], ids=str)
@pytest.mark.parametrize("chunk", [None, (1, 0), (8, 0), (8, 1)], ids=str)
def test_who_sees_whom(make_batch, dense, same_state, causal, window, chunk):
    size, lookback = chunk or (None, 0)
    params = AttentionParams(4, 2, 8, causal=causal, window=window, attn_chunk_size=size, attn_chunk_lookback=lookback)
    batch = make_batch(QUERY_LENS, SEQ_LENS, params)
    same_state(batch.attend(params, q_tile=4, kv_tile=8), dense(batch, params))
    same_state(batch.attend(params), dense(batch, params))


@pytest.mark.parametrize(
    ("cap", "alibi", "sinks", "scale", "causal"),
    [*itertools.product((None, 0.0, 2.5), (None, "linear", "sqrt"), (None, SINKS), (None, 0.3), (True, False))],
)
def test_score_modifiers(make_batch, dense, same_state, cap, alibi, sinks, scale, causal):
    params = AttentionParams(
        6,
        2,
        16,
        head_size_v=5,
        scale=scale,
        causal=causal,
        window=(9, 3),
        logits_soft_cap=cap,
        alibi_slopes=SLOPES if alibi else None,
        alibi_sqrt=alibi == "sqrt",
        sinks=sinks,
    )
    batch = make_batch((1, 7, 12, 6), (25, 17, 12, 0), params, gain=3.0)
    same_state(batch.attend(params, q_tile=5, kv_tile=7), dense(batch, params))


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
    tiles = draw(st.tuples(st.integers(1, 9), st.integers(1, 26)))
    return params, requests, tiles, draw(st.integers(1, 9)), draw(st.integers(0, 999))


@settings(max_examples=150)
@given(questions())
def test_random_questions(make_batch, dense, same_state, question):
    params, requests, (q_tile, kv_tile), block_size, seed = question
    query_lens, seq_lens = zip(*requests, strict=True)
    batch = make_batch(query_lens, seq_lens, params, block_size=block_size, seed=seed)
    same_state(batch.attend(params, q_tile=q_tile, kv_tile=kv_tile), dense(batch, params))


@pytest.mark.parametrize(
    "params",
    [
        AttentionParams(2, 1, 3, window=(4, 0), logits_soft_cap=1.5, sinks=(0.5, -1.0)),
        AttentionParams(3, 3, 4, head_size_v=2, causal=False, alibi_slopes=(0.5, 0.25, -0.125)),
        AttentionParams(4, 2, 2, scale=1.25, attn_chunk_size=5),
    ],
)
def test_plain_loops(make_batch, seen, params):
    batch = make_batch((3, 5), (11, 5), params)
    out, lse = batch.attend(params, q_tile=2, kv_tile=4)
    group = params.num_heads // params.num_kv_heads
    for r, (keys, values) in enumerate(zip(batch.keys, batch.values, strict=True)):
        rows = batch.query[batch.rows(r)].tolist()
        k, v = keys.tolist(), values.tolist()
        for i, h in itertools.product(range(len(rows)), range(params.num_heads)):
            position = len(k) - len(rows) + i
            scores = {}
            for j in sorted(seen(params, position, len(k))):
                score = math.fsum(a * b for a, b in zip(rows[i][h], k[j][h // group], strict=True))
                score *= params.scale if params.scale is not None else 1 / math.sqrt(params.head_size)
                if params.logits_soft_cap:
                    score = params.logits_soft_cap * math.tanh(score / params.logits_soft_cap)
                if params.alibi_slopes is not None:
                    score += params.alibi_slopes[h] * (j - position)
                scores[j] = score
            weights = {j: math.exp(score) for j, score in scores.items()}
            total = math.fsum([*weights.values(), *([math.exp(params.sinks[h])] if params.sinks else [])])
            row = batch.rows(r).start + i
            assert math.isclose(float(lse[row, h]), math.log(total), rel_tol=1e-13, abs_tol=1e-13)
            for d in range(params.value_head_size):
                want = math.fsum(weight * v[j][h // group][d] for j, weight in weights.items()) / total
                assert math.isclose(float(out[row, h, d]), want, rel_tol=1e-12, abs_tol=1e-13)


def test_scores_up_to_ten_thousand(make_batch, dense, same_state):
    params = AttentionParams(4, 2, 8, scale=1.0)
    batch = make_batch((30, 2), (60, 47), params, gain=900.0)
    scores = torch.einsum("ihd,jhd->hij", batch.query[:30, ::2], batch.keys[0])
    assert scores.abs().max() > 1e4
    same_state(batch.attend(params, q_tile=8, kv_tile=16), dense(batch, params), tolerance=1e-10)


def test_bands_of_rows_agree_with_one(make_batch, dense, same_state):
    params = AttentionParams(2, 1, 4, window=(6, 0))
    batch = make_batch((90,), (100,), params)
    same_state(batch.attend(params, q_tile=1, kv_tile=5), dense(batch, params))


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
