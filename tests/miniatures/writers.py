"""Wrong writes: other slots, other values, inputs changed on the way.

Each class is the reference backend but for its own lines. ``test_miniatures.py`` names the check that must catch it.
"""

from pathlib import Path

import torch

from attncheck.backends.candidates.reference import ReferenceImpl
from attncheck.backends.registry import import_file

Miniature = import_file("base.py", Path(__file__).with_name("base.py")).Miniature


# Writing the cache.


class WritesNeighbourSlot(Miniature):
    """Writes two slots at a time: the one behind the last row is overwritten too."""

    class Impl(ReferenceImpl):
        def write(self, layer, key, value, key_cache, value_cache, slot_mapping):
            real = slot_mapping[slot_mapping >= 0]
            if len(real):
                slots = key_cache.shape[0] * key_cache.shape[1]
                stray = (real[-1:] + 1) % slots
                super().write(layer, key[:1], value[:1], key_cache, value_cache, stray)
            super().write(layer, key, value, key_cache, value_cache, slot_mapping)


class SwapsKAndV(Miniature):
    """Stores values where keys belong, and keys where values belong (where both have one size)."""

    class Impl(ReferenceImpl):
        def write(self, layer, key, value, key_cache, value_cache, slot_mapping):
            if key.shape == value.shape:
                key, value = value, key
            super().write(layer, key, value, key_cache, value_cache, slot_mapping)


class RoundsKeys(Miniature):
    """Sends keys through a dtype with fewer bits on their way into the cache."""

    class Impl(ReferenceImpl):
        def write(self, layer, key, value, key_cache, value_cache, slot_mapping):
            coarse = key.to(torch.float8_e4m3fn).to(key.dtype)
            super().write(layer, coarse, value, key_cache, value_cache, slot_mapping)


class RoundsToBfloat16(Miniature):
    """Keeps a cache of bfloat16 precision, whatever the layer's dtype."""

    class Impl(ReferenceImpl):
        def write(self, layer, key, value, key_cache, value_cache, slot_mapping):
            coarse = (rows.to(torch.bfloat16).to(rows.dtype) for rows in (key, value))
            super().write(layer, *coarse, key_cache, value_cache, slot_mapping)


class ClampsLikeFp8(Miniature):
    """Clamps what it stores to the range of an FP8 format."""

    class Impl(ReferenceImpl):
        def write(self, layer, key, value, key_cache, value_cache, slot_mapping):
            within = (rows.clamp(-448, 448) for rows in (key, value))
            super().write(layer, *within, key_cache, value_cache, slot_mapping)


class ScalesAnyCache(Miniature):
    """Divides by k_scale and v_scale though the cache holds no FP8 codes, and multiplies when it reads."""

    class Impl(ReferenceImpl):
        def write(self, layer, key, value, key_cache, value_cache, slot_mapping):
            key, value = (key / layer._k_scale).to(key.dtype), (value / layer._v_scale).to(value.dtype)
            super().write(layer, key, value, key_cache, value_cache, slot_mapping)

        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            if caches is not None:
                caches = tuple(c.float() * s for c, s in zip(caches, (layer._k_scale, layer._v_scale), strict=True))
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)


class MutatesQuery(Miniature):
    """Scales the caller's query in place."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, *rest):
            super().attend(layer, query, *rest)
            query *= self.scale


class MutatesMetadata(Miniature):
    """Turns offsets into lengths in the tensor that every other layer reads too."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, key, value, caches, metadata, *rest):
            super().attend(layer, query, key, value, caches, metadata, *rest)
            starts = metadata.common.query_start_loc
            starts[1:] -= starts[:-1].clone()
