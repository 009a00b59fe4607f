"""Masks beyond the base predicate: bidirectional ranges, reference windows, and the arguments of a mask."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.reference import visible

ENDLESS = 10**9


def prefix_lm(params, ranges, clamp=None):
    """``base or (q and j in one range [a, b])``, both ends inclusive; with a clamp, also ``q - j < clamp`` there."""

    def mask_fn(request, q_pos, k_pos):
        sees = visible(params, q_pos, k_pos)
        for a, b in ranges[request] if isinstance(ranges, dict) else ranges:
            both = (q_pos >= a) & (q_pos <= b) & (k_pos >= a) & (k_pos <= b)
            sees = sees | (both if clamp is None else both & (q_pos - k_pos < clamp))
        return sees

    return mask_fn


@pytest.fixture(scope="module")
def base(layers):
    """A causal layer, maybe with a window, no chunks: the base of the prefix-LM forms."""
    return lambda **fixed: layers(**{"causal": True, "attn_chunk_size": None, **fixed})


@settings(max_examples=40)
@given(data=st.data())
def test_no_ranges_are_the_base_predicate(data, layers, batches, tiles, agree):
    """A mask function without ranges equals no mask function, for every layer."""
    params = data.draw(layers())
    batch = data.draw(batches(params, fitting=False))
    agree(batch.attend(params, mask_fn=prefix_lm(params, []), **data.draw(tiles)), batch.attend(params))


@settings(max_examples=40)
@given(data=st.data())
def test_one_range_over_everything_is_non_causal(data, base, batches, tiles, agree):
    """The range is ORed after the window, so that it admits what the window hides."""
    params = data.draw(base())
    batch = data.draw(batches(params))
    last = max(len(k) for k in batch.keys) - 1 + data.draw(st.integers(0, 3))
    state = batch.attend(params, mask_fn=prefix_lm(params, [(0, last)]), **data.draw(tiles))
    agree(state, batch.attend(replace(params, causal=False, window=(-1, -1))))


@settings(max_examples=40)
@given(data=st.data())
def test_a_clamped_range_over_everything_is_a_window_open_ahead(data, base, batches, tiles, agree):
    """Clamped: ``q - j < W`` holds within the range too: the non-causal layer with ``(W - 1, unlimited)``."""
    width = data.draw(st.integers(1, 9))
    params = data.draw(base(window=(width - 1, 0)))
    batch = data.draw(batches(params))
    state = batch.attend(params, mask_fn=prefix_lm(params, [(0, ENDLESS)], width), **data.draw(tiles))
    agree(state, batch.attend(replace(params, causal=False, window=(width - 1, -1))))


@settings(max_examples=40)
@given(data=st.data())
def test_a_range_out_of_reach_changes_nothing(data, base, batches, tiles, agree):
    """Wholly before the new rows, or past the end; of one token; or past the end in part, as if cut there."""
    params = data.draw(base())
    batch = data.draw(batches(params, requests=(1, 1)))
    length, rows = len(batch.keys[0]), len(batch.query[batch.rows(0)])
    a = data.draw(st.integers(0, length))
    plain, sizes = batch.attend(params), data.draw(tiles)
    for out_of_reach in ((0, length - rows - 1), (length, length + 9)):
        agree(batch.attend(params, mask_fn=prefix_lm(params, [out_of_reach]), **sizes), plain)
    agree(batch.attend(params, mask_fn=prefix_lm(params, [(a, a)]), **sizes), plain)
    cut, beyond = prefix_lm(params, [(a, length - 1)]), prefix_lm(params, [(a, length + 50)])
    agree(batch.attend(params, mask_fn=beyond, **sizes), batch.attend(params, mask_fn=cut))


@settings(max_examples=40)
@given(data=st.data())
def test_rows_of_one_range_see_one_set(data, base, batches, tiles, agree):
    """Both ends inclusive: a row in the range equals the unmasked layer over the keys up to the range's end."""
    params = data.draw(base(window=(-1, -1)))
    batch = data.draw(batches(params, requests=(1, 1), query_lens=st.integers(1, 7)))
    length = len(batch.keys[0])
    a = data.draw(st.integers(0, length - 1))
    b = data.draw(st.integers(a, length - 1))
    out, lse = batch.attend(params, mask_fn=prefix_lm(params, [(a, b)]), **data.draw(tiles))
    full = batch.attend(replace(params, causal=False), kv_range=(0, b + 1))
    causal, context = batch.attend(params), length - batch.rows(0).stop
    for row in range(batch.rows(0).stop):
        want = full if a <= context + row <= b else causal
        agree((out[row : row + 1], lse[row : row + 1]), tuple(x[row : row + 1] for x in want))


@settings(max_examples=40)
@given(data=st.data())
def test_ranges_are_per_request(data, base, batches, tiles, same_bits, requests_rows):
    """Each request under its own ranges equals it under those ranges alone."""
    params = data.draw(base())
    batch = data.draw(batches(params, requests=(2, 3)))
    pair = st.tuples(st.integers(0, 12), st.integers(0, 12)).map(lambda x: (min(x), max(x)))
    ranges = {r: data.draw(st.lists(pair, max_size=2)) for r in range(len(batch.keys))}
    sizes = data.draw(tiles)
    state = batch.attend(params, mask_fn=prefix_lm(params, ranges), **sizes)
    for r, own in ranges.items():
        rows = requests_rows(batch, [r])
        alone = batch.only([r]).attend(params, mask_fn=prefix_lm(params, own), **sizes)
        same_bits(alone, [x[rows] for x in state])


@settings(max_examples=40)
@given(data=st.data())
def test_reference_window_between_window_and_causal(data, base, batches, tiles, agree):
    """``causal and (j < prefix_len or q - j < W)``: prefix 0 is the window, prefix or W over all is causal."""
    params = data.draw(base(window=(-1, -1)))
    batch = data.draw(batches(params))
    width, prefix = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 9))

    def reference_window(prefix_len, w):
        return lambda _, q_pos, k_pos: (k_pos <= q_pos) & ((k_pos < prefix_len) | (q_pos - k_pos < w))

    sizes = data.draw(tiles)
    windowed = replace(params, window=(width - 1, 0))
    agree(batch.attend(params, mask_fn=reference_window(0, width), **sizes), batch.attend(windowed))
    for prefix_len, w in ((ENDLESS, width), (prefix, ENDLESS)):
        agree(batch.attend(params, mask_fn=reference_window(prefix_len, w), **sizes), batch.attend(params))
    union = batch.attend(
        params,
        mask_fn=lambda _, q, k: visible(windowed, q, k) | (visible(params, q, k) & (k < prefix)),
    )
    agree(batch.attend(params, mask_fn=reference_window(prefix, width), **sizes), union)


@settings(max_examples=40)
@given(data=st.data())
def test_a_mask_gets_real_keys_only_and_each_pair_once(data, layers, batches, tiles):
    """No key at ``j >= seq_len``, no unowned row, absolute positions, every (row, key) pair exactly once."""
    params = data.draw(layers())
    batch = data.draw(batches(params, fitting=False))
    pairs = []

    def spy(request, q_pos, k_pos):
        pairs.extend((request, q, k) for q in q_pos[:, 0].tolist() for k in k_pos[0].tolist())
        return visible(params, q_pos, k_pos)

    batch.attend(params, mask_fn=spy, **data.draw(tiles))
    want = [
        (r, len(keys) - (batch.rows(r).stop - row), j)
        for r, keys in enumerate(batch.keys)
        for row in range(batch.rows(r).start, batch.rows(r).stop)
        for j in range(len(keys))
    ]
    assert sorted(pairs) == sorted(want)
