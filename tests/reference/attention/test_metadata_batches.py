"""Attention as a metadata utility describes a batch: local attention, fast prefill, micro-batches."""

from dataclasses import replace
from itertools import pairwise

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from attncheck.reference import (
    CommonAttentionMetadata,
    UBatchSlice,
    compute_slot_mapping,
    make_kv_sharing_fast_prefill_common_attn_metadata,
    make_local_attention_virtual_batches,
    paged_attention,
    reshape_and_cache,
    split_attn_metadata,
)


def metadata_of(batch, **fields):
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
        **fields,
    )


def attend_as(metadata, query, key_cache, value_cache, params, **sizes):
    """Attention as the metadata describes it."""
    tables = metadata.block_table_tensor, metadata.seq_lens, metadata.query_start_loc
    return paged_attention(query, key_cache, value_cache, *tables, params, **sizes)


@settings(max_examples=60)
@given(data=st.data())
def test_local_attention_is_causal_attention_on_the_virtual_batch(data, layers, batches, tiles, agree):
    """Chunks of one page or several, contexts of any residue, padding requests; window, bias, cap, sinks kept."""
    size = data.draw(st.integers(1, 4))
    chunk = size * data.draw(st.integers(1, 3))
    params = data.draw(layers(causal=True, attn_chunk_size=chunk, attn_chunk_lookback=0))
    batch = data.draw(batches(params, block_size=size))
    virtual = make_local_attention_virtual_batches(chunk, metadata_of(batch), size)
    plain = replace(params, attn_chunk_size=None)
    caches = batch.key_cache, batch.value_cache
    agree(attend_as(virtual, batch.query, *caches, plain, **data.draw(tiles)), batch.attend(params))


@settings(max_examples=60)
@given(data=st.data())
def test_fast_rows_are_those_rows_of_the_full_call(data, layers, batches, tiles, agree):
    """Only the last rows of each request, which yield logits, are computed; padded indices are ignored."""
    params = data.draw(layers(causal=True))
    batch = data.draw(batches(params))
    rows = []
    for r in range(len(batch.keys)):
        span = batch.rows(r)
        wanted = data.draw(st.integers(0, span.stop - span.start))
        rows += range(span.stop - wanted, span.stop)
    padding = data.draw(st.lists(st.sampled_from([0, *rows[-1:], 10**6]), max_size=3))
    logits = torch.tensor([*rows, *padding], dtype=torch.int64)
    metadata = metadata_of(batch, logits_indices_padded=logits, num_logits_indices=len(rows))
    assume(metadata.max_query_len > 1)
    fast = make_kv_sharing_fast_prefill_common_attn_metadata(metadata)
    assert fast.num_actual_tokens == len(rows)
    state = attend_as(fast, batch.query[rows], batch.key_cache, batch.value_cache, params, **data.draw(tiles))
    out, lse = batch.attend(params)
    agree(state, (out[rows], lse[rows]))


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


@settings(max_examples=60)
@given(data=st.data())
def test_rows_of_micro_batches_are_the_rows_of_the_whole(data, layers, batches, tiles, agree, row_places):
    """Each part writes its own K/V to its slots, then reads; what later parts write is still NaN.

    Cuts at requests and inside them, a request cut twice, parts of very unequal size.
    """
    params = data.draw(layers(causal=True))
    batch = data.draw(batches(params, query_lens=st.integers(0, 7), shared_pages=st.just(0)))
    rows = int(batch.query_start_loc[-1])
    assume(rows > 0)
    cuts = data.draw(st.lists(st.integers(1, rows - 1), unique=True, max_size=4)) if rows > 1 else []
    metadata, slices = metadata_of(batch, causal=True), slices_of(batch, cuts)
    new = []
    for tokens, cache in ((batch.keys, batch.key_cache), (batch.values, batch.value_cache)):
        new.append(cache.new_full((len(batch.query), *cache.shape[2:]), torch.nan))
        for row, r, q in row_places(batch):
            new[-1][row] = tokens[r][q]
    caches = [batch.key_cache.clone(), batch.value_cache.clone()]
    live = metadata.slot_mapping[metadata.slot_mapping >= 0]
    for cache in caches:
        cache[live // cache.shape[1], live % cache.shape[1]] = torch.nan
    states = []
    for part, cut in zip(split_attn_metadata(slices, metadata), slices, strict=True):
        reshape_and_cache(new[0][cut.token_slice], new[1][cut.token_slice], *caches, part.slot_mapping)
        states.append(attend_as(part, batch.query[cut.token_slice], *caches, params, **data.draw(tiles)))
    agree([torch.cat(x) for x in zip(*states, strict=True)], batch.attend(params))
