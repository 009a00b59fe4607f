"""Soft cap, ALiBi and sinks: limits, identities, and equivalent formulations."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.reference import merge_many, varlen_attention

ENDLESS = 10**9


def greatest_score(batch, params):
    """A bound of ``|s|`` over all rows and keys, from the norms."""
    real = batch.query[: int(batch.query_start_loc[-1])]
    if not len(real) or not sum(len(k) for k in batch.keys):
        return 0.0
    return abs(params.softmax_scale) * float(real.norm(dim=-1).max() * torch.cat(batch.keys).norm(dim=-1).max())


@settings(max_examples=40)
@given(data=st.data())
def test_cap_off_or_far_away(data, layers, batches, tiles, same_bits, same_state):
    """0 is none to the bit; a cap of 1e6 differs by O(s^3 / cap^2)."""
    params = data.draw(layers(logits_soft_cap=None))
    batch, sizes = data.draw(batches(params, fitting=False)), data.draw(tiles)
    plain = batch.attend(params, **sizes)
    same_bits(batch.attend(replace(params, logits_soft_cap=0.0), **sizes), plain)
    far = batch.attend(replace(params, logits_soft_cap=1e6), **sizes)
    same_state(far, plain, tolerance=1e-9 + 10 * greatest_score(batch, params) ** 3 / 1e12)


@settings(max_examples=40)
@given(data=st.data())
def test_cap_bounds_every_weight(data, layers, batches, row_places, seen):
    """With a cap of c every key of an n-key row weighs at least ``exp(-2c) / n``, also 1e4 times above the cap."""
    params = data.draw(
        layers(logits_soft_cap=data.draw(st.floats(0.25, 3)), alibi_slopes=None, sinks=None, head_size_v=24)
    )
    gain = data.draw(st.sampled_from((1.0, 1e4)))
    batch = data.draw(batches(params, shared_pages=st.just(0), gain=gain))
    size = batch.key_cache.shape[1]
    for r, keys in enumerate(batch.keys):
        for p in range(len(keys)):
            batch.value_cache[batch.block_table[r, p // size], p % size] = torch.eye(24, dtype=torch.float64)[p]
    weights, lse = batch.attend(params)
    for row, r, q in row_places(batch):
        keys = sorted(seen(params, q, len(batch.keys[r])))
        if keys:
            least = torch.tensor(-2.0 * params.logits_soft_cap).exp() / len(keys)
            assert (weights[row][:, keys] >= 0.999999 * least).all()
            assert (lse[row].abs() <= params.logits_soft_cap + torch.tensor(float(len(keys))).log() + 1e-6).all()


@settings(max_examples=40)
@given(data=st.data())
def test_cap_moves_what_exceeds_it(data, layers, batches, row_places, seen):
    """Toggling it moves the lse of every row whose scores are of the cap's size or above."""
    params = data.draw(layers(scale=data.draw(st.floats(1, 2)), head_size=8, sinks=None, logits_soft_cap=0.5))
    batch = data.draw(batches(params, gain=4.0))
    _, capped = batch.attend(params)
    _, plain = batch.attend(replace(params, logits_soft_cap=None))
    rows = [row for row, r, q in row_places(batch) if seen(params, q, len(batch.keys[r]))]
    assert (capped[rows] - plain[rows]).abs().gt(1e-4).double().mean() > 0.95 or not rows


@settings(max_examples=40)
@given(data=st.data())
def test_slopes_of_zero_are_none_and_endless_ones_leave_the_own_key(data, layers, batches, tiles, agree, row_places):
    """Slope 0 equals none; a slope towards infinity, causal, gives ``out = V[q]``."""
    params = data.draw(layers(causal=True, alibi_slopes=None, sinks=None))
    batch, sizes = data.draw(batches(params)), data.draw(tiles)
    heads = params.num_heads
    agree(batch.attend(replace(params, alibi_slopes=(0.0,) * heads), **sizes), batch.attend(params, **sizes))
    out, lse = batch.attend(replace(params, alibi_slopes=(1e6,) * heads), **sizes)
    own = torch.zeros_like(out)
    for row, r, q in row_places(batch):
        own[row] = batch.values[r][q].repeat_interleave(params.group_size, dim=0)
    agree((out, lse), (own, lse))


