"""Cutting a batch between requests or through them, as the metadata utility cuts it."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from attncheck.reference import UBatchSlice, reshape_and_cache, split_attn_metadata


@pytest.fixture(scope="module")
def cut_up(metadata_of):
    """``(batch, cuts) -> (metadata, slices)``: the rows cut at these tokens; padding goes with the last part."""

    def cut(batch, cuts):
        starts = batch.query_start_loc.tolist()
        edges = [0, *sorted(cuts), len(batch.query)]
        slices = []
        for begin, end in pairwise(edges):
            first = max(r for r in range(len(starts) - 1) if starts[r] <= begin)
            last = len(starts) - 1 if end == edges[-1] else min(r for r, s in enumerate(starts) if s >= end)
            slices.append(UBatchSlice(slice(first, last), slice(begin, end)))
        return metadata_of(batch, causal=True), slices

    return cut


def draw_cuts(data, points):
    """Distinct tokens to cut at, out of these."""
    return data.draw(st.lists(st.sampled_from(points), unique=True, max_size=4)) if points else []


@settings(max_examples=60)
@given(data=st.data())
def test_rows_of_the_parts_are_the_rows_of_the_whole(
    data, layers, batches, cut_up, attend_as, tiles, agree, row_places
):
    """Each part writes its own K/V to its slots, then reads; what later parts write is still NaN.

    Cuts at requests and inside them, a request cut twice, parts of very unequal size.
    """
    params = data.draw(layers(causal=True))
    batch = data.draw(batches(params, query_lens=st.integers(0, 7), shared_pages=st.just(0)))
    rows = int(batch.query_start_loc[-1])
    assume(rows > 0)
    metadata, slices = cut_up(batch, draw_cuts(data, range(1, rows)))
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


@settings(max_examples=40)
@given(data=st.data())
def test_without_the_causal_rule_requests_stay_whole(data, layers, batches, cut_up, attend_as, same_bits):
    """Cuts between requests keep any layer's rows to the bit, and the flag of the batch."""
    params = data.draw(layers())
    batch = data.draw(batches(params))
    starts = batch.query_start_loc.tolist()
    assume(starts[-1] > 0)
    metadata, slices = cut_up(batch, draw_cuts(data, sorted(set(starts) - {0, starts[-1]})))
    metadata = replace(metadata, causal=params.causal)
    states = []
    for part, cut in zip(split_attn_metadata(slices, metadata), slices, strict=True):
        assert part.causal == params.causal
        states.append(attend_as(part, batch.query[cut.token_slice], batch.key_cache, batch.value_cache, params))
    same_bits([torch.cat(x) for x in zip(*states, strict=True)], batch.attend(params))


@settings(max_examples=40)
@given(data=st.data())
def test_each_pair_of_query_and_key_exactly_once(data, layers, batches, cut_up, row_places):
    """Counted from the parts' own numbers, tables included; lengths, bounds and computed counts fit each other."""
    batch = data.draw(batches(data.draw(layers()), query_lens=st.integers(0, 7)))
    rows, size = int(batch.query_start_loc[-1]), batch.key_cache.shape[1]
    assume(rows > 0)
    metadata, slices = cut_up(batch, draw_cuts(data, range(1, rows)))
    pairs = Counter()
    for part, cut in zip(split_attn_metadata(slices, metadata), slices, strict=True):
        starts, lens = part.query_start_loc.tolist(), part.seq_lens.tolist()
        query_lens = [b - a for a, b in pairwise(starts)]
        assert part.num_computed_tokens_cpu.tolist() == [s - q for s, q in zip(lens, query_lens, strict=True)]
        assert (part.max_query_len, part.max_seq_len) == (max(query_lens), max(lens))
        for i, (query_len, length) in enumerate(zip(query_lens, lens, strict=True)):
            for k in range(query_len):
                table = part.block_table_tensor[i].tolist()
                token = cut.token_slice.start + starts[i] + k
                pairs.update((token, j, table[j // size]) for j in range(length - query_len + k + 1))
    want = {(row, j, int(batch.block_table[r, j // size])) for row, r, q in row_places(batch) for j in range(q + 1)}
    assert pairs == Counter(want)
