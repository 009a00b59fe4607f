"""Decoding, prefilling in any chunks and prefilling at once are one computation, with any modifiers."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.reference import compute_slot_mapping, reshape_and_cache


@settings(max_examples=40)
@given(data=st.data())
def test_steps_each_decode_step_is_a_row_of_the_prefill(data, layers, batches, rows_of, agree):
    """Steps: decode at length n equals row n-1 of a longer prefill; later tokens need not exist yet."""
    params = data.draw(layers(causal=True))
    batch = data.draw(batches(params, requests=(1, 3), query_lens=st.integers(1, 9)))
    lens = [batch.rows(r).stop - batch.rows(r).start for r in range(len(batch.keys))]
    chosen = [data.draw(st.integers(0, n - 1)) for n in lens]
    step, rows = rows_of(batch, [(i, i + 1) for i in chosen])
    out, lse = batch.attend(params)
    agree(step.attend(params), (out[rows], lse[rows]))


@settings(max_examples=40)
@given(data=st.data())
def test_steps_a_served_batch_equals_prefill_at_once(data, layers, batches, rows_of, tiles, agree):
    """Steps: an empty cache is written and read step by step, each request in chunks of its own.

    What a step has not written yet is NaN, so a step that reads ahead, or misses its own keys, shows.
    """
    params = data.draw(layers(causal=True))
    batch = data.draw(
        batches(
            params, query_lens=st.integers(1, 12), context_lens=st.just(0), shared_pages=st.just(0), requests=(1, 3)
        )
    )
    caches = torch.full_like(batch.key_cache, torch.nan), torch.full_like(batch.value_cache, torch.nan)
    served = replace(batch, key_cache=caches[0], value_cache=caches[1])
    out, lse = batch.attend(params)
    done = [0] * len(batch.keys)
    while any(begin < len(k) for begin, k in zip(done, batch.keys, strict=True)):
        ends = [data.draw(st.integers(begin, len(k))) for begin, k in zip(done, batch.keys, strict=True)]
        if ends == done:  # a step of no rows would leave the loop where it is
            ends = [len(k) for k in batch.keys]
        spans = list(zip(done, ends, strict=True))
        tokens = torch.tensor([(r, p) for r, (a, b) in enumerate(spans) for p in range(a, b)])
        new = [torch.cat([x[r][a:b] for r, (a, b) in enumerate(spans)]) for x in (batch.keys, batch.values)]
        slots = compute_slot_mapping(tokens[:, 1], tokens[:, 0], batch.block_table, batch.key_cache.shape[1])
        reshape_and_cache(*new, *caches, slots)
        step, rows = rows_of(served, spans)
        agree(step.attend(params, **data.draw(tiles)), (out[rows], lse[rows]))
        done = ends


@settings(max_examples=40)
@given(data=st.data())
def test_steps_without_a_mask_an_earlier_step_is_shorter_sight(data, layers, batches, rows_of, agree):
    """Steps without the causal rule: a step sees the keys there are, as the whole call does over that key range."""
    params = data.draw(layers(causal=False))
    batch = data.draw(batches(params, requests=(1, 1), query_lens=st.integers(1, 9)))
    rows = len(batch.query[batch.rows(0)])
    begin = data.draw(st.integers(0, rows - 1))
    end = data.draw(st.integers(begin + 1, rows))
    step, index = rows_of(batch, [(begin, end)])
    out, lse = batch.attend(params, kv_range=(0, int(step.seq_lens[0])))
    agree(step.attend(params), (out[index], lse[index]))


@settings(max_examples=40)
@given(data=st.data())
def test_tiles_results_do_not_hang_on_them(data, layers, batches, tiles, agree):
    """The tile sizes are a matter of speed: any two pairs agree."""
    params = data.draw(layers())
    batch = data.draw(batches(params, fitting=False))
    agree(batch.attend(params, **data.draw(tiles)), batch.attend(params, **data.draw(tiles)))
