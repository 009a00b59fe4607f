"""Learns a codec from a backend's own writer, for packings that nothing else describes.

The writer gets rows whose numbers encode, digit by digit over a few rounds, their element and slot. Their places in
memory give the layout. Pools of two and three pages show the places within a page, the step from page to page, and what
changes with the size of the pool. The layout must then predict, byte for byte, how the writer changes a larger pool
full of other numbers: a single slot, slots in disorder, and a page written backwards. Any difference is refused with a
reason.

A writer that stores rows in a wrong place defines a wrong layout. Whether the reader uses the same places is examined
by ``numerics``.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attncheck.backends.caches.codecs import coding_of
from attncheck.backends.caches.placed_codec import ElementPlaces, PlacedCodec, flat_memory
from attncheck.errors import InternalError
from attncheck.reference.spec import LayerSpec
from attncheck.reference.step_spec import CacheSpec

Writer = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""``(kv_cache, slots, key, value)``, like a codec's ``write``: the backend's own writer, with all scales 1."""

Allocate = Callable[[int], Tensor]
"""Function that returns a zeroed cache of so many pages: dense memory, as the view that the backend uses."""

_BASE = 256
"""Maximum base of the digits: few rounds, and no digit so large that rounding would hide a small change."""

_PREDICTED_PAGES = 16
_PREDICTED_ELEMENTS = 1 << 22
"""Size limits of the pool for the prediction, which has at least four pages, one more than the pools seen so far."""

_DISORDERED_SLOTS = 64

_NOTE = "how the cache is laid out was learned from the backend's own writer"


@dataclass(frozen=True)
class NoCodec:
    """Result if no codec could be learned; ``reason`` is a sentence fragment."""

    reason: str


def learn_codec(
    write: Writer, allocate: Allocate, layer: LayerSpec, cache: CacheSpec, device: torch.device | str
) -> PlacedCodec | NoCodec:
    """Return the codec of a backend that stores the rows of ``layer`` as ``write`` does, or :class:`NoCodec`.

    ``write`` is given ``slots`` int64 ``[n]``, and key and value in the layer's dtype and the shapes of a codec, all on
    ``device``. Any exception that it raises becomes the reason. The codec encodes with the scales of ``cache``.
    """
    learner = _LayoutLearner(write, allocate, layer, cache, torch.device(device))
    try:
        codec = learner.learn()
        learner.examine(codec)
    except _UnknownLayoutError as unfit:
        return NoCodec(str(unfit))
    return replace(codec, coding=coding_of(layer, cache))


class _UnknownLayoutError(InternalError):
    """Raised if the observed writes fit no layout; the message states how."""


