"""A codec reads back what it wrote, at the address its packing declares, and touches nothing else."""

import itertools
from dataclasses import replace

import pytest
import torch

from attncheck.backends.caches.codecs import default_codec, packed_codec
from attncheck.backends.caches.packings import PACKINGS, allocate_kv_cache
from attncheck.backends.kernel import kernel_backend
from attncheck.reference.spec import AttentionType, CacheSpec, LayerSpec

LAYER = LayerSpec(num_heads=6, num_kv_heads=3, head_size=8, dtype="bfloat16")
BLOCKS, BLOCK_SIZE = 5, 4


def backend(packing, features=()):
    def attend(query, key_cache, value_cache, metadata, params, out):
        raise AssertionError("not called")

    candidate = kernel_backend(attend, name="kernel", features=features, supported_layouts=("NHD", "HND"))
    candidate.packing = packing
    return candidate


def rows(n, layer=LAYER, seed=0):
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, layer.dtype)
    key = torch.randn(n, layer.num_kv_heads, layer.head_size, generator=generator).to(dtype)
    value = torch.randn(n, layer.num_kv_heads, layer.value_head_size, generator=generator).to(dtype)
    return key, value


@pytest.mark.parametrize(("packing", "layout"), list(itertools.product(PACKINGS, ["NHD", "HND"])))
def test_what_is_written_is_read_back_and_nothing_else_changes(packing, layout):
    candidate, cache = backend(packing), CacheSpec(block_size=BLOCK_SIZE, layout=layout)
    codec = candidate.kv_cache_codec(LAYER, cache)
    kv_cache = allocate_kv_cache(candidate, LAYER, cache, BLOCKS, "cpu")
    slots = torch.tensor([13, 2, 19, 7])
    key, value = rows(4)
    codec.write(kv_cache, slots, key, value)
    read_key, read_value = codec.read(kv_cache, slots)
    assert torch.equal(read_key, key)
    assert torch.equal(read_value, value)
    assert int(kv_cache.count_nonzero()) == int(key.count_nonzero() + value.count_nonzero())


@pytest.mark.parametrize("packing", PACKINGS)
def test_slots_are_disjoint_and_cover_the_cache(packing):
    candidate, cache = backend(packing), CacheSpec(block_size=BLOCK_SIZE)
    codec = candidate.kv_cache_codec(LAYER, cache)
    kv_cache = allocate_kv_cache(candidate, LAYER, cache, BLOCKS, "cpu")
    touched = torch.zeros(kv_cache.shape, dtype=torch.int64)
    ones = torch.ones(1, 3, 8, dtype=torch.bfloat16)
    for slot in range(BLOCKS * BLOCK_SIZE):
        kv_cache.zero_()
        codec.write(kv_cache, torch.tensor([slot]), ones, ones)
        touched += kv_cache != 0
    assert (touched == 1).all()


ADDRESSES = {
    # Slot 11 is block 2, offset 3; head 1, element 5 of the key, and of the value.
    "split_first": ((0, 2, 3, 1, 5), (1, 2, 3, 1, 5)),
    "split_second": ((2, 0, 3, 1, 5), (2, 1, 3, 1, 5)),
    "content": ((2, 1, 3, 5), (2, 1, 3, 8 + 5)),
    "plane": ((2, 1, 3, 5), (2, 1, BLOCK_SIZE + 3, 5)),
}


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_address_of_one_element(packing):
    candidate, cache = backend(packing), CacheSpec(block_size=BLOCK_SIZE, layout="HND")
    kv_cache = allocate_kv_cache(candidate, LAYER, cache, BLOCKS, "cpu")
    key, value = torch.zeros(2, 1, 3, 8, dtype=torch.bfloat16)
    key[0, 1, 5], value[0, 1, 5] = 3.0, 7.0
    candidate.kv_cache_codec(LAYER, cache).write(kv_cache, torch.tensor([11]), key, value)
    key_address, value_address = ADDRESSES[packing]
    assert kv_cache[key_address] == 3.0
    assert kv_cache[value_address] == 7.0


def test_values_of_another_size_need_a_backend_that_declares_it():
    layer, cache = replace(LAYER, head_size_v=5), CacheSpec(block_size=BLOCK_SIZE)
    candidate = backend("split_first", features=("head_size_v",))
    assert default_codec(candidate, layer, cache) is None
    codec = packed_codec(candidate, layer, cache)
    kv_cache = allocate_kv_cache(candidate, layer, cache, BLOCKS, "cpu")
    assert kv_cache.shape == (BLOCKS, 3, BLOCK_SIZE, 13)
    key, value = rows(3, layer)
    codec.write(kv_cache, torch.tensor([4, 9, 0]), key, value)
    read_key, read_value = codec.read(kv_cache, torch.tensor([4, 9, 0]))
    assert torch.equal(read_key, key)
    assert torch.equal(read_value, value)


def test_no_codec_without_a_cache():
    layer = replace(LAYER, attn_type=AttentionType.ENCODER_ONLY)
    assert backend("split_first").kv_cache_codec(layer, CacheSpec()) is None


@pytest.mark.parametrize(("name", "dtype"), [("fp8", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
@pytest.mark.parametrize("k_scale", [0.25, (0.5, 2.0, 0.125)])
def test_fp8_codes_are_value_over_scale(name, dtype, k_scale):
    candidate = backend("split_second")
    cache = CacheSpec(block_size=BLOCK_SIZE, kv_cache_dtype=name, k_scale=k_scale, v_scale=2.0)
    codec = candidate.kv_cache_codec(LAYER, cache)
    kv_cache = allocate_kv_cache(candidate, LAYER, cache, BLOCKS, "cpu")
    key, value = rows(2)
    codec.write(kv_cache, torch.tensor([6, 1]), key, value)
    scale = torch.tensor(k_scale).reshape(-1, 1)
    stored = kv_cache.view(dtype)
    assert torch.equal(stored[1, 0, 2].float(), (key[0].float() / scale).to(dtype).float())
    assert torch.equal(stored[0, 1, 1].float(), (value[1].float() / 2).to(dtype).float())
    read_key, read_value = codec.read(kv_cache, torch.tensor([6, 1]))
    assert read_key.dtype == torch.bfloat16
    assert torch.equal(read_key[0].float(), (stored[1, 0, 2].float() * scale).bfloat16().float())
    assert torch.equal(read_value[1].float(), stored[0, 1, 1].float() * 2)


def test_fp8_saturates():
    candidate, cache = backend("split_first"), CacheSpec(block_size=BLOCK_SIZE, kv_cache_dtype="fp8", k_scale=2.0)
    codec = candidate.kv_cache_codec(LAYER, cache)
    kv_cache = allocate_kv_cache(candidate, LAYER, cache, BLOCKS, "cpu")
    key, value = torch.full((2, 1, 3, 8), 1e6, dtype=torch.bfloat16)
    codec.write(kv_cache, torch.tensor([0]), key, value)
    assert (codec.read(kv_cache, torch.tensor([0]))[0] == 896).all()
