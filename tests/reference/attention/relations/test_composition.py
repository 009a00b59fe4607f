"""Placement, composition, prefix sharing: blocks, neighbours and order change no result."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(max_examples=40)
@given(data=st.data())
def test_placement_permuted_blocks_give_the_same_bits(data, layers, batches, tiles, same_bits):
    """Placement: any injective renaming of the physical blocks, in a pool of any size, applied to the table too."""
    params = data.draw(layers())
    batch, sizes = data.draw(batches(params, fitting=False)), data.draw(tiles)
    blocks, spare = len(batch.key_cache), data.draw(st.integers(0, 9))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    name = torch.randperm(blocks + spare, generator=generator)[:blocks]

    def move(cache):
        pool = torch.full((blocks + spare, *cache.shape[1:]), torch.nan, dtype=cache.dtype)
        pool[name] = cache
        return pool

    real = (batch.block_table >= 0) & (batch.block_table < blocks)
    table = torch.where(real, name[batch.block_table.clamp(0, blocks - 1).long()], batch.block_table)
    moved = replace(
        batch, key_cache=move(batch.key_cache), value_cache=move(batch.value_cache), block_table=table.int()
    )
    same_bits(moved.attend(params, **sizes), batch.attend(params, **sizes))


@settings(max_examples=40)
@given(data=st.data())
def test_composition_any_requests_in_any_order_give_their_rows(data, layers, batches, tiles, same_bits, requests_rows):
    """Composition: alone, permuted, without some of the others, or twice in the batch (all blocks shared)."""
    params = data.draw(layers())
    batch, sizes = data.draw(batches(params, fitting=False)), data.draw(tiles)
    chosen = data.draw(st.lists(st.integers(0, len(batch.keys) - 1), min_size=1, max_size=5))
    out, lse = batch.attend(params, **sizes)
    rows = requests_rows(batch, chosen)
    same_bits(batch.only(chosen).attend(params, **sizes), (out[rows], lse[rows]))


@settings(max_examples=40)
@given(data=st.data())
def test_prefix_sharing_shared_blocks_are_as_good_as_private_ones(data, layers, batches, repage, same_bits):
    """Prefix sharing: first pages that several tables name, against a copy of their tokens for every request."""
    params = data.draw(layers())
    long = {"context_lens": st.integers(4, 17), "shared_pages": st.integers(1, 2), "block_size": 2}
    batch = data.draw(batches(params, requests=(2, 4), **long))
    assert (batch.block_table[:, 0] == batch.block_table[0, 0]).all()
    private = repage(batch, 2, seed=data.draw(st.integers(0, 99)))
    same_bits(batch.attend(params), private.attend(params))


@settings(max_examples=40)
@given(data=st.data())
def test_prefix_sharing_equal_rows_over_the_same_blocks_agree(data, layers, batches, same_bits):
    """Prefix sharing: two requests with one table row and one query get one answer."""
    params = data.draw(layers())
    batch = data.draw(batches(params, requests=(1, 1), query_lens=st.integers(1, 6)))
    twice = batch.only([0, 0])
    out, lse = twice.attend(params)
    first, second = twice.rows(0), twice.rows(1)
    same_bits((out[first], lse[first]), (out[second], lse[second]))


@settings(max_examples=40)
@given(data=st.data())
def test_empty_requests_and_unowned_rows_leave_the_others_alone(data, layers, batches, same_bits):
    """Padding: requests of no rows, whatever their length and table row hold, anywhere in the batch."""
    params = data.draw(layers())
    batch = data.draw(batches(params, requests=(1, 3), fitting=False))
    at = data.draw(st.integers(0, len(batch.keys)))
    stale = data.draw(st.sampled_from((0, 1, -1, 2**31 - 1)))
    starts, lens = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
    table = batch.block_table
    padded = replace(
        batch,
        query_start_loc=torch.tensor([*starts[: at + 1], starts[at], *starts[at + 1 :]]),
        seq_lens=torch.tensor([*lens[:at], stale, *lens[at:]]),
        block_table=torch.cat([table[:at], torch.full_like(table[:1], -9), table[at:]]),
    )
    same_bits(padded.attend(params), batch.attend(params))
