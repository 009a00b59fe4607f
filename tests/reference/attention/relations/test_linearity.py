"""Attention is linear in the values, and indifferent to a common shift of a row's scores."""

from dataclasses import replace

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st


def draw_values(batch, size, seed):
    """Random values for every slot; unowned slots are never read, so they need no NaN here."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*batch.value_cache.shape[:3], size, dtype=torch.float64, generator=generator)


@settings(max_examples=40)
@given(data=st.data())
def test_linearity_in_the_values(data, layers, batches, tiles, agree, same_bits):
    """Linearity: ``out(a V + b V') = a out(V) + b out(V')``, and the lse does not know V."""
    params = data.draw(layers())
    batch, sizes = data.draw(batches(params, fitting=False)), data.draw(tiles)
    a, b = data.draw(st.tuples(st.floats(-3, 3), st.floats(-3, 3)))
    v, w = (draw_values(batch, params.value_head_size, seed) for seed in (1, 2))
    out_v, lse = replace(batch, value_cache=v).attend(params, **sizes)
    out_w, lse_w = replace(batch, value_cache=w).attend(params, **sizes)
    same_bits([lse_w], [lse])
    agree(replace(batch, value_cache=a * v + b * w).attend(params, **sizes), (a * out_v + b * out_w, lse))


@settings(max_examples=40)
@given(data=st.data())
def test_linearity_values_of_one_give_the_share_of_the_keys(data, layers, batches, tiles, agree):
    """V = 1 gives ``Z_keys / Z``: ``exp(lse without the sink - lse)``; 1 without sinks, 0 where nothing is seen."""
    params = data.draw(layers(head_size_v=2))
    batch, sizes = data.draw(batches(params, fitting=False)), data.draw(tiles)
    ones = replace(batch, value_cache=torch.ones_like(batch.value_cache))
    out, lse = ones.attend(params, **sizes)
    _, of_keys = ones.attend(params, include_sinks=False)
    share = torch.where(of_keys == -torch.inf, 0.0, torch.exp(of_keys - lse).nan_to_num(0.0))
    agree((out, lse), (share.unsqueeze(-1).expand_as(out), lse))


@settings(max_examples=40)
@given(data=st.data())
def test_linearity_one_hot_values_are_the_influence_map(data, layers, batches, tiles, seen, agree, row_places):
    """Unit vectors as V read out the softmax row: 0 exactly where not seen, above where seen; it times V is out."""
    params = data.draw(layers(scale=None))
    batch = data.draw(batches(params, fitting=False, shared_pages=st.just(0), gain=1.0))
    count, size = max(len(k) for k in batch.keys), batch.key_cache.shape[1]
    assume(count > 0)
    unit = torch.full((*batch.value_cache.shape[:3], count), torch.nan, dtype=torch.float64)
    for r, keys in enumerate(batch.keys):
        for p in range(len(keys)):
            unit[batch.block_table[r, p // size], p % size] = torch.eye(count, dtype=torch.float64)[p]
    wide = replace(params, head_size_v=count, scale=params.softmax_scale)
    weights, _ = replace(batch, value_cache=unit).attend(wide, **data.draw(tiles))
    out, lse = batch.attend(params)
    product = torch.zeros_like(out)
    for row, r, q in row_places(batch):
        visible = seen(params, q, len(batch.keys[r]))
        want = torch.tensor([j in visible for j in range(count)])
        assert torch.equal(weights[row] > 0, want.expand_as(weights[row]))
        assert torch.equal(weights[row] == 0, ~want.expand_as(weights[row]))
        values = batch.values[r].repeat_interleave(params.group_size, dim=1)
        product[row] = torch.einsum("hj,jhv->hv", weights[row, :, : len(values)], values)
    agree((product, lse), (out, lse))


@settings(max_examples=40)
@given(data=st.data())
def test_shift_of_all_scores_of_a_row_moves_only_the_lse(data, layers, batches, tiles, agree):
    """Shift: one more dimension, 1 in every key, adds a constant of the row and head; no sinks, no cap."""
    params = data.draw(layers(sinks=None, logits_soft_cap=None, scale=data.draw(st.floats(0.1, 2))))
    batch, sizes = data.draw(batches(params, fitting=False)), data.draw(tiles)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    shift = torch.randn(*batch.query.shape[:2], dtype=torch.float64, generator=generator) * 5
    ones = torch.ones(*batch.key_cache.shape[:3], 1, dtype=torch.float64)
    shifted = replace(
        batch,
        query=torch.cat([batch.query, shift.unsqueeze(-1) / params.softmax_scale], dim=2),
        key_cache=torch.cat([batch.key_cache, ones], dim=3),
    )
    out, lse = batch.attend(params, **sizes)
    wide = replace(params, head_size=params.head_size + 1, head_size_v=params.value_head_size)
    agree(shifted.attend(wide, **sizes), (out, lse + shift))
