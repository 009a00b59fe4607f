"""Slots, packings and strides: the address of each element."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attncheck.errors import ReferenceArgumentError
from attncheck.reference import (
    AttentionParams,
    compute_slot_mapping,
    kv_cache_views,
    paged_attention,
    reshape_and_cache,
)


@given(
    lens=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    ranks=st.integers(1, 4),
    interleave=st.sampled_from([1, 2, 4, 8]),
    index=st.sampled_from([torch.int32, torch.int64]),
)
def test_slots_by_counting(lens, ranks, interleave, index):
    """Dealing positions to ranks one by one, each rank filling its own pages in order."""
    block_size, width = 8, 6
    tokens = [(r, p) for r, n in enumerate(lens) for p in range(n)]
    requests, positions = (torch.tensor([t[i] for t in tokens], dtype=index) for i in range(2))
    tables = [torch.randperm(900, dtype=torch.int32)[: len(lens) * width].view(-1, width) for _ in range(ranks)]
    want = [[-1] * len(tokens) for _ in range(ranks)]
    held = {}
    for t, (r, p) in enumerate(tokens):
        rank = p // interleave % ranks
        local = held.get((rank, r), 0)
        held[rank, r] = local + 1
        want[rank][t] = int(tables[rank][r, local // block_size]) * block_size + local % block_size
    for rank in range(ranks):
        slots = compute_slot_mapping(
            positions,
            requests,
            tables[rank],
            block_size,
            dcp_size=ranks,
            dcp_rank=rank,
            cp_kv_cache_interleave_size=interleave,
        )
        assert slots.dtype == torch.int64
        assert slots.tolist() == want[rank]


def test_slots_beyond_32_bits():
    table = torch.tensor([[2**31 - 1, 70_000]], dtype=torch.int32)
    slots = compute_slot_mapping(
        torch.tensor([3, 543 + 544], dtype=torch.int32), torch.zeros(2, dtype=torch.int32), table, 544
    )
    assert slots.tolist() == [(2**31 - 1) * 544 + 3, 70_000 * 544 + 543]


def test_entries_of_no_token_are_not_looked_at():
    table = torch.tensor([[5, -1], [-1, 6]])
    assert compute_slot_mapping(torch.tensor([1, 5]), torch.tensor([0, 1]), table, 4).tolist() == [21, 25]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"positions": torch.tensor([-1, 0])}, "positions"),
        ({"positions": torch.tensor([0, 8])}, "positions"),
        (
            # Counted by rank 0 it is position 8: beyond its row of two pages, where the next row's page would be read.
            {"positions": torch.tensor([0, 16]), "block_table": torch.tensor([[1, 3], [5, 7]]), "dcp_size": 2},
            "positions on this rank",
        ),
        ({"positions": torch.tensor([0.0, 1.0])}, "positions"),
        ({"positions": torch.tensor([0])}, "req_indices"),
        ({"req_indices": torch.tensor([0, 1])}, "req_indices"),
        ({"block_table": torch.tensor([[-1, 3]])}, "block_table"),
        ({"block_table": torch.tensor([1, 3])}, "block_table"),
        ({"block_size": 0}, "block_size"),
        ({"dcp_size": 0}, "dcp_size"),
        ({"dcp_rank": 1}, "dcp_rank"),
        ({"cp_kv_cache_interleave_size": 3}, "cp_kv_cache_interleave_size"),
    ],
)
def test_slot_questions_that_mean_nothing(change, name):
    question = {
        "positions": torch.tensor([0, 5]),
        "req_indices": torch.tensor([0, 0]),
        "block_table": torch.tensor([[1, 3]]),
        "block_size": 4,
    }
    assert compute_slot_mapping(**question).tolist() == [4, 13]
    with pytest.raises(ReferenceArgumentError) as refusal:
        compute_slot_mapping(**{**question, **change})
    assert refusal.value.argument.startswith(name)


NB, BS, HKV, D, DV = 3, 4, 2, 5, 3
PACKINGS = {
    "split_first": ((2, NB, BS, HKV, D), lambda kv, b, t, h, c: (kv, b, t, h, c)),
    "split_second": ((NB, 2, BS, HKV, D), lambda kv, b, t, h, c: (b, kv, t, h, c)),
    "content": ((NB, HKV, BS, D + DV), lambda kv, b, t, h, c: (b, h, t, c + kv * D)),
    "plane": ((NB, HKV, 2 * BS, D), lambda kv, b, t, h, c: (b, h, t + kv * BS, c)),
}


@pytest.mark.parametrize("packing", PACKINGS)
def test_every_element_of_a_packing(packing):
    shape, place = PACKINGS[packing]
    cache = torch.arange(torch.Size(shape).numel()).view(shape)
    views = kv_cache_views(cache, packing, D)
    assert views[0].shape == (NB, BS, HKV, D)
    assert views[1].shape == (NB, BS, HKV, DV if packing == "content" else D)
    for kv, view in enumerate(views):
        for at in torch.ones(view.shape).nonzero().tolist():
            assert view[tuple(at)] == cache[place(kv, *at)]
    views[1][2, 3, 1, 0] = -1
    assert cache[place(1, 2, 3, 1, 0)] == -1


@pytest.mark.parametrize(
    ("packing", "shape"),
    [
        ("split_first", (3, NB, BS, HKV, D)),
        ("split_first", (2, NB, BS, HKV, D + 1)),
        ("split_second", (2, NB, BS, HKV)),
        ("content", (NB, HKV, BS, D)),
        ("plane", (NB, HKV, 7, D)),
        ("planes", (NB, HKV, 8, D)),
    ],
)
def test_packings_that_do_not_fit(packing, shape):
    with pytest.raises(ReferenceArgumentError, match="packing" if packing == "planes" else "cache"):
        kv_cache_views(torch.zeros(shape), packing, D)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_written_and_read_through_any_packing(make_batch, same_state, packing, dtype):
    """One batch written token by token into each packing; attention over it is the same to the bit."""
    size_v = 3 if packing == "content" else 8
    params = AttentionParams(4, 2, 8, head_size_v=size_v)
    plain = make_batch((3, 6), (13, 6), params, dtype=torch.bfloat16, block_size=4)
    blocks = len(plain.key_cache)
    shape = {
        "split_first": (2, blocks, 4, 2, 8),
        "split_second": (blocks, 2, 4, 2, 8),
        "content": (blocks, 2, 4, 8 + size_v),
        "plane": (blocks, 2, 8, 8),
    }[packing]
    caches = kv_cache_views(torch.zeros(shape, dtype=torch.bfloat16).to(dtype), packing, 8)
    flat = tuple(torch.zeros(*x.shape, dtype=torch.bfloat16).to(dtype) for x in caches)
    positions = torch.cat([torch.arange(13), torch.arange(6)])
    requests = torch.tensor([0] * 13 + [1] * 6)
    slots = compute_slot_mapping(positions, requests, plain.block_table, 4)
    states = []
    for pair in (caches, flat):
        reshape_and_cache(torch.cat(plain.keys), torch.cat(plain.values), *pair, slots, k_scale=0.1, v_scale=0.2)
        batch = replace(plain, key_cache=pair[0], value_cache=pair[1])
        states.append(batch.attend(params, k_scale=0.1, v_scale=0.2))
    same_state(states[0], states[1], tolerance=0)
    if dtype == torch.bfloat16:
        same_state(states[0], plain.attend(params), tolerance=0)


def test_strided_arguments(make_batch, same_state):
    """Query out of a fused tensor, cache pages with gaps and heads first, tables and lengths with strides."""
    params = AttentionParams(4, 2, 8)
    batch = make_batch((3, 1), (13, 6), params)
    fused = torch.full((len(batch.query), 3, 5, 8), torch.nan, dtype=torch.float64)
    fused[:, 1, :4] = batch.query

    def gapped(cache):
        wide = torch.full((len(cache), 2, 2, 6, 9), torch.nan, dtype=torch.float64)
        view = wide[:, 1, :, 1:5, :8].transpose(1, 2)
        return view.copy_(cache)

    views = replace(
        batch,
        query=fused[:, 1, :4],
        key_cache=gapped(batch.key_cache),
        value_cache=gapped(batch.value_cache),
        block_table=torch.stack([batch.block_table, batch.block_table + 1], dim=2)[..., 0],
        seq_lens=torch.tensor([13, 0, 6, 0])[::2],
        query_start_loc=torch.tensor([[0, 9], [3, 9], [4, 9]])[:, 0],
    )
    same_state(views.attend(params), batch.attend(params), tolerance=0)


def test_size_one_axes_of_any_stride(make_batch, same_state):
    params = AttentionParams(1, 1, 8)
    batch = make_batch((3,), (13,), params)
    odd = replace(
        batch,
        query=batch.query.as_strided(batch.query.shape, (8, 777, 1)),
        key_cache=batch.key_cache.as_strided(batch.key_cache.shape, (32, 8, 999, 1)),
    )
    same_state(odd.attend(params), batch.attend(params), tolerance=0)


def test_high_blocks_of_a_large_pool():
    """Attention over a block whose element offset exceeds 2**31; the wrapped-around block holds another signature."""
    cache = torch.empty(2**13 + 2, 1024, 1, 256, dtype=torch.float8_e4m3fn)
    cache[2**13, 0], cache[0, 0] = 2.0, -2.0
    params = AttentionParams(1, 1, 256)
    out, _ = paged_attention(
        torch.ones(1, 1, 256),
        cache,
        cache,
        torch.tensor([[2**13]], dtype=torch.int32),
        torch.tensor([1]),
        torch.tensor([0, 1]),
        params,
    )
    assert torch.equal(out, torch.full((1, 1, 256), 2.0, dtype=torch.float64))
