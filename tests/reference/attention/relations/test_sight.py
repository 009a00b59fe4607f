"""The causal rule, the flag per request, windows: who sees whom, under every other modifier."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.reference import visible, window_pair


def without_mask(layers, **fixed):
    return layers(causal=False, window=(-1, -1), attn_chunk_size=None, **fixed)


@settings(max_examples=60)
@given(data=st.data())
def test_sight_a_key_reaches_exactly_the_rows_that_see_it(data, layers, batches, tiles, seen, row_places):
    """Another K and V at position j moves the rows that see j (j = q, j = q - W + 1), and no bit elsewhere."""
    params = data.draw(layers(scale=None, sinks=None))
    batch = data.draw(batches(params, shared_pages=st.just(0), gain=1.0, query_lens=st.integers(1, 7)))
    sizes, request = data.draw(tiles), data.draw(st.integers(0, len(batch.keys) - 1))
    position = data.draw(st.integers(0, len(batch.keys[request]) - 1))
    size = batch.key_cache.shape[1]
    slot = batch.block_table[request, position // size], position % size
    out, lse = batch.attend(params, **sizes)
    for cache in (batch.key_cache, batch.value_cache):
        cache[slot] += 1.0
    new_out, new_lse = batch.attend(params, **sizes)
    for row, r, q in row_places(batch):
        if r == request and position in seen(params, q, len(batch.keys[r])):
            assert (new_out[row] != out[row]).any(dim=-1).all()
        else:
            assert torch.equal(new_out[row], out[row])
            assert torch.equal(new_lse[row], lse[row])


@settings(max_examples=40)
@given(data=st.data())
def test_causal_is_the_window_without_right_side(data, layers, batches, tiles, agree):
    """Causal equals ``(left, 0)`` with ``left >= max seq_len - 1``."""
    params = data.draw(layers(causal=True, window=(-1, -1)))
    batch = data.draw(batches(params))
    longest = max(len(k) for k in batch.keys)
    left = max(longest - 1, 0) + data.draw(st.integers(0, 3))
    literal = replace(params, causal=False, window=(left, 0))
    agree(batch.attend(literal, **data.draw(tiles)), batch.attend(params))


@settings(max_examples=40)
@given(data=st.data())
def test_causal_or_not_is_the_same_for_one_row(data, layers, batches, tiles, agree):
    """A single new row is at the end, so that no key is ahead of it."""
    params = data.draw(layers(causal=True))
    batch = data.draw(batches(params, query_lens=st.integers(0, 1)))
    mirrored = replace(params, causal=False, window=(params.window[0], params.window[0]))
    agree(batch.attend(mirrored, **data.draw(tiles)), batch.attend(params))


@settings(max_examples=40)
@given(data=st.data())
def test_non_causal_rows_are_interchangeable(data, layers, batches, tiles, agree, requests_rows):
    """Rows of one request see one set, so permuting them permutes the outputs (no bias that uses positions)."""
    params = data.draw(without_mask(layers, alibi_slopes=None))
    batch = data.draw(batches(params, fitting=False))
    order = list(range(len(batch.query)))
    for r in range(len(batch.keys)):
        rows = batch.rows(r)
        order[rows] = data.draw(st.permutations(order[rows]))
    out, lse = batch.attend(params)
    moved = replace(batch, query=batch.query[order])
    agree(moved.attend(params, **data.draw(tiles)), (out[order], lse[order]))


@settings(max_examples=40)
@given(data=st.data())
def test_a_causal_flag_per_request(data, layers, batches, tiles, agree, requests_rows):
    """Each request under its own flag equals that request of a batch which is causal, or is not, as a whole."""
    params = data.draw(layers())
    batch = data.draw(batches(params, requests=(2, 4)))
    layer = [replace(params, causal=False), replace(params, causal=True)]
    flags = data.draw(st.lists(st.integers(0, 1), min_size=len(batch.keys), max_size=len(batch.keys)))
    state = batch.attend(params, mask_fn=lambda r, q, k: visible(layer[flags[r]], q, k), **data.draw(tiles))
    whole = [batch.attend(one) for one in layer]
    for r, flag in enumerate(flags):
        rows = requests_rows(batch, [r])
        agree(tuple(x[rows] for x in state), tuple(x[rows] for x in whole[flag]))


@settings(max_examples=40)
@given(data=st.data())
def test_a_window_wider_than_everything_is_none(data, layers, batches, tiles, agree):
    """W >= max seq_len equals no window, one-sided or mirrored."""
    params = data.draw(layers(window=(-1, -1)))
    batch = data.draw(batches(params))
    width = max(1, *(len(k) for k in batch.keys)) + data.draw(st.integers(0, 2))
    wide = replace(params, window=window_pair(width, bidirectional=not params.causal))
    agree(batch.attend(wide, **data.draw(tiles)), batch.attend(params))


@settings(max_examples=40)
@given(data=st.data())
def test_a_window_of_one_key_returns_it(data, layers, batches, tiles, agree, row_places):
    """W = 1, and chunks of one, give ``out = V[q]`` and the row's score with its own key as lse."""
    one = data.draw(st.sampled_from(({"window": (0, 0)}, {"attn_chunk_size": 1, "attn_chunk_lookback": 0})))
    params = data.draw(layers(sinks=None, logits_soft_cap=None, alibi_slopes=None, **one))
    batch = data.draw(batches(params))
    out, lse = batch.attend(params, **data.draw(tiles))
    want_out, want_lse = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    for row, r, q in row_places(batch):
        key, value = (x[r][q].repeat_interleave(params.group_size, dim=0) for x in (batch.keys, batch.values))
        want_out[row], want_lse[row] = value, params.softmax_scale * (batch.query[row] * key).sum(-1)
    agree((out, lse), (want_out, want_lse))


@settings(max_examples=40)
@given(data=st.data())
def test_a_windowed_row_is_attention_over_its_slice(data, layers, batches, tiles, agree, row_places):
    """The window of W keys ending at q equals no window over the key range ``[q - W + 1, q + 1)``."""
    width = data.draw(st.integers(1, 9))
    params = data.draw(layers(causal=True, window=window_pair(width)))
    batch = data.draw(batches(params, requests=(1, 2)))
    full = replace(params, window=(-1, -1))
    out, lse = batch.attend(params, **data.draw(tiles))
    for row, _, q in row_places(batch):
        part_out, part_lse = batch.attend(full, kv_range=(max(0, q - width + 1), q + 1))
        agree((out[row : row + 1], lse[row : row + 1]), (part_out[row : row + 1], part_lse[row : row + 1]))


@settings(max_examples=40)
@given(data=st.data())
def test_a_mirrored_window_is_both_halves_and_the_own_key(data, layers, batches, agree):
    """Not causal: rows at distance W - 1 either side matter, so the mirrored pair is the union of its halves."""
    width = data.draw(st.integers(1, 6))
    params = data.draw(layers(causal=False, window=window_pair(width, bidirectional=True)))
    batch = data.draw(batches(params))

    def inclusive(request, q_pos, k_pos):
        back = visible(replace(params, window=(width - 1, 0)), q_pos, k_pos)
        ahead = visible(replace(params, window=(0, width - 1)), q_pos, k_pos)
        return back | ahead

    agree(batch.attend(params, mask_fn=inclusive), batch.attend(params))
