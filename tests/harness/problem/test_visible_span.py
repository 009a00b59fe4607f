"""The spans of visible keys against the reference's predicate, for every pair of a row and a key."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from attncheck.harness.problem.pages import visible_span
from attncheck.reference import AttentionParams, visible

SIZES = st.none() | st.integers(1, 6)
DISTANCES = st.integers(-1, 6)


def params_of(causal, window, chunk, lookback):
    return AttentionParams(1, 1, 8, causal=causal, window=window, attn_chunk_size=chunk, attn_chunk_lookback=lookback)


def seen_keys(params, position, num_keys):
    sees = visible(params, torch.tensor([[position]]), torch.arange(num_keys)[None])
    return sees[0].nonzero().flatten().tolist()


@given(st.booleans(), st.tuples(DISTANCES, DISTANCES), SIZES, st.integers(0, 2), st.integers(0, 12), st.integers(1, 15))
def test_a_span_holds_exactly_the_keys_the_predicate_shows(causal, window, chunk, lookback, num_keys, rows):
    """Rows end at the last key, so that some come before the first; cross attention has rows beyond the keys, too."""
    params = params_of(causal, window, chunk, lookback)
    positions = torch.arange(num_keys - rows, num_keys + 3)
    first, last = visible_span(params, positions, num_keys)
    for position, lo, hi in zip(positions.tolist(), first.tolist(), last.tolist(), strict=True):
        assert list(range(lo, hi + 1)) == seen_keys(params, position, num_keys)


@given(st.booleans(), st.tuples(DISTANCES, DISTANCES), SIZES, st.lists(st.integers(0, 9), min_size=1, max_size=5))
def test_each_row_may_have_a_number_of_keys_of_its_own(causal, window, chunk, lengths):
    params = params_of(causal, window, chunk, 0)
    positions = torch.tensor([max(0, length - 2) for length in lengths])
    first, last = visible_span(params, positions, torch.tensor(lengths))
    for row, length in enumerate(lengths):
        keys = list(range(int(first[row]), int(last[row]) + 1))
        assert keys == seen_keys(params, int(positions[row]), length)
