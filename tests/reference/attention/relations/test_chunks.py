"""Local attention in chunks aligned to position 0, under every other modifier."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.reference import visible


@settings(max_examples=40)
@given(data=st.data())
def test_one_chunk_over_everything_is_causal(data, layers, batches, tiles, agree):
    """C >= max seq_len equals causal attention."""
    params = data.draw(layers(causal=True, attn_chunk_size=None))
    batch = data.draw(batches(params))
    size = max(1, *(len(k) for k in batch.keys)) + data.draw(st.integers(0, 2))
    agree(batch.attend(replace(params, attn_chunk_size=size), **data.draw(tiles)), batch.attend(params))


@settings(max_examples=40)
@given(data=st.data())
def test_a_row_sees_from_the_start_of_its_chunk(data, layers, batches, tiles, agree, row_places):
    """The row at q equals causal attention over the key range from its chunk's start (less the lookback's)."""
    size = data.draw(st.integers(1, 9))
    params = data.draw(layers(causal=True, attn_chunk_size=size))
    batch = data.draw(batches(params, requests=(1, 2)))
    out, lse = batch.attend(params, **data.draw(tiles))
    plain = replace(params, attn_chunk_size=None)
    for row, _, q in row_places(batch):
        start = max(0, (q // size - params.attn_chunk_lookback) * size)
        part_out, part_lse = batch.attend(plain, kv_range=(start, q + 1))
        agree((out[row : row + 1], lse[row : row + 1]), (part_out[row : row + 1], part_lse[row : row + 1]))


@settings(max_examples=40)
@given(data=st.data())
def test_a_row_that_opens_a_chunk_sees_one_key(data, layers, batches, tiles, row_places):
    """At ``q % C == 0`` the output is ``V[q]``; one row further the key before counts too."""
    size = data.draw(st.integers(2, 6))
    params = data.draw(layers(causal=True, window=(-1, -1), sinks=None, attn_chunk_size=size, attn_chunk_lookback=0))
    batch = data.draw(batches(params, gain=1.0))
    out, _ = batch.attend(params, **data.draw(tiles))
    for row, r, q in row_places(batch):
        own = batch.values[r][q].repeat_interleave(params.group_size, dim=0)
        assert torch.equal(out[row], own) == (q % size == 0)


@settings(max_examples=40)
@given(data=st.data())
def test_a_lookback_over_every_chunk_is_causal(data, layers, batches, tiles, agree):
    """With a lookback of b: from ``(b + 1) C >= max seq_len`` on nothing is hidden; each b adds one chunk."""
    size = data.draw(st.integers(1, 5))
    params = data.draw(layers(causal=True, attn_chunk_size=size))
    batch = data.draw(batches(params))
    back = max(len(k) for k in batch.keys) // size + data.draw(st.integers(0, 1))
    everything = replace(params, attn_chunk_lookback=back)
    agree(batch.attend(everything, **data.draw(tiles)), batch.attend(replace(params, attn_chunk_size=None)))

    def own_or_neighbours(request, q_pos, k_pos):
        shifted = visible(replace(params, attn_chunk_lookback=0), q_pos, k_pos)
        for chunks in range(1, params.attn_chunk_lookback + 1):
            base = visible(replace(params, attn_chunk_size=None), q_pos, k_pos)
            shifted = shifted | (base & (q_pos // size - chunks == k_pos // size))
        return shifted

    agree(batch.attend(params, mask_fn=own_or_neighbours), batch.attend(params))
