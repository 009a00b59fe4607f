"""Heads, scale and unequal head sizes."""

from dataclasses import replace

import pytest
import torch

from attncheck.reference import AttentionParams

GEOMETRIES = [(1, 1), (4, 4), (4, 1), (6, 2), (6, 3), (10, 2), (14, 2), (16, 2), (32, 2), (9, 3)]
LENS = ((1, 4, 9), (12, 17, 9))


@pytest.mark.parametrize(("heads", "kv_heads"), GEOMETRIES)
def test_groups_are_consecutive_heads(make_batch, same_state, heads, kv_heads):
    grouped = AttentionParams(heads, kv_heads, 8)
    batch = make_batch(*LENS, grouped)
    repeated = replace(
        batch,
        key_cache=batch.key_cache.repeat_interleave(heads // kv_heads, dim=2),
        value_cache=batch.value_cache.repeat_interleave(heads // kv_heads, dim=2),
    )
    same_state(repeated.attend(replace(grouped, num_kv_heads=heads)), batch.attend(grouped))


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (6, 3), (10, 2)])
def test_heads_in_turn_would_be_another_function(make_batch, heads, kv_heads):
    grouped = AttentionParams(heads, kv_heads, 8)
    batch = make_batch(*LENS, grouped)
    turn = (1, 1, heads // kv_heads, 1)
    wrong = replace(batch, key_cache=batch.key_cache.repeat(turn), value_cache=batch.value_cache.repeat(turn))
    a, b = batch.attend(grouped)[0], wrong.attend(replace(grouped, num_kv_heads=heads))[0]
    assert (a - b).abs().max() > 0.1


def test_permuting_groups_permutes_outputs(make_batch, same_state):
    params = AttentionParams(6, 3, 8)
    batch = make_batch(*LENS, params)
    out, lse = batch.attend(params)
    order = torch.tensor([2, 0, 1])
    heads = torch.cat([torch.arange(2 * g, 2 * g + 2) for g in order.tolist()])
    moved = replace(
        batch,
        query=batch.query[:, heads],
        key_cache=batch.key_cache[:, :, order],
        value_cache=batch.value_cache[:, :, order],
    )
    same_state(moved.attend(params), (out[:, heads], lse[:, heads]))


def test_equal_queries_of_a_group_give_equal_outputs(make_batch):
    params = AttentionParams(6, 2, 8)
    batch = make_batch(*LENS, params)
    query = batch.query[:, ::3].repeat_interleave(3, dim=1)
    out, _ = replace(batch, query=query).attend(params)
    for g in range(2):
        assert torch.equal(out[:, 3 * g], out[:, 3 * g + 1])
        assert torch.equal(out[:, 3 * g], out[:, 3 * g + 2])
    assert not torch.equal(out[:, 0], out[:, 3])


@pytest.mark.parametrize("factor", [0.25, -2.0, 3.7])
def test_scaling_queries_and_unscaling_scores_is_neutral(make_batch, same_state, factor):
    params = AttentionParams(4, 2, 8, scale=0.6)
    batch = make_batch(*LENS, params)
    scaled = replace(batch, query=batch.query * factor)
    same_state(scaled.attend(replace(params, scale=0.6 / factor)), batch.attend(params))


def test_scale_zero_gives_the_mean_of_what_is_seen(make_batch):
    params = AttentionParams(4, 2, 8, scale=0.0, window=(4, 0))
    batch = make_batch((3,), (11,), params, unowned_rows=0)
    out, lse = batch.attend(params)
    for i in range(3):
        mean = batch.values[0][8 + i - 4 : 8 + i + 1].mean(dim=0).repeat_interleave(2, dim=0)
        assert torch.allclose(out[i], mean, rtol=0, atol=1e-14)
    assert torch.allclose(lse, torch.tensor(5.0, dtype=torch.float64).log().expand_as(lse), rtol=1e-14, atol=0)


def test_default_scale_is_of_the_key_size(make_batch, same_state):
    params = AttentionParams(4, 2, 16, head_size_v=4)
    batch = make_batch(*LENS, params)
    same_state(batch.attend(params), batch.attend(replace(params, scale=0.25)), tolerance=0)
    out, _ = batch.attend(replace(params, scale=0.5))
    assert (out - batch.attend(params)[0]).abs().max() > 0.05


def test_padding_head_sizes_with_zeros_is_neutral(make_batch, same_state):
    params = AttentionParams(4, 2, 8, head_size_v=5, scale=0.3)
    batch = make_batch(*LENS, params)
    out, lse = batch.attend(params)
    pad = torch.nn.functional.pad
    padded = replace(
        batch,
        query=pad(batch.query, (0, 8)),
        key_cache=pad(batch.key_cache, (0, 8)),
        value_cache=pad(batch.value_cache, (0, 3)),
    )
    wide_out, wide_lse = padded.attend(replace(params, head_size=16, head_size_v=8))
    same_state((wide_out[..., :5], wide_lse), (out, lse))
    real = slice(0, sum(LENS[0]))
    assert (wide_out[real, :, 5:] == 0).all()


@pytest.mark.parametrize(("size", "size_v"), [(1, 1), (72, 80), (192, 128), (3, 130)])
def test_odd_sizes(make_batch, dense, same_state, size, size_v):
    params = AttentionParams(4, 2, size, head_size_v=size_v)
    batch = make_batch(*LENS, params)
    assert batch.attend(params)[0].shape[-1] == size_v
    same_state(batch.attend(params, kv_tile=5), dense(batch, params))
