from collections.abc import Callable

import pytest
import torch
from inline_snapshot import snapshot
from torch import Tensor

pytest.importorskip("triton")

from attncheck.backends.candidates.triton_unified.cache import reshape_and_cache

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, SIZE, SIZE_V, BLOCKS, PAGE = 3, 24, 40, 5, 6


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    drawn = torch.rand(*shape, generator=generator) * 8 - 4
    return drawn.to(DEVICE, dtype)


def memory(*shape: int, dtype: torch.dtype) -> Tensor:
    """Bytes of every value, as the contents of a cache."""
    wanted = torch.Size(shape).numel() * dtype.itemsize
    filled = (torch.arange(wanted, device=DEVICE) % 251 + 1).to(torch.uint8)
    return filled.view(dtype).view(shape)


def nhd(size: int, dtype: torch.dtype) -> Tensor:
    return memory(BLOCKS, PAGE, HEADS, size, dtype=dtype)


def bytes_of(x: Tensor) -> Tensor:
    """All the memory of a view's storage."""
    flat = torch.empty(0, dtype=torch.uint8, device=x.device)
    return flat.set_(x.untyped_storage(), 0, (x.untyped_storage().nbytes(),))


def test_nothing_is_written_for_no_rows_nor_beyond_the_cache() -> None:
    cache = nhd(SIZE, torch.float32)
    before = cache.clone()
    key = numbers(2, HEADS, SIZE)
    reshape_and_cache(key, key, cache[:4], cache[:4], torch.empty(0, dtype=torch.int64, device=DEVICE))
    reshape_and_cache(key, key, cache[:4], cache[:4], torch.tensor([-7, 4 * PAGE], device=DEVICE))
    assert torch.equal(bytes_of(cache), bytes_of(before))


def test_offsets_beyond_32_bits_are_reached() -> None:
    # Memory without a write is never backed by pages.
    memory = torch.empty(2**31 + 12, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
    cache = memory.as_strided((3, 1, 1, 4), (2**30 + 4, 4, 4, 1))
    slots = torch.tensor([2], device=DEVICE)
    row = torch.tensor([[[1.0, 2.0, -3.0, 448.0]]], device=DEVICE)
    reshape_and_cache(row, row, cache, cache, slots)
    assert cache[2].float().flatten().tolist() == [1.0, 2.0, -3.0, 448.0]


def test_what_does_not_fit_is_refused(refusals: Callable[..., list[str]]) -> None:
    cache = torch.zeros(BLOCKS, PAGE, HEADS, SIZE)
    given = {"key": torch.ones(2, HEADS, SIZE), "value": torch.ones(2, HEADS, SIZE), "key_cache": cache}
    given |= {"value_cache": cache, "slot_mapping": torch.tensor([1, 2])}
    codes = torch.zeros(BLOCKS, PAGE, HEADS, SIZE, dtype=torch.float8_e5m2)
    wrong = [
        {"key": torch.zeros(1, HEADS, SIZE)},
        {"key": torch.zeros(2, HEADS, SIZE, dtype=torch.float64)},
        {"key_cache": torch.zeros(BLOCKS, PAGE, HEADS, SIZE, dtype=torch.float16)},
        {"value_cache": torch.zeros(BLOCKS, PAGE, SIZE)},
        {"slot_mapping": torch.zeros(2)},
        {"key_cache": codes, "value_cache": codes, "k_scale": torch.ones(2)},
    ]
    found = refusals(lambda changed: reshape_and_cache(**given | changed), wrong)
    assert [message.removeprefix("reshape_and_cache: ") for message in found] == snapshot(
        [
            "key has shape (1, 3, 24), not [2+, 3, 24]",
            "key has dtype torch.float64",
            "caches have dtypes torch.float16 and torch.float32",
            "caches have shapes (5, 6, 3, 24) and (5, 6, 24), not [NB, BS, Hkv, D]; value has shape (2, 3, 24), not [2+, 24]",
            "slot_mapping is torch.float32 (2,), not int32 or int64 [T]",
            "k_scale has shape (2,): neither 1 element, [3] nor [5, 6, 3]",
        ]
    )
    assert not cache.any()


def test_a_compiled_step_writes_the_same_into_views_of_one_tensor() -> None:
    def step(pool: Tensor, key: Tensor, slots: Tensor) -> Tensor:
        reshape_and_cache(key, key + 1, pool[0], pool[1], slots)
        return pool.sum()

    key, slots = numbers(3, HEADS, SIZE), torch.tensor([1, -1, 6], device=DEVICE)
    plain, compiled = (torch.zeros(2, BLOCKS, PAGE, HEADS, SIZE, device=DEVICE) for _ in range(2))
    expected = step(plain, key, slots)
    assert torch.compile(step, backend="aot_eager", fullgraph=True)(compiled, key, slots) == expected
    assert plain.any()
    assert torch.equal(plain, compiled)