class _LayoutLearner:
    def __init__(
        self, write: Writer, allocate: Allocate, layer: LayerSpec, cache: CacheSpec, device: torch.device
    ) -> None:
        self._writer, self._allocator, self._device = write, allocate, device
        self._block_size = cache.block_size
        self._coding = replace(coding_of(layer, cache), k_scale=1.0, v_scale=1.0)
        self._shapes = row_shapes(layer)
        self._sizes = [math.prod(shape) for shape in self._shapes]

    def learn(self) -> PlacedCodec:
        """Return the layout that the pools of two and three pages show."""
        per_slot = sum(self._sizes)
        two, three = (self._places_in(blocks).view(blocks, self._block_size, per_slot) for blocks in (2, 3))
        growth = three[0] - two[0]
        steps = two[1] - two[0]
        found = []
        for name, shape, first, more, step in zip(
            ("keys", "values"),
            self._shapes,
            (two[0] - 2 * growth).split(self._sizes, dim=1),
            growth.split(self._sizes, dim=1),
            steps.split(self._sizes, dim=1),
            strict=True,
        ):
            stride = int(step.flatten()[0])
            if bool((step != stride).any()):
                raise _UnknownLayoutError(f"the {name} of one page are laid out differently from those of another")
            found.append(ElementPlaces(first.reshape(-1, *shape).cpu(), more.reshape(-1, *shape).cpu(), stride))
        return PlacedCodec(found[0], found[1], self._allocate(1).numel(), self._coding, _NOTE)

    def examine(self, codec: PlacedCodec) -> None:
        """Compare the layout with what the writer does to a larger pool full of numbers, byte for byte."""
        blocks = max(4, min(_PREDICTED_PAGES, _PREDICTED_ELEMENTS // codec.page))
        written, predicted = self._allocate(blocks), self._allocate(blocks)
        if written.numel() != blocks * codec.page:
            raise _UnknownLayoutError("the memory of a page depends on how many there are")
        slots = torch.arange(blocks * self._block_size)
        self._require_within(codec, slots, written)
        generator = torch.Generator().manual_seed(len(slots))
        disorder = slots[torch.randperm(len(slots), generator=generator)]
        batches = {
            "a single slot": disorder[:1],
            "slots in random order": disorder[:_DISORDERED_SLOTS],
            "the last page in reverse order": slots[-self._block_size :].flip(0),
        }
        numbers = torch.cat([x.flatten() for x in self._coding.encode(*self._rows(_DISORDERED_SLOTS, generator))])
        numbers = numbers.repeat(-(-written.numel() // len(numbers)))[: written.numel()]
        for name, batch in batches.items():
            rows = self._rows(len(batch), generator)
            images = []
            for kv_cache, write in ((written, self._write), (predicted, codec.write)):
                memory = flat_memory(kv_cache, self._coding)
                memory.copy_(numbers)
                write(kv_cache, batch.to(self._device), *rows)
                images.append(memory.view(torch.uint8))
            if not torch.equal(*images):
                raise _UnknownLayoutError(f"writing {name} gives another cache layout than writing whole pages")

    def _places_in(self, blocks: int) -> Tensor:
        """Return the place of each element of a pool, int64 ``[elements]``: slot by slot, each key before its value."""
        slots = torch.arange(blocks * self._block_size, device=self._device)
        kv_cache = self._allocate(blocks)
        memory = flat_memory(kv_cache, self._coding)
        elements = torch.arange(len(slots) * sum(self._sizes), device=self._device).view(len(slots), -1)
        dtype = self._coding.dtype
        base = min(_BASE, *(int(2 / torch.finfo(t).eps) for t in (dtype, self._coding.code_dtype or memory.dtype)))
        found, touched, weight = torch.zeros(len(memory), dtype=torch.int64, device=memory.device), None, 1
        while touched is None or weight < elements.numel():
            digits = (elements // weight % base + 1).to(dtype)
            key, value = (
                part.reshape(-1, *shape).contiguous()
                for part, shape in zip(digits.split(self._sizes, dim=1), self._shapes, strict=True)
            )
            memory.zero_()
            self._write(kv_cache, slots, key, value)
            touched = memory != 0 if touched is None else touched
            stored = memory if self._coding.code_dtype is None else memory.view(self._coding.code_dtype)
            found += weight * self._digits(stored.double(), touched, base)
            weight *= base
        return self._inverted(found[touched], touched.nonzero().flatten(), elements.numel())

    def _digits(self, stored: Tensor, touched: Tensor, base: int) -> Tensor:
        """Return the contents of memory as digits, 0 where nothing was stored."""
        is_digit = (stored >= 1) & (stored <= base) & (stored == stored.round())
        strange = stored[touched & ~is_digit]
        if len(strange):
            raise _UnknownLayoutError(
                f"{float(strange[0]):.6g} is in the cache after a write of whole numbers from 1 to {base}"
            )
        return torch.where(touched, stored - 1, 0.0).long()

    def _inverted(self, elements: Tensor, places: Tensor, count: int) -> Tensor:
        """Return the place of each element, given the element in each place."""
        if len(elements) and int(elements.max()) >= count:
            raise _UnknownLayoutError("numbers are stored that are mixed of those given")
        times = torch.bincount(elements, minlength=count)
        if bool((times == 0).any()):
            lost = (times == 0).nonzero().flatten()
            share = f"{len(lost)} of {count} numbers are stored nowhere"
            raise _UnknownLayoutError(f"{share}, the first is {self._element_name(int(lost[0]))}")
        if bool((times > 1).any()):
            raise _UnknownLayoutError(f"{self._element_name(int(times.argmax()))} is stored {int(times.max())} times")
        table = torch.empty_like(elements)
        table[elements] = places
        return table

    def _element_name(self, element: int) -> str:
        slot, index = divmod(element, sum(self._sizes))
        is_value = index >= self._sizes[0]
        shape = self._shapes[is_value]
        head, number = divmod(index - self._sizes[0] * is_value, shape[-1])
        place = f"page {slot // self._block_size}, offset {slot % self._block_size}"
        return f"element {number} of the {'value' if is_value else 'key'} of head {head} ({place})"

    def _require_within(self, codec: PlacedCodec, slots: Tensor, kv_cache: Tensor) -> None:
        """Raise unless the places of all slots lie in the pool."""
        for places in (part.of(slots, len(slots) // self._block_size) for part in (codec.keys, codec.values)):
            if int(places.min()) < 0 or int(places.max()) >= kv_cache.numel():
                raise _UnknownLayoutError("slots of the first or the last page are stored outside the pool")

    def _rows(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return keys and values of small nonzero integers, which every format represents exactly."""
        key, value = (
            torch.randint(1, 8, (count, *shape), generator=generator)
            * (1 - 2 * torch.randint(0, 2, (count, *shape), generator=generator))
            for shape in self._shapes
        )
        return key.to(self._device, self._coding.dtype), value.to(self._device, self._coding.dtype)

    def _allocate(self, blocks: int) -> Tensor:
        try:
            kv_cache = self._allocator(blocks)
        except Exception as error:
            raise _UnknownLayoutError(f"no cache of {blocks} pages could be made: {_first_line(error)}") from error
        if kv_cache.untyped_storage().nbytes() != kv_cache.numel() * kv_cache.element_size():
            raise _UnknownLayoutError("the cache is no dense memory of its own")
        return kv_cache

    def _write(self, kv_cache: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
        try:
            self._writer(kv_cache, slots.clone(), key.clone(), value.clone())
        except Exception as error:
            raise _UnknownLayoutError(f"the writer raised {_first_line(error)}") from error


def row_shapes(layer: LayerSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of one slot's key and value, as a codec takes them."""
    if layer.mla is not None:
        return (layer.mla.kv_lora_rank,), (layer.mla.qk_rope_head_dim,)
    return (layer.num_kv_heads, layer.head_size), (layer.num_kv_heads, layer.value_head_size)


def _first_line(error: Exception) -> str:
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
