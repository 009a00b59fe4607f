"""Faults of builders that affect others: changing shared metadata, keeping references, waiting despite declarations.

A single step of a single builder is right, unless stated otherwise.
"""

from dataclasses import replace
from typing import ClassVar

import numpy as np

from attncheck.backends.contract import Conventions
from attncheck.backends.mutants import graphs
from attncheck.backends.mutants.plain import Base, PlainBuilder, PlainImpl
from attncheck.backends.paged_metadata import PagedBuilder

SYNC_FREE = Conventions(sync_free_build=True)


class LensTakenDownUntilForward(Base):
    """``build`` subtracts the new tokens from the shared ``seq_lens``, and ``forward`` adds them again."""

    class Builder(PlainBuilder):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            common_attn_metadata.seq_lens.sub_(common_attn_metadata.query_start_loc.diff())
            return super().build(common_prefix_len, common_attn_metadata, fast_build)

    class Impl(PlainImpl):
        def forward(self, layer, query, key, value, kv_cache, attn_metadata, *rest, **more):
            if attn_metadata is not None:
                common = attn_metadata.common
                common.seq_lens.add_(common.query_start_loc.diff())
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, *rest, **more)


class HostLensSortedForEncoders(Base):
    """For an encoder layer, ``build`` sorts the shared ``seq_lens_cpu`` in place."""

    class Builder(PlainBuilder):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            if common_attn_metadata.block_table_tensor.shape[1] == 1 and not common_attn_metadata.causal:
                lens = common_attn_metadata.seq_lens_cpu
                lens.copy_(lens.clone().sort(descending=True).values)
            return metadata


class CaptureShortensLens(graphs.Base):
    """Metadata for a capture have lengths of 1, which are written into the runner's own ``seq_lens``."""

    class Builder(PagedBuilder):
        def build_for_cudagraph_capture(self, common_attn_metadata):
            metadata = super().build_for_cudagraph_capture(common_attn_metadata)
            common_attn_metadata.seq_lens.fill_(1)
            return metadata

    Impl = graphs.RowsImpl


class CaptureClearsHostTwins(graphs.Base):
    """Metadata for a capture overwrite the runner's own ``num_computed_tokens_cpu``."""

    class Builder(PagedBuilder):
        def build_for_cudagraph_capture(self, common_attn_metadata):
            common_attn_metadata.num_computed_tokens_cpu.fill_(-1)
            return super().build_for_cudagraph_capture(common_attn_metadata)

    Impl = graphs.RowsImpl


class DecodeLensOfTheLatestBuilder(Base):
    """Builders of one process keep the lengths of pure decodes in one place: the builder that builds last wins."""

    latest: ClassVar[dict] = {}

    class Builder(PlainBuilder):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            DecodeLensOfTheLatestBuilder.latest["lens"] = common_attn_metadata.seq_lens
            return super().build(common_prefix_len, common_attn_metadata, fast_build)

    class Impl(PlainImpl):
        def attend(self, layer, query, key, value, caches, metadata, *rest):
            latest = DecodeLensOfTheLatestBuilder.latest["lens"]
            if metadata.common.max_query_len == 1 and len(latest) == metadata.common.num_reqs:
                metadata = replace(metadata, common=replace(metadata.common, seq_lens=latest))
            super().attend(layer, query, key, value, caches, metadata, *rest)


class PlanOnTheLayer(Base):
    """``build`` stores the block table on the layers; one without a window reads it if all requests have context."""

    class Builder(PlainBuilder):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            for layer in self.vllm_config.compilation_config.static_forward_context.values():
                layer.impl.table = common_attn_metadata.block_table_tensor
            return super().build(common_prefix_len, common_attn_metadata, fast_build)

    class Impl(PlainImpl):
        table = None

        def attend(self, layer, query, key, value, caches, metadata, *rest):
            common, has_context = metadata.common, min(metadata.common.num_computed_tokens_cpu.tolist()) > 0
            is_planned = has_context and self.sliding_window == (-1, -1) and self.table is not None
            if is_planned and self.table.shape == common.block_table_tensor.shape:
                metadata = replace(metadata, common=replace(common, block_table_tensor=self.table))
            super().attend(layer, query, key, value, caches, metadata, *rest)


class ReadsTheLongest(Base):
    """Declares a build that does not wait, but reads the longest length from the device."""

    conventions = SYNC_FREE

    class Builder(PlainBuilder):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            metadata.longest = int(common_attn_metadata.seq_lens.max())
            return metadata


class SelectsDecodesByMask(Base):
    """Declares a build that does not wait, but selects decodes by a mask: the host must wait for their number."""

    conventions = SYNC_FREE

    class Builder(PlainBuilder):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            lens = common_attn_metadata.seq_lens
            metadata.decode_lens = lens[common_attn_metadata.query_start_loc.diff() == 1]
            return metadata


class DraftsMissTheNewToken(Base):
    """``build_for_drafting`` uses the lengths from before the draft: a row does not see its own key."""

    class Builder(PlainBuilder):
        def build_for_drafting(self, common_attn_metadata, draft_index):
            computed = common_attn_metadata.num_computed_tokens_cpu.to(common_attn_metadata.seq_lens.device)
            shorter = replace(common_attn_metadata, seq_lens=computed.clamp(min=1))
            return super().build_for_drafting(shorter, draft_index)


class DraftsOfTheFirstPage(Base):
    """``build_for_drafting`` keeps only the first page of every request, and uses it for all of the request's pages."""

    class Builder(PlainBuilder):
        def build_for_drafting(self, common_attn_metadata, draft_index):
            table = common_attn_metadata.block_table_tensor
            first = replace(common_attn_metadata, block_table_tensor=table[:, :1].expand_as(table).contiguous())
            return super().build_for_drafting(first, draft_index)


class CascadeSortsQueryLens(Base):
    """``use_cascade_attention`` sorts the runner's own array of query lengths."""

    class Builder(PlainBuilder):
        def use_cascade_attention(self, common_prefix_len, query_lens, *rest, **more):
            query_lens[::-1].sort()
            return bool(query_lens[0] > 1)


class CascadeAnswersByNumber(Base):
    """``use_cascade_attention`` returns an array with one element per request."""

    class Builder(PlainBuilder):
        def use_cascade_attention(self, common_prefix_len, query_lens, *rest, **more):
            return np.asarray(query_lens) == 1


class CountsBeyondItsThreshold(Base):
    """Declares a threshold of 8 rows for requests in front, and treats all requests that short as decodes.

    A runner that sorts by a smaller threshold leaves short requests behind long ones; these get the results of the
    decodes in front.
    """

    class Builder(PlainBuilder):
        reorder_batch_threshold = 8

    class Impl(PlainImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            is_short = [0 < rows <= 8 for rows in metadata.query_lens]
            if True in is_short[is_short.index(False) :] if False in is_short else False:
                decodes = sum(rows for rows, short in zip(metadata.query_lens, is_short, strict=True) if short)
                output[:decodes] = output[:1]
