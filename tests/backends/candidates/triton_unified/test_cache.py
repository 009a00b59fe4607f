import pytest
import torch

pytest.importorskip("triton")

from attncheck.backends.candidates.triton_unified.cache import reshape_and_cache

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, SIZE, BLOCKS, PAGE = 3, 24, 5, 6


def numbers(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def test_nothing_is_written_for_no_rows_nor_beyond_the_cache():
    cache = numbers(BLOCKS, PAGE, HEADS, SIZE)
    before = cache.clone()
    key = numbers(2, HEADS, SIZE)
    reshape_and_cache(key, key, cache[:4], cache[:4], torch.empty(0, dtype=torch.int64, device=DEVICE))
    reshape_and_cache(key, key, cache[:4], cache[:4], torch.tensor([-7, 4 * PAGE], device=DEVICE))
    assert torch.equal(cache, before)


def test_offsets_beyond_32_bits_are_reached():
    # Memory without a write is never backed by pages.
    memory = torch.empty(2**31 + 12, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
    cache = memory.as_strided((3, 1, 1, 4), (2**30 + 4, 4, 4, 1))
    slots = torch.tensor([2], device=DEVICE)
    row = torch.tensor([[[1.0, 2.0, -3.0, 448.0]]], device=DEVICE)
    reshape_and_cache(row, row, cache, cache, slots)
    assert cache[2].float().flatten().tolist() == [1.0, 2.0, -3.0, 448.0]


def test_what_does_not_fit_is_refused(refusals):
    cache = torch.zeros(BLOCKS, PAGE, HEADS, SIZE)
    given = {"key": torch.ones(2, HEADS, SIZE), "value": torch.ones(2, HEADS, SIZE), "key_cache": cache}
    given |= {"value_cache": cache, "slot_mapping": torch.tensor([1, 2])}
    codes = torch.zeros(BLOCKS, PAGE, HEADS, SIZE, dtype=torch.float8_e5m2)
    wrong = [
        ("key has shape (1, 3, 24), not [2+, 3, 24]", {"key": torch.zeros(1, HEADS, SIZE)}),
        ("key has dtype torch.float64", {"key": torch.zeros(2, HEADS, SIZE, dtype=torch.float64)}),
        ("caches have dtypes torch.float16 and torch.float32", {"key_cache": cache.half()}),
        ("caches have shapes (5, 6, 3, 24) and (5, 6, 24)", {"value_cache": torch.zeros(BLOCKS, PAGE, SIZE)}),
        ("slot_mapping is torch.float32 (2,), not int32 or int64 [T]", {"slot_mapping": torch.zeros(2)}),
        (
            "k_scale has shape (2,): neither 1 element, [3] nor [5, 6, 3]",
            {"key_cache": codes, "value_cache": codes, "k_scale": torch.ones(2)},
        ),
    ]
    found = refusals(lambda changed: reshape_and_cache(**given | changed[1]), wrong)
    for message, (reason, _) in zip(found, wrong, strict=True):
        assert message.removeprefix("reshape_and_cache: ").startswith(reason)
    assert not cache.any()


def test_a_compiled_step_writes_the_same_into_views_of_one_tensor():
    def step(pool, key, slots):
        reshape_and_cache(key, key + 1, pool[0], pool[1], slots)
        return pool.sum()

    key, slots = numbers(3, HEADS, SIZE), torch.tensor([1, -1, 6], device=DEVICE)
    plain, compiled = (torch.zeros(2, BLOCKS, PAGE, HEADS, SIZE, device=DEVICE) for _ in range(2))
    expected = step(plain, key, slots)
    assert torch.compile(step, backend="aot_eager", fullgraph=True)(compiled, key, slots) == expected
    assert plain.any()
    assert torch.equal(plain, compiled)
