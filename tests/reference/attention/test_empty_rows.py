"""Rows that see nothing, rows of no request, and what the lse means."""

import math
from dataclasses import replace

import pytest
import torch

from attncheck.reference import AttentionParams

PLAIN = AttentionParams(4, 2, 8)
SINKS = (1.0, -2.0, 3.5, -math.inf)


def assert_sees_nothing(out, lse, sinks=None):
    assert torch.equal(out, torch.zeros_like(out))
    want = torch.full((4,), -math.inf) if sinks is None else torch.tensor(sinks)
    assert torch.equal(lse, want.double().expand_as(lse))


@pytest.mark.parametrize("sinks", [None, SINKS])
@pytest.mark.parametrize(
    ("query_len", "seq_len", "changes", "empty"),
    [
        (3, 0, {}, [0, 1, 2]),
        (5, 2, {}, [0, 1, 2]),
        (5, 2, {"causal": False}, []),
        (5, 2, {"causal": False, "window": (1, 1)}, [0, 1]),
        (1, 0, {"causal": False}, [0]),
        (7, 2, {"attn_chunk_size": 2, "causal": False}, [0, 1, 2, 3, 4]),
    ],
)
def test_rows_without_a_key(make_batch, dense, same_state, sinks, query_len, seq_len, changes, empty):
    params = replace(PLAIN, sinks=sinks, **changes)
    batch = make_batch((query_len, 2), (seq_len, 6), params, unowned_rows=0)
    out, lse = batch.attend(params, q_tile=2, kv_tile=3)
    for row in empty:
        assert_sees_nothing(out[row], lse[row], sinks)
    seeing = [row for row in range(query_len + 2) if row not in empty]
    assert (out[seeing] != 0).all()
    same_state((out, lse), dense(batch, params))


@pytest.mark.parametrize("sinks", [None, SINKS])
def test_empty_key_ranges(make_batch, sinks):
    params = replace(PLAIN, sinks=sinks)
    batch = make_batch((3, 2), (10, 6), params, unowned_rows=0)
    for kv_range in ((0, 0), (5, 5), (10, 10**12)):
        assert_sees_nothing(*batch.attend(params, kv_range=kv_range), sinks)
    out, lse = batch.attend(params, kv_range=(6, 9))
    assert_sees_nothing(out[3:], lse[3:], sinks)
    assert (out[:3] != 0).all()


def test_rows_of_no_request_are_zero_even_with_sinks(make_batch):
    params = replace(PLAIN, sinks=(1.0, 2.0, 3.0, 4.0))
    batch = make_batch((3, 2), (10, 6), params, unowned_rows=4)
    assert batch.query[-4:].isnan().all()
    out, lse = batch.attend(params)
    assert_sees_nothing(out[-4:], lse[-4:])
    assert lse[:-4].isfinite().all()


def test_padding_requests_add_nothing(make_batch, same_state):
    batch = make_batch((3, 2), (10, 6), PLAIN)
    starts = torch.tensor([0, 3, 5, 5, 5])
    table = torch.cat([batch.block_table, torch.full_like(batch.block_table, 10**6)])
    padded = replace(batch, query_start_loc=starts, block_table=table, seq_lens=torch.tensor([10, 6, 0, 1]))
    same_state(padded.attend(PLAIN), batch.attend(PLAIN), tolerance=0)


def test_lse_of_disjoint_sets_adds_up(make_batch):
    params = replace(PLAIN, causal=False)
    batch = make_batch((3,), (17,), params, unowned_rows=0)
    _, whole = batch.attend(params)
    for cut in range(18):
        _, left = batch.attend(params, kv_range=(0, cut))
        _, right = batch.attend(params, kv_range=(cut, 17))
        assert torch.allclose(torch.logaddexp(left, right), whole, rtol=1e-13, atol=1e-13)


def test_lse_is_natural(make_batch):
    """Seventeen keys of score 0: ln 17, not log2 17 and not the maximum."""
    params = replace(PLAIN, scale=0.0, causal=False)
    batch = make_batch((2,), (17,), params, unowned_rows=0)
    _, lse = batch.attend(params, kv_tile=4)
    assert torch.allclose(lse, torch.full_like(lse, math.log(17)), rtol=1e-14, atol=0)


def test_a_first_tile_fully_masked_for_some_rows(make_batch, dense, same_state):
    """``-inf - -inf`` would be NaN: rows of one tile whose windows begin in different key tiles."""
    params = replace(PLAIN, window=(2, 0))
    batch = make_batch((12,), (40,), params)
    for kv_tile in (1, 2, 3, 5, 8):
        same_state(batch.attend(params, q_tile=12, kv_tile=kv_tile), dense(batch, params))


@pytest.mark.parametrize("where", [0, 12, 30, 39])
def test_the_maximum_may_come_in_any_tile(make_batch, dense, same_state, where):
    params = AttentionParams(4, 2, 8, causal=False, scale=1.0)
    batch = make_batch((3,), (40,), params, unowned_rows=0)
    loud = batch.keys[0].clone()
    loud[where] *= 400.0
    cache = batch.key_cache.clone()
    cache[batch.block_table[0, where // 4], where % 4] = loud[where]
    batch = replace(batch, key_cache=cache, keys=(loud,))
    for kv_tile in (1, 7, 64):
        same_state(batch.attend(params, kv_tile=kv_tile), dense(batch, params), tolerance=1e-11)


def test_equal_scores_tie_evenly(make_batch):
    params = AttentionParams(4, 2, 8, causal=False)
    batch = make_batch((2,), (24,), params, unowned_rows=0)
    same = replace(batch, key_cache=torch.ones_like(batch.key_cache))
    out, _ = same.attend(params, kv_tile=5)
    mean = batch.values[0].mean(dim=0).repeat_interleave(2, dim=0)
    assert torch.allclose(out, mean.expand_as(out), rtol=0, atol=1e-14)


def test_a_nan_that_is_data_is_not_hidden(make_batch):
    batch = make_batch((2, 2), (8, 8), PLAIN, unowned_rows=0)
    batch.key_cache[batch.block_table[0, 0], 1] = torch.nan
    out, lse = batch.attend(PLAIN)
    assert out[:2].isnan().all()
    assert lse[:2].isnan().all()
    assert out[2:].isfinite().all()
