"""The places of tokens in the cache do not change a bit of the result."""

from dataclasses import replace

import pytest
import torch

from attncheck.reference import AttentionParams, paged_attention, varlen_attention

PARAMS = AttentionParams(6, 2, 16, window=(17, 0), logits_soft_cap=4.0, sinks=(1.0, 0.5, -1.0, 2.0, 0.0, 3.0))
PLAIN = AttentionParams(4, 2, 8)
LENS = ((1, 7, 20, 3), (40, 33, 20, 8))


def bits(state):
    return tuple(x.view(torch.int64) for x in state)


def same_bits(state, expected):
    return all(torch.equal(a, b) for a, b in zip(bits(state), bits(expected), strict=True))


@pytest.mark.parametrize("params", [PARAMS, PLAIN], ids=["modified", "plain"])
def test_any_blocks_give_the_same_bits(make_batch, repage, params):
    batch = make_batch(*LENS, params, block_size=4)
    expected = batch.attend(params)
    for seed in range(5):
        assert same_bits(repage(batch, 4, seed, spare=3 + 5 * seed).attend(params), expected)


def test_any_block_size_is_ragged_attention_on_the_gathered_keys(make_batch, repage, same_state):
    batch = make_batch(*LENS, PARAMS)
    ends = torch.tensor([0, *LENS[1]]).cumsum(0)
    flat = varlen_attention(
        batch.query, torch.cat(batch.keys), torch.cat(batch.values), batch.query_start_loc, ends, PARAMS
    )
    for block_size in (1, 2, 3, 5, 16, 544):
        same_state(repage(batch, block_size, seed=block_size).attend(PARAMS), flat)


def test_permuting_the_pool_and_the_table_alike_changes_no_bit(make_batch):
    batch = make_batch(*LENS, PLAIN)
    order = torch.randperm(len(batch.key_cache), generator=torch.Generator().manual_seed(5))
    owned = (batch.block_table >= 0) & (batch.block_table < len(order))
    table = torch.where(owned, order.argsort()[batch.block_table.clamp(0, len(order) - 1)], batch.block_table)
    moved = replace(batch, key_cache=batch.key_cache[order], value_cache=batch.value_cache[order], block_table=table)
    assert same_bits(moved.attend(PLAIN), batch.attend(PLAIN))


def test_a_request_alone_equals_the_request_in_the_batch(make_batch):
    batch = make_batch(*LENS, PARAMS)
    out, lse = batch.attend(PARAMS)
    for r in range(len(LENS[0])):
        alone = batch.only([r]).attend(PARAMS)
        assert same_bits(alone, (out[batch.rows(r)], lse[batch.rows(r)]))


def test_permuting_requests_permutes_rows(make_batch):
    batch = make_batch(*LENS, PARAMS)
    out, lse = batch.attend(PARAMS)
    order = [2, 0, 3, 1]
    rows = torch.cat([torch.arange(batch.rows(r).start, batch.rows(r).stop) for r in order])
    assert same_bits(batch.only(order).attend(PARAMS), (out[rows], lse[rows]))


def test_slack_changes_nothing(make_batch, repage):
    batch = make_batch(*LENS, PLAIN)
    expected = batch.attend(PLAIN)
    wider = torch.cat([batch.block_table, torch.full((4, 9), -1, dtype=torch.int32)], dim=1)
    assert same_bits(replace(batch, block_table=wider).attend(PLAIN), expected)
    assert same_bits(replace(batch, block_table=batch.block_table.long()).attend(PLAIN), expected)
    assert same_bits(repage(batch, 4, seed=0, spare=50).attend(PLAIN), expected)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf, 1e30])
@pytest.mark.parametrize("which", ["key_cache", "value_cache"])
def test_slots_no_request_owns_are_without_effect(make_batch, poison, which):
    batch = make_batch(*LENS, PARAMS)
    expected = batch.attend(PARAMS)
    cache = getattr(batch, which)
    poisoned = torch.where(cache.isnan(), torch.full_like(cache, poison), cache)
    zeroed = torch.where(cache.isnan(), torch.zeros_like(cache), cache)
    assert same_bits(replace(batch, **{which: poisoned}).attend(PARAMS), expected)
    assert same_bits(replace(batch, **{which: zeroed}).attend(PARAMS), expected)


