"""The spans of visible keys against the reference's predicate, for every pair of a row and a key."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from attncheck.harness.problem.pages import visible_span
from attncheck.reference import AttentionParams, visible

DISTANCES = st.integers(-1, 6)
ROWS = st.lists(st.tuples(st.integers(0, 12), st.integers(-15, 2)), min_size=1, max_size=8)
"""Keys of the row's request, and the row's distance from their end: it may come before the first, or after the last."""


@given(st.booleans(), st.tuples(DISTANCES, DISTANCES), st.none() | st.integers(1, 6), st.integers(0, 2), ROWS)
def test_a_span_holds_exactly_the_keys_the_predicate_shows(causal, window, chunk, lookback, rows):
    params = AttentionParams(1, 1, 8, causal=causal, window=window, attn_chunk_size=chunk, attn_chunk_lookback=lookback)
    lengths = torch.tensor([num_keys for num_keys, _ in rows])
    positions = lengths + torch.tensor([distance for _, distance in rows])
    first, last = visible_span(params, positions, lengths)
    for row, position in enumerate(positions.tolist()):
        num_keys = int(lengths[row])
        sees = visible(params, torch.tensor([[position]]), torch.arange(num_keys)[None])
        assert list(range(int(first[row]), int(last[row]) + 1)) == sees[0].nonzero().flatten().tolist()
        alone = visible_span(params, positions[row], num_keys)
        assert alone == (first[row], last[row])
