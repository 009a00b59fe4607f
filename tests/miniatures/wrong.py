"""Four wrong backends as an outsider would bring them: one file, one fault each, everything declared.

    attncheck run --backend ./wrong.py:WindowOffByOne

Each is the reference backend but for the lines of its own class, so that a check which stays silent has missed just
that fault.
"""

from dataclasses import replace

import torch

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl


class Miniature(ReferenceBackend):
    """The reference under the name of the subclass, whose nested ``Impl`` brings the fault."""

    Impl = ReferenceImpl

    @classmethod
    def get_name(cls):
        return cls.__name__.upper()

    @classmethod
    def get_impl_cls(cls):
        return cls.Impl


class WindowOffByOne(Miniature):
    """A window of W keys shows W + 1: the bound is taken for a distance."""

    class Impl(ReferenceImpl):
        def params(self, metadata):
            honest = super().params(metadata)
            left, right = honest.window
            return honest if left < 0 else replace(honest, window=(left + 1, right))


class ReadsPastTheEnd(Miniature):
    """Loads the last page whole and gives the slots past the end weight 0: harmless until they hold NaN or Inf."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            if caches is None:
                return
            value_cache = caches[1].to(output.dtype)
            block_size = value_cache.shape[1]
            for request, start, end, seq_len in metadata.requests():
                if tail := seq_len % block_size:
                    page = value_cache[metadata.common.block_table_tensor[request, seq_len // block_size]]
                    past_the_end = 0.0 * page[tail:].sum(0)  # [Hkv, Dv]
                    output[start:end] += past_the_end.repeat_interleave(self.num_heads // self.num_kv_heads, 0)


class IgnoresSoftCap(Miniature):
    """Declares the soft cap, accepts it, and leaves it out."""

    class Impl(ReferenceImpl):
        def params(self, metadata):
            return replace(super().params(metadata), logits_soft_cap=None)


class WritesPadSlot(Miniature):
    """Takes slot -1 for an index: padding rows land in the last slot of the pool."""

    class Impl(ReferenceImpl):
        def write(self, layer, key, value, key_cache, value_cache, slot_mapping):
            super().write(layer, key, value, key_cache, value_cache, slot_mapping)
            padding = (slot_mapping < 0).nonzero().flatten()[-1:]
            last_slot = torch.full_like(padding, key_cache.shape[0] * key_cache.shape[1] - 1)
            super().write(layer, key[padding], value[padding], key_cache, value_cache, last_slot)