def test_blocks_before_every_window_may_be_reused(make_batch):
    window = AttentionParams(4, 2, 8, window=(5, 0))
    batch = make_batch((2, 1), (30, 23), window)
    expected = batch.attend(window)
    cache, table = batch.key_cache.clone(), batch.block_table.clone()
    # the first row of request 0 is at 28 and sees 23 on, of request 1 at 22 and sees 17 on
    for request, first_seen in ((0, 23), (1, 17)):
        for page in range(first_seen // 4):
            cache[table[request, page]] = torch.nan
    values = batch.value_cache.clone()
    values[cache.isnan()] = torch.nan
    assert same_bits(replace(batch, key_cache=cache, value_cache=values).attend(window), expected)
    table[0, : 23 // 4] = table[1, 5]  # handed to the other request, twice in one row
    table[1, : 17 // 4] = 0
    assert same_bits(replace(batch, block_table=table).attend(window), expected)


def test_a_key_no_row_of_the_request_sees_may_be_nan_inside_a_used_block(make_batch):
    chunks = AttentionParams(4, 2, 8, attn_chunk_size=6)
    batch = make_batch((2,), (11,), chunks)
    expected = batch.attend(chunks)
    for position in range(6):
        block, offset = batch.block_table[0, position // 4], position % 4
        batch.key_cache[block, offset] = batch.value_cache[block, offset] = torch.nan
    assert same_bits(batch.attend(chunks), expected)


def test_a_mask_with_holes_over_nan_keys(make_batch):
    params = AttentionParams(4, 2, 8, causal=False)
    batch = make_batch((3,), (14,), params)

    def odd(request, q_pos, k_pos):
        return ((k_pos % 2 == 1) & (q_pos >= 0)) & (k_pos != q_pos)

    expected = batch.attend(params, mask_fn=odd, q_tile=2, kv_tile=5)
    for position in range(0, 14, 2):
        block, offset = batch.block_table[0, position // 4], position % 4
        batch.key_cache[block, offset] = batch.value_cache[block, offset] = torch.nan
    assert same_bits(batch.attend(params, mask_fn=odd, q_tile=2, kv_tile=5), expected)


def test_shared_blocks_are_read_by_every_sharer(make_batch):
    batch = make_batch((2, 2), (12, 12), PLAIN)
    table = batch.block_table.clone()
    table[1] = table[0]
    query = batch.query.clone()
    query[2:4] = query[0:2]
    out, lse = replace(batch, block_table=table, query=query).attend(PLAIN)
    assert same_bits((out[2:4], lse[2:4]), (out[0:2], lse[0:2]))


def test_arguments_are_left_as_they_are(make_batch):
    batch = make_batch(*LENS, PARAMS)
    before = {name: x.clone() for name, x in vars(batch).items() if isinstance(x, torch.Tensor)}
    batch.attend(PARAMS, tree_mask=None, kv_range=(3, 30))
    for name, x in before.items():
        assert torch.equal(x.nan_to_num(0.5), getattr(batch, name).nan_to_num(0.5)), name


def test_requests_without_rows_are_never_looked_at(make_batch):
    batch = make_batch((3, 0, 2, 0), (10, 0, 7, 0), PLAIN)
    expected = batch.attend(PLAIN)
    for stale in (1, -5, 10**9):
        seq_lens = torch.tensor([10, stale, 7, stale])
        assert same_bits(replace(batch, seq_lens=seq_lens).attend(PLAIN), expected)


def test_no_requests_at_all():
    none = torch.zeros(0, dtype=torch.int32)
    cache = torch.zeros(2, 4, 2, 8)
    out, lse = paged_attention(
        torch.zeros(3, 4, 8), cache, cache, none.view(0, 1), none, torch.zeros(1, dtype=torch.int32), PLAIN
    )
    assert torch.equal(out, torch.zeros(3, 4, 8, dtype=torch.float64))
    assert (lse == -torch.inf).all()
