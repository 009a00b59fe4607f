"""Wrong answers: keys a row should not see or should, scores made otherwise, log-sum-exps of something else.

Each class is the reference backend but for its own lines. ``test_miniatures.py`` names the check that must catch it.
"""

import math
from dataclasses import replace
from pathlib import Path

import torch

from attncheck.backends.candidates.reference import ReferenceImpl
from attncheck.backends.registry import import_file
from attncheck.reference import paged_attention, varlen_attention, visible

Miniature = import_file("base.py", Path(__file__).with_name("base.py")).Miniature


class MaskedImpl(ReferenceImpl):
    """Attends under a predicate of its own, ``sees``; ``context`` is the position of the request's first row."""

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


class TopLeftCausal(Miniature):
    """Aligns the causal mask to the first key instead of the last: row i sees keys 0 to i."""

    class Impl(MaskedImpl):
        def sees(self, params, q, k, *, context, **_):
            return visible(params, q - context, k) if params.causal else visible(params, q, k)


class ExcludesItself(Miniature):
    """A row sees what came before it, but not itself."""

    class Impl(MaskedImpl):
        def sees(self, params, q, k, **_):
            return visible(params, q, k) & ((k < q) | (not params.causal))


class DropsLastPartialPage(Miniature):
    """Walks whole pages only: the keys on the last, partly filled page are lost."""

    class Impl(MaskedImpl):
        def sees(self, params, q, k, *, context, query_len, block_size):
            return visible(params, q, k) & (k < (context + query_len) // block_size * block_size)


class WindowTooShort(Miniature):
    """A window of W keys shows W - 1."""

    class Impl(ReferenceImpl):
        def params(self, metadata):
            honest = super().params(metadata)
            left, right = honest.window
            return replace(honest, window=(left - 1, right)) if left > 0 else honest


class WindowDroppedInDecode(Miniature):
    """The decode kernel never heard of the window."""

    class Impl(MaskedImpl):
        def sees(self, params, q, k, *, query_len, **_):
            return visible(replace(params, window=(-1, -1)) if query_len == 1 else params, q, k)


class AlwaysCausal(Miniature):
    """The causal mask is built in: ``causal`` in the metadata, and the encoder's type, change nothing."""

    class Impl(ReferenceImpl):
        def params(self, metadata):
            return replace(super().params(metadata), causal=True)


# Where keys, values and rows are looked for.


class IdentityBlockTable(Miniature):
    """Takes a request's pages to lie one behind the other, from its first on."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            if caches is not None:
                table = metadata.common.block_table_tensor
                ahead = torch.arange(table.shape[1], dtype=table.dtype, device=table.device)
                guessed = (table[:, :1] + ahead) % caches[0].shape[0]
                metadata = replace(metadata, common=replace(metadata.common, block_table_tensor=guessed))
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)


class RepeatsHeadsWrong(Miniature):
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


class MissesTheNewKeys(Miniature):
    """Attends before it writes: this step's own keys are what stood in their slots before."""

    class Impl(ReferenceImpl):
        def write(self, *arguments):
            self.pending = arguments

        def attend(self, *arguments):
            super().attend(*arguments)
            if hasattr(self, "pending"):
                super().write(*self.pending)
                del self.pending


class LeavesRowsUnwritten(Miniature):
    """Rounds the number of rows down to a multiple of four."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            rows = metadata.num_rows // 4 * 4
            kept = output[rows:].clone()
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            output[rows:] = kept


class ReturnsAnotherTensor(Miniature):
    """Declares that it fills the caller's output, and returns a tensor of its own."""

    class Impl(ReferenceImpl):
        def forward(self, layer, query, key, value, kv_cache, attn_metadata, output=None, *rest, **more):
            own = output.clone()
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, own, *rest, **more)


# What a score is made of.


class ScaleIgnored(Miniature):
    """Multiplies scores by head_size ** -0.5, whatever the layer says."""

    class Impl(ReferenceImpl):
        def params(self, metadata):
            return replace(super().params(metadata), scale=None)


class CapBeforeScale(Miniature):
    """Caps the bare product of query and key, and scales afterwards: cap * tanh(qk / cap) * scale."""

    class Impl(ReferenceImpl):
        def params(self, metadata):
            # With cap' = cap * scale, cap' * tanh(scale * qk / cap') is scale * cap * tanh(qk / cap).
            honest = super().params(metadata)
            cap = honest.logits_soft_cap
            return honest if cap is None else replace(honest, logits_soft_cap=cap * honest.softmax_scale)


class AlibiDropped(Miniature):
    """Declares ALiBi, accepts the slopes, and leaves them out."""

    class Impl(ReferenceImpl):
        def params(self, metadata):
            return replace(super().params(metadata), alibi_slopes=None)


class SlopesReversed(Miniature):
    """Head h gets the slope of head H - 1 - h."""

    class Impl(ReferenceImpl):
        def params(self, metadata):
            honest = super().params(metadata)
            return honest if honest.alibi_slopes is None else replace(honest, alibi_slopes=honest.alibi_slopes[::-1])


class SinksIgnored(Miniature):
    """Declares sinks, accepts them, and leaves them out."""

    class Impl(ReferenceImpl):
        def params(self, metadata):
            return replace(super().params(metadata), sinks=None)


class SinksScaled(Miniature):
    """Treats a sink as one more score: multiplies it by the scale."""

    class Impl(ReferenceImpl):
        def params(self, metadata):
            honest = super().params(metadata)
            if honest.sinks is None:
                return honest
            return replace(honest, sinks=tuple(sink * honest.softmax_scale for sink in honest.sinks))


# The log-sum-exp.


class ChangesLse(Miniature):
    """Shared by those below: the output is right, the LSE is what ``changed`` makes of it."""

    class Impl(ReferenceImpl):
        def changed(self, lse, metadata):
            raise NotImplementedError

        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            rows = metadata.num_rows
            output_lse[:rows] = self.changed(output_lse[:rows], metadata)


class LseBaseTwo(ChangesLse):
    """Base-2 logarithms, declared natural."""

    class Impl(ChangesLse.Impl):
        def changed(self, lse, metadata):
            return lse / math.log(2)


class LseOfTheMaxOnly(Miniature):
    """Stores the largest score instead of the logarithm of the sum (where no modifier makes that hard to say)."""

    class Impl(ReferenceImpl):
        sharpness = 1.0

        def params(self, metadata):
            honest = super().params(metadata)
            return replace(honest, scale=honest.softmax_scale * self.sharpness)

        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            params = self.params(metadata)
            if params.logits_soft_cap or params.alibi_slopes or params.sinks:
                return
            # Of scores a thousand times as large the sum keeps the largest.
            self.sharpness = 1000.0
            super().attend(layer, query, key, value, caches, metadata, torch.empty_like(output), output_lse)
            output_lse[: metadata.num_rows] /= self.sharpness
            self.sharpness = 1.0


class LseWithoutSink(ChangesLse):
    """The sinks stand in the output, but not in the LSE."""

    class Impl(ChangesLse.Impl):
        def changed(self, lse, metadata):
            sinks = self.params(metadata).sinks
            if sinks is None:
                return lse
            return lse + torch.log1p(-torch.exp(torch.tensor(sinks, device=lse.device) - lse))


class LseOfTheFirstHead(ChangesLse):
    """One LSE a row: that of head 0."""

    class Impl(ChangesLse.Impl):
        def changed(self, lse, metadata):
            return lse[:, :1].expand_as(lse).clone()
