"""Attention over the micro-batches that a metadata utility makes of a batch."""

from itertools import pairwise

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from attncheck.reference import (
    CommonAttentionMetadata,
    UBatchSlice,
    compute_slot_mapping,
    paged_attention,
    reshape_and_cache,
    split_attn_metadata,
)


def metadata_of(batch):
    """Rows of no request are padding tokens, their slot is -1."""
    starts, lens = batch.query_start_loc.int(), batch.seq_lens.int()
    query_lens = starts.diff()
    requests = torch.arange(len(lens)).repeat_interleave(query_lens)
    positions = torch.arange(len(requests)) - starts[requests] + (lens - query_lens)[requests]
    slots = torch.full((len(batch.query),), -1, dtype=torch.int64)
    slots[: len(requests)] = compute_slot_mapping(positions, requests, batch.block_table, batch.key_cache.shape[1])
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts.clone(),
        seq_lens=lens,
        seq_lens_cpu=lens.clone(),
        num_computed_tokens_cpu=lens - query_lens,
        num_reqs=len(lens),
        num_actual_tokens=len(batch.query),
        max_query_len=int(query_lens.max()),
        max_seq_len=int(lens.max()),
        block_table_tensor=batch.block_table,
        slot_mapping=slots,
    )


def slices_of(batch, cuts):
    """The rows of a batch cut at these tokens; padding goes with the last part."""
    starts = batch.query_start_loc.tolist()
    edges = [0, *sorted(cuts), len(batch.query)]
    slices = []
    for begin, end in pairwise(edges):
        first = max(r for r in range(len(starts) - 1) if starts[r] <= begin)
        last = len(starts) - 1 if end == edges[-1] else min(r for r, s in enumerate(starts) if s >= end)
        slices.append(UBatchSlice(slice(first, last), slice(begin, end)))
    return slices


@settings(max_examples=40)
@given(data=st.data())
def test_rows_of_micro_batches_are_the_rows_of_the_whole(data, layers, batches, tiles, same_state):
    """Each part writes its own K/V to its slots, then reads; what later parts write is still NaN.

    Cuts at requests and inside them, a request cut twice, parts of very unequal size.
    """
    params = data.draw(layers(causal=True))
    batch = data.draw(batches(params, shared_pages=st.just(0)))
    rows = int(batch.query_start_loc[-1])
    assume(rows > 0)
    cuts = data.draw(st.lists(st.integers(1, rows - 1), unique=True, max_size=4)) if rows > 1 else []
    metadata, slices = metadata_of(batch), slices_of(batch, cuts)
    new = []
    for tokens, cache in ((batch.keys, batch.key_cache), (batch.values, batch.value_cache)):
        new.append(cache.new_full((len(batch.query), *cache.shape[2:]), torch.nan))
        for row, r, q in batch.places():
            new[-1][row] = tokens[r][q]
    caches = [batch.key_cache.clone(), batch.value_cache.clone()]
    live = metadata.slot_mapping[metadata.slot_mapping >= 0]
    for cache in caches:
        cache[live // cache.shape[1], live % cache.shape[1]] = torch.nan
    states = []
    for part, cut in zip(split_attn_metadata(slices, metadata), slices, strict=True):
        reshape_and_cache(new[0][cut.token_slice], new[1][cut.token_slice], *caches, part.slot_mapping)
        tables = part.block_table_tensor, part.seq_lens, part.query_start_loc
        states.append(paged_attention(batch.query[cut.token_slice], *caches, *tables, params, **data.draw(tiles)))
    whole = [torch.cat(x) for x in zip(*states, strict=True)]
    same_state(whole, batch.attend(params), tolerance=1e-10)
