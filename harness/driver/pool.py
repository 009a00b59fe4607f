"""The pool of pages: its memory, its codec, and the rows written into it."""

import math
from collections.abc import Callable, Hashable, Iterable
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from attncheck.backends.caches.codecs import KVCacheCodec, PackedCodec
from attncheck.backends.caches.learned_codec import NoCodec, learn_codec
from attncheck.backends.caches.packings import allocate_kv_cache, kv_cache_shape, stride_order
from attncheck.backends.caches.placed_codec import PlacedCodec
from attncheck.backends.caches.row_codec import RowCodec
from attncheck.backends.contract import AttentionBackend, CommonAttentionMetadata
from attncheck.backends.dtypes import passed_name
from attncheck.errors import BackendUnavailableError, InternalError
from attncheck.harness.driver.construction import LatentCodecView, LayerStub, construct_builder, construct_impl
from attncheck.harness.driver.foreign_code import (
    as_plain,
    call_backend,
    has_its_memory,
    kind_of,
    require_memory,
    wait_for,
)
from attncheck.harness.problem.pages import RandomStream
from attncheck.harness.problem.problem import STALE_ROWS, Problem, foreign_slots, stale_rows, unchosen_slots
from attncheck.harness.problem.sizes import SMALL_POOL, stored_sizes
from attncheck.harness.problem.storage import Storage, alike, key_storage, value_storage
from attncheck.reference.step_spec import REGISTERED, ROW_FORMATS, CacheSpec

_BLOCKS = 3


class CodecError(InternalError):
    """A codec whose writes or reads are wrong; the message states what was observed."""


def prove_codec(codec: KVCacheCodec, backend: type[AttentionBackend], problem: Problem) -> None:
    """Raise CodecError if ``codec`` loses rows, mixes them up, or writes outside their slots."""
    layer, cache = problem.layer, replace(problem.cache, num_blocks=None)
    kv_cache = allocate_kv_cache(backend, layer, cache, _BLOCKS, "cpu")
    slots = torch.arange(_BLOCKS * cache.block_size)
    stream = RandomStream("codec proof")
    storages = key_storage(layer, cache), value_storage(layer, cache)
    key, value = (
        _rows(storage, stream.int8(len(slots), layer.num_kv_heads, size))
        for storage, size in zip(storages, stored_sizes(layer), strict=True)
    )
    codec.write(kv_cache, slots, key, value)
    read = codec.read(kv_cache, slots)
    _compare(storages, read, (key, value), "what was written to all slots is not what is read back")
    for slot in (0, len(slots) // 2, len(slots) - 1):
        one = torch.tensor([slot])
        codec.write(kv_cache, one, -key[slot : slot + 1], -value[slot : slot + 1])
        others = torch.cat([slots[:slot], slots[slot + 1 :]])
        read = codec.read(kv_cache, others)
        wanted = (key[others], value[others])
        _compare(storages, read, wanted, f"writing slot {slot} changed another slot")
        codec.write(kv_cache, one, key[slot : slot + 1], value[slot : slot + 1])


def _rows(storage: Storage, pattern: Tensor) -> Tensor:
    """Return rows the cache can hold, from an int8 pattern: its bytes as FP8 codes, or numbers of magnitude up to 2."""
    if storage.is_fp8:
        return storage.usable_rows(pattern.view(torch.uint8))
    if storage.coded_rows is not None:
        return storage.storable(pattern.double() / 64)
    return (pattern.float() / 64).to(storage.dtype)


def _compare(
    storages: tuple[Storage, Storage], got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], complaint: str
) -> None:
    for name, storage, rows, wanted in zip(("keys", "values"), storages, got, expected, strict=True):
        if rows.shape != wanted.shape:
            raise CodecError(f"the codec reads {name} of shape {tuple(rows.shape)}, not {tuple(wanted.shape)}")
        # A codec may round differently when it decodes a code, so the codes are compared, not the numbers.
        if storage.is_fp8 and torch.equal(*(alike(storage.codes(x), storage.held) for x in (rows, wanted))):
            continue
        if storage.is_fp8 or not torch.equal(rows.to(wanted.dtype), wanted):
            raise CodecError(f"the codec cannot be trusted with {name}: {complaint}")


