"""Images of a cache: of all of it, and of the pages of one that is too large to be copied."""

import pytest
import torch

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl
from attncheck.backends.candidates.torch_sdpa import SDPABackend
from attncheck.harness.checks.findings import Broken, Holds
from attncheck.harness.driver.pool import PoolMemory
from attncheck.harness.host import own_memory
from attncheck.harness.problem.sizes import needed_bytes, shortage

CPU = torch.device("cpu")
FAR = {"block_size": 16, "first_block": 8388600}
"""Pages at 2**31 elements of one head of size 16, keys and values each: a pool of 8 GiB."""


@pytest.fixture
def far_case(make_case):
    """A small batch far up in a pool; keywords are of the cache."""
    return lambda **cache: make_case(
        (1, 40), (3, 21), (12, 12), cache=FAR | cache, num_heads=1, num_kv_heads=1, head_size=16, dtype="float16"
    )


@pytest.mark.parametrize(("axis", "swapped"), [(0, False), (1, True)])
def test_an_image_of_some_pages_has_what_the_cache_has(axis, swapped):
    num_blocks, size = 2**19, 16  # an image of all of it would be too large
    shape = (num_blocks, 2, size, 3) if axis == 0 else (2, num_blocks, size, 3)
    cache = torch.zeros(shape, dtype=torch.int8)
    if swapped:
        cache = cache.transpose(2, 3).contiguous().transpose(2, 3)
    pages = torch.tensor([3, 70000, num_blocks - 1])
    cache.index_copy_(axis, pages, torch.randint(-99, 99, (*shape[:axis], 3, *shape[axis + 1 :]), dtype=torch.int8))
    memory = PoolMemory(cache, num_blocks, size, torch.tensor([num_blocks * size - 1, 70000 * size, 3 * size + 5]))
    image = memory.bytes()
    assert image.numel() == 3 * 2 * size * 3
    assert torch.equal(memory.view(image), cache.index_select(axis, pages))
    assert memory.view(image).stride()[2:] == cache.stride()[2:]
    slots = torch.tensor([70000 * size + 7, 3 * size, num_blocks * size - 1])
    assert memory.slots_in_image(slots).tolist() == [size + 7, 0, 3 * size - 1]
    before = cache.index_select(axis, pages)
    cache.zero_()
    memory.restore(image)
    assert torch.equal(cache.index_select(axis, pages), before)


def test_a_very_large_cache_without_an_axis_of_pages_is_not_copied():
    cache = torch.zeros(1, dtype=torch.int8).expand(2**26, 16, 2)
    with pytest.raises(MemoryError, match=r"no single axis of 67108863 pages"):
        PoolMemory(cache, 2**26 - 1, 16, torch.tensor([0]))


@pytest.mark.parametrize(
    ("backend", "cache"),
    [
        (SDPABackend, {"layout": "HND"}),
        (ReferenceBackend, {"kv_cache_dtype": "fp8_e5m2", "k_scale": 0.3, "first_block": 16777210}),
    ],
)
def test_a_right_backend_is_right_beyond_two_to_the_31_elements(judge, far_case, backend, cache):
    case = far_case(**cache)
    held = own_memory().resident
    for check in ("numerics", "cache_write", "containment"):
        assert isinstance(judge(check, backend, case), Holds)
    assert own_memory().resident - held < 2**28
    assert shortage(case, CPU) is None
    assert needed_bytes(case) > 2**32 > needed_bytes(case, reserves=True)
    # A pool too large even to be reserved counts as memory.
    assert needed_bytes(far_case(num_blocks=2**31), reserves=True) > 2**40


def test_a_stray_write_beside_the_pages_of_the_batch_is_found(judge, backend_of, far_case):
    class Impl(ReferenceImpl):
        def write(self, layer, key, value, key_cache, value_cache, slots):
            super().write(layer, key, value, key_cache, value_cache, slots)
            real = slots[slots >= 0]
            free = int(real.max()) // key_cache.shape[1] + 1
            key_cache[free, 3] = key[0]

    finding = judge("cache_write", backend_of(Impl), far_case())
    assert isinstance(finding, Broken)
    assert "(page 8388604, offset 3; owned by no request) was overwritten" in finding.summary
