"""The page size, the width of the table and the size of the pool change no result."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.reference import varlen_attention


@settings(max_examples=40)
@given(data=st.data())
def test_paging_any_block_size_is_block_size_one(data, layers, batches, repage, tiles, agree):
    """Paging: pages of any size, whole or partly filled, against pages of one token."""
    params = data.draw(layers())
    batch, sizes = data.draw(batches(params, fitting=False)), data.draw(tiles)
    single = repage(batch, 1, seed=data.draw(st.integers(0, 99)))
    agree(batch.attend(params, **sizes), single.attend(params))
    large = repage(batch, data.draw(st.sampled_from((8, 16, 33))), seed=3)
    agree(large.attend(params, **sizes), single.attend(params))


@settings(max_examples=40)
@given(data=st.data())
def test_paging_is_ragged_attention_on_the_gathered_keys(data, layers, batches, tiles, agree):
    """Paging: unpaged attention over the same tokens in order; key rows of no sequence behind are ignored."""
    params = data.draw(layers())
    batch = data.draw(batches(params, fitting=False))
    ends = torch.tensor([0, *(len(k) for k in batch.keys)]).cumsum(0)
    behind = data.draw(st.integers(0, 2))
    tail_k, tail_v = (torch.full((behind, *x[0].shape[1:]), torch.nan) for x in (batch.keys, batch.values))
    flat = varlen_attention(
        batch.query,
        torch.cat([*batch.keys, tail_k]),
        torch.cat([*batch.values, tail_v]),
        batch.query_start_loc,
        ends,
        params,
        **data.draw(tiles),
    )
    agree(batch.attend(params), flat)


@settings(max_examples=40)
@given(data=st.data())
def test_slack_a_wider_table_and_a_larger_pool_change_no_bit(data, layers, batches, tiles, same_bits):
    """Slack: columns past the length hold valid ids, negative ones or nonsense; blocks behind hold garbage."""
    params = data.draw(layers())
    batch, sizes = data.draw(batches(params, fitting=False)), data.draw(tiles)
    expected = batch.attend(params, **sizes)
    entries = st.sampled_from((0, 1, -1, 2**31 - 1))
    columns = data.draw(st.lists(entries, min_size=1, max_size=5))
    table = torch.cat([batch.block_table, torch.tensor(columns).int().expand(len(batch.keys), -1)], dim=1)
    table = table.to(data.draw(st.sampled_from((torch.int32, torch.int64))))
    spare = data.draw(st.integers(1, 20))
    caches = [torch.cat([x, x.new_full((spare, *x.shape[1:]), 1e30)]) for x in (batch.key_cache, batch.value_cache)]
    slack = replace(batch, block_table=table, key_cache=caches[0], value_cache=caches[1])
    same_bits(slack.attend(params, **sizes), expected)


@settings(max_examples=40)
@given(data=st.data())
def test_slack_columns_past_the_length_of_a_row_are_anything(data, layers, batches, same_bits):
    """Slack: each row's own tail of the table, down to its last page, renamed at will."""
    params = data.draw(layers())
    batch = data.draw(batches(params, fitting=False))
    table, size = batch.block_table.clone(), batch.key_cache.shape[1]
    for r, keys in enumerate(batch.keys):
        pages = -(-len(keys) // size)
        table[r, pages:] = data.draw(st.integers(-3, len(batch.key_cache) + 3))
    same_bits(replace(batch, block_table=table).attend(params), batch.attend(params))
