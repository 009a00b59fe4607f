"""The merge of states: split KV, cascade, and the shares of several ranks."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_batches import TILES, dense, drawn_batches, drawn_layers, make_batch, same_state

from attncheck.reference import AttentionParams, Precision, dcp_rank_attention, merge_attn_states, merge_many

ENDLESS = 10**9


def merged(states):
    return merge_many([out for out, _ in states], [lse for _, lse in states])


@settings(max_examples=40)
@given(data=st.data())
def test_parts_merge_to_the_whole_in_any_order_and_grouping(data):
    """Consecutive key ranges, empty ones included; the sinks are in one of them."""
    params = data.draw(drawn_layers())
    batch = data.draw(drawn_batches(params, fitting=False))
    edges = [0, *sorted(data.draw(st.lists(st.integers(0, 26), max_size=5))), ENDLESS]
    carrier = data.draw(st.integers(0, len(edges) - 2))
    states = [
        batch.attend(params, kv_range=pair, include_sinks=i == carrier, **data.draw(TILES))
        for i, pair in enumerate(pairwise(edges))
    ]
    whole = batch.attend(params)
    same_state(merged(data.draw(st.permutations(states))), whole, tolerance=1e-10)
    while len(states) > 1:
        first = states.pop(data.draw(st.integers(0, len(states) - 1)))
        other = states.pop(data.draw(st.integers(0, len(states) - 1)))
        states.append(merge_attn_states(*first, *other))
    same_state(states[0], whole, tolerance=1e-10)


def state(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((3, 2, 4), (3, 2))]


@pytest.mark.parametrize("mark", [-math.inf, math.inf])
@pytest.mark.parametrize("rubbish", [0.0, 1e30, math.inf, math.nan])
def test_an_empty_state_counts_for_nothing(mark, rubbish):
    out, lse = state()
    empty = torch.full_like(out, rubbish), torch.full_like(lse, mark)
    same_state(merge_attn_states(out, lse, *empty), (out, lse))
    same_state(merge_attn_states(*empty, out, lse), (out, lse))
    nothing, none = merge_attn_states(*empty, *empty)
    assert torch.equal(nothing, torch.zeros_like(out))
    assert (none == -math.inf).all()


@pytest.mark.parametrize("far", [0.0, 40.0, 95.0, 745.0, 1400.0])
def test_weights_far_apart(far):
    """The closed form of two states: out = a + (b - a) * sigmoid(lse_b - lse_a)."""
    (a, _), (b, _) = state(seed=1), state(seed=2)
    for base in (-700.0, 0.0, 700.0):
        lse_a = torch.full((3, 2), base, dtype=torch.float64)
        out, lse = merge_attn_states(a, lse_a, b, lse_a - far)
        share = 1 / (1 + math.exp(far)) if far < 700 else 0.0
        assert torch.allclose(out, a + (b - a) * share, rtol=0, atol=1e-14)
        assert torch.allclose(lse, lse_a + math.log1p(math.exp(-far)), rtol=1e-14, atol=1e-15)


def test_a_nan_lse_is_data():
    (a, lse_a), (b, lse_b) = state(seed=1), state(seed=2)
    lse_b[0] = math.nan
    out, lse = merge_attn_states(a, lse_a, b, lse_b)
    assert out[0].isnan().all()
    assert lse[0].isnan().all()
    assert out[1:].isfinite().all()


def test_arguments_stay_and_dtypes_mix():
    given_states = [*state(seed=1), *state(seed=2)]
    copies = [x.clone() for x in given_states]
    low, _ = merge_attn_states(*given_states, precision=Precision.kernel(torch.bfloat16))
    assert low.dtype == torch.float32
    assert torch.equal(low, low.bfloat16().float())
    assert all(torch.equal(x, copy) for x, copy in zip(given_states, copies, strict=True))
    a, lse_a, b, lse_b = given_states
    out, lse = merge_attn_states(a.half(), lse_a.float(), b.bfloat16(), lse_b.float())
    assert out.dtype == lse.dtype == torch.float64


SLOPES, SINKS = (0.5, 0.06, 0.25, 0.125), (1.0, 0.5, -1.0, 2.0)
PLAIN = AttentionParams(4, 2, 8, head_size_v=6)
LAYERS = {
    "causal": PLAIN,
    "all": replace(PLAIN, causal=False),
    "window": replace(PLAIN, window=(4, 0)),
    "both ways": replace(PLAIN, causal=False, window=(3, 1)),
    "chunks": replace(PLAIN, attn_chunk_size=5, attn_chunk_lookback=1),
    "modified": replace(PLAIN, logits_soft_cap=2.0, alibi_slopes=SLOPES, sinks=SINKS),
    "sqrt": replace(PLAIN, alibi_slopes=SLOPES, alibi_sqrt=True),
}


def share(batch, size, rank, interleave, block_size, seed=0):
    """(key_cache, value_cache, block_table) of a rank, written position by position; NaN and nonsense elsewhere."""
    pages = max(-(-len(k) // block_size) for k in batch.keys)
    free = torch.randperm(pages * len(batch.keys), generator=torch.Generator().manual_seed(seed)).tolist()
    caches = [
        rows[0].new_full((len(free), block_size, *rows[0].shape[1:]), math.nan) for rows in (batch.keys, batch.values)
    ]
    table = torch.full((len(batch.keys), pages), -3, dtype=torch.int32)
    for r, tokens in enumerate(zip(batch.keys, batch.values, strict=True)):
        held = [p for p in range(len(tokens[0])) if p // interleave % size == rank]
        for local, position in enumerate(held):
            if local % block_size == 0:
                table[r, local // block_size] = free.pop()
            for cache, rows in zip(caches, tokens, strict=True):
                cache[table[r, local // block_size], local % block_size] = rows[position]
    return (*caches, table)


def attend_rank(batch, params, size, rank, interleave=1, block_size=4, **options):
    caches = share(batch, size, rank, interleave, block_size)
    options = {"dcp_size": size, "dcp_rank": rank, "cp_kv_cache_interleave_size": interleave, **options}
    return dcp_rank_attention(batch.query, *caches, batch.seq_lens, batch.query_start_loc, params, **options)


@settings(max_examples=30)
@given(data=st.data(), size=st.integers(1, 4), interleave=st.integers(1, 3), pages=st.integers(1, 3))
def test_merged_ranks_are_the_whole(data, size, interleave, pages):
    """Any ranks, interleave and block size; lengths run through every residue of a round."""
    layer = data.draw(st.sampled_from(list(LAYERS.values())))
    first = data.draw(st.integers(0, 9))
    seq_lens = tuple(range(first, first + size * interleave + 1))
    query_lens = data.draw(st.lists(st.integers(0, 4), min_size=len(seq_lens), max_size=len(seq_lens)))
    batch = make_batch(query_lens, seq_lens, layer)
    tiles = {"q_tile": data.draw(st.integers(1, 5)), "kv_tile": data.draw(st.integers(1, 9))}
    states = [attend_rank(batch, layer, size, rank, interleave, pages * interleave, **tiles) for rank in range(size)]
    same_state(merge_many(*zip(*states, strict=True)), dense(batch, layer))


def test_the_sinks_are_on_rank_0():
    layer = replace(PLAIN, sinks=SINKS)
    batch = make_batch((2, 1), (3, 1), layer)
    out, lse = attend_rank(batch, layer, 4, 3, block_size=2)
    assert not out.any()
    assert (lse == -math.inf).all()
    batch = make_batch((2,), (0,), layer, unowned_rows=0)
    out, lse = attend_rank(batch, layer, 2, 0)
    assert not out.any()
    assert lse.tolist() == [list(SINKS)] * 2


def test_scales_of_codes():
    """Per token and head, at the slots where the rank holds the tokens; a query of codes too."""
    batch, e4m3 = make_batch((2, 1), (9, 6), PLAIN, unowned_rows=0), torch.float8_e4m3fn
    key_cache, value_cache, table = share(batch, 2, 1, 1, 4)
    generator = torch.Generator().manual_seed(1)
    k_scale, v_scale = (torch.rand(key_cache.shape[:3], generator=generator).double() + 0.1 for _ in range(2))
    coded = (batch.query.to(e4m3), key_cache.to(e4m3), value_cache.to(e4m3))
    tables = (table, batch.seq_lens, batch.query_start_loc, PLAIN)
    ranks = {"dcp_size": 2, "dcp_rank": 1}
    values = (coded[0].double() * 0.7, coded[1].double() * k_scale[..., None], coded[2].double() * v_scale[..., None])
    want = dcp_rank_attention(*values, *tables, **ranks)
    same_state(dcp_rank_attention(*coded, *tables, **ranks, q_scale=0.7, k_scale=k_scale, v_scale=v_scale), want)
