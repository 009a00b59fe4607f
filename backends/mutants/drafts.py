"""Faults of padded batches, and of drafts to verify that are fewer than the config allows.

Each is right for batches without padding whose requests have as many rows as the config allows, and for prompts.
"""

from dataclasses import replace

import torch

from attncheck.backends.contract import AttentionCGSupport
from attncheck.backends.mutants import graphs
from attncheck.backends.mutants.plain import Base, PlainBuilder, PlainImpl
from attncheck.backends.paged_metadata import PagedBuilder

_MOST_VERIFIED = 8
"""Most rows of a request that a kernel for decodes takes."""


def configured_rows(builder):
    """Return the rows of a request with all drafts of the builder's config, or 0 without drafts."""
    speculative = builder.vllm_config.speculative_config
    return 0 if speculative is None else 1 + speculative.num_speculative_tokens


class RowsByTheConfig(Base):
    """Verifies drafts by rows of the configured number: row t is of request t // (K + 1), also with fewer drafts."""

    class Builder(PlainBuilder):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            common, rows = common_attn_metadata, configured_rows(self)
            if 1 < common.max_query_len <= rows:
                starts = torch.arange(common.num_reqs + 1, device=self.device) * rows
                starts = starts.clamp(max=common.query_start_loc[-1]).to(torch.int32)
                common = replace(common, query_start_loc=starts)
            return super().build(common_prefix_len, common, fast_build)


class FirstRowByTheConfig(Base):
    """While a request verifies all K drafts, the first row of every request is K tokens before its end."""

    class Builder(PlainBuilder):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            rows = configured_rows(self)
            metadata.rows = rows if common_attn_metadata.max_query_len == rows > 1 else 0
            return metadata

    class Impl(PlainImpl):
        rows = 0

        def seen(self, metadata, q_pos, k_pos):
            self.rows = getattr(metadata, "rows", 0)  # a fast prefill copies the declared fields alone
            return super().seen(metadata, self.moved(q_pos), k_pos)

        def scores(self, query, keys, q_pos, k_pos):
            return super().scores(query, keys, self.moved(q_pos), k_pos)

        def moved(self, q_pos):
            return q_pos - (self.rows - len(q_pos)) if self.rows else q_pos


class RowsByTheBucket(graphs.Base):
    """With K drafts in the config, a step of (K + 1) tokens a request counts as uniform, padding tokens included."""

    class Builder(PagedBuilder):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            rows = configured_rows(self)
            is_bucket = common_attn_metadata.num_actual_tokens == rows * common_attn_metadata.num_reqs
            metadata.plan = rows if rows and is_bucket else None
            return metadata

    class Impl(graphs.PlannedImpl):
        def locate(self, metadata, num_rows):
            if metadata.plan is None:
                return super().locate(metadata, num_rows)
            return graphs.locate_uniform(metadata.common, num_rows, metadata.plan)


class PaddingJoinsTheLast(graphs.Base):
    """In a step of up to eight rows a request, padding tokens count as rows of the last request."""

    level = AttentionCGSupport.NEVER

    class Impl(graphs.RowsImpl):
        def locate(self, metadata, num_rows):
            common = metadata.common
            if not 1 < common.max_query_len <= _MOST_VERIFIED:
                return super().locate(metadata, num_rows)
            end = torch.full_like(common.query_start_loc[-1:], num_rows)
            starts = torch.cat([common.query_start_loc[:-1], end])
            return graphs.locate(starts, common.seq_lens, num_rows)


class TokensForEachRequest(Base):
    """In a step of decodes, a request has as many rows as there are tokens for each, those of padding included."""

    class Impl(PlainImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            common = metadata.common
            step, rest = divmod(common.num_actual_tokens, common.num_reqs)
            if caches is None or common.max_query_len > 1 or step < 2 or rest:
                super().attend(layer, query, key, value, caches, metadata, output, output_lse)
                return
            first = torch.arange(common.num_reqs, device=query.device) * step
            out, lse = torch.empty_like(output[: len(first)]), query.new_empty(len(first), self.num_heads).float()
            super().attend(layer, query[first], key, value, caches, metadata, out, lse)
            is_real = common.query_start_loc.diff() > 0
            output[first[is_real]] = out[is_real]
            if output_lse is not None:
                output_lse[first[is_real]] = lse[is_real]


class DecodesByCounts(Base):
    """Takes a step with as many tokens as requests for decodes, also where padding requests have no rows."""

    class Builder(PlainBuilder):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            common = common_attn_metadata
            if common.num_actual_tokens == common.num_reqs:
                starts = torch.arange(common.num_reqs + 1, device=self.device)
                starts = starts.clamp(max=common.query_start_loc[-1]).to(torch.int32)
                common = replace(common, query_start_loc=starts)
            return super().build(common_prefix_len, common, fast_build)
