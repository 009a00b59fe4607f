"""Faults of latent attention: confused sizes, wrongly split weights, pieces of the context lost or masked."""

from dataclasses import replace
from types import SimpleNamespace

import torch

from attncheck.backends.candidates.reference_mla import ReferenceMLABackend, ReferenceMLAImpl
from attncheck.backends.candidates.torch_mla import TorchMLABackend, TorchMLAImpl


class Latent(ReferenceMLABackend):
    """The reference under the name of the subclass, whose nested ``Impl`` contains the fault."""

    Impl = ReferenceMLAImpl

    @classmethod
    def get_name(cls):
        return cls.__name__.upper()

    @classmethod
    def get_impl_cls(cls):
        return cls.Impl


class PlainTorch(TorchMLABackend):
    """``torch_mla`` under the name of the subclass, whose nested ``Impl`` contains the fault."""

    Impl = TorchMLAImpl

    @classmethod
    def get_name(cls):
        return cls.__name__.upper()

    @classmethod
    def get_impl_cls(cls):
        return cls.Impl


# Scores are ignored.


class LatentZeros(Latent):
    """Every row is 0."""

    class Impl(ReferenceMLAImpl):
        def answer(self, *arguments):
            out, lse = super().answer(*arguments)
            return torch.zeros_like(out), lse


class LatentConstant(Latent):
    """Every row is 0.5."""

    class Impl(ReferenceMLAImpl):
        def answer(self, *arguments):
            out, lse = super().answer(*arguments)
            return torch.full_like(out, 0.5), lse


class LatentMean(Latent):
    """Every visible key has the same weight, whatever its score."""

    class Impl(ReferenceMLAImpl):
        def params(self, metadata):
            return replace(super().params(metadata), scale=0.0)


# Sizes and weights.


class ScaleOfTheCacheRow(Latent):
    """Uses the head size it gets, that of a cache row, as the size of a query: scale (L + E) ** -0.5."""

    class Impl(ReferenceMLAImpl):
        def params(self, metadata):
            honest = super().params(metadata)
            return replace(honest, scale=honest.latent_size**-0.5)


class CutsAllKeysFirst(Latent):
    """Reads the rows of ``kv_b_proj`` as those of all keys, then those of all values; they alternate by head."""

    class Impl(ReferenceMLAImpl):
        def process_weights_after_loading(self, act_dtype):
            keys = self.num_heads * self.qk_nope_head_dim
            halves = self.kv_b_proj.weight[:keys], self.kv_b_proj.weight[keys:]
            self._projections = tuple(half.unflatten(0, (self.num_heads, -1)).permute(2, 0, 1) for half in halves)


class RotatedPartFirst(Latent):
    """Reads and writes a cache row as rotated part, then latent part."""

    class Impl(ReferenceMLAImpl):
        def write(self, layer, kv_c, k_pe, kv_cache, slot_mapping):
            super().write(layer, k_pe, kv_c, kv_cache, slot_mapping)

        def answer(self, layer, query, kv_cache, metadata):
            turned = kv_cache.roll(self.kv_lora_rank, dims=-1)
            return super().answer(layer, query, turned, metadata)


class RotatedPartPerHead(Latent):
    """Shifts the rotated part by one channel per head, as if each head had its own."""

    class Impl(ReferenceMLAImpl):
        def answer(self, layer, query, kv_cache, metadata):
            q_nope, q_pe = query.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
            turned = [q_pe[:, head].roll(head, dims=-1) for head in range(self.num_heads)]
            return super().answer(layer, torch.cat([q_nope, torch.stack(turned, 1)], -1), kv_cache, metadata)


class ReadsByVScale(Latent):
    """Scales the latent part of an FP8 row by v_scale, as if it were values; the row has one scale."""

    class Impl(ReferenceMLAImpl):
        def answer(self, layer, query, kv_cache, metadata):
            return super().answer(SimpleNamespace(_k_scale=layer._v_scale), query, kv_cache, metadata)


# New rows and pieces of the context.


class DraftsSeeEachOther(PlainTorch):
    """Decodes several rows without a causal mask among them."""

    class Impl(TorchMLAImpl):
        def _absorbed(self, query, tokens, first, metadata):
            open_eyed = replace(metadata, common=replace(metadata.common, causal=False))
            return super()._absorbed(query, tokens, first, open_eyed)


class DropsTheLastPiece(PlainTorch):
    """Rounds the number of context pieces down."""

    class Impl(TorchMLAImpl):
        def _up_projected(self, query, tokens, first, metadata):
            self.workspace = metadata.workspace
            return super()._up_projected(query, tokens, first, metadata)

        def _piece(self, query, tokens, span, first, causal):
            out, lse = super()._piece(query, tokens, span, first, causal)
            is_context = span[1] <= first
            is_partial = self.workspace is not None and span[1] - span[0] < self.workspace
            return (out, torch.full_like(lse, -torch.inf)) if is_context and is_partial else (out, lse)


class MasksContextByLocalIndex(PlainTorch):
    """Applies the causal mask in the pieces of the context, with positions counted from each piece's beginning."""

    class Impl(TorchMLAImpl):
        def _piece(self, query, tokens, span, first, causal):
            if span[1] <= first:
                return super()._piece(query, tokens, span, span[0], True)
            return super()._piece(query, tokens, span, first, causal)


class CountsEmptyPieces(PlainTorch):
    """A request whose context ends before another's still merges a piece: zeros, with an LSE of 0."""

    class Impl(TorchMLAImpl):
        def _up_projected(self, query, tokens, first, metadata):
            out, lse = super()._up_projected(query, tokens, first, metadata)
            contexts = [seq_len - (end - start) for _, start, end, seq_len in metadata.requests()]
            if first >= max(contexts):
                return out, lse
            total = torch.logaddexp(lse, torch.zeros_like(lse))
            return out * torch.exp(lse - total)[..., None], total