@dataclass(frozen=True)
class _DenseCodec:
    """A codec of dense caches, for caches of any strides. ``order``: the physical order of a dense cache's axes."""

    codec: KVCacheCodec
    order: tuple[int, ...]

    def write(self, kv_cache: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
        dense = self._dense(kv_cache)
        self.codec.write(dense, slots, key, value)
        kv_cache.copy_(dense)

    def read(self, kv_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        return self.codec.read(self._dense(kv_cache), slots)

    def _dense(self, kv_cache: Tensor) -> Tensor:
        return torch.empty_permuted(kv_cache.shape, self.order, dtype=kv_cache.dtype, device=kv_cache.device).copy_(
            kv_cache
        )


# Copy a cache's memory: all of it, or only the pages that a step may reach if the cache is very large.
#
# Most pages of a very large cache are reserved but never touched; copying all of it would take that memory.

_MOST_COPIED = 2**30
"""Bytes of a cache up to which all of it is copied if its shape does not show which axis counts pages."""


class PoolMemory:
    """The memory behind a cache of ``num_blocks`` pages. An image of it is a flat uint8 tensor.

    ``slots``: int64, the slots that a step may reach. If the cache has more than ``SMALL_POOL`` slots, an image holds
    only the pages of these. Raises MemoryError for a very large cache whose shape has no single axis of pages.
    """

    def __init__(self, kv_cache: Tensor, num_blocks: int, block_size: int, slots: Tensor) -> None:
        self._cache, self._block_size = kv_cache, block_size
        # Keep the memory order of the axes, because a codec may compute element offsets.
        self._order = sorted(range(kv_cache.dim()), key=kv_cache.stride().__getitem__, reverse=True)
        self._pages: Tensor | None = None
        if num_blocks * block_size <= SMALL_POOL:
            return
        axes = [axis for axis, extent in enumerate(kv_cache.shape) if extent == num_blocks]
        if len(axes) == 1:
            self._axis = self._order.index(axes[0])
            self._pages = (slots // block_size).unique().to(kv_cache.device)
        elif kv_cache.nbytes > _MOST_COPIED:
            raise MemoryError(
                f"copies of {kv_cache.nbytes / 2**30:.1f} GiB: the shape {tuple(kv_cache.shape)} of the cache has no "
                f"single axis of {num_blocks} pages, so that some of them could be copied"
            )

    def bytes(self) -> Tensor:
        """Return the memory that an image copies: a view if that is all of it, else a copy."""
        if self._pages is None:
            return self._all()
        return self._physical().index_select(self._axis, self._pages).flatten().view(torch.uint8)

    def restore(self, image: Tensor) -> None:
        """Write an image back to the cache."""
        if self._pages is None:
            self._all().copy_(image)
        else:
            self._physical().index_copy_(self._axis, self._pages, self._shaped(image, self._pages))

    def view(self, image: Tensor) -> Tensor:
        """Return an image in the shape and memory order of the cache; it has fewer pages if the image has fewer."""
        if self._pages is not None:
            inverse = [self._order.index(axis) for axis in range(len(self._order))]
            return self._shaped(image, self._pages).permute(inverse)
        cache = self._cache
        whole = torch.empty(0, dtype=cache.dtype, device=cache.device)
        return whole.set_(image.untyped_storage(), cache.storage_offset(), cache.shape, cache.stride())

    def slots_in_image(self, slots: Tensor) -> Tensor:
        """Return the slots in :meth:`view` of ``slots`` (int64) of the cache, whose pages the image must hold."""
        if self._pages is None:
            return slots
        pages = torch.searchsorted(self._pages.to(slots.device), slots // self._block_size)
        return pages * self._block_size + slots % self._block_size

    def _all(self) -> Tensor:
        cache = self._cache
        longest = max(size * step for size, step in zip(cache.shape, cache.stride(), strict=True))
        end = cache.storage_offset() + longest  # a backend may have enlarged the storage
        return flat_bytes(cache)[: end * cache.element_size()]

    def _physical(self) -> Tensor:
        return self._cache.permute(self._order)

    def _shaped(self, image: Tensor, pages: Tensor) -> Tensor:
        shape = list(self._physical().shape)
        shape[self._axis] = len(pages)
        return image.view(self._cache.dtype).view(shape)


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return a view of all memory behind a tensor as flat uint8, for any shape and strides."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


# Hold the paged KV cache of one session: allocate it, fill it with the problem's context, and poison foreign slots.
#
# The cache is filled and read only through the backend's codec, which is proven first; without a codec, it is filled
# through the backend's own writer. Slots are int64 indices into the pool: page * block_size + offset.

Writer = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""``(kv_cache, slots, key, value)``: stores rows in a cache."""

_E5M2_INFINITY = 0x7C

_NAN = 0xFF
"""A byte whose repetition is NaN in every dtype of a cache."""


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
        if problem.cache.pool_order != "LB" and problem.num_blocks * problem.cache.block_size <= SMALL_POOL:
            flat_bytes(self.kv_cache).fill_(_NAN)  # what lies between the pages is of another layer
            self.kv_cache.zero_()

    def _take_up(self, problem: Problem, regions: dict[str, Tensor]) -> None:
        self.problem, self.regions = problem, regions
        reached = torch.cat([problem.owned_slots, *regions.values()])
        self._memory = PoolMemory(self.kv_cache, problem.num_blocks, problem.cache.block_size, reached)
        self._fill()
        self._clean = self.bytes().clone()

    def bytes(self) -> Tensor:
        """Return the cache's memory as flat uint8; of a very large cache, a copy of the pages that a step may reach."""
        return self._memory.bytes()

    def differs_from(self, image: Tensor) -> bool:
        """Return whether the memory differs from an earlier copy of :meth:`bytes`."""
        return not has_its_memory(self.kv_cache) or not same_bytes(image, self._memory.bytes())

    def filled(self, poison: float | None = None, regions: tuple[str, ...] | None = None) -> Tensor:
        """Return the cache with the contents it has before a step.

        ``poison``: written to foreign slots, or only to slots of ``regions`` if given. None leaves stale rows there.
        """
        require_memory(self.kv_cache, "kv_cache", "forward")
        self._memory.restore(self._clean)
        if poison is not None:
            names = self.regions if regions is None else regions
            chosen = [slots for name, slots in self.poisonable.items() if name in names]
            if chosen:
                self._poison(torch.cat(chosen), poison)
        return self.kv_cache

    @property
    def poisonable(self) -> dict[str, Tensor]:
        """The slots whose contents must not affect any row, by region name."""
        return self.regions | unchosen_slots(self.problem)

    def _poison(self, slots: Tensor, poison: float) -> None:
        def spread(number: float) -> None:
            self.write((slots, *self._equal_rows(len(slots), number)))

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

    def write(self, *pieces: tuple[Tensor, Tensor, Tensor]) -> None:
        """Store slots (on the host), keys and values of all pieces; rows with a negative slot are left out."""

        def write() -> None:
            for slots, key, value in pieces:
                kept = (slots >= 0).nonzero().flatten()
                rows: Iterable[Tensor] = (slots, key, value)
                if len(kept) < len(slots):
                    rows = (each.index_select(0, kept.to(each.device)) for each in rows)
                self._writer(self.kv_cache.detach(), *(each.to(self._device, non_blocking=True) for each in rows))
                require_memory(self.kv_cache, "kv_cache", "cache")

        call_backend("cache", write, self._device)

    def write_image(self, image: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store rows through the codec in a copy of :meth:`bytes`. Raises RuntimeError if there is no codec."""
        codec = self._codec_in_hand()
        places = self._memory.slots_in_image(slots)
        places, key, value = (tensor.to(self._device, non_blocking=True) for tensor in (places, key, value))
        call_backend("codec", lambda: codec.write(self._memory.view(image), places, key, value), self._device)

    def read_image(self, image: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return what :meth:`read_exactly` returns, rounded to the layer's dtype."""
        key, value = self.read_exactly(image, slots)
        return key.to(self.problem.dtype), value.to(self.problem.dtype)

    def read_exactly(self, image: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values read through the codec from a copy of :meth:`bytes`, in the dtype of the codec.

        Raises RuntimeError if there is no codec.
        """
        codec = self._codec_in_hand()
        places = self._memory.slots_in_image(slots)

        def read() -> tuple[Tensor, Tensor]:
            given = codec.read(self._memory.view(image), places)
            keys, values = map(as_plain, given)
            if keys is None or values is None:
                kinds = " and ".join(map(kind_of, given))
                raise TypeError(f"the codec returned {kinds}; it must return two tensors")
            return keys, values

        return call_backend("codec", read, self._device)

    def _codec_in_hand(self) -> KVCacheCodec:
        if self.codec is None:
            raise RuntimeError("only a pool with a codec can read or write a copy of its memory")
        return self.codec

    def _fill(self) -> None:
        """Write plausible stale rows to foreign slots and to the step's new slots, then write the context."""
        problem = self.problem
        stale_keys, stale_values = stale_rows(problem)
        stale = (*self.regions.values(), problem.key_slots[problem.written_keys])
        index = torch.cat([torch.arange(len(slots)) for slots in stale]) % STALE_ROWS
        # index_select takes a tenth of the time of indexing with brackets.
        stale_key, stale_value = stale_keys.index_select(0, index), stale_values.index_select(0, index)
        old = problem.old_keys
        if len(problem.owned_slots) < len(problem.keys):
            old = old[_first_occurrences(problem.key_slots[old])]
        keys, values = (rows.index_select(0, old.to(rows.device)) for rows in (problem.keys, problem.values))
        self.write((torch.cat(stale), stale_key, stale_value), (problem.key_slots[old], keys, values))

    def _equal_rows(self, count: int, number: float) -> tuple[Tensor, Tensor]:
        """Return keys and values ``[count, Hkv, D]``, in the layer's dtype; every element is ``number``."""
        heads, dtype = self.problem.layer.num_kv_heads, self.problem.dtype
        key, value = (
            torch.full((count, heads, size), number, dtype=dtype, device=self._device)
            for size in stored_sizes(self.problem.layer)
        )
        return key, value


def _stored_as(problem: Problem) -> object:
    layer, cache = problem.layer, problem.cache.unplaced
    return cache, layer.num_kv_heads, layer.head_size, layer.value_head_size, layer.dtype, layer.mla, layer.attn_type


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of equal size in bytes hold the same bits.

    Bytes are compared eight at a time where size and offset permit, since torch.equal takes as long for one byte as for
    eight.
    """
    a, b = (x.flatten().view(torch.uint8) for x in (a, b))
    if all(x.numel() % 8 == x.storage_offset() % 8 == 0 for x in (a, b)):
        a = a.view(torch.int64)
        b = b.view(torch.int64)
    return torch.equal(a, b)


def _first_occurrences(slots: Tensor) -> Tensor:
    """Return the index at which each distinct slot occurs first; requests that share pages would write it twice."""
    distinct, inverse = slots.unique(return_inverse=True)
    first: Tensor = torch.full((len(distinct),), len(slots)).scatter_reduce(
        0, inverse, torch.arange(len(slots)), "amin", include_self=True
    )
    return first


_LONGEST = 1024
"""Maximum tokens of a prefill.

A pool has many times as many slots, and attention over all of them would take too long.
"""


class PoolFiller:
    """Store rows in a problem's cache as the layer that fills it would.

    ``cache`` has the scales passed to the layer.
    """

    def __init__(
        self, backend: type[AttentionBackend], problem: Problem, device: torch.device, cache: CacheSpec
    ) -> None:
        self._backend, self._problem, self._device = backend, problem, device
        self._cache = cache
        self._capacity = min(_LONGEST, problem.num_blocks * problem.cache.block_size)
        self._builders: dict[int, Any] = {}

    @cached_property
    def _attn_layer(self) -> LayerStub:
        return LayerStub(self._cache, self._device)

    @cached_property
    def _impl(self) -> Any:
        impl = self._attn_layer.impl = construct_impl(self._backend, self._problem, self._device, writes=True)
        return impl

    def _builder(self, kv_cache: Tensor) -> Any:
        cache = self._problem.cache
        page = kv_cache_shape(
            self._backend, self._problem.layer, cache.block_size, num_blocks=1, kv_cache_dtype=cache.kv_cache_dtype
        )
        num_blocks = kv_cache.numel() // math.prod(page)
        if num_blocks not in self._builders:
            problem, layer = self._problem.in_pool_of(num_blocks), self._attn_layer
            self._builders[num_blocks] = construct_builder(
                self._backend, (problem,), self._device, layer, fills=self._capacity
            )
        return self._builders[num_blocks]

    def write(self, kv_cache: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store ``key`` and ``value`` at ``slots``."""
        impl = self._impl
        # Constructing a builder may set attributes of the layer that its writer needs.
        builder = self._builder(kv_cache)
        if not self._backend.forward_includes_kv_cache_update:
            impl.do_kv_cache_update(self._attn_layer, key, value, kv_cache, slots)
            wait_for(self._device, "do_kv_cache_update")
            return
        for first in range(0, len(slots), self._capacity):
            piece = slice(first, first + self._capacity)
            common = _prefill_metadata(slots[piece], self._problem, self._device)
            metadata = builder.build(common_prefix_len=0, common_attn_metadata=common)
            query = key.new_zeros(len(slots[piece]), *self._problem.query.shape[1:])
            query = self._problem.passed_query(query)
            output = key.new_zeros(len(query), self._problem.layer.num_heads, self._problem.output_size)
            keywords = {}
            if "lse" in self._backend.features:
                keywords["output_lse"] = torch.zeros(output.shape[:2], device=self._device)
            with torch.no_grad():
                impl.forward(
                    self._attn_layer, query, key[piece], value[piece], kv_cache, metadata, output=output, **keywords
                )
            wait_for(self._device, "forward")


def new_pool(backend: type[AttentionBackend], problem: Problem, device: torch.device, impl: Any) -> KVPool:
    """Return the problem's pool. Raises TypeError if the backend has neither a codec nor a writer."""
    dense = replace(problem.cache, pool_order="LB")
    declared = backend.kv_cache_codec(problem.layer, dense)
    if declared is None and not impl.brings_writer:
        raise TypeError(
            f"{backend.get_name()} brings neither a writer nor a cache codec: one of them must fill its cache"
        )
    writer = PoolFiller(backend, problem, device, problem.cache).write
    if problem.cache.kv_cache_dtype in ROW_FORMATS:
        _require_exact_rows(declared, backend, problem)
    codec = _learned(backend, problem, dense, device) if declared is None else declared
    if problem.cache.kv_cache_dtype == REGISTERED:
        _require_exact_rows(codec, backend, problem)
    if problem.cache != dense and not isinstance(codec, NoCodec | PackedCodec | RowCodec):
        is_large = problem.num_blocks * dense.block_size > SMALL_POOL
        order = stride_order(backend, problem.layer, dense)
        codec = NoCodec("the pool is too large to be copied") if is_large else _DenseCodec(codec, order)
    return KVPool(backend, problem, device, codec, writer)


def _require_exact_rows(
    codec: KVCacheCodec | NoCodec | None, backend: type[AttentionBackend], problem: Problem
) -> None:
    """Raise BackendUnavailableError unless ``codec`` returns the rows that its format stores exactly.

    Without a codec, or with another rounding, a difference would not show a fault.
    """
    reason = ""
    if codec is None:
        reason = " has scales in the cache: declare by kv_cache_codec where they lie and what they multiply"
    elif isinstance(codec, NoCodec):
        reason = f": {codec.reason}; kv_cache_codec can declare one"
    else:
        try:
            prove_codec(codec, backend, problem)
        except CodecError as error:
            reason = f": the codec stores rows unlike attncheck's definition of the format ({error})"
    if reason:
        reason = f"kv_cache_dtype {passed_name(problem.cache.kv_cache_dtype, backend)}{reason}"
        raise BackendUnavailableError(backend.get_name(), (reason,))


def _learned(
    backend: type[AttentionBackend], problem: Problem, cache: CacheSpec, device: torch.device
) -> KVCacheCodec | NoCodec:
    """Return the codec learned from the backend's own writer, or a NoCodec with the reason why none could be learned.

    A codec is learned once per process for each layer and ``cache``, whose memory is dense.
    """
    layer = problem.layer
    known = _known_layouts(backend, layer, replace(cache, num_blocks=None), device)
    if known:
        return known[0]
    filler = PoolFiller(backend, problem, device, replace(cache, k_scale=1.0, v_scale=1.0))

    def write_latent(kv_cache: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
        filler.write(kv_cache, slots, key[:, None], value[:, None])

    def allocate(blocks: int) -> Tensor:
        return allocate_kv_cache(backend, layer, cache, blocks, device)

    write = filler.write if layer.mla is None else write_latent
    is_registered = cache.kv_cache_dtype == REGISTERED
    write_scaled = PoolFiller(backend, problem, device, cache).write if is_registered else None
    found = learn_codec(write, allocate, layer, cache, device, write_scaled)
    if isinstance(found, NoCodec):
        return NoCodec(f"the backend brings no cache codec, and its writer shows none: {found.reason}")
    known.append(found)
    return found


@lru_cache(maxsize=256)
def _known_layouts(*geometry: Hashable) -> list[KVCacheCodec]:  # noqa: ARG001 (the key of the list)
    """Return the list that holds the codec learned for ``geometry``; it is empty until one is learned."""
    return []


def _prefill_metadata(slots: Tensor, problem: Problem, device: torch.device) -> CommonAttentionMetadata:
    """Return the metadata of one prompt whose keys and values are stored at ``slots``."""
    count, size = len(slots), problem.cache.block_size
    starts = torch.tensor([0, count], dtype=torch.int32)
    lens = torch.tensor([count], dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device, copy=True),
        query_start_loc_cpu=starts,
        seq_lens=lens.to(device, copy=True),
        seq_lens_cpu=lens,
        num_computed_tokens_cpu=torch.zeros(1, dtype=torch.int32),
        num_reqs=1,
        num_actual_tokens=count,
        max_query_len=count,
        max_seq_len=count,
        block_table_tensor=torch.arange(-(-count // size), dtype=torch.int32, device=device)[None],
        slot_mapping=slots,
        causal=problem.layer.is_causal,
    )
