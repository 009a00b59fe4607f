"""Faults that only certain steps show: their number of requests, their lengths, or the steps before them.

Each is modelled on a bug that engines have had. All are right at the lengths and sizes that most tests use.
"""

from dataclasses import replace

import torch

from attncheck.backends.contract import AttentionCGSupport
from attncheck.backends.mutants import graphs
from attncheck.backends.paged_metadata import PagedBuilder

Base, RowsImpl, PlannedImpl = graphs.Base, graphs.RowsImpl, graphs.PlannedImpl


class OwnLengths(PagedBuilder):
    """Builder that copies the lengths into its own buffer, for as many requests as the config allows."""

    def __init__(self, *args):
        super().__init__(*args)
        most = self.vllm_config.scheduler_config.max_num_seqs
        self.lens = torch.zeros(most, dtype=torch.int32, device=self.device)

    def refill(self, common):
        self.lens[: common.num_reqs].copy_(common.seq_lens)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        common = common_attn_metadata
        self.refill(common)
        return super().build(common_prefix_len, replace(common, seq_lens=self.lens[: common.num_reqs]), fast_build)


# Sizes.


class MovesForMoreRequests(Base):
    """The buffer of lengths fits the largest graph; a step with more requests replaces it by another, for good.

    The old buffer is kept alive, so that no memory that a graph reads is freed.
    """

    class Builder(OwnLengths):
        def __init__(self, *args):
            super().__init__(*args)
            self.lens = self.lens[: self.vllm_config.compilation_config.max_cudagraph_capture_size]
            self.outgrown = []

        def refill(self, common):
            if common.num_reqs > len(self.lens):
                self.outgrown.append(self.lens)
                self.lens = self.lens.new_zeros(common.num_reqs)
            super().refill(common)


class PlansManyOnTheHost(Base):
    """More requests than a warp has threads are laid out on the host."""

    class Impl(RowsImpl):
        def locate(self, metadata, num_rows):
            if metadata.common.num_reqs <= 32:
                return super().locate(metadata, num_rows)
            return graphs.locate_on_host(metadata, num_rows)


class PairsRequests(Base):
    """Processes requests in pairs, and treats the last of an even number as the partner of padding."""

    class Builder(OwnLengths):
        def refill(self, common):
            super().refill(common)
            real = int(common.query_start_loc_cpu.diff().count_nonzero())
            if real % 2 == 0 and real < common.num_reqs:
                self.lens[real - 1] -= 1


class VerifiesManyOnTheHost(Base):
    """More requests than a warp has threads are laid out on the host, but only if drafts are verified."""

    level = AttentionCGSupport.UNIFORM_BATCH

    class Impl(RowsImpl):
        def locate(self, metadata, num_rows):
            common = metadata.common
            if common.max_query_len == 1 or common.num_reqs <= 32:
                return super().locate(metadata, num_rows)
            return graphs.locate_on_host(metadata, num_rows)


# Lengths.


