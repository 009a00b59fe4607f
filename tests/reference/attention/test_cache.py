"""Slots, packings and strides: the address of each element; what a write, a copy and a swap change, byte for byte."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.errors import ReferenceArgumentError
from attncheck.reference import (
    AttentionParams,
    compute_slot_mapping,
    copy_blocks,
    dequantize_fp8,
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


@settings(max_examples=120)
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


@pytest.mark.parametrize("packing", LAYOUTS)
def test_attention_reads_what_was_written_in_any_packing(make_batch, same_state, packing):
    params = AttentionParams(4, 2, 8)
    batch = make_batch((3, 6), (13, 6), params)
    _, *caches = pool_of(packing, *batch.key_cache.shape, torch.float64)
    positions, requests = torch.cat([torch.arange(13), torch.arange(6)]), torch.tensor([0] * 13 + [1] * 6)
    slots = compute_slot_mapping(positions, requests, batch.block_table, 4)
    reshape_and_cache(torch.cat(batch.keys), torch.cat(batch.values), *caches, slots)
    written = replace(batch, key_cache=caches[0], value_cache=caches[1])
    same_state(written.attend(params), batch.attend(params), tolerance=0)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pool(dtype=torch.float32):
    """Caches full of a pattern that no write produces by chance."""
    bits = torch.arange(NB * BS * HKV * (D + DV), dtype=torch.int64) % 251
    k, v = bits[: NB * BS * HKV * D], bits[NB * BS * HKV * D :]
    if dtype.itemsize == 1:
        return tuple(x.to(torch.uint8).view(dtype).view(NB, BS, HKV, -1) for x in (k, v))
    return tuple(x.to(dtype).view(NB, BS, HKV, -1) for x in (k, v))


@pytest.mark.parametrize("per", ["tensor", "head", "slot"])
def test_float8_scales(per):
    key, value = draw(3, HKV, D), draw(3, HKV, DV, seed=1)
    slots = torch.tensor([2, 5, 11])
    blocks, offsets = slots // BS, slots % BS
    k_scale, v_scale = {
        "tensor": (torch.tensor([0.03]), 0.07),
        "head": (torch.tensor([0.03, 0.4]), torch.tensor([0.7, 0.09])),
        "slot": (draw(NB, BS, HKV, seed=2).abs() + 0.01, draw(NB, BS, HKV, seed=3).abs() + 0.01),
    }[per]
    caches = pool(E4M3)
    reshape_and_cache(key, value, *caches, slots, k_scale=k_scale, v_scale=v_scale)
    for cache, rows, scale in zip(caches, (key, value), (k_scale, v_scale), strict=True):
        wide = {"tensor": lambda s: s, "head": lambda s: s[:, None], "slot": lambda s: s[blocks, offsets][..., None]}
        of_rows = wide[per](scale)
        codes = cache.view(torch.uint8)[blocks, offsets]
        assert torch.equal(codes, quantize_fp8(rows, of_rows).view(torch.uint8))
        values = dequantize_fp8(codes.view(E4M3), of_rows)
        assert (values - rows).abs().max() <= (rows.abs() / 16).max() + 0.01


def test_a_refused_write_writes_nothing():
    caches, before = pool(), pool()
    for slots in ([3, NB * BS], [3, 3], [3] * 9):
        with pytest.raises(ReferenceArgumentError):
            reshape_and_cache(draw(3, HKV, D), draw(3, HKV, DV), *caches, torch.tensor(slots))
    assert all(torch.equal(a, b) for a, b in zip(caches, before, strict=True))


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, E4M3, torch.uint8], ids=str)
def test_copy_blocks(dtype):
    caches = [x.view(dtype) if dtype.itemsize == 1 else x for x in pool(E4M3 if dtype.itemsize == 1 else dtype)]
    want = [x.clone() for x in caches]
    for cache in want:
        cache[2], cache[1] = cache[0].clone(), cache[2].clone()
    copy_blocks(caches, torch.tensor([[0, 2], [2, 1]], dtype=torch.int32))
    assert all(torch.equal(raw(a), raw(b)) for a, b in zip(caches, want, strict=True))


def test_swap_blocks():
    (src, _), (dst, _) = pool(E4M3), pool(E4M3)
    dst = dst.transpose(1, 2).contiguous().transpose(1, 2)
    dst.view(torch.uint8).fill_(1)
    before = src.view(torch.uint8).clone()
    swap_blocks(src, dst, torch.tensor([[2, 0], [1, 2]]))
    want = torch.ones_like(before)
    want[0], want[2] = before[2], before[1]
    assert torch.equal(raw(dst), raw(want))
    assert torch.equal(src.view(torch.uint8), before)


@pytest.mark.parametrize("mapping", [[[0, 1], [2, 1]], [[0, NB]], [[-1, 0]], [[0, -1]], [[NB, 0]]], ids=str)
def test_copies_that_mean_nothing_change_nothing(mapping):
    caches, before = pool(), pool()
    with pytest.raises(ReferenceArgumentError, match="mapping"):
        copy_blocks(caches, torch.tensor(mapping))
    with pytest.raises(ReferenceArgumentError, match="mapping"):
        swap_blocks(before[0], caches[0], torch.tensor(mapping))
    assert all(torch.equal(a, b) for a, b in zip(caches, before, strict=True))
