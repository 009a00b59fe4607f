"""Prove a cache codec correct before it is used to judge a backend.

The proof uses a small pool of the backend's own cache shape. It checks that rows written are read back, that distinct
slots use distinct bytes, and that writing one slot changes no other.
"""

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from attncheck.backends.caches.codecs import KVCacheCodec, PackedCodec
from attncheck.backends.caches.packings import allocate_kv_cache
from attncheck.backends.contract import AttentionBackend
from attncheck.errors import InternalError
from attncheck.harness.driver.latent_views import LatentCodecView
from attncheck.harness.problem.float8 import alike
from attncheck.harness.problem.layer_sizes import stored_sizes
from attncheck.harness.problem.problem import Problem
from attncheck.harness.problem.random_stream import RandomStream
from attncheck.harness.problem.storage import Storage, key_storage, value_storage
from attncheck.reference.spec import CacheSpec, LayerSpec

_BLOCKS = 3


class CodecError(InternalError):
    """A codec whose writes or reads are wrong; the message states what was observed."""


def prove_codec(codec: KVCacheCodec, backend: type[AttentionBackend], problem: Problem) -> None:
    """Raise CodecError if ``codec`` loses rows, mixes them up, or writes outside their slots.

    A PackedCodec is a value object, so equal ones are proven once per process for each cache shape.
    """
    layer, cache = problem.layer, replace(problem.cache, num_blocks=None)
    kv_cache = allocate_kv_cache(backend, layer, cache, _BLOCKS, "cpu")
    inner = codec.codec if isinstance(codec, LatentCodecView) else codec
    if type(inner) is PackedCodec:
        is_view = inner is not codec
        _prove_once(inner, is_view, layer, cache, kv_cache.shape, kv_cache.stride(), kv_cache.dtype)
    else:
        _prove(codec, layer, cache, kv_cache)


@lru_cache(maxsize=256)
def _prove_once(
    packed: PackedCodec,
    is_view: bool,
    layer: LayerSpec,
    cache: CacheSpec,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    codec = LatentCodecView(packed) if is_view else packed
    _prove(codec, layer, cache, torch.empty_strided(shape, stride, dtype=dtype).zero_())


def _prove(codec: KVCacheCodec, layer: LayerSpec, cache: CacheSpec, kv_cache: Tensor) -> None:
    """Prove ``codec`` on ``kv_cache``, which is zeroed and has ``_BLOCKS`` pages."""
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
        read, wanted = codec.read(kv_cache, others), (key[others], value[others])
        _compare(storages, read, wanted, f"writing slot {slot} changed another slot")
        codec.write(kv_cache, one, key[slot : slot + 1], value[slot : slot + 1])


def _rows(storage: Storage, pattern: Tensor) -> Tensor:
    """Return rows the cache can hold, from an int8 pattern: its bytes as FP8 codes, or numbers of magnitude up to 2."""
    if storage.is_fp8:
        return storage.usable_rows(pattern.view(torch.uint8))
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
