"""Codecs write at the addresses of a packing, or, learned from a writer, what the writer writes, whatever the layout."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.backends.caches.codecs import default_codec, packed_codec
from attncheck.backends.caches.learned_codec import learn_codec
from attncheck.backends.caches.packings import PACKINGS, allocate_kv_cache
from attncheck.backends.caches.placed_codec import PlacedCodec
from attncheck.backends.candidates.torch_mla import TorchMLABackend
from attncheck.backends.dtypes import FP8_DTYPES
from attncheck.backends.kernel import kernel_backend
from attncheck.reference.attention.cache import kv_cache_views, reshape_and_cache
from attncheck.reference.spec import AttentionType, CacheSpec, LayerSpec, MLASpec

LAYER = LayerSpec(num_heads=6, num_kv_heads=3, head_size=8, dtype="bfloat16")
CACHE = CacheSpec(block_size=4)
BLOCKS = 5


def backend(packing, features=()):
    made = kernel_backend(lambda *_: None, name="kernel", features=features, supported_layouts=("NHD", "HND"))
    made.packing = packing
    return made


def reference_writer(packing, layer, cache):
    """The reference's, on the views of a packing."""

    def write(kv_cache, slots, key, value):
        held = kv_cache.view(FP8_DTYPES[cache.kv_cache_dtype]) if kv_cache.dtype == torch.uint8 else kv_cache
        reshape_and_cache(key, value, *kv_cache_views(held, packing, layer.head_size), slots)

    return write


