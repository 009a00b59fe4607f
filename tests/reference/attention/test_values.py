"""What attention is as a function of its values and scores: linear in V, indifferent to a common shift."""

from dataclasses import replace

import pytest
import torch

from attncheck.reference import AttentionParams

LAYERS = {
    "plain": AttentionParams(6, 2, 8),
    "modified": AttentionParams(
        6, 2, 8, window=(9, 0), logits_soft_cap=2.0, alibi_slopes=(0.1, 0.2, 0.3, 0.4, 0.5, 0.6), attn_chunk_size=12
    ),
    "sinks": AttentionParams(6, 2, 8, sinks=(0.5, -1.0, 2.0, 0.0, 1.0, 3.0)),
}
LENS = ((1, 5, 9), (20, 17, 9))


@pytest.fixture(params=LAYERS)
def layer(request):
    return LAYERS[request.param]


def with_values(batch, values):
    """The batch with one value a position and KV head: ``values(request, position) -> [Hkv, Dv]``."""
    cache = torch.full((*batch.value_cache.shape[:3], values(0, 0).shape[-1]), torch.nan, dtype=torch.float64)
    for r, keys in enumerate(batch.keys):
        for position in range(len(keys)):
            cache[batch.block_table[r, position // 4], position % 4] = values(r, position)
    return replace(batch, value_cache=cache)


def test_linear_in_the_values(make_batch, same_state, layer):
    batch = make_batch(*LENS, layer)
    other = torch.randn(batch.value_cache.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    a, b = 1.75, -0.5
    out, lse = batch.attend(layer)
    out_other, lse_other = replace(batch, value_cache=other).attend(layer)
    assert torch.equal(lse, lse_other)
    both = replace(batch, value_cache=a * batch.value_cache + b * other).attend(layer)
    same_state(both, (a * out + b * out_other, lse))


def test_values_of_one_read_out_the_weight_of_the_keys(make_batch, same_state, layer):
    """1 without sinks; with one, ``sigmoid(L - sink)``, where L is the lse without it."""
    batch = with_values(make_batch(*LENS, layer), lambda r, p: torch.ones(2, 3))
    wide = replace(layer, head_size_v=3)
    out, lse = batch.attend(wide)
    want = torch.ones(*lse.shape, 3, dtype=torch.float64)
    if layer.sinks is not None:
        _, without = batch.attend(wide, include_sinks=False)
        want *= torch.sigmoid(without - torch.tensor(layer.sinks, dtype=torch.float64)).unsqueeze(-1)
    real = slice(0, sum(LENS[0]))
    same_state((out[real], lse[real]), (want[real], lse[real]))


def test_one_hot_values_read_out_the_softmax_row(make_batch, dense, seen, layer):
    """The influence map: weight exactly 0 where a row does not see, above 0 where it does."""
    batch = with_values(make_batch(*LENS, layer), lambda r, p: torch.eye(20)[p].expand(2, -1))
    out, _ = batch.attend(replace(layer, head_size_v=20), q_tile=3, kv_tile=5)
    for r, keys in enumerate(batch.keys):
        rows = batch.rows(r)
        for i, weights in enumerate(out[rows]):
            position = len(keys) - (rows.stop - rows.start) + i
            visible = seen(layer, position, len(keys))
            for j in range(20):
                assert bool((weights[:, j] > 0).all()) == (j in visible)
                assert bool((weights[:, j] == 0).all()) == (j not in visible)


def test_a_common_shift_of_the_scores_moves_only_the_lse(make_batch, same_state):
    """One more key dimension, 1 for every key, adds a constant of the row to all of its scores."""
    params = AttentionParams(4, 2, 8, scale=0.5)
    batch = make_batch(*LENS, params)
    out, lse = batch.attend(params)
    shift = torch.linspace(-3, 3, len(batch.query), dtype=torch.float64).view(-1, 1, 1).expand(-1, 4, 1)
    ones = torch.ones(*batch.key_cache.shape[:3], 1, dtype=torch.float64)
    shifted = replace(
        batch, query=torch.cat([batch.query, shift], dim=2), key_cache=torch.cat([batch.key_cache, ones], dim=3)
    )
    wide = replace(params, head_size=9, head_size_v=8)
    same_state(shifted.attend(wide), (out, lse + 0.5 * shift.squeeze(-1)))


def test_more_keys_raise_the_lse_and_it_bounds_every_score(make_batch):
    params = AttentionParams(4, 2, 8, causal=False)
    batch = make_batch((3,), (15,), params, unowned_rows=0)
    before = torch.full((3, 4), -torch.inf, dtype=torch.float64)
    for n in range(16):
        _, lse = batch.attend(params, kv_range=(0, n))
        assert (lse > before).all() or n == 0
        before = lse
    scores = torch.einsum("ihd,jhd->ihj", batch.query, batch.keys[0].repeat_interleave(2, dim=1)) * 8**-0.5
    assert (before >= scores.amax(dim=2)).all()


def test_values_of_coordinates_name_the_slot_that_was_read(make_batch):
    """Values that encode request, position and head; a row that sees one key returns that key's coordinates."""
    params = AttentionParams(6, 2, 8, head_size_v=3, window=(0, 0))
    batch = with_values(
        make_batch(*LENS, params), lambda r, p: torch.tensor([[r, p, head] for head in range(2)], dtype=torch.float64)
    )
    out, _ = batch.attend(params)
    for r, keys in enumerate(batch.keys):
        rows = batch.rows(r)
        for i in range(rows.stop - rows.start):
            position = len(keys) - (rows.stop - rows.start) + i
            want = [[r, position, head // 3] for head in range(6)]
            assert out[rows.start + i].tolist() == want


@pytest.mark.parametrize("needle", [0, 3, 4, 11, 15, 16, 18])
def test_a_needle_among_equal_keys_is_found_wherever_it_lies(make_batch, needle):
    """Its score is the logarithm of all others' sum, so it weighs one half."""
    params = AttentionParams(2, 1, 4, scale=1.0)
    batch = make_batch((1,), (19,), params, unowned_rows=0)
    query = torch.zeros(1, 2, 4, dtype=torch.float64)
    query[..., 0] = 1.0
    keys = torch.zeros_like(batch.key_cache)
    values = torch.zeros_like(batch.value_cache)
    slot = (batch.block_table[0, needle // 4], needle % 4)
    keys[slot] = torch.tensor([torch.tensor(18.0, dtype=torch.float64).log(), 0, 0, 0], dtype=torch.float64)
    values[slot] = 1.0
    out, _ = replace(batch, query=query, key_cache=keys, value_cache=values).attend(params, kv_tile=5)
    assert torch.allclose(out, torch.full_like(out, 0.5), rtol=0, atol=1e-14)
