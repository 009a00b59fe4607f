"""Proof that a cache codec can be trusted, before anything is judged by it.

On a small pool of the backend's own shape: what is written is read back, distinct slots touch distinct bytes, nothing
else changes. Must not know: problems' contents, checks.
"""

import torch
from torch import Tensor

from attncheck.backends.codecs import KVCacheCodec
from attncheck.backends.contract import AttentionBackend
from attncheck.backends.packings import allocate_kv_cache
from attncheck.errors import AttncheckError
from attncheck.harness.problem import Problem
from attncheck.harness.randomness import Stream

_BLOCKS = 3


class CodecError(AttncheckError):
    """A codec that does not do what codecs do; the sentence says what was seen."""


def prove_codec(codec: KVCacheCodec, backend: type[AttentionBackend], problem: Problem) -> None:
    """Raises CodecError where ``codec`` loses, mixes up or spills rows."""
    layer, cache = problem.layer, problem.cache
    kv_cache = allocate_kv_cache(backend, layer, cache, _BLOCKS, "cpu")
    slots = torch.arange(_BLOCKS * cache.block_size)
    stream = Stream("codec proof")
    key, value = (
        (stream.int8(len(slots), layer.num_kv_heads, size).float() / 64).to(problem.dtype)
        for size in (layer.head_size, layer.value_head_size)
    )
    codec.write(kv_cache, slots, key, value)
    _compare(codec.read(kv_cache, slots), (key, value), "what was written to all slots is not what is read back")
    for slot in (0, len(slots) // 2, len(slots) - 1):
        one = torch.tensor([slot])
        codec.write(kv_cache, one, -key[slot : slot + 1], -value[slot : slot + 1])
        others = torch.cat([slots[:slot], slots[slot + 1 :]])
        _compare(
            codec.read(kv_cache, others), (key[others], value[others]), f"writing slot {slot} changed another slot"
        )
        codec.write(kv_cache, one, key[slot : slot + 1], value[slot : slot + 1])


def _compare(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], complaint: str) -> None:
    for name, rows, wanted in zip(("keys", "values"), got, expected, strict=True):
        if rows.shape != wanted.shape:
            raise CodecError(f"the codec reads {name} of shape {tuple(rows.shape)}, not {tuple(wanted.shape)}")
        if not torch.equal(rows.to(wanted.dtype), wanted):
            raise CodecError(f"the codec cannot be trusted with {name}: {complaint}")
