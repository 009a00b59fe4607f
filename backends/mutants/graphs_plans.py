"""Plans made only at capture, or from data of the capture: one fault each.

A graph sees no host number of a later step. Steps of shapes that were not captured are right.
"""

from dataclasses import replace

import torch

from attncheck.backends.mutants import graphs
from attncheck.backends.paged_metadata import PagedBuilder

Base, PlannedImpl = graphs.Base, graphs.PlannedImpl


class KnowsCaptures(PagedBuilder):
    """Builder that keeps the result of ``made_for`` for a captured shape (requests, tokens), which is the plan."""

    def __init__(self, *args):
        super().__init__(*args)
        self.captured = {}

    def made_for(self, common):
        raise NotImplementedError

    def build_for_cudagraph_capture(self, common_attn_metadata):
        common = common_attn_metadata
        self.captured[common.num_reqs, common.num_actual_tokens] = self.made_for(common)
        return self.build(0, common)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        metadata, common = super().build(common_prefix_len, common_attn_metadata, fast_build), common_attn_metadata
        metadata.plan = self.captured.get((common.num_reqs, common.num_actual_tokens))
        return metadata


class PlansByShape(Base):
    """Plans the positions of rows once per captured shape; later batches of that shape reuse the plan."""

    class Builder(KnowsCaptures):
        def made_for(self, common):
            return graphs.locate_by(common, common.num_actual_tokens)

    class Impl(PlannedImpl):
        def locate(self, metadata, num_rows):
            return metadata.plan or super().locate(metadata, num_rows)


