"""Split KV, cascade and merge: any partition of the keys, merged in any order, is the whole."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.reference import merge_attn_states, merge_many

ENDLESS = 10**9


@pytest.fixture(scope="module")
def parts_of(tiles):
    """``(data, batch, params, cuts) -> states`` over consecutive key ranges; the sinks are in one of them."""

    def split(data, batch, params, cuts):
        edges = [0, *sorted(cuts), ENDLESS]
        carrier = data.draw(st.integers(0, len(edges) - 2))
        return [
            batch.attend(params, kv_range=pair, include_sinks=i == carrier, **data.draw(tiles))
            for i, pair in enumerate(pairwise(edges))
        ]

    return split


def merged(states):
    return merge_many([out for out, _ in states], [lse for _, lse in states])


cuts = st.lists(st.integers(0, 26), max_size=5)


@settings(max_examples=60)
@given(data=st.data())
def test_split_anywhere_and_merged_is_the_whole(data, layers, batches, parts_of, agree):
    """Any number of parts, empty ones included, out and lse; window, chunk, ALiBi and sinks as in the whole."""
    params = data.draw(layers())
    batch = data.draw(batches(params, fitting=False))
    agree(merged(parts_of(data, batch, params, data.draw(cuts))), batch.attend(params))


@settings(max_examples=40)
@given(data=st.data())
def test_merge_in_any_order_and_grouping(data, layers, batches, parts_of, agree):
    """Associative, commutative: states taken two at a time, at random, until one is left; a part split again."""
    params = data.draw(layers())
    batch = data.draw(batches(params, fitting=False))
    states = parts_of(data, batch, params, data.draw(cuts))
    agree(merged(data.draw(st.permutations(states))), batch.attend(params))
    while len(states) > 1:
        first = states.pop(data.draw(st.integers(0, len(states) - 1)))
        other = states.pop(data.draw(st.integers(0, len(states) - 1)))
        states.append(merge_attn_states(*first, *other))
    agree(states[0], batch.attend(params))


@settings(max_examples=40)
@given(data=st.data())
def test_merge_with_an_empty_state_is_the_identity(data, layers, batches, agree):
    """Empty is -inf or +inf, whatever its out holds; both empty is 0 and -inf."""
    params = data.draw(layers())
    batch = data.draw(batches(params, fitting=False))
    out, lse = batch.attend(params)
    rubbish = data.draw(st.sampled_from((0.0, -3.0, 1e30, torch.inf, torch.nan)))
    empty = torch.full_like(out, rubbish), torch.full_like(lse, data.draw(st.sampled_from((-torch.inf, torch.inf))))
    agree(merge_attn_states(out, lse, *empty), (out, lse))
    agree(merge_attn_states(*empty, out, lse), (out, lse))
    agree(merge_attn_states(*empty, *empty), (torch.zeros_like(out), torch.full_like(lse, -torch.inf)))


@settings(max_examples=40)
@given(data=st.data())
def test_a_state_merged_with_itself_gains_ln_2(data, layers, batches, agree):
    """Two equal states: the same output, an lse larger by ``ln 2`` (equal weights, natural base)."""
    params = data.draw(layers())
    batch = data.draw(batches(params, fitting=False))
    out, lse = batch.attend(params)
    agree(merge_attn_states(out, lse, out, lse), (out, lse + torch.tensor(2.0, dtype=torch.float64).log()))


@settings(max_examples=40)
@given(data=st.data())
def test_cascade_one_block_row_for_all_then_the_rest(data, layers, batches, tiles, agree):
    """Cascade: part 1 over the shared prefix as ONE request, not causal; part 2 causal over the rest; merged.

    The prefix is any number of shared pages, none and the whole of the shortest context included.
    """
    params = data.draw(layers(causal=True, window=(-1, -1), attn_chunk_size=None, alibi_slopes=None))
    shared = data.draw(st.integers(0, 4))
    contexts = st.integers(shared * 2, shared * 2 + 7)
    batch = data.draw(
        batches(params, requests=(1, 4), context_lens=contexts, shared_pages=st.just(shared), block_size=2)
    )
    prefix, sizes, carrier = shared * 2, data.draw(tiles), data.draw(st.booleans())
    everyone = replace(
        batch,
        block_table=batch.block_table[:1],
        seq_lens=torch.tensor([prefix]),
        query_start_loc=torch.tensor([0, int(batch.query_start_loc[-1])]),
    )
    one = everyone.attend(replace(params, causal=False), include_sinks=carrier, **sizes)
    two = batch.attend(params, kv_range=(prefix, ENDLESS), include_sinks=not carrier, **sizes)
    agree(merge_attn_states(*one, *two), batch.attend(params))


@settings(max_examples=40)
@given(data=st.data())
def test_cascade_with_a_window_keeps_absolute_positions(data, layers, batches, tiles, agree):
    """With any modifiers the prefix part sees by absolute position, up to all of one row's context."""
    params = data.draw(layers(causal=True))
    batch = data.draw(batches(params))
    prefix = data.draw(st.integers(0, max(len(k) for k in batch.keys)))
    one = batch.attend(params, kv_range=(0, prefix), **data.draw(tiles))
    two = batch.attend(params, kv_range=(prefix, ENDLESS), include_sinks=False, **data.draw(tiles))
    agree(merge_attn_states(*one, *two), batch.attend(params))


@settings(max_examples=40)
@given(data=st.data())
def test_a_needle_is_found_in_whichever_part_it_lies(data, layers, batches, parts_of, agree):
    """One key that outweighs all others, in each position in turn; the merged output is its value."""
    params = data.draw(
        layers(
            causal=False,
            window=(-1, -1),
            attn_chunk_size=None,
            logits_soft_cap=None,
            alibi_slopes=None,
            sinks=None,
            scale=1.0,
            head_size=8,
        )
    )
    batch = data.draw(batches(params, requests=(1, 1), query_lens=st.integers(1, 3), gain=1.0))
    needle = data.draw(st.integers(0, len(batch.keys[0]) - 1))
    size = batch.key_cache.shape[1]
    slot = batch.block_table[0, needle // size], needle % size
    batch.query[..., 0] = 1.0
    batch.key_cache[slot] = torch.tensor([1e3] + [0.0] * 7, dtype=torch.float64)
    batch.value_cache[slot] = 77.0
    out, _ = merged(parts_of(data, batch, params, data.draw(cuts)))
    rows = batch.rows(0)
    assert torch.allclose(out[rows], torch.full_like(out[rows], 77.0), rtol=1e-10, atol=0)
