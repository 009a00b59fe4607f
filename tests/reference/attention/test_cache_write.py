"""Writing, copying and swapping: exactly the named slots change, byte for byte."""

import pytest
import torch

from attncheck.errors import ReferenceArgumentError
from attncheck.reference import copy_blocks, dequantize_fp8, quantize_fp8, reshape_and_cache, swap_blocks

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NB, BS, HKV, D, DV = 5, 4, 2, 6, 3


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pool(dtype=torch.float32):
    """Caches full of a pattern that no write produces by chance."""
    bits = torch.arange(NB * BS * HKV * (D + DV), dtype=torch.int64) % 251
    k, v = bits[: NB * BS * HKV * D], bits[NB * BS * HKV * D :]
    if dtype.itemsize == 1:
        return tuple(x.to(torch.uint8).view(dtype).view(NB, BS, HKV, -1) for x in (k, v))
    return tuple(x.to(dtype).view(NB, BS, HKV, -1) for x in (k, v))


def raw(x):
    return x.contiguous().view(torch.uint8)


def hnd(x):
    """The same logical cache with heads before tokens in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def padded_pages(x):
    """The same logical cache as a view into pages with a gap behind each."""
    wide = torch.empty(x.shape[0], 2 * x[0].numel() + 3, dtype=x.dtype)
    view = wide.as_strided(x.shape, (wide.shape[1], *x.stride()[1:]))
    view.copy_(x)
    return view


SLOTS = [13, -1, 0, 7, -5, 19, 4]


@pytest.mark.parametrize("layout", [lambda x: x, hnd, padded_pages], ids=["NHD", "HND", "padded"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, E4M3, E5M2], ids=str)
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_exactly_the_mapped_slots_change(layout, dtype, index):
    key, value = draw(9, HKV, D), draw(9, HKV, DV, seed=1)  # two rows of padding behind
    caches = [layout(x) for x in pool(dtype)]
    want = [x.clone() for x in caches]
    for t, slot in enumerate(SLOTS):
        if slot >= 0:
            for cache, rows, scale in zip(want, (key, value), (0.5, 0.25), strict=True):
                row = (rows[t] / scale) if dtype.itemsize == 1 else rows[t]
                cache[slot // BS, slot % BS] = row.to(dtype)
    rows_before = key.clone(), value.clone()
    reshape_and_cache(key, value, *caches, torch.tensor(SLOTS, dtype=index), k_scale=0.5, v_scale=0.25)
    for cache, expected in zip(caches, want, strict=True):
        assert torch.equal(raw(cache), raw(expected))
    assert torch.equal(key, rows_before[0])
    assert torch.equal(value, rows_before[1])


def test_slot_order_and_repetition_do_not_matter():
    key, value, slots = draw(4, HKV, D), draw(4, HKV, DV, seed=1), torch.tensor([3, 17, 8, 9])
    first, second = pool(), pool()
    reshape_and_cache(key, value, *first, slots)
    order = torch.tensor([2, 0, 3, 1])
    for _ in range(2):
        reshape_and_cache(key[order], value[order], *second, slots[order])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_views_of_a_fused_tensor_are_read():
    fused = draw(3, HKV, D + DV)
    caches = pool()
    reshape_and_cache(fused[..., :D], fused[..., D:], *caches, torch.tensor([2, 5, 11]))
    assert torch.equal(caches[0][1, 1], fused[1, :, :D])
    assert torch.equal(caches[1][2, 3], fused[2, :, D:])


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


def test_an_empty_mapping_writes_nothing():
    caches, before = pool(), pool()
    reshape_and_cache(draw(3, HKV, D), draw(3, HKV, DV), *caches, torch.zeros(0, dtype=torch.int64))
    reshape_and_cache(draw(3, HKV, D), draw(3, HKV, DV), *caches, torch.tensor([-1, -1]))
    assert all(torch.equal(a, b) for a, b in zip(caches, before, strict=True))


def test_a_refused_write_writes_nothing():
    caches, before = pool(), pool()
    for slots in ([3, 20], [3, 3], [3] * 9):
        with pytest.raises(ReferenceArgumentError):
            reshape_and_cache(draw(3, HKV, D), draw(3, HKV, DV), *caches, torch.tensor(slots))
    assert all(torch.equal(a, b) for a, b in zip(caches, before, strict=True))


def test_high_slots_of_a_large_pool():
    """Element offsets beyond 2**31: the wrapped-around slot stays as it was. Hardly a page of the pool is touched."""
    num_blocks, block_size, size = 2**13 + 8, 1024, 256  # 2**31 elements and some
    cache = torch.empty(num_blocks, block_size, 1, size, dtype=E4M3)
    slot = 2**23 + 5
    assert slot * size > 2**31
    cache.view(torch.uint8)[0, 5] = 17
    cache.view(torch.uint8)[0, 5 + 1] = 18
    row = torch.full((1, 1, size), 3.0)
    reshape_and_cache(row, row, cache, cache, torch.tensor([slot]))
    assert (cache.view(torch.uint8)[0, 5] == 17).all()
    assert (cache[2**13, 5].float() == 3.0).all()
    copy_blocks([cache.view(num_blocks * block_size, size)], torch.tensor([[slot, slot + 1]]))
    assert (cache[2**13, 6].float() == 3.0).all()
    assert (cache.view(torch.uint8)[0, 6] == 18).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, E4M3, torch.uint8], ids=str)
def test_copy_blocks(dtype):
    caches = [x.view(dtype) if dtype.itemsize == 1 else x for x in pool(E4M3 if dtype.itemsize == 1 else dtype)]
    want = [x.clone() for x in caches]
    for cache in want:
        cache[3], cache[1] = cache[0].clone(), cache[4].clone()
    copy_blocks(caches, torch.tensor([[0, 3], [4, 1]], dtype=torch.int32))
    assert all(torch.equal(raw(a), raw(b)) for a, b in zip(caches, want, strict=True))


def test_copies_of_a_chain_read_before_they_write():
    cache = torch.arange(5.0).view(5, 1)
    copy_blocks([cache], torch.tensor([[0, 1], [1, 2], [2, 0]]))
    assert cache.flatten().tolist() == [2.0, 0.0, 1.0, 3.0, 4.0]


def test_swap_blocks():
    (src, _), (dst, _) = pool(E4M3), pool(E4M3)
    dst.view(torch.uint8).fill_(1)
    before = src.view(torch.uint8).clone()
    swap_blocks(src, hnd_dst := hnd(dst), torch.tensor([[4, 0], [1, 3]]))
    want = torch.ones_like(before)
    want[0], want[3] = before[4], before[1]
    assert torch.equal(raw(hnd_dst), want)
    assert torch.equal(src.view(torch.uint8), before)


@pytest.mark.parametrize("mapping", [[[0, 1], [2, 1]], [[0, 5]], [[-1, 0]], [[0, -1]], [[5, 0]]], ids=str)
def test_copies_that_mean_nothing_change_nothing(mapping):
    caches, before = pool(), pool()
    with pytest.raises(ReferenceArgumentError, match="mapping"):
        copy_blocks(caches, torch.tensor(mapping))
    with pytest.raises(ReferenceArgumentError, match="mapping"):
        swap_blocks(before[0], caches[0], torch.tensor(mapping))
    assert all(torch.equal(a, b) for a, b in zip(caches, before, strict=True))