class KernelForShortContexts(Base):
    """Host lengths, which are short at capture, decide whether one partition of 512 keys is enough."""

    class Impl(RowsImpl):
        def attend_rows(self, query, caches, table, request, position, metadata):
            if max(metadata.seq_lens) <= 512:
                table = table[:, : 512 // caches[0].shape[1]]
            return super().attend_rows(query, caches, table, request, position, metadata)


class CountsTilesOfDummies(Base):
    """The grid has as many tiles of 64 rows as the step's requests fill: the graph keeps the number of its dummies."""

    tile = 64

    class Builder(PagedBuilder):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            metadata.plan = sum(-(-rows // CountsTilesOfDummies.tile) for rows in metadata.query_lens)
            return metadata

    class Impl(PlannedImpl):
        def locate(self, metadata, num_rows):
            request, position = super().locate(metadata, num_rows)
            starts, tile = metadata.common.query_start_loc, CountsTilesOfDummies.tile
            tiles = (starts.diff() + tile - 1) // tile
            first = tiles.cumsum(0) - tiles
            nth = torch.arange(num_rows, device=starts.device) - starts[request]
            return request, position.masked_fill(first[request] + nth // tile >= metadata.plan, graphs.NOWHERE)


# Earlier steps.


class KeepsTheTableWhileItGrows(Base):
    """Keeps the block table if as many requests as before are a token longer each, as if they were the same."""

    class Builder(PagedBuilder):
        lens = None

        def __init__(self, *args):
            super().__init__(*args)
            pages = -(-self.vllm_config.model_config.max_model_len // self.kv_cache_spec.block_size)
            size = self.vllm_config.scheduler_config.max_num_seqs, pages
            self.table = torch.zeros(size, dtype=torch.int32, device=self.device)

        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            common, lens = common_attn_metadata, common_attn_metadata.seq_lens_cpu.clone()
            table = self.table[: common.num_reqs, : common.block_table_tensor.shape[1]]
            if self.lens is None or not torch.equal(lens, self.lens + 1):
                table.copy_(common.block_table_tensor)
            self.lens = lens
            return super().build(common_prefix_len, replace(common, block_table_tensor=table), fast_build)


class PlansByBatchSize(Base):
    """Keeps one plan per number of requests, made at capture: rows per request are in the plan, but not in its key."""

    level = AttentionCGSupport.UNIFORM_BATCH

    class Builder(PagedBuilder):
        def __init__(self, *args):
            super().__init__(*args)
            self.plans = {}

        def build_for_cudagraph_capture(self, common_attn_metadata):
            self.plans.setdefault(common_attn_metadata.num_reqs, common_attn_metadata.max_query_len)
            return self.build(0, common_attn_metadata)

        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            lens = [rows for rows in metadata.query_lens if rows]
            if len(set(lens)) == 1 and not any(metadata.query_lens[len(lens) :]):
                metadata.plan = self.plans.get(common_attn_metadata.num_reqs, lens[0])
            return metadata

    class Impl(PlannedImpl):
        def locate(self, metadata, num_rows):
            if metadata.plan is None:
                return graphs.locate_on_host(metadata, num_rows)
            return graphs.locate_uniform(metadata.common, num_rows, metadata.plan)


class DraftsByTheRowsBefore(Base):
    """Only ``build`` plans which row belongs to which request: drafts reuse the plan, also that of a verification."""

    level = AttentionCGSupport.UNIFORM_BATCH

    class Builder(PagedBuilder):
        def __init__(self, *args):
            super().__init__(*args)
            most = self.vllm_config.scheduler_config.max_num_batched_tokens
            self.request, self.is_planned = torch.zeros(most, dtype=torch.int64, device=self.device), False

        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            num_rows = common_attn_metadata.num_actual_tokens
            if not (fast_build and self.is_planned):
                of_row = [request for request, start, end, _ in metadata.requests() for _ in range(start, end)]
                of_row += [0] * (num_rows - len(of_row))
                self.request[:num_rows].copy_(torch.tensor(of_row))
                self.is_planned = True
            metadata.plan = self.request[:num_rows]
            return metadata

    class Impl(PlannedImpl):
        def locate(self, metadata, num_rows):
            common, request = metadata.common, metadata.plan
            rows = torch.arange(num_rows, device=request.device)
            position = common.seq_lens[request] - common.query_start_loc[1:][request] + rows
            position = position.masked_fill(rows >= common.query_start_loc[-1], graphs.NOWHERE)
            return request, position.clamp(min=graphs.NOWHERE)


class GrowsForUniformSteps(Base):
    """Only uniform steps use the workspace, and a larger one of them reallocates it."""

    level = AttentionCGSupport.UNIFORM_BATCH

    class Impl(graphs.EqualRows.Impl):
        workspace = None

        def attend_rows(self, query, caches, table, request, position, metadata):
            if len({n for n in metadata.query_lens if n}) == 1:
                if self.workspace is None or len(self.workspace) < len(query):
                    self.workspace = torch.empty_like(query, dtype=torch.float32)
                query = self.workspace[: len(query)].copy_(query)
            return super().attend_rows(query, caches, table, request, position, metadata)
