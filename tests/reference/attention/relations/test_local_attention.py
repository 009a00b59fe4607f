"""Local attention as causal attention over virtual requests, as the metadata utility makes them."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.reference import make_local_attention_virtual_batches


@settings(max_examples=60)
@given(data=st.data())
def test_local_attention_is_causal_attention_on_the_virtual_batch(
    data, layers, batches, tiles, metadata_of, attend_as, agree
):
    """Chunks of one page or several, contexts of any residue, padding requests; window, bias, cap, sinks kept."""
    size = data.draw(st.integers(1, 4))
    chunk = size * data.draw(st.integers(1, 3))
    params = data.draw(layers(causal=True, attn_chunk_size=chunk, attn_chunk_lookback=0))
    batch = data.draw(batches(params, block_size=size))
    virtual = make_local_attention_virtual_batches(chunk, metadata_of(batch), size)
    plain = replace(params, attn_chunk_size=None)
    caches = batch.key_cache, batch.value_cache
    agree(attend_as(virtual, batch.query, *caches, plain, **data.draw(tiles)), batch.attend(params))


@settings(max_examples=40)
@given(data=st.data())
def test_a_chunk_over_everything_keeps_the_batch(data, layers, batches, metadata_of, attend_as, same_bits):
    """C >= max seq_len: one virtual request each, of the same lengths."""
    params = data.draw(layers(causal=True, attn_chunk_size=None))
    batch = data.draw(batches(params))
    metadata, size = metadata_of(batch), batch.key_cache.shape[1]
    virtual = make_local_attention_virtual_batches(24 * size, metadata, size)
    assert virtual.query_start_loc.tolist() == metadata.query_start_loc.tolist()
    assert virtual.seq_lens.tolist() == metadata.seq_lens.tolist()
    state = attend_as(virtual, batch.query, batch.key_cache, batch.value_cache, params)
    same_bits(state, batch.attend(params))


@settings(max_examples=60)
@given(data=st.data())
def test_virtual_requests_cover_each_query_once_and_the_mask_exactly(data, layers, batches, metadata_of, row_places):
    """Row by row, the slots its virtual request shows it are those of its chunk up to itself, in order."""
    size = data.draw(st.integers(1, 4))
    chunk = size * data.draw(st.integers(1, 3))
    batch = data.draw(batches(data.draw(layers()), block_size=size))
    virtual = make_local_attention_virtual_batches(chunk, metadata_of(batch), size)
    starts, lens = virtual.query_start_loc.tolist(), virtual.seq_lens.tolist()
    shown = []
    for v, length in enumerate(lens):
        first = length - (starts[v + 1] - starts[v])
        assert int(virtual.num_computed_tokens_cpu[v]) == first
        for last in range(first, length):
            pages = virtual.block_table_tensor[v].tolist()
            shown.append([(pages[j // size], j % size) for j in range(last + 1)])
    want = [
        [(int(batch.block_table[r, j // size]), j % size) for j in range(q // chunk * chunk, q + 1)]
        for _, r, q in row_places(batch)
    ]
    assert shown == want
