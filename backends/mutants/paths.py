"""Faults that show only on a path: trees, chunks, shared caches, prefixes and parts, micro-batches."""

from dataclasses import replace
from typing import ClassVar

import torch

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceBuilder, ReferenceImpl
from attncheck.backends.mutants.base import Base
from attncheck.reference import merge_attn_states, paged_attention, visible

ENDLESS = 2**62


def scales_of(layer):
    """Return the scales of an FP8 cache, as keywords of ``paged_attention``."""
    return {"k_scale": layer._k_scale, "v_scale": layer._v_scale}


class PagedImpl(ReferenceImpl):
    """Impl that calls ``paged_attention`` with arguments that ``options`` changes."""

    def options(self, metadata, params):
        raise NotImplementedError

    def answer(self, query, caches, metadata, params, **options):
        common = metadata.common
        where = common.block_table_tensor, common.seq_lens, common.query_start_loc
        return paged_attention(query[: metadata.num_rows], *caches, *where, params, **options)

    def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
        if caches is None:
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            return
        params, options = self.options(metadata, self.params(metadata))
        out, lse = self.answer(query, caches, metadata, params, **scales_of(layer), **options)
        output[: len(out)] = out.to(output.dtype)
        output_lse[: len(lse)] = lse.float()


# Trees of drafts.


class TreeIgnored(Base):
    """Every draft sees all rows before it."""

    class Impl(PagedImpl):
        def options(self, metadata, params):
            return params, {}


class TreeTransposed(Base):
    """A draft sees its descendants; under the causal mask, that is only itself."""

    class Impl(PagedImpl):
        def options(self, metadata, params):
            return params, {"tree_mask": None if metadata.tree is None else metadata.tree.T.contiguous()}


class TreeWithoutContext(Base):
    """Indexes the tree by the key's position instead of its place after the context."""

    class Impl(PagedImpl):
        def options(self, metadata, params):
            tree = metadata.tree
            if tree is None:
                return params, {}

            def mask(request, q, k):
                row = q - (metadata.seq_lens[request] - len(tree))
                inside = k < len(tree)
                return visible(params, q, k) & (~inside | tree[row, k.clamp(max=len(tree) - 1)])

            return params, {"mask_fn": mask}


class TreeByDepth(Base):
    """Uses the depth of a row in the tree as its position: a window reaches further back."""

    class Impl(PagedImpl):
        def options(self, metadata, params):
            tree = metadata.tree
            if tree is None:
                return params, {}
            depth = tree.sum(1) - 1

            def mask(request, q, k):
                context = metadata.seq_lens[request] - len(tree)
                place = context + depth[q - context]
                node = k - context
                standing = torch.where(node >= 0, context + depth[node.clamp(0, len(tree) - 1)], k)
                return visible(params, place, standing) & ((node < 0) | tree[q - context, node.clamp(min=0)])

            return params, {"mask_fn": mask}


class DraftsSeeEachOther(Base):
    """Short queries use the decode kernel, which has no mask."""

    class Impl(PagedImpl):
        def options(self, metadata, params):
            short = max(metadata.query_lens) <= 8
            return (replace(params, causal=False) if short else params), {}


# Chunks.


class ChunkAsWindow(Base):
    """Sees the last keys, as many as a chunk has, instead of those of the row's chunk."""

    class Impl(PagedImpl):
        def options(self, metadata, params):
            chunk = params.attn_chunk_size
            return (replace(params, attn_chunk_size=None, window=(chunk - 1, 0)) if chunk else params), {}


class ChunksFromTheFirstRow(Base):
    """Counts chunks from the first new row."""

    class Impl(PagedImpl):
        def options(self, metadata, params):
            def mask(request, q, k):
                context = metadata.seq_lens[request] - metadata.query_lens[request]
                return visible(params, q - context, k - context)

            return params, {"mask_fn": mask}


# Caches of other layers.


