"""Writes and reads a backend's KV cache from outside the backend, in plain torch.

A cache is filled and read only through a codec, so that the harness never guesses the place of a key. Before a codec is
used, the harness checks that it reads back what it wrote, and that distinct slots touch distinct bytes.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from attncheck.backends.caches.packings import CacheGeometry, Packing, detect_packing
from attncheck.backends.caches.row_codec import row_codec
from attncheck.backends.dtypes import DTYPES, FP8_DTYPES
from attncheck.reference.attention.cache import dequantize_fp8, kv_cache_views, quantize_fp8
from attncheck.reference.spec import LayerSpec
from attncheck.reference.step_spec import ROW_FORMATS, CacheSpec

Scale = float | tuple[float, ...]


class KVCacheCodec(Protocol):
    """Writes and reads one layer's cache, given as the logical view that ``forward`` gets."""

    def write(self, kv_cache: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store ``key[i]`` and ``value[i]`` at slot ``slots[i]``, and change nothing else.

        slots: int64 ``[n]``, distinct, none negative. key, value: ``[n, num_kv_heads, head size]`` in the activation
        dtype; a latent cache takes ``kv_c_normed`` ``[n, kv_lora_rank]`` and ``k_pe`` ``[n, qk_rope_head_dim]``.
        """

    def read(self, kv_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return the contents of ``slots``, as new tensors in the shapes that ``write`` takes.

        They have the activation dtype. Rows of ``ROW_FORMATS`` may instead have a wider float dtype, and be unrounded.
        """


@dataclass(frozen=True)
class Coding:
    """The encoding of numbers in a cache: unchanged, or as FP8 codes, which are ``round(x / scale)``.

    dtype: the activation dtype.
    code_dtype: the float8 dtype of an FP8 cache, otherwise None; only codes are scaled.
    k_scale, v_scale: a number, or one per KV head.
    """

    dtype: torch.dtype
    code_dtype: torch.dtype | None = None
    k_scale: Scale = 1.0
    v_scale: Scale = 1.0

    def encode(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows as the cache holds them: codes as uint8, others unchanged, not yet rounded to the cache dtype."""
        return self._encode(key, self.k_scale), self._encode(value, self.v_scale)

    def decode(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the contents of a cache as rows in the activation dtype."""
        return self._decode(key, self.k_scale), self._decode(value, self.v_scale)

    def _encode(self, x: Tensor, scale: Scale) -> Tensor:
        if self.code_dtype is None:
            return x
        return quantize_fp8(x, _per_head(scale, x.device), self.code_dtype).view(torch.uint8)

    def _decode(self, stored: Tensor, scale: Scale) -> Tensor:
        if self.code_dtype is None:
            return stored.to(self.dtype)
        codes = stored.view(self.code_dtype)
        return dequantize_fp8(codes, _per_head(scale, stored.device)).to(self.dtype)


@dataclass(frozen=True)
class PackedCodec:
    """A codec for the packings of :mod:`~attncheck.backends.caches.packings`; the cache's strides give the layout."""

    packing: Packing
    head_size: int
    """For a latent cache, the width of its latent part."""
    coding: Coding

    def write(self, kv_cache: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """See :class:`KVCacheCodec`."""
        views = self._views(kv_cache)
        place = slots // views[0].shape[1], slots % views[0].shape[1]
        for view, new in zip(views, self.coding.encode(key, value), strict=True):
            view[place] = new.to(view.dtype)

    def read(self, kv_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`KVCacheCodec`."""
        views = self._views(kv_cache)
        place = slots // views[0].shape[1], slots % views[0].shape[1]
        return self.coding.decode(views[0][place], views[1][place])

    def _views(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        if self.packing == "latent":
            return kv_cache[..., : self.head_size], kv_cache[..., self.head_size :]
        return kv_cache_views(kv_cache, self.packing, self.head_size)


def coding_of(layer: LayerSpec, cache: CacheSpec) -> Coding:
    """Return the encoding of a layer's cache."""
    return Coding(
        dtype=DTYPES[layer.dtype],
        code_dtype=FP8_DTYPES.get(cache.kv_cache_dtype),
        k_scale=cache.k_scale,
        v_scale=cache.v_scale if layer.mla is None else cache.k_scale,  # one scale for the whole latent row
    )


def default_codec(backend: CacheGeometry, layer: LayerSpec, cache: CacheSpec) -> KVCacheCodec | None:
    """Return a codec for a backend with a detectable packing.

    Return None for others, and if the value head size differs from the head size. Also return None for codes of four
    bits, because the usual shape does not determine how they are rounded and scaled.
    """
    if cache.kv_cache_dtype in ROW_FORMATS:
        return row_codec(backend, layer, cache) if ROW_FORMATS[cache.kv_cache_dtype].bits == 8 else None
    if layer.value_head_size != layer.head_size:
        return None
    return packed_codec(backend, layer, cache)


def packed_codec(backend: CacheGeometry, layer: LayerSpec, cache: CacheSpec) -> KVCacheCodec | None:
    """Return a codec for a backend with a detectable packing, or None; also None for layers without a cache.

    Unlike :func:`default_codec`, this assumes ``[key | value]`` for a ``content`` packing whose values have another
    size than the keys. Use it only for backends that have this order.
    """
    if not layer.has_cache:
        return None
    if cache.kv_cache_dtype in ROW_FORMATS:
        return row_codec(backend, layer, cache)
    packing = detect_packing(backend, layer, cache)
    if packing is None:
        return None
    head_size = layer.head_size if layer.mla is None else layer.mla.kv_lora_rank
    return PackedCodec(packing, head_size, coding_of(layer, cache))


def _per_head(scale: Scale, device: torch.device) -> Tensor:
    """Return a scale that broadcasts over ``[n, num_kv_heads, head size]``."""
    if isinstance(scale, tuple):
        return torch.tensor(scale, dtype=torch.float32, device=device)[:, None]
    # float32, as in the layer's scales that the backend gets.
    return torch.tensor(scale, dtype=torch.float32, device=device)
