"""What a request does not own, and what no row of it can see, may hold anything; so may other requests."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.reference import visible

POISON = st.sampled_from((torch.nan, torch.inf, -torch.inf, 1e30))
CACHES = st.sampled_from((["key_cache"], ["value_cache"], ["key_cache", "value_cache"]))


def filled(batch, names, mask, value):
    """The batch with ``value`` in the masked slots ``[NB, BS]`` of the named caches."""
    place = mask[..., None, None]
    return replace(batch, **{n: getattr(batch, n).masked_fill(place, value) for n in names})


def slots_of(batch, positions):
    """Bool ``[NB, BS]``: the slots of these positions, given for each request."""
    size = batch.key_cache.shape[1]
    slots = torch.zeros(batch.key_cache.shape[:2], dtype=torch.bool)
    for r, own in enumerate(positions):
        for p in own:
            slots[batch.block_table[r, p // size], p % size] = True
    return slots


@settings(max_examples=80)
@given(data=st.data(), names=CACHES, poison=POISON, period=st.none() | st.integers(2, 6))
def test_containment_keys_no_row_of_the_request_sees_change_no_bit(
    data, names, poison, period, layers, batches, tiles, same_bits, seen
):
    """Before every window, in earlier chunks, behind every row; holes that a mask function cuts (every ``period``).

    Blocks that lie wholly out of sight are handed to others, one id even twice in one row.
    """
    params, sizes = data.draw(layers()), data.draw(tiles)
    batch = data.draw(batches(params, shared_pages=st.just(0)))
    options = {}
    if period is not None:
        options["mask_fn"] = lambda _, q_pos, k_pos: visible(params, q_pos, k_pos) & (k_pos % period != 0)
    unseen = [set(range(len(keys))) for keys in batch.keys]
    for _, r, q in batch.places():
        unseen[r] -= {j for j in seen(params, q, len(batch.keys[r])) if period is None or j % period}
    poisoned = filled(batch, names, slots_of(batch, unseen), poison)
    size, table = batch.key_cache.shape[1], batch.block_table.clone()
    for r, keys in enumerate(batch.keys):
        for page in range(-(-len(keys) // size)):
            if set(range(page * size, min((page + 1) * size, len(keys)))) <= unseen[r]:
                table[r, page] = data.draw(st.integers(0, len(batch.key_cache) - 1))
    poisoned = replace(poisoned, block_table=table)
    same_bits(poisoned.attend(params, **options, **sizes), batch.attend(params, **options, **sizes))


@settings(max_examples=50)
@given(data=st.data(), stale=st.sampled_from((0, 1, -1, 2**31 - 1)))
def test_composition_any_requests_in_any_order_give_their_rows(data, stale, layers, batches, tiles, same_bits):
    """Alone, permuted, without some, or twice; a request of no rows among them, whatever its length and table hold."""
    params, sizes = data.draw(layers()), data.draw(tiles)
    batch = data.draw(batches(params, fitting=False))
    chosen = data.draw(st.lists(st.integers(0, len(batch.keys) - 1), min_size=1, max_size=5))
    out, lse = batch.attend(params, **sizes)
    rows = [row for r in chosen for row in range(batch.rows(r).start, batch.rows(r).stop)]
    some, at = batch.only(chosen), data.draw(st.integers(0, len(chosen)))
    starts, lens, table = some.query_start_loc.tolist(), some.seq_lens.tolist(), some.block_table
    padded = replace(
        some,
        query_start_loc=torch.tensor([*starts[: at + 1], *starts[at:]]),
        seq_lens=torch.tensor([*lens[:at], stale, *lens[at:]]),
        block_table=torch.cat([table[:at], torch.full_like(table[:1], -9), table[at:]]),
    )
    same_bits(padded.attend(params, **sizes), (out[rows], lse[rows]))
