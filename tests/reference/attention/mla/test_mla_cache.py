"""Writing a latent cache: which bytes of the pool change, and to what."""

import pytest
import torch

from attncheck.errors import ReferenceArgumentError
from attncheck.reference import mla_write_cache, quantize_fp8

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def rows(count, size, seed=0):
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed))


def pool(dtype, width=5, pattern=0x2B):
    """A cache with a byte pattern in every slot, in a wider allocation that must not be touched either."""
    element = torch.empty(0, dtype=dtype).element_size()
    return torch.full((6, 4, (width + 2) * element), pattern, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, E4M3, E5M2], ids=str)
def test_exactly_the_named_slots_hold_exactly_the_rows(dtype):
    allocation = pool(dtype)
    cache = allocation[..., 1:6]
    c, k_pe, slots = rows(6, 3), rows(7, 2, seed=1), [9, -1, 0, 23, -5]
    want = allocation.clone()
    for t, slot in enumerate(slots):
        if slot >= 0:
            row = torch.cat([c[t], k_pe[t]])
            row = quantize_fp8(row, 0.3, dtype) if dtype in (E4M3, E5M2) else row.to(dtype)
            want[slot // 4, slot % 4, 1:6] = row
    mla_write_cache(c, k_pe, cache, torch.tensor(slots), k_scale=0.3)
    assert torch.equal(allocation.view(torch.uint8), want.view(torch.uint8))


def test_a_tensor_scale_and_no_rope():
    for scale in (torch.tensor(0.3), torch.tensor([0.3])):
        cache = torch.zeros(2, 4, 3).to(E4M3)
        mla_write_cache(rows(1, 3), torch.zeros(1, 0), cache, torch.tensor([5]), k_scale=scale)
        want = quantize_fp8(rows(1, 3), 0.3)
        assert torch.equal(cache[1, 1].view(torch.uint8), want[0].view(torch.uint8))


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"kv_c_normed": rows(1, 3)}, "kv_c_normed.shape"),
        ({"kv_c_normed": torch.zeros(3, 1, 3)}, "kv_c_normed.shape"),
        ({"kv_c_normed": torch.zeros(3, 3).to(E4M3)}, "kv_c_normed.dtype"),
        ({"kv_c_normed": torch.zeros(3, 4)}, "kv_cache.shape"),
        ({"k_pe": torch.zeros(1, 2)}, "k_pe.shape"),
        ({"k_pe": torch.zeros(3, 1, 2)}, "k_pe.shape"),
        ({"k_pe": torch.zeros(3, 2, dtype=torch.int32)}, "k_pe.dtype"),
        ({"k_pe": torch.zeros(3, 2, device="meta")}, "k_pe.device"),
        ({"kv_cache": torch.zeros(5, 4, 1, 5)}, "kv_cache.shape"),
        ({"kv_cache": torch.zeros(5, 4, 6)}, "kv_cache.shape"),
        ({"kv_cache": torch.zeros(5, 4, 5, dtype=torch.uint8)}, "kv_cache.dtype"),
        ({"slot_mapping": torch.tensor([1, 20])}, "slot_mapping"),
        ({"slot_mapping": torch.tensor([1, 1])}, "slot_mapping"),
        ({"slot_mapping": torch.tensor([1.0])}, "slot_mapping.dtype"),
        ({"slot_mapping": torch.tensor(1)}, "slot_mapping.shape"),
        ({"k_scale": 0.0}, "k_scale"),
        ({"k_scale": torch.ones(5)}, "k_scale.shape"),
    ],
)
def test_refused_before_anything_is_written(change, argument):
    cache = torch.zeros(5, 4, 5).to(E4M3)
    sound = {
        "kv_c_normed": rows(3, 3),
        "k_pe": rows(3, 2),
        "kv_cache": cache,
        "slot_mapping": torch.tensor([3, -1, 7]),
    }
    with pytest.raises(ReferenceArgumentError) as refusal:
        mla_write_cache(**{**sound, **change})
    assert refusal.value.argument == argument
    assert not cache.float().any()
    mla_write_cache(**sound)
    assert cache.float().any()
