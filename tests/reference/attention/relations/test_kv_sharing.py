"""Layers that share another layer's keys and values, and fast prefill over them."""

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from attncheck.reference import make_kv_sharing_fast_prefill_common_attn_metadata, reshape_and_cache


@settings(max_examples=40)
@given(data=st.data())
def test_a_sharing_layer_leaves_the_cache_and_reads_the_targets(data, layers, batches, tiles, same_bits):
    """Q of its own (other heads, window, cap), the target's cache, table and lengths; every byte stays.

    The answer is that of a layer which wrote the same K/V into a cache of its own. Without K/V to write, no slot of
    a mapping may be live.
    """
    target = data.draw(layers())
    batch = data.draw(batches(target, fitting=False))
    same_kv = {"num_kv_heads": target.num_kv_heads, "head_size": target.head_size, "head_size_v": target.head_size_v}
    sharing = data.draw(layers(**same_kv))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    shape = (len(batch.query), sharing.num_heads, sharing.head_size)
    queries = replace(batch, query=torch.randn(shape, dtype=torch.float64, generator=generator))
    own = replace(queries, key_cache=batch.key_cache.clone(), value_cache=batch.value_cache.clone())
    before, sizes = [own.key_cache.clone(), own.value_cache.clone()], data.draw(tiles)
    nothing = [x.new_empty(0, *x.shape[2:]) for x in before]
    reshape_and_cache(*nothing, queries.key_cache, queries.value_cache, torch.zeros(0, dtype=torch.int64))
    same_bits(queries.attend(sharing, **sizes), own.attend(sharing, **sizes))
    same_bits([queries.key_cache, queries.value_cache], before)


@pytest.fixture(scope="module")
def armed(metadata_of):
    """``(data, batch) -> (metadata, rows)``: the last few rows of each request want logits; padding behind."""

    def arm(data, batch):
        rows = []
        for r in range(len(batch.keys)):
            span = batch.rows(r)
            wanted = data.draw(st.integers(0, span.stop - span.start))
            rows += range(span.stop - wanted, span.stop)
        padding = data.draw(st.lists(st.sampled_from([0, *rows[-1:], 10**6]), max_size=3))
        logits = torch.tensor([*rows, *padding], dtype=torch.int64)
        return metadata_of(batch, logits_indices_padded=logits, num_logits_indices=len(rows)), rows

    return arm


@settings(max_examples=60)
@given(data=st.data())
def test_fast_rows_are_those_rows_of_the_full_call(data, layers, batches, armed, attend_as, tiles, agree, same_bits):
    """Only rows that yield logits are computed; positions count from the end; padded indices are ignored.

    Requests without such rows get none; the cache stays.
    """
    params = data.draw(layers(causal=True))
    batch = data.draw(batches(params))
    metadata, rows = armed(data, batch)
    assume(metadata.max_query_len > 1)
    before = [batch.key_cache.clone(), batch.value_cache.clone()]
    fast = make_kv_sharing_fast_prefill_common_attn_metadata(metadata)
    assert fast.num_actual_tokens == len(rows)
    state = attend_as(fast, batch.query[rows], batch.key_cache, batch.value_cache, params, **data.draw(tiles))
    out, lse = batch.attend(params)
    agree(state, (out[rows], lse[rows]))
    same_bits([batch.key_cache, batch.value_cache], before)


@settings(max_examples=40)
@given(data=st.data())
def test_fast_prefill_changes_neither_keys_nor_a_pure_decode(data, layers, batches, armed):
    """Lengths and tables are the batch's own; where every request has one row at most, so is the whole batch."""
    params = data.draw(layers(causal=True))
    batch = data.draw(batches(params, query_lens=st.integers(0, data.draw(st.integers(1, 4)))))
    metadata, rows = armed(data, batch)
    assume(metadata.max_query_len > 0)
    fast = make_kv_sharing_fast_prefill_common_attn_metadata(metadata)
    assert torch.equal(fast.seq_lens, metadata.seq_lens)
    assert torch.equal(fast.block_table_tensor, metadata.block_table_tensor)
    if metadata.max_query_len == 1:
        assert fast is metadata
    else:
        assert int(fast.query_start_loc[-1]) == len(rows)
        assert torch.equal(fast.num_computed_tokens_cpu, metadata.seq_lens_cpu - fast.query_start_loc_cpu.diff())
