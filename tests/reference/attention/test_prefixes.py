"""Image spans, and first keys beyond a window: against the dense formulation, whose masks are written out key by key."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_batches import TILES, dense, drawn_batches, make_batch, same_bits, same_state, seen_keys

from attncheck.errors import ReferenceArgumentError
from attncheck.reference import AttentionParams


@st.composite
def spans(draw):
    """Ordered spans without overlaps, some of them behind every key, or cut by the last one."""
    edges = sorted(draw(st.sets(st.integers(0, 40), max_size=8)))
    return [(edges[i], edges[i + 1]) for i in range(0, len(edges) - 1, 2)]


@st.composite
def windows(draw):
    return AttentionParams(2, 1, 4, window=(draw(st.integers(-1, 9)), 0))


@settings(max_examples=60)
@given(data=st.data(), params=windows(), sizes=TILES)
def test_spans_are_seen_whole_by_their_rows_alone(data, params, sizes):
    batch = data.draw(drawn_batches(params, shared_pages=st.just(0)))
    ranges = {r: data.draw(spans()) for r in data.draw(st.sets(st.integers(0, len(batch.keys) - 1)))}

    def sees(request, q, j):
        together = any(q in range(lo, hi + 1) and j in range(lo, hi + 1) for lo, hi in ranges.get(request, ()))
        return together or j in seen_keys(params, q, len(batch.keys[request]))

    same_state(batch.attend(params, mm_req_doc_ranges=ranges, **sizes), dense(batch, params, sees=sees))


@settings(max_examples=60)
@given(data=st.data(), params=windows(), sizes=TILES)
def test_first_keys_are_seen_from_their_own_row_on(data, params, sizes):
    batch = data.draw(drawn_batches(params, shared_pages=st.just(0)))
    numbers = [data.draw(st.integers(0, 30)) for _ in batch.keys]

    def sees(request, q, j):
        return (j <= q and j < numbers[request]) or j in seen_keys(params, q, len(batch.keys[request]))

    state = batch.attend(params, rswa_prefix_lens=torch.tensor(numbers), **sizes)
    same_state(state, dense(batch, params, sees=sees))


def test_without_spans_and_first_keys_no_bit_changes():
    params = AttentionParams(2, 1, 4, window=(3, 0))
    batch = make_batch((5, 2), (9, 7), params)
    plain = batch.attend(params)
    same_bits(batch.attend(params, mm_req_doc_ranges={0: [], 1: [(9, 12)]}), plain)
    same_bits(batch.attend(params, rswa_prefix_lens=torch.zeros(2)), plain)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"mm_req_doc_ranges": {2: [(0, 1)]}}, "mm_req_doc_ranges"),
        ({"mm_req_doc_ranges": {0: [(4, 2)]}}, "mm_req_doc_ranges"),
        ({"rswa_prefix_lens": torch.zeros(3)}, "rswa_prefix_lens.shape"),
    ],
)
def test_undefined_masks_are_refused(options, named):
    params = AttentionParams(2, 1, 4)
    with pytest.raises(ReferenceArgumentError, match=named):
        make_batch((5, 2), (9, 7), params).attend(params, **options)
