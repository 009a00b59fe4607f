"""What a request does not own, and what no row of it can see, may hold anything; so may other requests."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.reference import visible

POISON = (torch.nan, torch.inf, -torch.inf, 1e30)
CACHES = (["key_cache"], ["value_cache"], ["key_cache", "value_cache"])


def filled(batch, names, mask, value):
    """The batch with ``value`` in the masked slots ``[NB, BS]`` of the named caches."""
    place = mask[..., None, None]
    return replace(batch, **{n: getattr(batch, n).masked_fill(place, value) for n in names})


def owned_slots(batch):
    """Bool ``[NB, BS]``: slots of positions below ``seq_len`` of any request."""
    size = batch.key_cache.shape[1]
    owned = torch.zeros(batch.key_cache.shape[:2], dtype=torch.bool)
    for r, keys in enumerate(batch.keys):
        for p in range(len(keys)):
            owned[batch.block_table[r, p // size], p % size] = True
    return owned


@pytest.fixture(scope="module")
def unseen(seen, row_places):
    """``(batch, params) -> per request, the positions no row of it can see``."""

    def find(batch, params):
        free = [set(range(len(keys))) for keys in batch.keys]
        for _, r, q in row_places(batch):
            free[r] -= seen(params, q, len(batch.keys[r]))
        return free

    return find


@settings(max_examples=60)
@given(data=st.data())
def test_containment_slots_not_owned_change_no_bit(data, layers, batches, tiles, same_bits):
    """Containment: tails of last pages, unowned blocks, any table tail pointing at them; K, V or both."""
    params = data.draw(layers())
    batch, sizes = data.draw(batches(params, fitting=False)), data.draw(tiles)
    names, poison = data.draw(st.sampled_from(CACHES)), data.draw(st.sampled_from(POISON))
    free = ~owned_slots(batch)
    clean = filled(batch, CACHES[2], free, 0.0)
    table = clean.block_table.clone()
    table[(table < 0) | (table >= len(free))] = data.draw(st.integers(0, len(free) - 1))
    poisoned = filled(replace(clean, block_table=table), names, free, poison)
    same_bits(poisoned.attend(params, **sizes), clean.attend(params, **sizes))


@settings(max_examples=60)
@given(data=st.data())
def test_containment_keys_no_row_of_the_request_sees_change_no_bit(data, layers, batches, tiles, same_bits, unseen):
    """Before every window, in earlier chunks, behind every row; slot by slot, even in a block in use."""
    params = data.draw(layers())
    batch, sizes = data.draw(batches(params, shared_pages=st.just(0))), data.draw(tiles)
    size, mask = batch.key_cache.shape[1], torch.zeros(batch.key_cache.shape[:2], dtype=torch.bool)
    for r, positions in enumerate(unseen(batch, params)):
        for p in positions:
            mask[batch.block_table[r, p // size], p % size] = True
    poisoned = filled(batch, data.draw(st.sampled_from(CACHES)), mask, data.draw(st.sampled_from(POISON)))
    same_bits(poisoned.attend(params, **sizes), batch.attend(params, **sizes))


@settings(max_examples=40)
@given(data=st.data())
def test_containment_keys_a_mask_hides_from_all_rows_change_no_bit(data, layers, batches, tiles, same_bits):
    """Holes that a mask function cuts into the middle of what the layer would see."""
    params = data.draw(layers())
    batch, sizes = data.draw(batches(params, shared_pages=st.just(0))), data.draw(tiles)
    period, size = data.draw(st.integers(2, 6)), batch.key_cache.shape[1]
    hole = data.draw(st.integers(0, period - 1))
    mask = torch.zeros(batch.key_cache.shape[:2], dtype=torch.bool)
    for r, keys in enumerate(batch.keys):
        for p in range(hole, len(keys), period):
            mask[batch.block_table[r, p // size], p % size] = True

    def with_holes(request, q_pos, k_pos):
        return visible(params, q_pos, k_pos) & (k_pos % period != hole)

    poisoned = filled(batch, data.draw(st.sampled_from(CACHES)), mask, data.draw(st.sampled_from(POISON)))
    same_bits(*(x.attend(params, mask_fn=with_holes, **sizes) for x in (poisoned, batch)))


@settings(max_examples=60)
@given(data=st.data())
def test_containment_freed_blocks_may_belong_to_others(data, layers, batches, tiles, same_bits, unseen):
    """Blocks that lie wholly out of every row's sight are handed to others, one id even twice in one row."""
    params = data.draw(layers(window=data.draw(st.tuples(st.integers(0, 6), st.integers(-1, 3)))))
    batch = data.draw(batches(params, shared_pages=st.just(0), context_lens=st.integers(5, 20)))
    sizes, blocks = data.draw(tiles), len(batch.key_cache)
    size, table = batch.key_cache.shape[1], batch.block_table.clone()
    for r, positions in enumerate(unseen(batch, params)):
        for page in range(-(-len(batch.keys[r]) // size)):
            if set(range(page * size, min((page + 1) * size, len(batch.keys[r])))) <= positions:
                table[r, page] = data.draw(st.integers(0, blocks - 1))
    same_bits(replace(batch, block_table=table).attend(params, **sizes), batch.attend(params, **sizes))


@settings(max_examples=40)
@given(data=st.data())
def test_containment_nothing_is_modified(data, layers, batches, tiles, same_bits):
    """No argument changes, NaN patterns of the pool included."""
    params = data.draw(layers())
    batch = data.draw(batches(params, fitting=False))
    tensors = [x for x in vars(batch).values() if isinstance(x, torch.Tensor)]
    before = [x.clone() for x in tensors]
    batch.attend(params, **data.draw(tiles))
    same_bits(tensors, before)


@settings(max_examples=40)
@given(data=st.data())
def test_containment_the_tail_of_a_table_and_blocks_behind_change_no_bit(data, layers, batches, tiles, same_bits):
    """Columns past the last page of each row hold anything; a larger pool holds garbage."""
    params = data.draw(layers())
    batch, sizes = data.draw(batches(params, fitting=False)), data.draw(tiles)
    expected = batch.attend(params, **sizes)
    columns = batch.block_table.new_zeros(len(batch.keys), data.draw(st.integers(0, 5)))
    table = torch.cat([batch.block_table, columns], dim=1)
    for r, keys in enumerate(batch.keys):
        pages = -(-len(keys) // batch.key_cache.shape[1])
        table[r, pages:] = data.draw(st.integers(-3, len(batch.key_cache) + 3) | st.just(2**31 - 1))
    spare = data.draw(st.integers(1, 20))
    caches = [torch.cat([x, x.new_full((spare, *x.shape[1:]), 1e30)]) for x in (batch.key_cache, batch.value_cache)]
    index = data.draw(st.sampled_from((torch.int32, torch.int64)))
    slack = replace(batch, block_table=table.to(index), key_cache=caches[0], value_cache=caches[1])
    same_bits(slack.attend(params, **sizes), expected)


@settings(max_examples=40)
@given(data=st.data())
def test_composition_any_requests_in_any_order_give_their_rows(data, layers, batches, tiles, same_bits):
    """Alone, permuted, without some of the others, or twice in the batch (all blocks shared)."""
    params = data.draw(layers())
    batch, sizes = data.draw(batches(params, fitting=False)), data.draw(tiles)
    chosen = data.draw(st.lists(st.integers(0, len(batch.keys) - 1), min_size=1, max_size=5))
    out, lse = batch.attend(params, **sizes)
    rows = [row for r in chosen for row in range(batch.rows(r).start, batch.rows(r).stop)]
    same_bits(batch.only(chosen).attend(params, **sizes), (out[rows], lse[rows]))


@settings(max_examples=40)
@given(data=st.data())
def test_requests_of_no_rows_leave_the_others_alone(data, layers, batches, same_bits):
    """Anywhere in the batch, whatever their length and table row hold."""
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
