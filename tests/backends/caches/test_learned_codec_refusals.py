"""A writer whose writes follow no layout gets no codec, and the reason states what it wrote."""

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.backends.caches.learned_codec import NoCodec, learn_codec
from attncheck.reference.spec import CacheSpec, LayerSpec

LAYER = LayerSpec(num_heads=6, num_kv_heads=3, head_size=8, dtype="bfloat16")
CACHE = CacheSpec(block_size=4)


def halves(blocks):
    return torch.zeros(2, blocks, 4, 3, 8, dtype=torch.bfloat16)


def right(kv_cache, slots, key, value):
    for half, new in zip(kv_cache, (key, value), strict=True):
        half[slots // 4, slots % 4] = new


def by_token(kv_cache, slots, key, value):
    kv_cache.transpose(1, 2)[slots // 4, slots % 4] = torch.cat([key, value], dim=-1)


def refusal(write, allocate=halves):
    codec = learn_codec(write, allocate, LAYER, CACHE, "cpu")
    assert isinstance(codec, NoCodec), codec
    return codec.reason


def test_the_right_writer_is_not_refused():
    assert not isinstance(learn_codec(right, halves, LAYER, CACHE, "cpu"), NoCodec)


def altered(change):
    """The right writer, with arguments that are changed before."""
    return lambda kv_cache, slots, key, value: right(kv_cache, *change(slots, key, value))


def noisy(slots, key, value):
    return slots, key + 0.01 * torch.randn_like(key), value


def rotated(slots, key, value):
    return slots, torch.cat([-key[..., 4:], key[..., :4]], dim=-1), value


def stalled(kv_cache, slots, key, value):
    raise RuntimeError("the builder was never called\nsecond line")


def by_batch(kv_cache, slots, key, value):
    """Rows go to the pages of their slots, in the order in which they came."""
    for half, new in zip(kv_cache, (key, value), strict=True):
        half[slots // 4, torch.arange(len(slots)) % 4] = new


def accumulating(kv_cache, slots, key, value):
    for half, new in zip(kv_cache, (key, value), strict=True):
        half[slots // 4, slots % 4] += new


def sorting(slots, key, value):
    return slots.sort().values, key, value


def clearing(kv_cache, slots, key, value):
    """The rest of each page is zeroed."""
    kv_cache[:, slots // 4] = 0
    right(kv_cache, slots, key, value)


def alternating(kv_cache, slots, key, value):
    """Odd pages are kept in another order than even ones."""
    is_odd = slots // 4 % 2 == 1
    right(kv_cache, torch.where(is_odd, slots ^ 1, slots), key, value)


def doubled(kv_cache, slots, key, value):
    """Keys are written in place of values as well; values past them."""
    for index, new in enumerate((key, key)):
        kv_cache[index, slots // 4, slots % 4] = new


REFUSED = {
    "noise": (altered(noisy), "is in the cache after a write of whole numbers from 1 to 256"),
    "rotation": (altered(rotated), "is in the cache after a write of whole numbers"),
    "a head left out": (
        altered(lambda slots, key, value: (slots, torch.cat([key[:, :2], 0 * key[:, :1]], 1), value)),
        "64 of 384 numbers are stored nowhere, the first is element 0 of the key of head 2 (page 0, offset 0)",
    ),
    "one head for all": (altered(lambda slots, key, value: (slots, key[:, :1].expand_as(key), value)), "nowhere"),
    "the slot after": (altered(lambda slots, key, value: (slots + 1, key, value)), "the writer raised"),
    "values in place of keys as well": (doubled, "the value of head 0 (page 0, offset 0)"),
    "rows in the order of the batch": (by_batch, "writing slots in random order gives another cache layout"),
    "slots sorted": (altered(sorting), "writing slots in random order gives another cache layout"),
    "sums": (accumulating, "writing a single slot gives another cache layout"),
    "the rest of the page cleared": (clearing, "writing a single slot gives another cache layout"),
    "odd pages": (alternating, "the keys of one page are laid out differently from those of another"),
    "an exception": (stalled, "the writer raised RuntimeError: the builder was never called"),
    "nothing": (lambda *_: None, "384 of 384 numbers are stored nowhere"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_is_no_layout_is_refused_in_words(fault):
    write, expected = REFUSED[fault]
    reason = refusal(write)
    assert expected in reason
    assert "\n" not in reason


def test_a_writer_that_wraps_around_the_pool_is_refused():
    def write(kv_cache, slots, key, value):
        total = kv_cache.shape[1] * 4
        right(kv_cache, (slots + 1) % total, key, value)

    assert refusal(write) == snapshot("the keys of one page are laid out differently from those of another")


def test_halves_that_change_places_with_the_size_of_the_pool_are_refused():
    def write(kv_cache, slots, key, value):
        right(kv_cache, slots, *((key, value) if kv_cache.shape[1] % 2 else (value, key)))

    assert refusal(write) == "slots of the first or the last page are stored outside the pool"


def test_memory_that_is_not_the_cache_alone_is_refused():
    padded = lambda blocks: torch.zeros(blocks, 3, 4, 20, dtype=torch.bfloat16)[..., :16]  # noqa: E731
    assert refusal(by_token, padded) == "the cache is no dense memory of its own"
    spare = lambda blocks: torch.zeros(blocks + 1, 3, 4, 16, dtype=torch.bfloat16)  # noqa: E731
    assert refusal(by_token, spare) == "the memory of a page depends on how many there are"


def beside(summary):
    """The right writer into rows with a column to spare, where it keeps what ``summary`` makes of the keys."""

    def write(kv_cache, slots, key, value):
        right(kv_cache[..., :8], slots, key, value)
        kv_cache[0, slots // 4, slots % 4, :, 8] = summary(key)

    return write


def test_what_is_kept_beside_the_rows_is_refused():
    spare = lambda blocks: torch.zeros(2, blocks, 4, 3, 9, dtype=torch.bfloat16)  # noqa: E731
    first = refusal(beside(lambda key: key[..., 0]), spare)
    assert first == "element 0 of the key of head 0 (page 0, offset 0) is stored 2 times"
    assert refusal(beside(lambda key: key.max()), spare) == "numbers are stored that are mixed of those given"
    message = refusal(beside(lambda _: 0.5), spare)
    assert message == snapshot("0.5 is in the cache after a write of whole numbers from 1 to 256")
    rarely = beside(lambda key: float(key.max() < 100))
    assert refusal(rarely, spare) == snapshot(
        "writing a single slot gives another cache layout than writing whole pages"
    )
    untouched = lambda kv_cache, *rows: right(kv_cache[..., :8], *rows)  # noqa: E731
    assert not isinstance(learn_codec(untouched, spare, LAYER, CACHE, "cpu"), NoCodec)


def test_a_writer_at_fault_in_the_very_last_slot_is_refused():
    """Writes to a few slots of a large pool would not find this fault."""
    cache = CacheSpec(block_size=64)

    def write(kv_cache, slots, key, value):
        last = kv_cache.shape[1] * 64 - 1
        slots = torch.where((slots == last) & (last > 3 * 64), last - 1, slots)
        for half, new in zip(kv_cache, (key, value), strict=True):
            half[slots // 64, slots % 64] = new

    codec = learn_codec(write, lambda n: torch.zeros(2, n, 64, 3, 8, dtype=torch.bfloat16), LAYER, cache, "cpu")
    assert isinstance(codec, NoCodec)
    assert codec.reason == snapshot(
        "writing the last page in reverse order gives another cache layout than writing whole pages"
    )


def test_a_cache_that_cannot_be_made_is_a_reason():
    def allocate(blocks):
        raise ValueError("block size 4 is too small")

    assert refusal(right, allocate) == "no cache of 2 pages could be made: ValueError: block size 4 is too small"
