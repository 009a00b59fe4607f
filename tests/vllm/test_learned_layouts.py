"""How vLLM's CPU kernels lay out a page is learned from their writer, whatever the dtype, sizes and instructions."""

import pytest
import torch

from attncheck.backends.caches.learned_codec import learn_codec
from attncheck.backends.caches.placed_codec import PlacedCodec
from attncheck.backends.dtypes import cache_dtype
from attncheck.reference.spec import LayerSpec
from attncheck.reference.step_spec import CacheSpec

pytestmark = pytest.mark.vllm

HEADS = 2


def learned(isa, dtype, kind, block_size, head_size):
    ops = pytest.importorskip("vllm._custom_ops")
    layer = LayerSpec(num_heads=HEADS, num_kv_heads=HEADS, head_size=head_size, dtype=dtype)
    cache = CacheSpec(block_size=block_size, layout="HND", kv_cache_dtype=kind, k_scale=0.5)

    def write(kv_cache, slots, key, value):
        planes = kv_cache.view(len(kv_cache), HEADS, 2 * block_size, head_size).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(key, value, *planes, slots, isa, kv_cache_dtype=kind)

    def allocate(blocks):
        return torch.zeros(blocks, HEADS, block_size, 2 * head_size, dtype=cache_dtype(layer, cache))

    return learn_codec(write, allocate, layer, cache, "cpu")


SIZES = ((32, 64), (64, 32), (64, 80), (32, 96), (32, 256))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    ("isa", "kind"),
    [
        ("vec", "auto"),
        ("vec", "fp8_e4m3"),
        ("vec", "fp8_e5m2"),
        ("vec16", "auto"),
        ("amx", "auto"),
        ("amx", "fp8_e4m3"),
    ],
)
def test_every_layout_is_learned(isa, kind, dtype):
    if isa == "amx" and not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("vLLM's library for a CPU without AVX512_BF16 has no amx writer")
    if kind != "auto" and not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM has no kernel for an FP8 cache on a CPU without AVX-512")
    for block_size, head_size in SIZES:
        if isa != "vec16" and head_size % 32:
            continue  # vLLM takes vec16 for these
        codec = learned(isa, dtype, kind, block_size, head_size)
        assert isinstance(codec, PlacedCodec), (block_size, head_size, codec)
        assert codec.keys.stride == codec.values.stride == codec.page == 2 * HEADS * block_size * head_size
        plane = block_size * head_size
        offset, head, element = (
            torch.arange(n).view(shape)
            for n, shape in zip((block_size, HEADS, head_size), ((-1, 1, 1), (1, -1, 1), (1, 1, -1)), strict=True)
        )
        of_head = 2 * plane * head
        if isa != "amx":  # keys transposed, values row by row
            assert torch.equal(codec.keys.base, of_head + block_size * element + offset)
            assert torch.equal(codec.values.base, of_head + plane + head_size * offset + element)
            continue
        halves = (codec.keys, 0), (codec.values, plane)
        for places, beginning in halves:  # tiles: each half is filled by its own numbers
            sorted_places = places.base.permute(1, 0, 2).reshape(HEADS, -1).sort(dim=1).values
            assert torch.equal(sorted_places, of_head.view(-1, 1) + beginning + torch.arange(plane))