def rows(n, layer, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = layer.head_size, layer.value_head_size
    tensors = (torch.randn(n, layer.num_kv_heads, size, generator=generator) for size in sizes)
    return [x.to(getattr(torch, layer.dtype)) for x in tensors]


def test_values_of_another_size_need_a_backend_that_declares_it():
    layer, cache = replace(LAYER, head_size_v=5), CACHE
    candidate = backend("split_first", features=("head_size_v",))
    assert default_codec(candidate, layer, cache) is None
    codec = packed_codec(candidate, layer, cache)
    kv_cache = allocate_kv_cache(candidate, layer, cache, BLOCKS, "cpu")
    assert kv_cache.shape == (BLOCKS, 3, 4, 13)
    key, value = rows(3, layer)
    codec.write(kv_cache, torch.tensor([4, 9, 0]), key, value)
    for read, written in zip(codec.read(kv_cache, torch.tensor([4, 9, 0])), (key, value), strict=True):
        assert torch.equal(read, written)
    encoder = replace(LAYER, attn_type=AttentionType.ENCODER_ONLY)
    assert backend("split_first").kv_cache_codec(encoder, CacheSpec()) is None


@pytest.mark.parametrize(("name", "dtype"), [("fp8", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
@pytest.mark.parametrize("k_scale", [0.25, (0.5, 2.0, 0.125)])
def test_fp8_codes_are_value_over_scale(name, dtype, k_scale):
    candidate = backend("split_second")
    cache = CacheSpec(block_size=4, kv_cache_dtype=name, k_scale=k_scale, v_scale=2.0)
    codec = candidate.kv_cache_codec(LAYER, cache)
    kv_cache = allocate_kv_cache(candidate, LAYER, cache, BLOCKS, "cpu")
    key, value = rows(2, LAYER)
    codec.write(kv_cache, torch.tensor([6, 1]), key, value)
    scale = torch.tensor(k_scale).reshape(-1, 1)
    stored = kv_cache.view(dtype)
    assert torch.equal(stored[1, 0, 2].float(), (key[0].float() / scale).to(dtype).float())
    assert torch.equal(stored[0, 1, 1].float(), (value[1].float() / 2).to(dtype).float())
    read_key, read_value = codec.read(kv_cache, torch.tensor([6, 1]))
    assert read_key.dtype == torch.bfloat16
    assert torch.equal(read_key[0].float(), (stored[1, 0, 2].float() * scale).bfloat16().float())
    assert torch.equal(read_value[1].float(), stored[0, 1, 1].float() * 2)


def numbers(n=3, seed=0):
    """Slots, keys and values for the layer of this module."""
    return torch.randperm(BLOCKS * 4, generator=torch.Generator().manual_seed(seed))[:n], *rows(n, LAYER, seed)


def grid(*shape):
    return lambda blocks: torch.zeros(*(blocks if extent is None else extent for extent in shape), dtype=torch.bfloat16)


def learned(write, allocate, layer=LAYER, cache=CACHE):
    codec = learn_codec(write, allocate, layer, cache, "cpu")
    assert isinstance(codec, PlacedCodec), codec
    return codec


@settings(max_examples=25)
@given(
    st.sampled_from(PACKINGS),
    st.sampled_from(["NHD", "HND"]),
    st.sampled_from(["float16", "bfloat16", "float32"]),
    st.sampled_from(["auto", "float32", "fp8_e4m3", "fp8_e5m2"]),
    st.integers(1, 33),
    st.integers(1, 5),
    st.integers(1, 70),
)
def test_any_known_packing_is_learned_byte_for_byte(packing, layout, dtype, kind, block_size, heads, head_size):
    layer = LayerSpec(num_heads=heads, num_kv_heads=heads, head_size=head_size, dtype=dtype)
    scales = {"k_scale": 0.5, "v_scale": (0.25, 2.0, 1.5, 0.5, 1.0)[:heads]}
    cache = CacheSpec(block_size=block_size, layout=layout, kv_cache_dtype=kind, **scales)
    write, made = reference_writer(packing, layer, cache), backend(packing)
    codec = learned(write, lambda blocks: allocate_kv_cache(made, layer, cache, blocks, "cpu"), layer, cache)
    known = packed_codec(made, layer, cache)
    caches = [allocate_kv_cache(made, layer, cache, BLOCKS, "cpu") for _ in range(2)]
    slots = torch.arange(block_size - 1, BLOCKS * block_size, 3)
    new = rows(len(slots), layer)
    codec.write(caches[0], slots, *new)
    known.write(caches[1], slots, *new)
    assert torch.equal(*(x.view(torch.uint8) for x in caches))
    for got, expected in zip(codec.read(caches[1], slots), known.read(caches[1], slots), strict=True):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)


def tiled(kv_cache, slots, key, value):
    """Keys in tiles of two elements, those of all slots of the page side by side; values with pairs of slots woven."""
    block, offset = slots // 4, slots % 4
    flat = kv_cache.view(len(kv_cache), 3, 2, 32)
    for head in range(3):
        for element in range(8):
            flat[block, head, 0, element // 2 * 8 + offset * 2 + element % 2] = key[:, head, element]
            flat[block, head, 1, offset // 2 * 16 + element * 2 + offset % 2] = value[:, head, element]


def test_tiles():
    allocate = grid(None, 3, 4, 16)
    codec, kv_cache = learned(tiled, allocate), allocate(BLOCKS)
    key, value = torch.zeros(2, 1, 3, 8, dtype=torch.bfloat16)
    key[0, 1, 5], value[0, 2, 6] = 3.0, 7.0
    codec.write(kv_cache, torch.tensor([11]), key, value)  # page 2, offset 3
    assert kv_cache.flatten().nonzero().flatten().tolist() == [2 * 192 + 64 + 16 + 6 + 1, 2 * 192 + 128 + 32 + 16 + 13]
    assert [float(x) for x in kv_cache[kv_cache != 0]] == [3.0, 7.0]
    again, all_slots = (allocate(BLOCKS), allocate(BLOCKS)), numbers(BLOCKS * 4)
    codec.write(again[0], *all_slots)
    tiled(again[1], *all_slots)
    assert torch.equal(*again)
    assert torch.equal(codec.read(again[1], all_slots[0])[0], all_slots[1])


def test_pages_that_lie_further_apart_the_more_there_are():
    def write(kv_cache, slots, key, value):  # [element, K or V, head, block, offset]
        for index, new in enumerate((key, value)):
            kv_cache[:, index].permute(2, 3, 1, 0)[slots // 4, slots % 4] = new

    allocate = grid(8, 2, 3, None, 4)
    codec, slots_and_rows = learned(write, allocate), numbers(7)
    for blocks in (5, 11):
        caches = allocate(blocks), allocate(blocks)
        codec.write(caches[0], *slots_and_rows)
        write(caches[1], *slots_and_rows)
        assert torch.equal(*caches)


def test_a_latent_cache():
    mla = MLASpec(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
    layer = LayerSpec(num_heads=2, num_kv_heads=1, head_size=20, dtype="float32", mla=mla)
    known = packed_codec(TorchMLABackend, layer, CACHE)
    codec = learned(known.write, lambda blocks: torch.zeros(blocks, 4, 20), layer)
    caches = torch.zeros(3, 4, 20), torch.zeros(3, 4, 20)
    latent, rotary = torch.randn(2, 16), torch.randn(2, 4)
    for each, kv_cache in zip((codec, known), caches, strict=True):
        each.write(kv_cache, torch.tensor([9, 2]), latent, rotary)
    assert torch.equal(*caches)
    assert torch.equal(codec.read(caches[0], torch.tensor([9, 2]))[1], rotary)


def test_values_of_another_size_and_views_into_larger_memory():
    layer = replace(LAYER, head_size_v=5)
    codec = learned(reference_writer("content", layer, CACHE), grid(None, 3, 4, 13), layer)
    memory = torch.zeros(3 * BLOCKS * 156, dtype=torch.bfloat16)
    kv_cache = memory[156 * BLOCKS : 156 * 2 * BLOCKS].view(BLOCKS, 3, 4, 13)
    key, value = rows(2, layer)
    codec.write(kv_cache, torch.tensor([19, 0]), key, value)
    assert torch.equal(kv_cache[4, :, 3, :8], key[0])
    assert torch.equal(kv_cache[0, :, 0, 8:], value[1])
    assert int(memory.count_nonzero()) == int(kv_cache.count_nonzero())


def test_arguments_that_a_writer_overwrites_and_no_slots_at_all():
    def write(kv_cache, slots, key, value):
        tiled(kv_cache, slots, key, value)
        for argument in (slots, key, value):
            argument.zero_()

    codec, kv_cache = learned(write, grid(None, 3, 4, 16)), grid(None, 3, 4, 16)(BLOCKS)
    assert torch.equal(codec.keys.base, learned(tiled, grid(None, 3, 4, 16)).keys.base)
    codec.write(kv_cache, *numbers(0))
    assert not kv_cache.any()
    assert [tuple(x.shape) for x in codec.read(kv_cache, torch.arange(0))] == [(0, 3, 8), (0, 3, 8)]
