"""Who sees whom: the predicate and its spans."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from attncheck.reference import AttentionParams, visible
from attncheck.reference.attention.params import Visibility, row_span


@st.composite
def layers(draw):
    return AttentionParams(
        1,
        1,
        4,
        causal=draw(st.booleans()),
        window=draw(st.tuples(st.integers(-2, 9), st.integers(-2, 9))),
        attn_chunk_size=draw(st.none() | st.integers(1, 9)),
        attn_chunk_lookback=draw(st.integers(0, 3)),
    )


@given(layers(), st.integers(-15, 30), st.integers(0, 25))
def test_predicate_and_span_are_the_struck_out_set(seen, params, q, num_keys):
    want = seen(params, q, num_keys)
    positions = torch.arange(num_keys)
    assert set(positions[visible(params, torch.tensor(q), positions)].tolist()) == want
    assert set(range(*row_span(params, q, (0, num_keys)))) == want


@given(layers(), st.integers(-15, 30), st.integers(0, 8), st.integers(0, 25))
def test_reach_holds_all_and_common_only_what_all_rows_see(seen, params, first, more, num_keys):
    rows = [seen(params, q, num_keys) for q in range(first, first + more + 1)]
    sight = Visibility(params, (0, num_keys), first)
    reach, common = set(range(*sight.reach(first, first + more))), set(range(*sight.common(first, first + more)))
    assert set.union(*rows) <= reach
    assert common == set.intersection(*rows)
    if set.union(*rows):
        assert (min(set.union(*rows)), max(set.union(*rows))) == (min(reach), max(reach))
