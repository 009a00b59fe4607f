"""Who sees whom: the predicate, its spans, and the relations of windows and chunks."""

from dataclasses import replace

import pytest
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


def test_shapes_broadcast():
    params = AttentionParams(1, 1, 4, causal=False)
    assert visible(params, torch.zeros(3, 1, dtype=torch.int32), torch.zeros(1, 5, dtype=torch.int64)).shape == (3, 5)
    assert visible(params, torch.tensor(3), torch.tensor(2)).shape == ()


def test_the_drawings():
    """The matrices of the docstring, read as text."""

    def drawing(params):
        sees = visible(params, torch.tensor([[3], [4]]), torch.arange(5))
        return ["".join("x" if one else "." for one in row) for row in sees.tolist()]

    layer = AttentionParams(1, 1, 4)
    assert drawing(layer) == ["xxxx.", "xxxxx"]
    assert drawing(replace(layer, causal=False, window=(1, -1))) == ["..xxx", "...xx"]
    assert drawing(replace(layer, causal=False, window=(2, 0))) == [".xxx.", "..xxx"]
    assert drawing(replace(layer, attn_chunk_size=2)) == ["..xx.", "....x"]


@pytest.mark.parametrize("query_len", [1, 6, 23])
def test_a_window_is_attention_over_its_slice(make_batch, same_state, query_len):
    width = 6
    params, full = AttentionParams(4, 2, 8, window=(width - 1, 0)), AttentionParams(4, 2, 8)
    batch = make_batch((query_len,), (23,), params, unowned_rows=0)
    out, lse = batch.attend(params, q_tile=4, kv_tile=5)
    for i in range(query_len):
        q = 23 - query_len + i
        part_out, part_lse = batch.attend(full, kv_range=(max(0, q - width + 1), q + 1))
        same_state((out[i : i + 1], lse[i : i + 1]), (part_out[i : i + 1], part_lse[i : i + 1]))


def test_a_window_wider_than_everything_is_none(make_batch, same_state):
    plain = AttentionParams(4, 2, 8)
    batch = make_batch((3, 9), (20, 9), plain)
    for window in ((19, 0), (10**9, -1), (19, 7)):
        same_state(batch.attend(replace(plain, window=window)), batch.attend(plain))
    full = replace(plain, causal=False)
    same_state(batch.attend(replace(full, window=(20, 20))), batch.attend(full))


def test_a_window_of_one_key_returns_its_value_and_score(make_batch):
    params = AttentionParams(4, 2, 8, window=(0, 0), scale=0.7)
    batch = make_batch((5,), (12,), params, unowned_rows=0)
    out, lse = batch.attend(params)
    own_keys, own_values = (x[0][-5:].repeat_interleave(2, dim=1) for x in (batch.keys, batch.values))
    assert torch.equal(out, own_values)
    assert torch.allclose(lse, 0.7 * (batch.query * own_keys).sum(-1), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("bad_left", "query_len"), [(5, 1), (3, 1), (5, 8), (3, 8)])
def test_a_window_one_off_is_another_function(make_batch, bad_left, query_len):
    right = AttentionParams(4, 2, 8, window=(4, 0))
    batch = make_batch((query_len,), (30,), right, unowned_rows=0)
    out, _ = batch.attend(right)
    wrong, _ = batch.attend(replace(right, window=(bad_left, 0)))
    assert ((out - wrong).abs().amax(dim=(1, 2)) > 1e-3).all()


def test_chunks(make_batch, same_state):
    plain = AttentionParams(4, 2, 8)
    batch = make_batch((20,), (30,), plain, unowned_rows=0)
    same_state(batch.attend(replace(plain, attn_chunk_size=30)), batch.attend(plain))
    ones, _ = batch.attend(replace(plain, attn_chunk_size=1))
    assert torch.equal(ones, batch.values[0][-20:].repeat_interleave(2, dim=1))
    opens = batch.attend(replace(plain, attn_chunk_size=6))
    for i in range(20):
        q = 10 + i
        if q % 6 == 0:
            assert torch.equal(opens[0][i], batch.values[0][q].repeat_interleave(2, dim=0))
        part = batch.attend(plain, kv_range=(q // 6 * 6, q + 1))
        same_state(tuple(x[i : i + 1] for x in opens), tuple(x[i : i + 1] for x in part))


@pytest.mark.parametrize("chunk", [4, 8, 16])
def test_local_attention_is_causal_attention_on_virtual_requests(make_batch, same_state, chunk):
    """Each request is cut where its rows cross a multiple of the chunk; the pieces see their chunk's pages only."""
    plain = AttentionParams(4, 2, 8)
    batch = make_batch((20, 1, 9, 5), (30, 25, 9, 8), plain, block_size=4, unowned_rows=0)
    starts, lens, tables = [0], [], []
    for r in range(4):
        rows, total = batch.rows(r), int(batch.seq_lens[r])
        position = total - (rows.stop - rows.start)
        while position < total:
            begin = position // chunk * chunk
            end = min(begin + chunk, total)
            starts.append(starts[-1] + end - position)
            lens.append(end - begin)
            pages = batch.block_table[r, begin // 4 : (begin + chunk) // 4]
            tables.append(torch.nn.functional.pad(pages, (0, chunk // 4 - len(pages)), value=-1))
            position = end
    virtual = replace(
        batch,
        block_table=torch.stack(tables),
        seq_lens=torch.tensor(lens),
        query_start_loc=torch.tensor(starts),
    )
    same_state(virtual.attend(plain), batch.attend(replace(plain, attn_chunk_size=chunk)))
