"""Writing, copying and swapping blocks, and the layouts they meet, each judged by the whole pool."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.reference import (
    compute_slot_mapping,
    copy_blocks,
    kv_cache_views,
    quantize_fp8,
    reshape_and_cache,
    swap_blocks,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PACKINGS = ("NHD", "HND", "padded", "split_first", "split_second", "content", "plane")


def raw(x):
    """The bytes of a tensor in logical order."""
    return x.reshape(-1).contiguous().view(torch.uint8)


def views_of(packing, blocks, size, heads, width, dtype):
    """(memory, key view, value view) of a pool in which no byte is what a write would leave."""
    shape = {
        "split_first": (2, blocks, size, heads, width),
        "split_second": (blocks, 2, size, heads, width),
        "content": (blocks, heads, size, 2 * width),
        "plane": (blocks, heads, 2 * size, width),
        "NHD": (2, blocks, size, heads, width),
        "HND": (2, blocks, heads, size, width),
        "padded": (2, blocks, size + 2, heads + 1, width + 3),
    }[packing]
    count = torch.Size(shape).numel() * dtype.itemsize
    memory = (torch.arange(count) % 119).to(torch.uint8).view(dtype).view(shape)
    if packing == "HND":
        return memory, *(x.transpose(1, 2) for x in memory)
    if packing == "padded":
        return memory, *(x[:, 1 : size + 1, :heads, :width] for x in memory)
    return memory, *(memory if packing == "NHD" else kv_cache_views(memory, packing, width))


@st.composite
def writes(draw):
    """Rows, slots (some negative, none twice, fewer than rows) and the geometry of a pool."""
    blocks, size, heads, width = draw(st.tuples(*[st.integers(1, n) for n in (5, 5, 3, 4)]))
    slots = draw(st.lists(st.integers(0, blocks * size - 1), unique=True, max_size=blocks * size))
    for at in draw(st.lists(st.integers(0, len(slots)), max_size=3)):
        slots.insert(at, draw(st.integers(-5, -1)))
    rows, generator = len(slots) + draw(st.integers(0, 3)), torch.Generator().manual_seed(draw(st.integers(0, 999)))
    key, value = (torch.randn(rows, heads, width, generator=generator) for _ in range(2))
    return key, value, torch.tensor(slots, dtype=torch.int64), (blocks, size, heads, width)


@settings(max_examples=80)
@given(write=writes(), packing=st.sampled_from(PACKINGS), dtype=st.sampled_from((torch.float32, torch.bfloat16)))
def test_write_then_read_is_the_identity_and_nothing_else_changes(write, packing, dtype):
    """Every live slot holds its row, converted; every other byte of the pool's memory is what it was."""
    key, value, slots, geometry = write
    memory, *caches = views_of(packing, *geometry, dtype)
    before, live, size = [c.clone() for c in caches], slots >= 0, geometry[1]
    around = memory.clone()
    reshape_and_cache(key, value, *caches, slots)
    blocks, offsets = slots[live] // size, slots[live] % size
    for cache, old, rows in zip(caches, before, (key, value), strict=True):
        assert torch.equal(raw(cache[blocks, offsets]), raw(rows[: len(slots)][live].to(dtype)))
        cache[blocks, offsets] = old[blocks, offsets]
    assert torch.equal(raw(memory), raw(around))


