"""Slots, packings and strides: the address of each element; what a write, a copy and a swap change, byte for byte."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.reference import (
    AttentionParams,
    compute_slot_mapping,
    copy_blocks,
    kv_cache_views,
    paged_attention,
    quantize_fp8,
    reshape_and_cache,
    swap_blocks,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


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


def raw(x):
    """The bytes of a tensor in logical order."""
    return x.reshape(-1).contiguous().view(torch.uint8)


def pool_of(packing, blocks, size, heads, width, dtype):
    """(memory, key view, value view) of a pool in which no byte is what a write would leave."""
    shape = {
        "split_first": (2, blocks, size, heads, width),
        "split_second": (blocks, 2, size, heads, width),
        "content": (blocks, heads, size, 2 * width),
        "plane": (blocks, heads, 2 * size, width),
        "HND": (2, blocks, heads, size, width),
        "padded": (2, blocks, size + 2, heads + 1, width + 3),
    }[packing]
    count = torch.Size(shape).numel() * dtype.itemsize
    memory = (torch.arange(count) % 119).to(torch.uint8).view(dtype).view(shape)
    if packing == "HND":
        return memory, *(x.transpose(1, 2) for x in memory)
    if packing == "padded":
        return memory, *(x[:, 1 : size + 1, :heads, :width] for x in memory)
    return memory, *kv_cache_views(memory, packing, width)


@st.composite
def writes(draw):
    """Rows, slots (some negative, none twice, fewer than rows) and the geometry of a pool."""
    blocks, size, heads, width = draw(st.tuples(*[st.integers(1, n) for n in (5, 5, 3, 4)]))
    slots = draw(st.lists(st.integers(0, blocks * size - 1), unique=True, max_size=blocks * size))
    for at in draw(st.lists(st.integers(0, len(slots)), max_size=3)):
        slots.insert(at, draw(st.integers(-5, -1)))
    rows, generator = len(slots) + draw(st.integers(0, 3)), torch.Generator().manual_seed(draw(st.integers(0, 999)))
    key, value = (torch.randn(rows, heads, width, generator=generator) for _ in range(2))
    index = draw(st.sampled_from((torch.int32, torch.int64)))
    return key, value, torch.tensor(slots, dtype=index), (blocks, size, heads, width)


LAYOUTS = (*PACKINGS, "HND", "padded")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, E4M3, E5M2)


@settings(max_examples=80)
@given(write=writes(), packing=st.sampled_from(LAYOUTS), dtype=st.sampled_from(DTYPES))
def test_every_live_slot_holds_its_row_and_nothing_else_changes(write, packing, dtype):
    """Rows are converted, or divided by the scale and coded; every other byte of the pool's memory stays."""
    key, value, slots, geometry = write
    memory, *caches = pool_of(packing, *geometry, dtype)
    before, live, size = [c.clone() for c in caches], slots >= 0, geometry[1]
    around = memory.clone()
    reshape_and_cache(key, value, *caches, slots, k_scale=0.5, v_scale=0.25)
    blocks, offsets = slots[live].long() // size, slots[live].long() % size
    for cache, old, rows, scale in zip(caches, before, (key, value), (0.5, 0.25), strict=True):
        written = rows[: len(slots)][live] / (scale if dtype.itemsize == 1 else 1)
        assert torch.equal(raw(cache[blocks, offsets]), raw(written.to(dtype)))
        cache[blocks, offsets] = old[blocks, offsets]
    assert torch.equal(raw(memory), raw(around))


@pytest.mark.parametrize("per", ["tensor", "head", "slot"])
def test_float8_scales_of_a_write(per):
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(3, HKV, size, generator=generator) for size in (D, DV))
    slots = torch.tensor([2, 5, 11])
    blocks, offsets = slots // BS, slots % BS
    shape = {"tensor": (1, 1), "head": (HKV,), "slot": (NB, BS, HKV)}[per]
    scales = [torch.rand(shape, generator=generator) + 0.01 for _ in range(2)]
    caches = [torch.zeros(NB, BS, HKV, size).to(E4M3) for size in (D, DV)]
    reshape_and_cache(key, value, *caches, slots, k_scale=scales[0], v_scale=scales[1])
    for cache, rows, scale in zip(caches, (key, value), scales, strict=True):
        wide = scale[..., None].expand(NB, BS, HKV, 1)[blocks, offsets] if per != "tensor" else scale
        codes = cache.view(torch.uint8)[blocks, offsets]
        assert torch.equal(codes, quantize_fp8(rows, wide).view(torch.uint8))


def test_high_slots_of_a_large_pool():
    """Element offsets beyond 2**31: the wrapped-around slot stays as it was. Hardly a page of the pool is touched."""
    num_blocks, block_size, size = 2**13 + 8, 1024, 256  # 2**31 elements and some
    cache = torch.empty(num_blocks, block_size, 1, size, dtype=E4M3)
    slot = 2**23
    cache.view(torch.uint8)[0, 0] = 17
    cache.view(torch.uint8)[0, 1] = 18
    row = torch.full((1, 1, size), 3.0)
    reshape_and_cache(row, row, cache, cache, torch.tensor([slot]))
    assert (cache.view(torch.uint8)[0, 0] == 17).all()
    assert (cache[2**13, 0].float() == 3.0).all()
    copy_blocks([cache.view(num_blocks * block_size, size)], torch.tensor([[slot, slot + 1]]))
    assert (cache[2**13, 1].float() == 3.0).all()
    assert (cache.view(torch.uint8)[0, 1] == 18).all()
    table, lens, starts = torch.tensor([[2**13]], dtype=torch.int32), torch.tensor([1]), torch.tensor([0, 1])
    out, _ = paged_attention(torch.ones(1, 1, size), cache, cache, table, lens, starts, AttentionParams(1, 1, size))
    assert (out == 3.0).all()


def bytes_of(*shape, dtype, first=0):
    count = torch.Size(shape).numel() * dtype.itemsize
    return ((torch.arange(count) + first) % 119).to(torch.uint8).view(dtype).view(shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, E4M3, torch.uint8], ids=str)
def test_copies_of_blocks(dtype):
    """In the order of the mapping: a block that was copied over is copied on."""
    caches = [bytes_of(3, 4, size, dtype=dtype) for size in (5, 3)]
    want = [x.clone() for x in caches]
    for cache in want:
        cache[2], cache[1] = cache[0].clone(), cache[2].clone()
    copy_blocks(caches, torch.tensor([[0, 2], [2, 1]], dtype=torch.int32))
    assert all(torch.equal(raw(a), raw(b)) for a, b in zip(caches, want, strict=True))


def test_swaps_of_blocks():
    source = bytes_of(3, 4, 2, 5, dtype=E4M3)
    target = bytes_of(3, 2, 4, 5, dtype=E4M3, first=7).transpose(1, 2)
    want = target.clone()
    want[0], want[2] = source[2], source[1]
    before = source.clone()
    swap_blocks(source, target, torch.tensor([[2, 0], [1, 2]]))
    assert torch.equal(raw(target), raw(want))
    assert torch.equal(raw(source), raw(before))
