"""A writer whose writes follow no layout gets no codec, and the reason states what it wrote."""

import pytest
import torch

from attncheck.backends.caches.learned_codec import NoCodec, learn_codec
from attncheck.reference.spec import CacheSpec, LayerSpec

LAYER = LayerSpec(num_heads=6, num_kv_heads=3, head_size=8, dtype="bfloat16")


def grid(*shape):
    """``allocate`` of a cache of this shape, in which None is the number of blocks."""
    return lambda blocks: torch.zeros([blocks if n is None else n for n in shape], dtype=torch.bfloat16)


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