class KeepsTheLastTable(Base):
    """Copies rows of its own table only if a request has more pages than in the step before."""

    class Builder(KnowsCaptures):
        def made_for(self, common):
            return common.block_table_tensor.clone(), [0] * common.num_reqs

        def build(self, *args, **keywords):
            metadata = super().build(*args, **keywords)
            if metadata.plan is None:
                return metadata
            table, pages = metadata.plan
            for request, seq_len in enumerate(metadata.seq_lens):
                needed = -(-seq_len // self.kv_cache_spec.block_size)
                if needed > pages[request]:
                    table[request].copy_(metadata.common.block_table_tensor[request])
                pages[request] = needed
            metadata.common = replace(metadata.common, block_table_tensor=table)
            return metadata

    class Impl(PlannedImpl):
        """Impl that reads the table like any other."""


class OnePlanForAllBuckets(Base):
    """Plans the order in which rows are stored at capture, in one buffer: a smaller graph size overwrites it."""

    class Builder(KnowsCaptures):
        def made_for(self, common):
            if not self.captured:
                most = self.vllm_config.scheduler_config.max_num_batched_tokens
                self.order = torch.zeros(most, dtype=torch.int64, device=self.device)
            rows = common.num_actual_tokens
            return self.order[:rows].copy_(torch.arange(rows - 1, -1, -1, device=self.device))

    class Impl(PlannedImpl):
        def finish(self, out, lse, output, output_lse, metadata, position):
            if (order := metadata.plan) is None:
                super().finish(out, lse, output, output_lse, metadata, position)
            else:
                output.index_copy_(0, order, out[order].to(output.dtype))
                output_lse.index_copy_(0, order, lse[order])


class PacksDraftsByEight(Base):
    """At capture lays out more than four rows per request in tiles of eight: wrong for five, six and seven."""

    class Builder(KnowsCaptures):
        def made_for(self, common):
            if common.max_query_len > 8:
                return None
            rows = torch.arange(common.num_actual_tokens, device=self.device)
            tile = 8 if common.max_query_len > 4 else common.max_query_len
            return rows // tile, rows % tile

    class Impl(PlannedImpl):
        def locate(self, metadata, num_rows):
            if metadata.plan is None:
                return super().locate(metadata, num_rows)
            (request, nth), common = metadata.plan, metadata.common
            first = (common.seq_lens - common.query_start_loc.diff())[request]
            position = first + nth
            return request, position.masked_fill(position >= common.seq_lens[request], graphs.NOWHERE)


class CapturesAShortMaximum(Base):
    """Sets ``max_seq_len`` to that of the dummies, for a fast capture: the graph never gathers more."""

    class Builder(PagedBuilder):
        def build_for_cudagraph_capture(self, common_attn_metadata):
            longest = int(common_attn_metadata.seq_lens_cpu.max())
            return self.build(0, replace(common_attn_metadata, max_seq_len=longest))

    class Impl(PlannedImpl):
        def attend_rows(self, query, caches, table, request, position, metadata):
            pages = -(-metadata.common.max_seq_len // caches[0].shape[1])
            return super().attend_rows(query, caches, table[:, :pages], request, position, metadata)


class GridOfTheDummies(Base):
    """Launches as many rows per request as the longest query has: a prompt longer than the dummies is cut off."""

    class Builder(PagedBuilder):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            metadata.plan = max(metadata.query_lens)
            return metadata

    class Impl(PlannedImpl):
        def locate(self, metadata, num_rows):
            request, position = super().locate(metadata, num_rows)
            nth = torch.arange(num_rows, device=request.device) - metadata.common.query_start_loc[request]
            return request, position.masked_fill(nth >= metadata.plan, graphs.NOWHERE)


class SkipsFreshPrompts(Base):
    """Treats a prompt of 1 + K tokens as no decode, and lays its rows out on the host: a graph of decodes omits it."""

    class Builder(PagedBuilder):
        def __init__(self, *args):
            super().__init__(*args)
            most = self.vllm_config.scheduler_config.max_num_seqs
            self.decodes, self.is_capture = torch.zeros(most, dtype=torch.int32, device=self.device), False

        def build_for_cudagraph_capture(self, common_attn_metadata):
            self.is_capture = True
            metadata = self.build(0, common_attn_metadata)
            self.is_capture = False
            return metadata

        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            metadata, common = super().build(common_prefix_len, common_attn_metadata, fast_build), common_attn_metadata
            is_prompt = (common.query_start_loc_cpu.diff() > 1) & (common.num_computed_tokens_cpu <= 0)
            is_prompt &= torch.tensor(not self.is_capture)
            lens = common.seq_lens_cpu.masked_fill(is_prompt, -common.num_actual_tokens)
            prompts = [(start, end) for r, start, end, _ in metadata.requests() if is_prompt[r]]
            metadata.plan = self.decodes[: common.num_reqs].copy_(lens), prompts
            return metadata

    class Impl(PlannedImpl):
        def locate(self, metadata, num_rows):
            decodes, prompts = metadata.plan
            request, position = graphs.locate_by(metadata.common, num_rows, decodes)
            for start, end in prompts:
                position[start:end] = torch.arange(end - start, device=position.device)
            return request, position.clamp(min=graphs.NOWHERE)


class EmptySplitsAreNaN(Base):
    """Captures with three splits of the keys, for long requests; a split without keys of a row gives NaN."""

    class Builder(PagedBuilder):
        def build_for_cudagraph_capture(self, common_attn_metadata):
            metadata = self.build(0, common_attn_metadata)
            metadata.plan = 3
            return metadata

    class Impl(PlannedImpl):
        def attend_rows(self, query, caches, table, request, position, metadata):
            attend, width = super().attend_rows, -(-table.shape[1] // (metadata.plan or 1))
            keys = width * caches[0].shape[1]
            parts = [
                attend(query, caches, part, request, position - index * keys, metadata)
                for index, part in enumerate(table.split(width, dim=1))
            ]
            outs, lses = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
            if metadata.plan is not None:
                empty = (lses == -torch.inf) & (position >= 0)[:, None]
                outs = outs.masked_fill(empty[..., None], torch.nan)
            lse = lses.logsumexp(0)
            weights = (lses - lse.masked_fill(lse == -torch.inf, 0)).exp()
            return (outs * weights[..., None]).sum(0), lse


class LeavesTheLseOut(Base):
    """Assumes that a capture needs no log-sum-exp: replays leave that of an earlier step."""

    class Builder(PagedBuilder):
        def build_for_cudagraph_capture(self, common_attn_metadata):
            metadata = self.build(0, common_attn_metadata)
            metadata.plan = "no LSE"
            return metadata

    class Impl(PlannedImpl):
        def finish(self, out, lse, output, output_lse, metadata, position):
            super().finish(out, lse, output, output_lse if metadata.plan is None else None, metadata, position)
