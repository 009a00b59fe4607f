"""Packed sequences without a cache, and cross attention over cached encoder rows."""

from dataclasses import replace

import pytest
import torch

from attncheck.reference import AttentionParams, Precision, varlen_attention

ENCODER = AttentionParams(4, 2, 8, head_size_v=6, causal=False)
LENS = (5, 1, 12, 3)
SLOPES = (0.5, 0.06, 0.25, 0.125)


def offsets(lens):
    return torch.tensor([0, *lens]).cumsum(0)


def draw(rows, heads, size, seed=0):
    return torch.randn(rows, heads, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def packed(lens=LENS):
    total = sum(lens)
    return draw(total, 4, 8, 1), draw(total, 2, 8, 2), draw(total, 2, 6, 3), offsets(lens)


@pytest.mark.parametrize(
    "params",
    [
        ENCODER,
        replace(ENCODER, window=(3, 3), logits_soft_cap=1.0),
        replace(ENCODER, alibi_slopes=SLOPES, sinks=(0.0, 1.0, 2.0, -1.0)),
        replace(ENCODER, causal=True),
    ],
)
def test_agrees_with_the_dense_formulation(make_batch, dense, same_state, params):
    batch = make_batch(LENS, (9, 1, 12, 2), params, unowned_rows=2)
    state = varlen_attention(
        batch.query,
        torch.cat([*batch.keys, torch.full((3, 2, 8), torch.nan, dtype=torch.float64)]),
        torch.cat([*batch.values, torch.full((3, 2, 6), torch.nan, dtype=torch.float64)]),
        batch.query_start_loc.int(),
        offsets((9, 1, 12, 2)).int(),
        params,
        q_tile=3,
        kv_tile=4,
    )
    same_state(state, dense(batch, params))


def test_each_sequence_alone(same_state):
    query, key, value, ends = packed()
    out, lse = varlen_attention(query, key, value, ends, ends, ENCODER)
    for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        alone = torch.tensor([0, end - start])
        rows = slice(start, end)
        part = varlen_attention(query[rows], key[rows], value[rows], alone, alone, ENCODER)
        same_state(part, (out[rows], lse[rows]), tolerance=0)


@pytest.mark.parametrize("precision", [Precision(), Precision.kernel(torch.bfloat16)], ids=["float64", "bfloat16"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"causal": True, "sinks": (0.0, 1.0, 2.0, -torch.inf)},
        {"causal": True, "window": (3, 0), "logits_soft_cap": 2.0},
        {"window": (2, 1), "alibi_slopes": SLOPES},
        {"causal": True, "attn_chunk_size": 4},
    ],
    ids=["plain", "sinks", "window", "alibi", "chunks"],
)
@pytest.mark.parametrize("rows", [(1, 1, 1, 1, 1), (5, 0, 3, 2, 1)], ids=["decodes", "mixed"])
def test_neighbours_change_no_bit(same_state, rows, changes, precision):
    """Short sequences share operations, a long one between them is attended alone, one has no keys, one no rows."""
    lens, params = (6, 2, 4, 11, 0), replace(ENCODER, **changes)
    query, key, value = draw(sum(rows), 4, 8, 1), draw(sum(lens), 2, 8, 2), draw(sum(lens), 2, 6, 3)
    starts, ends = offsets(rows), offsets(lens)
    options = {"precision": precision, "kv_tile": 10}
    out, lse = varlen_attention(query, key, value, starts, ends, params, **options)
    for i in range(len(lens)):
        own, keys = slice(*starts[i : i + 2].tolist()), slice(*ends[i : i + 2].tolist())
        alone = offsets(rows[i : i + 1]), offsets(lens[i : i + 1])
        part = varlen_attention(query[own], key[keys], value[keys], *alone, params, **options)
        same_state(part, (out[own], lse[own]), tolerance=0)


def test_permuting_tokens_permutes_rows(same_state):
    query, key, value, ends = packed()
    out, lse = varlen_attention(query, key, value, ends, ends, ENCODER)
    generator = torch.Generator().manual_seed(4)
    order = torch.cat([s + torch.randperm(n, generator=generator) for s, n in zip(ends.tolist(), LENS, strict=False)])
    moved = varlen_attention(query[order], key[order], value[order], ends, ends, ENCODER)
    same_state(moved, (out[order], lse[order]))


def test_a_window_over_everything_is_none_and_a_half_one_is_not(same_state):
    query, key, value, ends = packed()
    plain = varlen_attention(query, key, value, ends, ends, ENCODER)
    same_state(varlen_attention(query, key, value, ends, ends, replace(ENCODER, window=(11, 11))), plain)
    both = varlen_attention(query, key, value, ends, ends, replace(ENCODER, window=(2, 2)))
    half = varlen_attention(query, key, value, ends, ends, replace(ENCODER, window=(2, 0)))
    assert (both[0][:3] - half[0][:3]).abs().amax(dim=(1, 2)).min() > 1e-3


def test_keys_ahead_get_a_positive_bias(same_state):
    """Signed in the non-causal case: exactly ``slope * (j - q)``, not its absolute value."""
    params = replace(ENCODER, alibi_slopes=SLOPES)
    query, key, value, ends = packed((6,))
    bias = torch.tensor(SLOPES, dtype=torch.float64)[:, None] * torch.arange(6, dtype=torch.float64)
    scores = torch.einsum("ihd,jhd->ihj", query, key.repeat_interleave(2, dim=1)) * 8**-0.5 + bias
    _, lse = varlen_attention(query, key, value, ends, ends, params)
    moved = torch.tensor(SLOPES, dtype=torch.float64) * torch.arange(6, dtype=torch.float64)[:, None]
    assert torch.allclose(lse, scores.logsumexp(-1) - moved, rtol=1e-13, atol=1e-13)


def test_rows_align_to_the_end_of_the_keys(same_state):
    causal = replace(ENCODER, causal=True)
    query, key, value, _ = packed((9,))
    out, lse = varlen_attention(query, key, value, torch.tensor([0, 9]), torch.tensor([0, 9]), causal)
    tail = varlen_attention(query[6:], key, value, torch.tensor([0, 3]), torch.tensor([0, 9]), causal)
    same_state(tail, (out[6:], lse[6:]))


def test_cross_attention_over_cached_encoder_rows(make_batch, dense, same_state):
    """Encoder lengths rule; decoder lengths, larger or smaller, do not matter; no encoder rows give zeros."""
    cross = AttentionParams(4, 2, 8, causal=False)
    batch = make_batch((7, 1, 3, 2), (4, 9, 3, 0), cross)
    out, lse = batch.attend(cross)
    same_state((out, lse), dense(batch, cross))
    assert torch.equal(out[batch.rows(3)], torch.zeros(2, 4, 8, dtype=torch.float64))
    decode = replace(batch.only([0]), query=batch.query[6:7], query_start_loc=torch.tensor([0, 1]))
    same_state(decode.attend(cross), (out[6:7], lse[6:7]))


def test_no_key_rows_at_all():
    query = draw(2, 4, 8)
    out, lse = varlen_attention(
        query, draw(0, 2, 8), draw(0, 2, 6), torch.tensor([0, 2]), torch.tensor([0, 0]), ENCODER
    )
    assert torch.equal(out, torch.zeros(2, 4, 6, dtype=torch.float64))
    assert (lse == -torch.inf).all()