@settings(max_examples=40)
@given(data=st.data())
def test_slopes_are_one_more_dimension_that_holds_the_position(data, layers, batches, tiles, agree, row_places):
    """Constant shift: ``slope * (j - 0)``, as a dot product, leaves the output; the lse grows by ``slope * q``."""
    heads = data.draw(st.sampled_from(((2, 1), (4, 2), (3, 3))))
    slopes = data.draw(st.tuples(*[st.floats(-1, 1)] * heads[0]))
    fixed = {"logits_soft_cap": None, "sinks": None, "scale": data.draw(st.floats(0.25, 2)), "alibi_sqrt": False}
    params = data.draw(layers(num_heads=heads[0], num_kv_heads=heads[1], alibi_slopes=slopes, **fixed))
    batch = data.draw(batches(params, shared_pages=st.just(0), fitting=False))
    size, slope = batch.key_cache.shape[1], torch.tensor(slopes, dtype=torch.float64)
    place = torch.zeros(*batch.key_cache.shape[:3], 1, dtype=torch.float64)
    for r, keys in enumerate(batch.keys):
        for p in range(len(keys)):
            place[batch.block_table[r, p // size], p % size] = p
    ramp = (slope / params.softmax_scale)[None, :, None].expand(len(batch.query), -1, 1)
    wider = replace(
        batch,
        query=torch.cat([batch.query, ramp], dim=2),
        key_cache=torch.cat([batch.key_cache, place], dim=3),
    )
    size_v = params.value_head_size
    layer = replace(params, head_size=params.head_size + 1, head_size_v=size_v, alibi_slopes=None)
    out, lse = batch.attend(params)
    shift = torch.zeros_like(lse)
    for row, _, q in row_places(batch):
        shift[row] = slope * q
    agree(wider.attend(layer, **data.draw(tiles)), (out, lse + shift))


@settings(max_examples=40)
@given(data=st.data())
def test_sinks_are_a_sigmoid_on_the_output(data, layers, batches, tiles, agree, same_bits):
    """``out = out0 sigmoid(L - sink)``, ``lse = ln(e^L + e^sink)``; sinks of -inf are none, to the bit."""
    params = data.draw(layers(sinks=None))
    batch, sizes = data.draw(batches(params, fitting=False)), data.draw(tiles)
    out, lse = batch.attend(params, **sizes)
    none = replace(params, sinks=(-torch.inf,) * params.num_heads)
    same_bits(batch.attend(none, **sizes), (out, lse))
    sinks = data.draw(st.tuples(*[st.floats(-30, 30)] * params.num_heads))
    logits = torch.tensor(sinks, dtype=torch.float64).expand_as(lse).clone()
    logits[int(batch.query_start_loc[-1]) :] = -torch.inf  # rows of no request have none
    share = torch.sigmoid(lse - logits).nan_to_num(0.0)
    state = batch.attend(replace(params, sinks=sinks), **sizes)
    agree(state, (out * share.unsqueeze(-1), torch.logaddexp(lse, logits)))
    assert state[1][: int(batch.query_start_loc[-1])].isfinite().all()


@settings(max_examples=40)
@given(data=st.data())
def test_sinks_are_one_more_key_of_no_value(data, layers, batches, tiles, agree):
    """A key that every row sees, of the head's own score (one more dimension) and value 0; no cap, no bias."""
    heads = data.draw(st.sampled_from(((2, 1), (4, 2), (3, 3))))
    sinks = data.draw(st.tuples(*[st.floats(-5, 5)] * heads[0]))
    fixed = {"causal": False, "window": (-1, -1), "attn_chunk_size": None, "logits_soft_cap": None}
    fixed |= {"alibi_slopes": None, "scale": data.draw(st.floats(0.25, 2))}
    params = data.draw(layers(num_heads=heads[0], num_kv_heads=heads[1], sinks=sinks, **fixed))
    batch = data.draw(batches(params, fitting=False))
    logits = torch.tensor(sinks, dtype=torch.float64) / params.softmax_scale
    own = torch.zeros(1, heads[1], params.head_size + 1, dtype=torch.float64)
    own[..., -1] = 1.0
    keys = [torch.cat([torch.nn.functional.pad(k, (0, 1)), own]) for k in batch.keys]
    values = [torch.cat([v, v.new_zeros(1, *v.shape[1:])]) for v in batch.values]
    query = torch.cat([batch.query, logits[None, :, None].expand(len(batch.query), -1, 1)], dim=2)
    ends = torch.tensor([0, *(len(k) for k in keys)]).cumsum(0)
    size_v = params.value_head_size
    wide = replace(params, head_size=params.head_size + 1, head_size_v=size_v, sinks=None)
    rows = batch.query_start_loc
    agree(varlen_attention(query, torch.cat(keys), torch.cat(values), rows, ends, wide), batch.attend(params))


@settings(max_examples=40)
@given(data=st.data())
def test_sinks_in_a_split_belong_to_one_part_whichever(data, layers, batches, tiles, agree):
    """Exactly one part carries them, or they are applied after the merge; both give the whole."""
    params = data.draw(layers())
    params = replace(params, sinks=data.draw(st.tuples(*[st.floats(-5, 5)] * params.num_heads)))
    batch = data.draw(batches(params))
    cuts = sorted(data.draw(st.lists(st.integers(0, 24), min_size=1, max_size=3)))
    ranges = list(zip([0, *cuts], [*cuts, ENDLESS], strict=True))
    carrier = data.draw(st.integers(-1, len(ranges) - 1))
    sizes = data.draw(tiles)
    parts = [batch.attend(params, kv_range=x, include_sinks=i == carrier, **sizes) for i, x in enumerate(ranges)]
    out, lse = merge_many([o for o, _ in parts], [x for _, x in parts])
    if carrier < 0:
        logits = torch.tensor(params.sinks, dtype=torch.float64).expand_as(lse).clone()
        logits[int(batch.query_start_loc[-1]) :] = -torch.inf
        out = out * torch.sigmoid(lse - logits).nan_to_num(0.0).unsqueeze(-1)
        lse = torch.logaddexp(lse, logits)
    agree((out, lse), batch.attend(params))
