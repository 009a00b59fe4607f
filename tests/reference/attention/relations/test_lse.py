"""The log-sum-exp: ``exp(lse)`` is the total weight of the keys a row sees."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.reference import merge_many, visible


@pytest.fixture(scope="module")
def one_key_each():
    """``(batch, params) -> states over each single key position``: an lse there is the score of that key."""

    def states(batch, params):
        count = max(len(k) for k in batch.keys)
        return [batch.attend(params, kv_range=(j, j + 1), include_sinks=False) for j in range(count)]

    return states


@settings(max_examples=40)
@given(data=st.data())
def test_lse_of_disjoint_key_sets_adds_up(data, layers, batches, tiles, agree):
    """Any partition of the keys, by any rule: lse of the union is ``logaddexp`` of the parts' (no sinks)."""
    params = data.draw(layers(sinks=None))
    batch, sizes = data.draw(batches(params, fitting=False)), data.draw(tiles)
    modulus, count = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    total = torch.full((len(batch.query), params.num_heads), -torch.inf, dtype=torch.float64)
    for part in range(count):

        def mask_fn(request, q_pos, k_pos, part=part):
            return visible(params, q_pos, k_pos) & ((k_pos + request) // modulus % count == part)

        total = torch.logaddexp(total, batch.attend(params, mask_fn=mask_fn, **sizes)[1])
    out, lse = batch.attend(params)
    agree((out, total), (out, lse))


@settings(max_examples=40)
@given(data=st.data())
def test_lse_is_at_least_every_score_and_the_sum_of_all(data, layers, batches, tiles, agree, one_key_each):
    """Above the greatest score, at most ``ln n`` above it; single keys merged are the whole."""
    params = data.draw(layers(sinks=None))
    batch = data.draw(batches(params, requests=(1, 3), query_lens=st.integers(1, 5), context_lens=st.integers(0, 9)))
    states = one_key_each(batch, params)
    state = batch.attend(params, **data.draw(tiles))
    scores = torch.stack([lse for _, lse in states])
    seen = scores.isfinite().sum(0)
    rows = seen > 0
    assert (state[1][rows] >= scores.amax(0)[rows] - 1e-12).all()
    assert (state[1][rows] <= scores.amax(0)[rows] + seen[rows].double().log() + 1e-12).all()
    agree(merge_many([out for out, _ in states], [lse for _, lse in states]), state)


@settings(max_examples=40)
@given(data=st.data())
def test_lse_falls_when_a_key_is_removed(data, layers, batches, tiles, one_key_each):
    """Strictly where the row saw it, by ``ln(1 - weight)``; not by a bit where it did not."""
    params = data.draw(layers(scale=None, alibi_slopes=None))
    batch = data.draw(batches(params, requests=(1, 2), query_lens=st.integers(1, 5), gain=1.0))
    gone = data.draw(st.integers(0, max(len(k) for k in batch.keys) - 1))

    def without(request, q_pos, k_pos):
        return visible(params, q_pos, k_pos) & (k_pos != gone)

    sizes = data.draw(tiles)
    before = batch.attend(params, mask_fn=lambda _, q, k: visible(params, q, k), **sizes)[1]
    after = batch.attend(params, mask_fn=without, **sizes)[1]
    score = batch.attend(params, kv_range=(gone, gone + 1), include_sinks=False)[1]
    saw = score.isfinite()
    assert (after[saw] < before[saw]).all()
    assert torch.equal(after[~saw], before[~saw])
    left = torch.log1p(-torch.exp(score - before).clamp(max=1.0))[saw & after.isfinite()]
    assert torch.allclose((after - before)[saw & after.isfinite()], left, rtol=1e-9, atol=1e-10)


@settings(max_examples=40)
@given(data=st.data())
def test_rows_that_see_nothing_are_zero_and_minus_infinity(data, layers, batches, tiles, seen, row_places):
    """No keys, more rows than keys, an empty window or range: 0 and -inf, with sinks 0 and the sink; never NaN."""
    params = data.draw(layers())
    batch = data.draw(batches(params, fitting=False, query_lens=st.integers(0, 9), context_lens=st.integers(0, 4)))
    lo = data.draw(st.integers(0, 9))
    kv_range = data.draw(st.sampled_from(((0, 10**9), (lo, lo + 2), (lo, lo))))
    out, lse = batch.attend(params, kv_range=kv_range, **data.draw(tiles))
    assert not out.isnan().any()
    assert not lse.isnan().any()
    sinks = torch.tensor(params.sinks or (-torch.inf,) * params.num_heads, dtype=torch.float64)
    for row, r, q in row_places(batch):
        if not {j for j in seen(params, q, len(batch.keys[r])) if kv_range[0] <= j < kv_range[1]}:
            assert (out[row] == 0).all()
            assert torch.equal(lse[row], sinks)
        else:
            assert lse[row].isfinite().all()
    unowned = slice(int(batch.query_start_loc[-1]), None)
    assert (out[unowned] == 0).all()
    assert (lse[unowned] == -torch.inf).all()


@settings(max_examples=40)
@given(data=st.data())
def test_lse_is_natural(data, layers, batches, tiles, agree, with_tokens):
    """Every key of one request twice, at scale and bias as they are, adds ``ln 2`` and leaves the output."""
    params = data.draw(layers(sinks=None, causal=False, window=(-1, -1), attn_chunk_size=None, alibi_slopes=None))
    batch = data.draw(batches(params, fitting=False, shared_pages=st.just(0)))
    keys, values = ([torch.cat([x, x]) for x in tokens] for tokens in (batch.keys, batch.values))
    twice = with_tokens(batch, keys, values)
    out, lse = batch.attend(params)
    agree(twice.attend(params, **data.draw(tiles)), (out, lse + torch.tensor(2.0, dtype=torch.float64).log()))