@settings(max_examples=40)
@given(write=writes(), scale=st.floats(0.01, 4), dtype=st.sampled_from((E4M3, E5M2)))
def test_write_then_read_is_the_code(write, scale, dtype):
    """A float8 pool gets the codes of the rows, whatever its packing."""
    key, value, slots, geometry = write
    live, size = slots >= 0, geometry[1]
    for packing in ("NHD", "content"):
        _, *caches = views_of(packing, *geometry, dtype)
        reshape_and_cache(key, value, *caches, slots, k_scale=scale, v_scale=scale / 3)
        for cache, rows, factor in zip(caches, (key, value), (scale, scale / 3), strict=True):
            got = cache.view(torch.uint8)[slots[live] // size, slots[live] % size]
            assert torch.equal(got, quantize_fp8(rows[: len(slots)][live], factor, dtype).view(torch.uint8))


@settings(max_examples=40)
@given(data=st.data(), write=writes(), packing=st.sampled_from(PACKINGS))
def test_layouts_orders_and_repetitions_agree(data, write, packing):
    """Any packing, any order of the rows, in two calls or one, written twice: the same logical pool."""
    key, value, slots, geometry = write
    order = data.draw(st.permutations(range(len(slots))))
    cut = data.draw(st.integers(0, len(slots)))
    pools = []
    for _ in range(2):
        _, k, v = views_of("NHD", *geometry, torch.float32)
        pools.append((k.clone(), v.clone()))
    _, *other = views_of(packing, *geometry, torch.float32)
    for view, start in zip(other, pools[0], strict=True):
        view.copy_(start)
    reshape_and_cache(key, value, *pools[0], slots)
    for part in (order[:cut], order[cut:], order):
        for pool in (other, pools[1]):
            reshape_and_cache(key[part], value[part], *pool, slots[part])
    for want, a, b in zip(pools[0], pools[1], other, strict=True):
        assert torch.equal(raw(a), raw(want))
        assert torch.equal(raw(b), raw(want))


@pytest.fixture(scope="module")
def written():
    """``(batch, packing) -> batch`` whose tokens were written into a pool of that packing, slot by slot."""

    def write(batch, packing):
        blocks, size, heads, width = batch.key_cache.shape
        _, *caches = views_of(packing, blocks, size, heads, width, torch.float64)
        tokens = torch.tensor([(r, p) for r, k in enumerate(batch.keys) for p in range(len(k))], dtype=torch.int64)
        requests, positions = tokens.view(-1, 2).unbind(1)
        slots = compute_slot_mapping(positions, requests, batch.block_table, size)
        reshape_and_cache(torch.cat(batch.keys), torch.cat(batch.values), *caches, slots)
        return replace(batch, key_cache=caches[0], value_cache=caches[1])

    return write


@settings(max_examples=40)
@given(data=st.data(), packing=st.sampled_from(PACKINGS))
def test_attention_reads_what_was_written_in_any_packing(data, packing, layers, batches, written, same_bits):
    """Layouts agree: the same tokens through strides of any kind give the same bits."""
    params = data.draw(layers(head_size_v=None))
    batch = data.draw(batches(params, fitting=False, shared_pages=st.just(0)))
    same_bits(written(batch, packing).attend(params), batch.attend(params))


@settings(max_examples=40)
@given(data=st.data(), packing=st.sampled_from(PACKINGS))
def test_copied_blocks_serve_as_well(data, packing, layers, batches, written, same_bits):
    """copy_blocks: copy some blocks to free ones, in K and V, and point the tables there: no bit changes.

    Blocks that are no destination keep every byte.
    """
    params = data.draw(layers(head_size_v=None))
    batch = written(data.draw(batches(params, shared_pages=st.just(0))), packing)
    blocks, expected = len(batch.key_cache), batch.attend(params)
    used = batch.block_table[(batch.block_table >= 0) & (batch.block_table < blocks)].unique().tolist()
    free = [b for b in range(blocks) if b not in used]
    pairs = list(zip(data.draw(st.permutations(used)), free, strict=False))
    before = [x.clone() for x in (batch.key_cache, batch.value_cache)]
    copy_blocks([batch.key_cache, batch.value_cache], torch.tensor(pairs, dtype=torch.int64).view(-1, 2))
    table = batch.block_table.clone()
    for source, destination in pairs:
        table[batch.block_table == source] = destination
    same_bits(replace(batch, block_table=table).attend(params), expected)
    rest = [b for b in range(blocks) if b not in [d for _, d in pairs]]
    same_bits([batch.key_cache[rest], batch.value_cache[rest]], [x[rest] for x in before])


@settings(max_examples=40)
@given(data=st.data(), packing=st.sampled_from(PACKINGS))
def test_swapped_out_and_in_again_is_unchanged(data, packing, layers, batches, written, same_bits):
    """swap_blocks: blocks moved to another pool and back to other places serve as before; the source is kept."""
    params = data.draw(layers(head_size_v=None))
    batch = written(data.draw(batches(params, shared_pages=st.just(0))), packing)
    blocks = len(batch.key_cache)
    away, back = (data.draw(st.permutations(range(blocks))) for _ in range(2))
    moved = []
    for cache in (batch.key_cache, batch.value_cache):
        before, host, device = cache.clone(), torch.zeros_like(cache), torch.zeros_like(cache)
        swap_blocks(cache, host, torch.tensor(list(enumerate(away))))
        swap_blocks(host, device, torch.tensor(list(enumerate(back))))
        same_bits([cache], [before])
        moved.append(device)
    name = torch.tensor([back[away[b]] for b in range(blocks)], dtype=torch.int32)
    real = (batch.block_table >= 0) & (batch.block_table < blocks)
    table = torch.where(real, name[batch.block_table.clamp(0, blocks - 1).long()], batch.block_table)
    state = replace(batch, key_cache=moved[0], value_cache=moved[1], block_table=table).attend(params)
    same_bits(state, batch.attend(params))
