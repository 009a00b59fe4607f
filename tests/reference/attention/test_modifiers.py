"""Soft cap, ALiBi and sinks: their limits, their identities, and the formulas they are mistaken for."""

from dataclasses import replace

import pytest
import torch

from attncheck.reference import AttentionParams

PLAIN = AttentionParams(4, 2, 8)
SLOPES = (0.5, 0.06, 0.25, 0.125)
SINKS = (1.0, -2.0, 3.5, 0.0)


@pytest.fixture
def batch(make_batch):
    return make_batch((6, 1, 9), (25, 30, 9), PLAIN, gain=4.0, unowned_rows=0)


def rows_that_differ(a, b, least=1e-4):
    return ((a[0] - b[0]).abs().amax(dim=2) > least).double().mean()


def test_cap_off_and_cap_far_away(batch, same_state):
    plain = batch.attend(PLAIN)
    for off in (None, 0, 0.0):
        same_state(batch.attend(replace(PLAIN, logits_soft_cap=off)), plain, tolerance=0)
    same_state(batch.attend(replace(PLAIN, logits_soft_cap=1e6)), plain, tolerance=1e-8)


def test_a_cap_bounds_every_weight(make_batch):
    """Scores lie within the cap, so a key of n weighs at least exp(-2 cap) / n; even far above the cap."""
    for gain, cap in ((5.0, 1.0), (1e4, 0.5)):
        params = AttentionParams(4, 2, 8, head_size_v=12, causal=False, logits_soft_cap=cap)
        batch = make_batch((3,), (12,), params, gain=gain, unowned_rows=0)
        values = torch.zeros_like(batch.value_cache)
        for position in range(12):
            values[batch.block_table[0, position // 4], position % 4, :, position] = 1.0
        weights, lse = replace(batch, value_cache=values).attend(params)
        least = torch.tensor(-2 * cap).exp() / 12
        assert (weights >= least * 0.999).all()
        assert (lse.abs() <= cap + torch.tensor(12.0).log() + 1e-12).all()


def test_a_cap_far_exceeded_leaves_two_scores(make_batch):
    params = AttentionParams(2, 1, 4, scale=1.0, logits_soft_cap=0.75)
    batch = make_batch((1,), (3,), params, unowned_rows=0)
    query = torch.full((1, 2, 4), 1e4, dtype=torch.float64)
    keys = batch.key_cache.clone()
    for position, sign in enumerate((1.0, -1.0, 1.0)):
        keys[batch.block_table[0, 0], position] = sign
    _, lse = replace(batch, query=query, key_cache=keys).attend(params)
    want = torch.tensor([0.75, -0.75, 0.75], dtype=torch.float64).logsumexp(0)
    assert torch.allclose(lse, want.expand_as(lse), rtol=1e-14, atol=0)


def test_cap_before_scaling_is_another_function(batch):
    cap, scale = 2.0, 8**-0.5
    right = batch.attend(replace(PLAIN, logits_soft_cap=cap))
    # cap * tanh(s / cap) scaled afterwards = a cap of cap * scale on scaled scores
    assert rows_that_differ(right, batch.attend(replace(PLAIN, logits_soft_cap=cap * scale))) > 0.9
    assert rows_that_differ(right, batch.attend(PLAIN)) > 0.9


def test_slopes_of_zero_are_none(batch, same_state):
    same_state(batch.attend(replace(PLAIN, alibi_slopes=(0.0,) * 4)), batch.attend(PLAIN))


def test_a_steep_slope_leaves_the_own_key(batch):
    out, _ = batch.attend(replace(PLAIN, alibi_slopes=(1e6,) * 4))
    own = torch.cat([v[len(v) - (batch.rows(r).stop - batch.rows(r).start) :] for r, v in enumerate(batch.values)])
    assert torch.equal(out, own.repeat_interleave(2, dim=1))


def test_a_constant_shift_of_the_bias_moves_only_the_lse(batch, same_state):
    """``slope * (j - c)`` for another c: the same output, an lse larger by ``slope * (q - c)``; checked by hand."""
    slopes = torch.tensor(SLOPES, dtype=torch.float64)
    out, lse = batch.attend(replace(PLAIN, alibi_slopes=SLOPES))
    for r, (keys, values) in enumerate(zip(batch.keys, batch.values, strict=True)):
        rows = batch.rows(r)
        q_pos = torch.arange(len(keys) - (rows.stop - rows.start), len(keys), dtype=torch.float64)
        k_pos = torch.arange(len(keys), dtype=torch.float64)
        scores = torch.einsum("ihd,jhd->ihj", batch.query[rows], keys.repeat_interleave(2, dim=1)) * 8**-0.5
        scores += slopes[:, None] * k_pos  # c = 0
        scores = scores.masked_fill(k_pos > q_pos[:, None, None], -torch.inf)
        want = torch.einsum("ihj,jhd->ihd", scores.softmax(-1), values.repeat_interleave(2, dim=1))
        want_lse = scores.logsumexp(-1) - slopes * q_pos[:, None]
        same_state((out[rows], lse[rows]), (want, want_lse))


def test_alibi_with_sinks_is_not_shift_free(batch):
    layer = replace(PLAIN, alibi_slopes=SLOPES, sinks=SINKS)
    out, _ = batch.attend(layer)
    bare, lse = batch.attend(replace(layer, sinks=None))
    slopes, sinks = (torch.tensor(x, dtype=torch.float64) for x in (SLOPES, SINKS))
    shifted = bare * torch.sigmoid(lse + slopes * 20 - sinks).unsqueeze(-1)  # another c, the same sink
    assert (out - shifted).abs().max() > 0.1


def test_slopes_belong_to_query_heads(batch):
    """By KV head, reversed, or scaled, they make another function; so does the bias inside the cap."""
    layer = replace(PLAIN, alibi_slopes=SLOPES)
    right = batch.attend(layer)
    for wrong in ((0.5, 0.5, 0.06, 0.06), SLOPES[::-1], tuple(s * 8**-0.5 for s in SLOPES)):
        assert rows_that_differ(right, batch.attend(replace(layer, alibi_slopes=wrong))) > 0.6


def test_sqrt_form_is_flat_ahead(make_batch, same_state, dense):
    layer = replace(PLAIN, causal=False, alibi_slopes=SLOPES, alibi_sqrt=True)
    batch = make_batch((4,), (9,), layer)
    same_state(batch.attend(layer), dense(batch, layer))
    assert rows_that_differ(batch.attend(layer), batch.attend(replace(layer, alibi_sqrt=False))) > 0.5


def test_sinks_of_minus_infinity_are_none(batch, same_state):
    same_state(batch.attend(replace(PLAIN, sinks=(-torch.inf,) * 4)), batch.attend(PLAIN), tolerance=0)
    same_state(batch.attend(PLAIN), batch.attend(replace(PLAIN, sinks=SINKS), include_sinks=False), tolerance=0)
    same_state(batch.attend(replace(PLAIN, sinks=(-800.0,) * 4)), batch.attend(PLAIN))


def test_a_sink_is_a_sigmoid_on_the_output(batch, same_state):
    out, lse = batch.attend(PLAIN)
    sinks = torch.tensor(SINKS, dtype=torch.float64)
    want = out * torch.sigmoid(lse - sinks).unsqueeze(-1), torch.logaddexp(lse, sinks.expand_as(lse))
    same_state(batch.attend(replace(PLAIN, sinks=SINKS)), want)


def test_a_sink_is_one_more_key_of_that_score_and_no_value(make_batch, same_state):
    """Its score is one and the same for all query heads here, as a key's would be."""
    layer = AttentionParams(4, 1, 8, scale=1.0, causal=False, sinks=(1.25,) * 4)
    batch = make_batch((3,), (11,), layer, unowned_rows=0)
    query = torch.cat([batch.query, torch.ones(3, 4, 1, dtype=torch.float64)], dim=2)
    keys = torch.cat([batch.key_cache, torch.zeros(*batch.key_cache.shape[:3], 1, dtype=torch.float64)], dim=3)
    values = batch.value_cache.clone()
    slot = (batch.block_table[0, 2], 3)  # position 11
    keys[slot] = torch.tensor([0.0] * 8 + [1.25], dtype=torch.float64)
    values[slot] = 0.0
    wide = AttentionParams(4, 1, 9, head_size_v=8, scale=1.0, causal=False)
    extended = replace(batch, query=query, key_cache=keys, value_cache=values, seq_lens=torch.tensor([12]))
    same_state(extended.attend(wide), batch.attend(layer))


def test_a_sink_is_neither_scaled_nor_capped_nor_masked(batch):
    layer = replace(PLAIN, sinks=SINKS, logits_soft_cap=0.5, window=(2, 0))
    right = batch.attend(layer)
    scaled = replace(layer, sinks=tuple(s * 8**-0.5 for s in SINKS))
    capped = replace(layer, sinks=tuple(0.5 * torch.tensor(s / 0.5).tanh().item() for s in SINKS))
    by_kv_head = replace(layer, sinks=(1.0, 1.0, -2.0, -2.0))
    for wrong in (scaled, capped, by_kv_head):
        assert rows_that_differ(right, batch.attend(wrong)) > 0.4


def test_a_sink_above_every_score_keeps_the_row_finite(batch, same_state):
    sinks = (700.0, 650.0, 720.0, 690.0)
    out, lse = batch.attend(replace(PLAIN, sinks=sinks))
    assert torch.allclose(lse, torch.tensor(sinks, dtype=torch.float64).expand_as(lse), rtol=1e-14, atol=0)
    assert out.isfinite().all()
    assert out.abs().max() < 1e-200