class WritesASharedCache(Base):
    """A layer that shares a cache clears the slots of the step."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            if self.kv_sharing_target_layer_name is not None:
                slots = metadata.common.slot_mapping
                live = slots[slots >= 0]
                size = caches[0].shape[1]
                for cache in caches:
                    cache[live // size, live % size] = 0


# Prefixes.


class Cascading(PagedImpl):
    """Impl that computes both parts, each with its own arguments."""

    def parts(self, prefix, params):
        raise NotImplementedError

    def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
        params, prefix = self.params(metadata), metadata.common_prefix_len
        if not prefix:
            ReferenceImpl.attend(self, layer, query, key, value, caches, metadata, output, output_lse)
            return
        states = [
            self.answer(query, caches, metadata, own, **scales_of(layer), **options)
            for own, options in self.parts(prefix, params)
        ]
        out, lse = merge_attn_states(*states[0], *states[1])
        output[: len(out)] = out.to(output.dtype)
        output_lse[: len(lse)] = lse.float()


class PrefixTwice(Base):
    """The rest also starts at position 0."""

    class Impl(Cascading):
        def parts(self, prefix, params):
            return (params, {"kv_range": (0, prefix)}), (params, {"kv_range": (0, ENDLESS), "include_sinks": False})


class SinksInBothParts(Base):
    """Counts the sinks with the prefix and with the rest."""

    class Impl(Cascading):
        def parts(self, prefix, params):
            return (params, {"kv_range": (0, prefix)}), (params, {"kv_range": (prefix, ENDLESS)})


class WindowDroppedInThePrefix(Base):
    """Attends to the whole prefix, without the window."""

    class Impl(Cascading):
        def parts(self, prefix, params):
            whole = replace(params, window=(-1, -1))
            rest = {"kv_range": (prefix, ENDLESS), "include_sinks": False}
            return (whole, {"kv_range": (0, prefix)}), (params, rest)


class AveragesThePrefix(Base):
    """Averages the outputs of both parts."""

    class Impl(Cascading):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            params, prefix = self.params(metadata), metadata.common_prefix_len
            if not prefix:
                ReferenceImpl.attend(self, layer, query, key, value, caches, metadata, output, output_lse)
                return
            head, head_lse = self.answer(query, caches, metadata, params, **scales_of(layer), kv_range=(0, prefix))
            rest = {"kv_range": (prefix, ENDLESS), **scales_of(layer)}
            tail, tail_lse = self.answer(query, caches, metadata, params, **rest)
            output[: len(head)] = ((head + tail) / 2).to(output.dtype)
            output_lse[: len(head)] = torch.logaddexp(head_lse, tail_lse).float()


# Parts that the harness merges.


class Merged(Base):
    """Backend without its own cascade and chunks."""

    features = ReferenceBackend.features - {"cascade", "local"}


class EmptyPartsWeigh(Merged):
    """The LSE is 0 for a row that sees nothing."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            output_lse[torch.isneginf(output_lse)] = 0.0


class MergesInBaseTwo(Merged):
    """The LSE has base 2, but is declared natural."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            output_lse /= torch.log(torch.tensor(2.0))


class PartsAreCausal(Merged):
    """Always applies the causal mask."""

    class Impl(ReferenceImpl):
        def params(self, metadata):
            return replace(super().params(metadata), causal=True, window=(-1, -1))


class IgnoresVirtualTables(Merged):
    """With chunks, every piece of a request reads the pages of its first piece."""

    class Impl(PagedImpl):
        def options(self, metadata, params):
            return params, {}

        def answer(self, query, caches, metadata, params, **options):
            table = metadata.common.block_table_tensor.clone()
            table[1:] = torch.where(table[1:, :1] > 0, table[:1], table[1:])
            common = replace(metadata.common, block_table_tensor=table)
            return super().answer(query, caches, replace(metadata, common=common), params, **options)


# Micro-batches.


class BuildsOncePerShape(Base):
    """Caches metadata by the number of requests, for all builders of the process."""

    class Builder(ReferenceBuilder):
        kept: ClassVar[dict] = {}

        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            previous = self.kept.get(common_attn_metadata.num_reqs)
            self.kept[common_attn_metadata.num_reqs] = metadata
            same = previous is not None and previous.common.num_actual_tokens == metadata.common.num_actual_tokens
            return previous if same else metadata


class LengthsOfTheWholeStep(Base):
    """A request that is split between micro-batches keeps its length in the whole step, by its table's pages."""

    class Impl(PagedImpl):
        def options(self, metadata, params):
            def mask(request, q, k):
                return torch.ones_like(q - k, dtype=torch.bool)

            return params, ({} if len(metadata.seq_lens) > 1 else {"mask_fn": mask})
