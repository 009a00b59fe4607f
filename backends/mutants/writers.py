"""Faults of cache writes: wrong slots, wrong values, changed inputs."""

import torch

from attncheck.backends.candidates.reference import ReferenceImpl
from attncheck.backends.mutants.base import Base, fits_in_memory

# Writing the cache.


class WritesNeighbourSlot(Base):
    """Writes two slots at a time: the slot after the last row is overwritten, too."""

    class Impl(ReferenceImpl):
        def write(self, layer, key, value, key_cache, value_cache, slot_mapping):
            real = slot_mapping[slot_mapping >= 0]
            if len(real):
                slots = key_cache.shape[0] * key_cache.shape[1]
                stray = (real[-1:] + 1) % slots
                super().write(layer, key[:1], value[:1], key_cache, value_cache, stray)
            super().write(layer, key, value, key_cache, value_cache, slot_mapping)


class SwapsKAndV(Base):
    """Stores values instead of keys, and keys instead of values (if both have the same size)."""

    class Impl(ReferenceImpl):
        def write(self, layer, key, value, key_cache, value_cache, slot_mapping):
            if key.shape == value.shape:
                key, value = value, key
            super().write(layer, key, value, key_cache, value_cache, slot_mapping)


class RoundsKeys(Base):
    """Converts keys to a dtype with fewer bits before they are written to the cache."""

    class Impl(ReferenceImpl):
        def write(self, layer, key, value, key_cache, value_cache, slot_mapping):
            coarse = key.to(torch.float8_e4m3fn).to(key.dtype)
            super().write(layer, coarse, value, key_cache, value_cache, slot_mapping)


class RoundsToBfloat16(Base):
    """Stores values with bfloat16 precision, whatever the layer's dtype."""

    class Impl(ReferenceImpl):
        def write(self, layer, key, value, key_cache, value_cache, slot_mapping):
            coarse = (rows.to(torch.bfloat16).to(rows.dtype) for rows in (key, value))
            super().write(layer, *coarse, key_cache, value_cache, slot_mapping)


class ClampsLikeFp8(Base):
    """Clamps stored values to the range of an FP8 format."""

    class Impl(ReferenceImpl):
        def write(self, layer, key, value, key_cache, value_cache, slot_mapping):
            within = (rows.clamp(-448, 448) for rows in (key, value))
            super().write(layer, *within, key_cache, value_cache, slot_mapping)


class ScalesAnyCache(Base):
    """Divides by k_scale and v_scale although the cache holds no FP8 codes, and multiplies when it reads."""

    class Impl(ReferenceImpl):
        def write(self, layer, key, value, key_cache, value_cache, slot_mapping):
            key, value = (key / layer._k_scale).to(key.dtype), (value / layer._v_scale).to(value.dtype)
            super().write(layer, key, value, key_cache, value_cache, slot_mapping)

        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            if caches is not None and fits_in_memory(caches[0]):
                caches = tuple(c.float() * s for c, s in zip(caches, (layer._k_scale, layer._v_scale), strict=True))
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)


class MutatesQuery(Base):
    """Scales the caller's query in place."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, *rest):
            super().attend(layer, query, *rest)
            query *= self.scale


class MutatesMetadata(Base):
    """Turns offsets into lengths in place, in the tensor that every other layer reads, too."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, key, value, caches, metadata, *rest):
            super().attend(layer, query, key, value, caches, metadata, *rest)
            starts = metadata.common.query_start_loc
            starts[1:] -= starts[:-1].clone()


class WritesPadSlot(Base):
    """Uses slot -1 as an index: padding rows are written to the last slot of the pool."""

    class Impl(ReferenceImpl):
        def write(self, layer, key, value, key_cache, value_cache, slot_mapping):
            super().write(layer, key, value, key_cache, value_cache, slot_mapping)
            padding = (slot_mapping < 0).nonzero().flatten()[-1:]
            last_slot = torch.full_like(padding, key_cache.shape[0] * key_cache.shape[1] - 1)
            super().write(layer, key[padding], value[padding], key_cache, value_cache, last_slot)


class WritesTheNextRow(Base):
    """Stores each new row at the slot of the previous row, and the first at that of the last."""

    class Impl(ReferenceImpl):
        def write(self, layer, key, value, key_cache, value_cache, slot_mapping):
            real = slot_mapping >= 0
            rows = len(slot_mapping)
            key, value = (part[:rows][real].roll(-1, 0) for part in (key, value))
            super().write(layer, key, value, key_cache, value_cache, slot_mapping[real])


class WritesEightRows(Base):
    """Stores only the first 8 rows of a step."""

    class Impl(ReferenceImpl):
        def write(self, layer, key, value, key_cache, value_cache, slot_mapping):
            super().write(layer, key, value, key_cache, value_cache, slot_mapping[:8])


# A layer that reads the cache of another.


class SharedCacheWritten(Base):
    """A layer that shares another's cache writes the keys and values that it is given."""

    class Impl(ReferenceImpl):
        def forward(self, layer, query, key, value, kv_cache, attn_metadata, *rest, **more):
            if self.kv_sharing_target_layer_name is not None and key is not None and attn_metadata is not None:
                caches = self._cache_views(kv_cache)
                self.write(layer, key, value, *caches, attn_metadata.common.slot_mapping)
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, *rest, **more)


class SharedCacheAddedTo(Base):
    """A layer that shares another's cache adds the values that it is given to its output rows, as a residual."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            if self.kv_sharing_target_layer_name is not None and value is not None:
                rows = slice(0, metadata.num_rows)
                output[rows] += value[rows].repeat_interleave(self.num_heads // self.num_kv_heads, 1)
