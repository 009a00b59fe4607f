"""One rank's share of the keys, and all shares together."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.errors import ReferenceArgumentError
from attncheck.reference import (
    AttentionParams,
    dcp_rank_attention,
    merge_many,
)

SLOPES, SINKS = (0.5, 0.06, 0.25, 0.125), (1.0, 0.5, -1.0, 2.0)
PLAIN = AttentionParams(4, 2, 8, head_size_v=6)
LAYERS = {
    "causal": PLAIN,
    "all": replace(PLAIN, causal=False),
    "window": replace(PLAIN, window=(4, 0)),
    "both ways": replace(PLAIN, causal=False, window=(3, 1)),
    "chunks": replace(PLAIN, attn_chunk_size=5, attn_chunk_lookback=1),
    "modified": replace(PLAIN, logits_soft_cap=2.0, alibi_slopes=SLOPES, sinks=SINKS),
    "sqrt": replace(PLAIN, alibi_slopes=SLOPES, alibi_sqrt=True),
}


def share(batch, size, rank, interleave, block_size, seed=0):
    """(key_cache, value_cache, block_table) of a rank, written position by position; NaN and nonsense elsewhere."""
    pages = max(-(-len(k) // block_size) for k in batch.keys) + 1
    free = torch.randperm(pages * len(batch.keys), generator=torch.Generator().manual_seed(seed)).tolist()
    caches = [
        rows[0].new_full((len(free), block_size, *rows[0].shape[1:]), math.nan) for rows in (batch.keys, batch.values)
    ]
    table = torch.full((len(batch.keys), pages), -3, dtype=torch.int32)
    for r, tokens in enumerate(zip(batch.keys, batch.values, strict=True)):
        held = [p for p in range(len(tokens[0])) if p // interleave % size == rank]
        for local, position in enumerate(held):
            if local % block_size == 0:
                table[r, local // block_size] = free.pop()
            for cache, rows in zip(caches, tokens, strict=True):
                cache[table[r, local // block_size], local % block_size] = rows[position]
    return (*caches, table)


def attend_rank(batch, params, size, rank, interleave=1, block_size=4, **options):
    caches = share(batch, size, rank, interleave, block_size)
    options = {"dcp_size": size, "dcp_rank": rank, "cp_kv_cache_interleave_size": interleave, **options}
    return dcp_rank_attention(batch.query, *caches, batch.seq_lens, batch.query_start_loc, params, **options)


def attend_all(batch, params, size, interleave=1, block_size=4, **options):
    states = (attend_rank(batch, params, size, rank, interleave, block_size, **options) for rank in range(size))
    return merge_many(*zip(*states, strict=True))


@settings(max_examples=40, deadline=None)
@given(data=st.data(), size=st.integers(1, 5), interleave=st.integers(1, 4), pages=st.integers(1, 3))
def test_merged_ranks_are_the_whole(data, size, interleave, pages, make_batch, dense, same_state):
    """Any ranks, interleave and block size; lengths run through every residue of a round."""
    layer = data.draw(st.sampled_from(list(LAYERS.values())))
    first = data.draw(st.integers(0, 9))
    seq_lens = tuple(range(first, first + size * interleave + 1))
    query_lens = data.draw(st.lists(st.integers(0, 4), min_size=len(seq_lens), max_size=len(seq_lens)))
    batch = make_batch(query_lens, seq_lens, layer)
    tiles = {"q_tile": data.draw(st.integers(1, 5)), "kv_tile": data.draw(st.integers(1, 9))}
    same_state(attend_all(batch, layer, size, interleave, pages * interleave, **tiles), dense(batch, layer))


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 6), interleave=st.integers(1, 5), seq_len=st.integers(0, 60))
def test_local_lengths(size, interleave, seq_len):
    """With all scores 0, exp(lse) counts the keys a rank holds; they sum to the length, also where a table ends."""
    layer, query = AttentionParams(1, 1, 1, causal=False), torch.zeros(1, 1, 1)
    counts = []
    for rank in range(size):
        held = sum(p // interleave % size == rank for p in range(seq_len))
        cache = torch.zeros(seq_len + 1, interleave, 1, 1)
        table = torch.arange(-(-held // interleave))[None]
        lens, starts = torch.tensor([seq_len]), torch.tensor([0, 1])
        ranks = {"dcp_size": size, "dcp_rank": rank, "cp_kv_cache_interleave_size": interleave}
        _, lse = dcp_rank_attention(query, cache, cache, table, lens, starts, layer, **ranks)
        counts.append(round(math.exp(lse.item())))
        assert counts[-1] == held
        if held:
            with pytest.raises(ReferenceArgumentError, match=r"block_table\.shape"):
                dcp_rank_attention(query, cache, cache, table[:, 1:], lens, starts, layer, **ranks)
    assert sum(counts) == seq_len


def test_the_sinks_are_on_rank_0(make_batch):
    layer = replace(PLAIN, sinks=SINKS)
    batch = make_batch((2, 1), (3, 1), layer)
    out, lse = attend_rank(batch, layer, 4, 3, block_size=2)
    assert not out.any()
    assert (lse == -math.inf).all()
    batch = make_batch((2,), (0,), layer, unowned_rows=0)
    out, lse = attend_rank(batch, layer, 2, 0)
    assert not out.any()
    assert lse.tolist() == [list(SINKS)] * 2


def test_scales_of_codes(make_batch, same_state):
    """Per token and head, at the slots where the rank holds the tokens; a query of codes too."""
    batch, e4m3 = make_batch((2, 1), (9, 6), PLAIN, unowned_rows=0), torch.float8_e4m3fn
    key_cache, value_cache, table = share(batch, 2, 1, 1, 4)
    generator = torch.Generator().manual_seed(1)
    k_scale, v_scale = (torch.rand(key_cache.shape[:3], generator=generator).double() + 0.1 for _ in range(2))
    coded = (batch.query.to(e4m3), key_cache.to(e4m3), value_cache.to(e4m3))
    tables = (table, batch.seq_lens, batch.query_start_loc, PLAIN)
    ranks = {"dcp_size": 2, "dcp_rank": 1}
    values = (coded[0].double() * 0.7, coded[1].double() * k_scale[..., None], coded[2].double() * v_scale[..., None])
    want = dcp_rank_attention(*values, *tables, **ranks)
    same_state(dcp_rank_attention(*coded, *tables, **ranks, q_scale=0.7, k_scale=k_scale, v_scale=v_scale), want)


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"dcp_size": 0}, "dcp_size"),
        ({"dcp_rank": 2}, "dcp_rank"),
        ({"dcp_rank": -1}, "dcp_rank"),
        ({"dcp_rank": True}, "dcp_rank"),
        ({"cp_kv_cache_interleave_size": 3}, "cp_kv_cache_interleave_size"),
        ({"cp_kv_cache_interleave_size": 0}, "cp_kv_cache_interleave_size"),
        ({"block_table": torch.tensor([[0, 1, 2]])}, "block_table.shape"),
        ({"block_table": torch.tensor([[0], [1]])}, "block_table.shape"),
        ({"block_table": torch.tensor([[0, 1], [2, 9]])}, "block_table[1, 1]"),
        ({"seq_lens": torch.tensor([9, -1])}, "seq_lens[1]"),
        ({"query_start_loc": torch.tensor([0, 2, 4])}, "query_start_loc[-1]"),
        ({"query": torch.zeros(3, 4, 7)}, "query.shape"),
        ({"value_cache": torch.zeros(5, 4, 2, 8)}, "value_cache.shape"),
        ({"params": None}, "params"),
        ({"kv_tile": 0}, "kv_tile"),
    ],
)
def test_refusals(change, argument):
    sound = {
        "query": torch.zeros(3, 4, 8),
        "key_cache": torch.zeros(5, 4, 2, 8),
        "value_cache": torch.zeros(5, 4, 2, 6),
        "block_table": torch.tensor([[0, 1], [2, 3]]),
        "seq_lens": torch.tensor([9, 16]),
        "query_start_loc": torch.tensor([0, 2, 3]),
        "params": PLAIN,
        "dcp_size": 2,
        "dcp_rank": 0,
    }
    dcp_rank_attention(**sound)
    with pytest.raises(ReferenceArgumentError) as refusal:
        dcp_rank_attention(**{**sound, **change})
    assert refusal.value.argument == argument
