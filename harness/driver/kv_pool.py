"""Hold the paged KV cache of one session: allocate it, fill it with the problem's context, and poison foreign slots.

The cache is filled and read only through the backend's codec, which is proven first; without a codec, it is filled
through the backend's own writer. Slots are int64 indices into the pool: page * block_size + offset.
"""

import math
from collections.abc import Callable
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from attncheck.backends.caches.codecs import KVCacheCodec
from attncheck.backends.caches.learned_codec import NoCodec
from attncheck.backends.caches.packings import allocate_kv_cache
from attncheck.backends.caches.placed_codec import PlacedCodec
from attncheck.backends.contract import AttentionBackend
from attncheck.harness.driver.codec_proof import prove_codec
from attncheck.harness.driver.foreign_code import call_backend
from attncheck.harness.driver.latent_views import LatentCodecView
from attncheck.harness.driver.pool_memory import PoolMemory
from attncheck.harness.problem.foreign_slots import STALE_ROWS, foreign_slots, stale_rows
from attncheck.harness.problem.layer_sizes import stored_sizes
from attncheck.harness.problem.problem import Problem
from attncheck.harness.problem.storage import key_storage

Writer = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""``(kv_cache, slots, key, value)``: stores rows in a cache."""

_E5M2_INFINITY = 0x7C


class KVPool:
    """A backend's KV cache for one problem.

    ``codec``: None if there is none, and then ``no_codec`` holds the reason. ``note``: a remark on the codec for
    readers of findings about the cache.
    """

    def __init__(
        self,
        backend: type[AttentionBackend],
        problem: Problem,
        device: torch.device,
        codec: KVCacheCodec | NoCodec,
        own_writer: Writer,
    ) -> None:
        """Allocate and fill the cache. ``own_writer``: the backend's writer, used if there is no codec.

        Raises CodecError if the codec is wrong.
        """
        self._backend, self._device = backend, device
        self.no_codec = codec.reason if isinstance(codec, NoCodec) else ""
        self.note = codec.note if isinstance(codec, PlacedCodec) else ""
        self.codec: KVCacheCodec | None = None if isinstance(codec, NoCodec) else codec
        if self.codec is not None and problem.layer.mla is not None:
            self.codec = LatentCodecView(self.codec)
        if self.codec is not None:
            prove_codec(self.codec, backend, problem)
        self._writer: Writer = own_writer if self.codec is None else self.codec.write
        self._allocate(problem)
        self._take_up(problem, foreign_slots(problem))

    def beside(self, problem: Problem) -> "KVPool":
        """Return a pool for another problem of as many blocks, in the same memory, which it fills at once."""
        if problem.num_blocks != self.problem.num_blocks:
            raise ValueError(f"a pool of {self.problem.num_blocks} blocks for a problem of {problem.num_blocks}")
        other = copy(self)
        other._take_up(problem, foreign_slots(problem))
        return other

    def has_codec_for(self, problem: Problem) -> bool:
        """Return whether :meth:`with_own_memory` can make a pool of ``problem``.

        It can if there is a codec and both problems' rows are stored in the same way.
        """
        return self.codec is not None and _stored_as(self.problem) == _stored_as(problem)

    def with_own_memory(self, problem: Problem, *, is_judged: bool = False) -> "KVPool":
        """Return a pool for ``problem`` in memory of its own, filled by the same codec, which is not proven again.

        Foreign slots hold zeros and have no regions unless ``is_judged``, because most results are not examined.
        """
        other = copy(self)
        other._allocate(problem)
        other._take_up(problem, foreign_slots(problem) if is_judged else {})
        return other

    def _allocate(self, problem: Problem) -> None:
        self.kv_cache = allocate_kv_cache(self._backend, problem.layer, problem.cache, problem.num_blocks, self._device)

    def _take_up(self, problem: Problem, regions: dict[str, Tensor]) -> None:
        self.problem, self.regions = problem, regions
        reached = torch.cat([problem.owned_slots, *regions.values()])
        self._memory = PoolMemory(self.kv_cache, problem.num_blocks, problem.cache.block_size, reached)
        self._fill()
        self._clean = self.bytes().clone()

    def bytes(self) -> Tensor:
        """Return the cache's memory as flat uint8; of a very large cache, a copy of the pages that a step may reach."""
        return self._memory.bytes()

    def filled(self, poison: float | None = None, regions: tuple[str, ...] | None = None) -> Tensor:
        """Return the cache with the contents it has before a step.

        ``poison``: written to foreign slots, or only to those of ``regions`` if given. None leaves stale rows there.
        """
        self._memory.restore(self._clean)
        if poison is not None:
            chosen = [slots for name, slots in self.regions.items() if regions is None or name in regions]
            if chosen:
                self._poison(torch.cat(chosen), poison)
        return self.kv_cache

    def _poison(self, slots: Tensor, poison: float) -> None:
        def spread(number: float) -> None:
            self.write(slots, *self._equal_rows(len(slots), number))

        held = key_storage(self.problem.layer, self.problem.cache).held
        if held != torch.float8_e5m2 or not math.isinf(poison):
            spread(poison)
            return
        # Float8 E5M2 has infinities, but no writer produces one: set them in the bytes in which two fillings differ.
        spread(0.0)
        zeros = self.bytes().clone()
        spread(math.nan)
        memory = self.bytes()
        memory[memory != zeros] = _E5M2_INFINITY | (0x80 if poison < 0 else 0)
        self._memory.restore(memory)

    def write(self, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store rows at ``slots``; rows with a negative slot are left out."""
        slots, key, value = (tensor.to(self._device) for tensor in (slots, key, value))
        keep = slots >= 0
        if not bool(keep.all()):
            slots, key, value = slots[keep], key[keep], value[keep]
        call_backend("cache", lambda: self._writer(self.kv_cache, slots, key, value), self._device)

    def write_image(self, image: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store rows through the codec in a copy of :meth:`bytes`. Raises RuntimeError if there is no codec."""
        codec = self._codec_in_hand()
        places = self._memory.slots_in_image(slots)
        places, key, value = (tensor.to(self._device) for tensor in (places, key, value))
        call_backend("codec", lambda: codec.write(self._memory.view(image), places, key, value), self._device)

    def read_image(self, image: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values read through the codec from a copy of :meth:`bytes`.

        Raises RuntimeError if there is no codec.
        """
        codec = self._codec_in_hand()
        places = self._memory.slots_in_image(slots)
        return call_backend("codec", lambda: codec.read(self._memory.view(image), places), self._device)

    def _codec_in_hand(self) -> KVCacheCodec:
        if self.codec is None:
            raise RuntimeError("only a pool with a codec can read or write a copy of its memory")
        return self.codec

    def _fill(self) -> None:
        """Write plausible stale rows to foreign slots and to the step's new slots, then write the context."""
        problem = self.problem
        stale_keys, stale_values = stale_rows(problem)
        stale = (*self.regions.values(), problem.key_slots[problem.new_keys[problem.new_keys >= 0]])
        index = torch.cat([torch.arange(len(slots)) for slots in stale]) % STALE_ROWS
        # index_select takes a tenth of the time of indexing with brackets.
        self.write(torch.cat(stale), stale_keys.index_select(0, index), stale_values.index_select(0, index))
        old = problem.old_keys
        if len(problem.owned_slots) < len(problem.keys):
            old = old[_first_occurrences(problem.key_slots[old])]
        keys, values = (rows.index_select(0, old.to(rows.device)) for rows in (problem.keys, problem.values))
        self.write(problem.key_slots[old], keys, values)

    def _equal_rows(self, count: int, number: float) -> tuple[Tensor, Tensor]:
        """Return keys and values ``[count, Hkv, D]`` on the CPU, in the layer's dtype; every element is ``number``."""
        heads, dtype = self.problem.layer.num_kv_heads, self.problem.dtype
        key, value = (
            torch.full((count, heads, size), number, dtype=dtype) for size in stored_sizes(self.problem.layer)
        )
        return key, value


def _stored_as(problem: Problem) -> object:
    """Return the facts of a layer and its cache that determine how rows are stored."""
    layer, cache = problem.layer, replace(problem.cache, num_blocks=None, first_block=None)
    return cache, layer.num_kv_heads, layer.head_size, layer.value_head_size, layer.dtype, layer.mla, layer.attn_type


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of equal size in bytes hold the same bits.

    Bytes are compared eight at a time where size and offset permit, since torch.equal takes as long for one byte as for
    eight.
    """
    a, b = (x.flatten().view(torch.uint8) for x in (a, b))
    if all(x.numel() % 8 == x.storage_offset() % 8 == 0 for x in (a, b)):
        a, b = a.view(torch.int64), b.view(torch.int64)
    return torch.equal(a, b)


def _first_occurrences(slots: Tensor) -> Tensor:
    """Return the index at which each distinct slot occurs first; requests that share pages would write it twice."""
    distinct, inverse = slots.unique(return_inverse=True)
    first: Tensor = torch.full((len(distinct),), len(slots)).scatter_reduce(
        0, inverse, torch.arange(len(slots)), "amin", include_self=True
    )
    return first
