"""Encoder layers over packed sequences, and cross attention over cached encoder rows."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.reference import compute_slot_mapping, reshape_and_cache, varlen_attention, window_pair

NO_MASK = {"causal": False, "window": (-1, -1), "attn_chunk_size": None}
PLACELESS = {**NO_MASK, "alibi_slopes": None}


def offsets(lens):
    return torch.tensor([0, *lens]).cumsum(0)


@pytest.fixture(scope="module")
def encoded():
    """``(data, params, lens) -> (query, key, value)`` of packed sequences of as many queries as keys."""

    def draw(data, params, lens):
        generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
        shapes = (
            (params.num_heads, params.head_size),
            (params.num_kv_heads, params.head_size),
            (params.num_kv_heads, params.value_head_size),
        )
        return [torch.randn(sum(lens), *shape, dtype=torch.float64, generator=generator) for shape in shapes]

    return draw


lengths = st.lists(st.integers(0, 12), min_size=1, max_size=4)


@settings(max_examples=40)
@given(data=st.data(), lens=lengths)
def test_encoder_permuting_tokens_permutes_rows(data, lens, layers, encoded, tiles, agree):
    """Without window and bias the tokens of a sequence have no order."""
    params = data.draw(layers(**PLACELESS))
    tokens, ends = encoded(data, params, lens), offsets(lens)
    order = list(range(sum(lens)))
    for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        order[start:end] = data.draw(st.permutations(order[start:end]))
    out, lse = varlen_attention(*tokens, ends, ends, params)
    moved = varlen_attention(*(x[order] for x in tokens), ends, ends, params, **data.draw(tiles))
    agree(moved, (out[order], lse[order]))


@settings(max_examples=40)
@given(data=st.data(), lens=lengths)
def test_encoder_any_sequences_in_any_order_give_their_rows(data, lens, layers, encoded, tiles, same_bits):
    """Each sequence alone equals itself in the batch; nothing leaks between neighbours."""
    params = data.draw(layers(causal=False))
    tokens, ends, sizes = encoded(data, params, lens), offsets(lens), data.draw(tiles)
    chosen = data.draw(st.lists(st.integers(0, len(lens) - 1), min_size=1, max_size=4))
    rows = [row for r in chosen for row in range(int(ends[r]), int(ends[r + 1]))]
    out, lse = varlen_attention(*tokens, ends, ends, params, **sizes)
    fewer = offsets([lens[r] for r in chosen])
    part = varlen_attention(*(x[rows] for x in tokens), fewer, fewer, params, **sizes)
    same_bits(part, (out[rows], lse[rows]))


@settings(max_examples=40)
@given(data=st.data(), lens=lengths)
def test_encoder_reversed_in_time_under_a_mirrored_window(data, lens, layers, encoded, tiles, agree):
    """``(W-1, W-1)`` looks both ways alike: reversing every sequence reverses its rows. W over all is none."""
    width = data.draw(st.integers(1, 8))
    params = data.draw(layers(**{**PLACELESS, "window": window_pair(width, bidirectional=True)}))
    tokens, ends = encoded(data, params, lens), offsets(lens)
    out, lse = varlen_attention(*tokens, ends, ends, params)
    back = [row for s, e in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True) for row in range(e - 1, s - 1, -1)]
    agree(varlen_attention(*(x[back] for x in tokens), ends, ends, params, **data.draw(tiles)), (out[back], lse[back]))
    full = replace(params, window=(-1, -1))
    over_all = replace(params, window=window_pair(max([1, *lens]), bidirectional=True))
    agree(varlen_attention(*tokens, ends, ends, over_all), varlen_attention(*tokens, ends, ends, full))


@settings(max_examples=40)
@given(data=st.data())
def test_unequal_lengths_align_at_the_end(data, layers, batches, encoded, tiles, agree):
    """The last Lq query rows over Lk keys equal those rows of a call with all Lk query rows."""
    params = data.draw(layers())
    lens = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    tokens, ends = encoded(data, params, lens), offsets(lens)
    tails = [data.draw(st.integers(0, n)) for n in lens]
    rows = [row for end, n in zip(ends[1:].tolist(), tails, strict=True) for row in range(end - n, end)]
    out, lse = varlen_attention(*tokens, ends, ends, params)
    fewer = varlen_attention(tokens[0][rows], *tokens[1:], offsets(tails), ends, params, **data.draw(tiles))
    agree(fewer, (out[rows], lse[rows]))


@settings(max_examples=40)
@given(data=st.data())
def test_cross_rows_do_not_depend_on_their_number(data, layers, batches, tiles, agree):
    """Cross: decoding equals the rows of a longer decoder prefill; decoder lengths and order do not matter."""
    params = data.draw(layers(**PLACELESS))
    batch = data.draw(batches(params, fitting=False))
    chosen = [
        data.draw(st.lists(st.integers(span.start, span.stop - 1), max_size=5)) if span.stop > span.start else []
        for span in (batch.rows(r) for r in range(len(batch.keys)))
    ]
    rows = [row for own in chosen for row in own]
    other = replace(batch, query=batch.query[rows], query_start_loc=offsets([len(own) for own in chosen]))
    out, lse = batch.attend(params)
    agree(other.attend(params, **data.draw(tiles)), (out[rows], lse[rows]))


@settings(max_examples=40)
@given(data=st.data())
def test_cross_without_encoder_rows_gives_zeros(data, layers, batches, same_bits, requests_rows):
    """Cross: ``encoder_len = 0`` gives 0 (and the sink as lse), and nothing to the neighbours."""
    params = data.draw(layers(**PLACELESS))
    batch = data.draw(batches(params, requests=(2, 4), query_lens=st.integers(1, 5)))
    r = data.draw(st.integers(0, len(batch.keys) - 1))
    lens = batch.seq_lens.clone()
    lens[r] = 0
    out, lse = replace(batch, seq_lens=lens).attend(params)
    rows = batch.rows(r)
    assert (out[rows] == 0).all()
    sinks = torch.tensor(params.sinks or (-torch.inf,) * params.num_heads, dtype=torch.float64)
    assert torch.equal(lse[rows], sinks.expand_as(lse[rows]))
    others = requests_rows(batch, [i for i in range(len(batch.keys)) if i != r])
    whole = batch.attend(params)
    same_bits((out[others], lse[others]), [x[others] for x in whole])


@settings(max_examples=40)
@given(data=st.data())
def test_cross_encoder_rows_are_written_once(data, layers, batches, agree, same_bits, requests_rows):
    """Cross: requests join one after the other; only a first step brings K/V rows, later ones write nothing.

    Key rows are fewer or more than query rows, and lengths are the encoder's alone.
    """
    params = data.draw(layers(**PLACELESS))
    batch = data.draw(batches(params, requests=(1, 3), fitting=False, shared_pages=st.just(0)))
    caches = torch.full_like(batch.key_cache, torch.nan), torch.full_like(batch.value_cache, torch.nan)
    out, lse = batch.attend(params)
    for step in range(len(batch.keys) + 1):
        new = [step] if step < len(batch.keys) else []
        tokens = torch.tensor([(r, p) for r in new for p in range(len(batch.keys[r]))], dtype=torch.int64).view(-1, 2)
        slots = compute_slot_mapping(tokens[:, 1], tokens[:, 0], batch.block_table, batch.key_cache.shape[1])
        rows_kv = [torch.cat([*(x[r] for r in new), x[0][:0]]) for x in (batch.keys, batch.values)]
        before = [cache.clone() for cache in caches]
        reshape_and_cache(*rows_kv, *caches, slots)
        if not new:
            same_bits(caches, before)
        running = list(range(min(step + 1, len(batch.keys))))
        now = replace(batch.only(running), key_cache=caches[0], value_cache=caches[1])
        rows = requests_rows(batch, running)
        agree(now.attend(params), (out[rows], lse[rows]))
