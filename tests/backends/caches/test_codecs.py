"""Packings of caches, and codecs: declared, or learned from a writer, or refused with what it wrote."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.backends.caches.codecs import default_codec, packed_codec
from attncheck.backends.caches.learned_codec import NoCodec, learn_codec
from attncheck.backends.caches.packings import (
    PACKINGS,
    allocate_kv_cache,
    detect_packing,
    packed_shape,
    pool_axes,
    stride_order,
)
from attncheck.backends.caches.placed_codec import PlacedCodec
from attncheck.backends.candidates.torch_mla import TorchMLABackend
from attncheck.backends.dtypes import FP8_DTYPES
from attncheck.backends.kernel import kernel_backend
from attncheck.reference.attention.cache import kv_cache_views, reshape_and_cache
from attncheck.reference.spec import AttentionType, LayerSpec, MLASpec
from attncheck.reference.step_spec import CacheSpec

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


HALVES = grid(2, None, 4, 3, 8)


def right(kv_cache, slots, key, value):
    page_size = kv_cache.shape[2]
    for half, new in zip(kv_cache, (key, value), strict=True):
        half[slots // page_size, slots % page_size] = new


def learn(write, allocate=HALVES, block_size=4):
    return learn_codec(write, allocate, LAYER, CacheSpec(block_size=block_size), "cpu")


def altered(change):
    """The right writer, with arguments that are changed before."""
    return lambda kv_cache, slots, key, value: right(kv_cache, *change(slots, key, value))


def noisy(slots, key, value):
    return slots, key + 0.01 * torch.randn_like(key), value


def stalled(kv_cache, slots, key, value):
    raise RuntimeError("the builder was never called\nsecond line")


def by_batch(kv_cache, slots, key, value):
    """Rows go to the pages of their slots, in the order in which they came."""
    for half, new in zip(kv_cache, (key, value), strict=True):
        half[slots // 4, torch.arange(len(slots)) % 4] = new


def accumulating(kv_cache, slots, key, value):
    for half, new in zip(kv_cache, (key, value), strict=True):
        half[slots // 4, slots % 4] += new


def alternating(kv_cache, slots, key, value):
    """Odd pages are kept in another order than even ones."""
    is_odd = slots // 4 % 2 == 1
    right(kv_cache, torch.where(is_odd, slots ^ 1, slots), key, value)


def by_parity(kv_cache, slots, key, value):
    """Halves change places with the size of the pool."""
    right(kv_cache, slots, *((key, value) if kv_cache.shape[1] % 2 else (value, key)))


def doubled(kv_cache, slots, key, value):
    """Keys are written in place of values as well; values past them."""
    right(kv_cache, slots, key, key)


REFUSED = {
    "noise": (altered(noisy), "is in the cache after a write of whole numbers from 1 to 256"),
    "a head left out": (
        altered(lambda slots, key, value: (slots, torch.cat([key[:, :2], 0 * key[:, :1]], 1), value)),
        "64 of 384 numbers are stored nowhere, the first is element 0 of the key of head 2 (page 0, offset 0)",
    ),
    "values in place of keys as well": (doubled, "the value of head 0 (page 0, offset 0)"),
    "rows in the order of the batch": (by_batch, "writing slots in random order gives another cache layout"),
    "sums": (accumulating, "writing a single slot gives another cache layout"),
    "odd pages": (alternating, "the keys of one page are laid out differently from those of another"),
    "by the size of the pool": (by_parity, "slots of the first or the last page are stored outside the pool"),
    "an exception": (stalled, "the writer raised RuntimeError: the builder was never called"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_is_no_layout_is_refused_in_words(fault):
    write, expected = REFUSED[fault]
    found = learn(write)
    assert isinstance(found, NoCodec)
    assert expected in found.reason
    assert "\n" not in found.reason


def by_token(kv_cache, slots, key, value):
    kv_cache.transpose(1, 2)[slots // 4, slots % 4] = torch.cat([key, value], dim=-1)


def test_memory_that_is_not_the_cache_alone_is_refused():
    padded = grid(None, 3, 4, 20)
    found = learn(by_token, lambda blocks: padded(blocks)[..., :16])
    assert found.reason == "the cache is no dense memory of its own"
    spare = grid(None, 3, 4, 16)
    found = learn(by_token, lambda blocks: spare(blocks + 1))
    assert found.reason == "the memory of a page depends on how many there are"

    def refused(blocks):
        raise ValueError("block size 4 is too small")

    assert learn(right, refused).reason == "no cache of 2 pages could be made: ValueError: block size 4 is too small"


def test_what_is_kept_beside_the_rows_is_refused():
    """The right writer into rows with a column to spare, where it keeps what it makes of the keys."""
    spare = grid(2, None, 4, 3, 9)

    def reason(summary):
        def write(kv_cache, slots, key, value):
            right(kv_cache[..., :8], slots, key, value)
            kv_cache[0, slots // 4, slots % 4, :, 8] = summary(key)

        return learn(write, spare).reason

    first = "element 0 of the key of head 0 (page 0, offset 0) is stored 2 times"
    assert reason(lambda key: key[..., 0]) == first
    assert reason(lambda key: key.max()) == "numbers are stored that are mixed of those given"
    assert reason(lambda key: 0.5) == "0.5 is in the cache after a write of whole numbers from 1 to 256"
    other = "writing a single slot gives another cache layout than writing whole pages"
    assert reason(lambda key: float(key.max() < 100)) == other
    untouched = lambda kv_cache, *rows: right(kv_cache[..., :8], *rows)  # noqa: E731
    assert not isinstance(learn(untouched, spare), NoCodec)


def test_a_writer_at_fault_in_the_very_last_slot_is_refused():
    """Writes to a few slots of a large pool would not find this fault."""

    def write(kv_cache, slots, key, value):
        last = kv_cache.shape[1] * 64 - 1
        slots = torch.where((slots == last) & (last > 3 * 64), last - 1, slots)
        right(kv_cache, slots, key, value)

    found = learn(write, grid(2, None, 64, 3, 8), block_size=64)
    other = "writing the last page in reverse order gives another cache layout than writing whole pages"
    assert found.reason == other


FLOAT_LAYER = LayerSpec(num_heads=4, num_kv_heads=2, head_size=8, dtype="float32")


def fake_backend(shape=lambda nb, bs, h, d: (2, nb, bs, h, d), order=None):
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
    cache = allocate_kv_cache(fake_backend(order=order), FLOAT_LAYER, CacheSpec(block_size=4), 3, "cpu")
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
    fake = fake_backend(lambda nb, bs, h, d: packed_shape(packing, nb, bs, h, d, d))
    for block_size in (2, 4, 8, 13, 16):
        for layout, order in (("NHD", nhd), ("HND", hnd)):
            cache = CacheSpec(block_size=block_size, layout=layout)
            assert detect_packing(fake, FLOAT_LAYER, cache) == packing
            assert stride_order(fake, FLOAT_LAYER, cache) == order


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
            assert detect_packing(fake_backend(shape), FLOAT_LAYER, cache) is None
            assert stride_order(fake_backend(shape), FLOAT_LAYER, cache) == tuple(range(len(shape(1, 1, 1, 1))))
    assert detect_packing(fake_backend(only_its_own_heads), FLOAT_LAYER, CacheSpec()) is None


def test_one_page_size_is_enough_to_be_recognised():
    def only_16(nb, bs, h, d):
        if bs != 16:
            raise ValueError("block_size must be 16")
        return (2, nb, bs, h, d)

    assert detect_packing(fake_backend(only_16), FLOAT_LAYER, CacheSpec(block_size=16)) == "split_first"


def test_a_backend_that_ignores_the_layout_has_one():
    fake = fake_backend(order=(1, 0, 2, 3, 4))
    assert stride_order(fake, FLOAT_LAYER, CacheSpec(layout="HND")) == (1, 0, 2, 3, 4)


@pytest.mark.parametrize(
    ("shape", "orders"),
    [
        (lambda nb, bs, h, d: (2, nb, bs, h, d), {"BL": ([1], []), "BHL": ([1, 3], []), "LHB": ([], [3, 1])}),
        (lambda nb, bs, h, d: (nb, 2 * bs * h * d), {"BL": ([0], [])}),
        (lambda nb, bs, h, d: (2, nb, bs * h * d), {"BL": ([1], [])}),
        (lambda nb, bs, h, d: (nb, bs, 2 * h, d), {"BL": ([0], [])}),
        (lambda nb, bs, h, d: (2, nb * bs, h, d), {}),
    ],
)
def test_an_axis_is_of_pages_or_heads_alone(shape, orders):
    for order in ("BL", "BHL", "LHB"):
        cache = CacheSpec(block_size=4, layout="HND", pool_order=order)
        if order in orders:
            assert pool_axes(fake_backend(shape), FLOAT_LAYER, cache, 5) == orders[order]
        else:
            with pytest.raises(ValueError, match=r"has no axis of the (pages|heads) alone"):
                pool_axes(fake_backend(shape), FLOAT_LAYER, cache, 5)


def test_orders_and_shapes_that_are_none_are_errors_of_the_backend():
    for order in ((0, 1, 2, 3), (0, 1, 2, 3, 3), (1, 2, 3, 4, 5)):
        with pytest.raises(ValueError, match="no permutation of the 5 dimensions") as refused:
            allocate_kv_cache(fake_backend(order=order), FLOAT_LAYER, CacheSpec(), 3, "cpu")
        assert str(refused.value).startswith("FAKE.get_kv_cache_stride_order")
        assert str(order) in str(refused.value)
    with pytest.raises(ValueError, match=r"FAKE.get_kv_cache_shape\(\) returned \(0, 16\): every extent must be pos"):
        allocate_kv_cache(fake_backend(lambda nb, bs, h, d: (0, bs)), FLOAT_LAYER, CacheSpec(), 3, "cpu")


def test_dtype_of_the_allocated_cache():
    dtypes = {"auto": torch.float32, "float16": torch.float16, "fp8": torch.uint8, "fp8_e5m2": torch.uint8}
    for kv_cache_dtype, dtype in dtypes.items():
        cache = allocate_kv_cache(fake_backend(), FLOAT_LAYER, CacheSpec(kv_cache_dtype=kv_cache_dtype), 3, "cpu")
        assert cache.dtype == dtype
        assert not cache.any()
    encoder = LayerSpec(num_heads=4, num_kv_heads=2, head_size=8, attn_type=AttentionType.ENCODER_ONLY)
    assert allocate_kv_cache(fake_backend(), encoder, CacheSpec(), 3, "cpu").numel() == 0


def test_only_content_holds_values_of_another_size():
    assert packed_shape("content", 3, 4, 2, 8, 5) == (3, 2, 4, 13)
    with pytest.raises(ValueError, match="head_size_v 5 beside head_size 8: packing plane needs them equal"):
        packed_shape("plane", 3, 4, 2, 8, 5)
