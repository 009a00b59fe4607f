"""Faults of masks, and of the places where rows and keys are read."""

from dataclasses import replace

import torch

from attncheck.backends.candidates.reference import ReferenceImpl
from attncheck.backends.mutants.base import Base
from attncheck.reference import paged_attention, varlen_attention, visible


class MaskedImpl(ReferenceImpl):
    """Impl that attends under its own predicate, ``sees``; ``context`` is the position of the request's first row."""

    def sees(self, params, q, k, *, context, query_len, block_size):
        raise NotImplementedError

    def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
        if caches is None:
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            return
        common, params, rows = metadata.common, self.params(metadata), metadata.num_rows
        lens, block_size = metadata.query_lens, caches[0].shape[1]

        def mask(request, q, k):
            context = metadata.seq_lens[request] - lens[request]
            return self.sees(params, q, k, context=context, query_len=lens[request], block_size=block_size)

        out, lse = paged_attention(
            query[:rows],
            *caches,
            common.block_table_tensor,
            common.seq_lens,
            common.query_start_loc,
            params,
            k_scale=layer._k_scale,
            v_scale=layer._v_scale,
            mask_fn=mask,
        )
        output[:rows] = out.to(output.dtype)
        output_lse[:rows] = lse.float()


# Which keys a row sees.


class TopLeftCausal(Base):
    """Aligns the causal mask to the first key instead of the last: row i sees keys 0 to i."""

    class Impl(MaskedImpl):
        def sees(self, params, q, k, *, context, **_):
            return visible(params, q - context, k) if params.causal else visible(params, q, k)


class ExcludesItself(Base):
    """A row sees the keys before it, but not its own."""

    class Impl(MaskedImpl):
        def sees(self, params, q, k, **_):
            return visible(params, q, k) & ((k < q) | (not params.causal))


class DropsLastPartialPage(Base):
    """Walks whole pages only: the keys on the last, partly filled page are lost."""

    class Impl(MaskedImpl):
        def sees(self, params, q, k, *, context, query_len, block_size):
            return visible(params, q, k) & (k < (context + query_len) // block_size * block_size)


class WindowTooShort(Base):
    """A window of W keys shows W - 1."""

    class Impl(ReferenceImpl):
        def params(self, metadata):
            honest = super().params(metadata)
            left, right = honest.window
            return replace(honest, window=(left - 1, right)) if left > 0 else honest


class WindowDroppedInDecode(Base):
    """The decode kernel ignores the window."""

    class Impl(MaskedImpl):
        def sees(self, params, q, k, *, query_len, **_):
            return visible(replace(params, window=(-1, -1)) if query_len == 1 else params, q, k)


class AlwaysCausal(Base):
    """Always applies the causal mask: ``causal`` in the metadata, and the encoder's type, have no effect."""

    class Impl(ReferenceImpl):
        def params(self, metadata):
            return replace(super().params(metadata), causal=True)


# Where keys, values and rows are read.


class IdentityBlockTable(Base):
    """Assumes that a request's pages are adjacent, beginning with its first."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            if caches is not None:
                table = metadata.common.block_table_tensor
                ahead = torch.arange(table.shape[1], dtype=table.dtype, device=table.device)
                guessed = (table[:, :1] + ahead) % caches[0].shape[0]
                metadata = replace(metadata, common=replace(metadata.common, block_table_tensor=guessed))
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)


class RepeatsHeadsWrong(Base):
    """Query head h reads KV head h % Hkv (K and V tiled) instead of h // G (each head repeated)."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            common, params, rows = metadata.common, self.params(metadata), metadata.num_rows
            tiled = torch.arange(self.num_heads) % self.num_kv_heads
            params = replace(params, num_kv_heads=self.num_heads)
            if caches is None:
                starts = common.query_start_loc
                out, lse = varlen_attention(
                    query[:rows], key[:rows, tiled], value[:rows, tiled], starts, starts, params
                )
            else:
                scales = {"k_scale": layer._k_scale, "v_scale": layer._v_scale}
                out, lse = paged_attention(
                    query[:rows],
                    *(cache[:, :, tiled] for cache in caches),
                    common.block_table_tensor,
                    common.seq_lens,
                    common.query_start_loc,
                    params,
                    **{name: scale[tiled] if scale.numel() > 1 else scale for name, scale in scales.items()},
                )
            output[:rows] = out.to(output.dtype)
            output_lse[:rows] = lse.float()


class MissesTheNewKeys(Base):
    """Attends before it writes: the step's own keys are the previous contents of their slots."""

    class Impl(ReferenceImpl):
        def write(self, *arguments):
            self.pending = arguments

        def attend(self, *arguments):
            super().attend(*arguments)
            if hasattr(self, "pending"):
                super().write(*self.pending)
                del self.pending


class LeavesRowsUnwritten(Base):
    """Rounds the number of rows down to a multiple of four."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            rows = metadata.num_rows // 4 * 4
            kept = output[rows:].clone()
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            output[rows:] = kept


class ReturnsAnotherTensor(Base):
    """Declares that it fills the caller's output, but returns another tensor."""

    class Impl(ReferenceImpl):
        def forward(self, layer, query, key, value, kv_cache, attn_metadata, output=None, *rest, **more):
            own = output.clone()
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, own, *rest, **more)


class WindowOffByOne(Base):
    """A window of W keys shows W + 1: the size is used as a distance."""

    class Impl(ReferenceImpl):
        def params(self, metadata):
            honest = super().params(metadata)
            left, right = honest.window
            return honest if left < 0 else replace(honest, window=(left + 1, right))
