"""Shapes, strides and addresses of caches, against numbers worked out by hand (vLLM's conventions)."""

import pytest
import torch

from attncheck.backends.caches.packings import allocate_kv_cache, detect_packing, packed_shape, stride_order
from attncheck.reference.spec import AttentionType, CacheSpec, LayerSpec

LAYER = LayerSpec(num_heads=4, num_kv_heads=2, head_size=8, dtype="float32")


def backend(shape=lambda nb, bs, h, d: (2, nb, bs, h, d), order=None):
    """Only what a cache is allocated from."""

    class Fake:
        get_name = staticmethod(lambda: "FAKE")

        @staticmethod
        def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size):
            return shape(num_blocks, block_size, num_kv_heads, head_size)

        @staticmethod
        def get_kv_cache_stride_order():
            if order is None:
                raise NotImplementedError
            return order

    return Fake


@pytest.mark.parametrize(
    ("order", "strides", "position"),
    [
        ((0, 1, 2, 3, 4), (192, 64, 16, 8, 1), 237),
        ((0, 1, 3, 2, 4), (192, 64, 8, 32, 1), 245),
        ((1, 0, 2, 3, 4), (64, 128, 16, 8, 1), 109),
        ((1, 0, 3, 2, 4), (64, 128, 8, 32, 1), 117),
    ],
)
def test_allocation_in_a_stride_order(order, strides, position):
    cache = allocate_kv_cache(backend(order=order), LAYER, CacheSpec(block_size=4), 3, "cpu")
    assert cache.shape == (2, 3, 4, 2, 8)
    assert cache.stride() == strides
    cache[1, 0, 2, 1, 5] = 1.0
    flat = cache.untyped_storage()
    assert torch.tensor([], dtype=torch.float32).set_(flat).nonzero().tolist() == [[position]]


@pytest.mark.parametrize(
    ("packing", "nhd", "hnd"),
    [
        ("split_first", (0, 1, 2, 3, 4), (0, 1, 3, 2, 4)),
        ("split_second", (0, 1, 2, 3, 4), (0, 1, 3, 2, 4)),
        ("content", (0, 2, 1, 3), (0, 1, 2, 3)),
        ("plane", (0, 2, 1, 3), (0, 1, 2, 3)),
    ],
)
def test_the_order_follows_from_the_packing(packing, nhd, hnd):
    fake = backend(lambda nb, bs, h, d: packed_shape(packing, nb, bs, h, d, d))
    for block_size in (2, 4, 8, 13, 16):
        for layout, order in (("NHD", nhd), ("HND", hnd)):
            cache = CacheSpec(block_size=block_size, layout=layout)
            assert detect_packing(fake, LAYER, cache) == packing
            assert stride_order(fake, LAYER, cache) == order


def test_other_packings_are_not_guessed():
    def only_its_own_heads(nb, bs, h, d):
        if h != 2:
            raise ValueError("num_kv_heads must be 2")
        return (2, nb, bs, h, d)

    for shape in (
        lambda nb, bs, h, d: (2, nb, h, bs, d),
        lambda nb, bs, h, d: (2, nb, bs, h * d),
        lambda nb, bs, h, d: (nb, bs, h, 2 * d),
        lambda nb, bs, h, d: (2, nb, h, d, bs),
        lambda nb, bs, h, d: (2, nb, d, h, bs),
        lambda nb, bs, h, d: (nb, bs, d),
    ):
        for block_size in (4, 8, 16):
            cache = CacheSpec(block_size=block_size, layout="HND")
            assert detect_packing(backend(shape), LAYER, cache) is None
            assert stride_order(backend(shape), LAYER, cache) == tuple(range(len(shape(1, 1, 1, 1))))
    assert detect_packing(backend(only_its_own_heads), LAYER, CacheSpec()) is None


def test_one_page_size_is_enough_to_be_recognised():
    def only_16(nb, bs, h, d):
        if bs != 16:
            raise ValueError("block_size must be 16")
        return (2, nb, bs, h, d)

    assert detect_packing(backend(only_16), LAYER, CacheSpec(block_size=16)) == "split_first"


def test_a_backend_that_ignores_the_layout_has_one():
    fake = backend(order=(1, 0, 2, 3, 4))
    assert stride_order(fake, LAYER, CacheSpec(layout="HND")) == (1, 0, 2, 3, 4)


def test_orders_and_shapes_that_are_none_are_errors_of_the_backend():
    for order in ((0, 1, 2, 3), (0, 1, 2, 3, 3), (1, 2, 3, 4, 5)):
        with pytest.raises(ValueError, match="no permutation of the 5 dimensions") as refused:
            allocate_kv_cache(backend(order=order), LAYER, CacheSpec(), 3, "cpu")
        assert str(refused.value).startswith("FAKE.get_kv_cache_stride_order")
        assert str(order) in str(refused.value)
    with pytest.raises(ValueError, match=r"FAKE.get_kv_cache_shape\(\) returned \(0, 16\): every extent must be pos"):
        allocate_kv_cache(backend(lambda nb, bs, h, d: (0, bs)), LAYER, CacheSpec(), 3, "cpu")


def test_dtype_of_the_allocated_cache():
    dtypes = {"auto": torch.float32, "float16": torch.float16, "fp8": torch.uint8, "fp8_e5m2": torch.uint8}
    for kv_cache_dtype, dtype in dtypes.items():
        cache = allocate_kv_cache(backend(), LAYER, CacheSpec(kv_cache_dtype=kv_cache_dtype), 3, "cpu")
        assert cache.dtype == dtype
        assert not cache.any()
    encoder = LayerSpec(num_heads=4, num_kv_heads=2, head_size=8, attn_type=AttentionType.ENCODER_ONLY)
    assert allocate_kv_cache(backend(), encoder, CacheSpec(), 3, "cpu").numel() == 0


def test_only_content_holds_values_of_another_size():
    assert packed_shape("content", 3, 4, 2, 8, 5) == (3, 2, 4, 13)
    with pytest.raises(ValueError, match="head_size_v 5 beside head_size 8: packing plane needs them equal"):
        packed_shape("plane", 3, 4, 2, 8, 5)
