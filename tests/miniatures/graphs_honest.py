"""Correct backends of other designs, each valid in a captured graph at its declared level: none may cause an alarm."""

from dataclasses import replace

import torch

from attncheck.backends.contract import AttentionCGSupport, Conventions
from attncheck.backends.mutants import graphs
from attncheck.backends.paged_metadata import PagedBuilder

Miniature, RowsImpl, PlannedImpl = graphs.Base, graphs.RowsImpl, graphs.PlannedImpl


class BufferedBuilder(PagedBuilder):
    """A builder with limits for buffers, from the largest step that its config allows."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        scheduler = vllm_config.scheduler_config
        self.max_reqs, self.max_tokens = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
        self.max_pages = -(-vllm_config.model_config.max_model_len // kv_cache_spec.block_size)


class RefillsBuffers(Miniature):
    """The builder has persistent buffers, which every build refills; lengths and offsets come from the host tensors."""

    class Builder(BufferedBuilder):
        def __init__(self, *args):
            super().__init__(*args)
            self.starts = torch.zeros(self.max_reqs + 1, dtype=torch.int32, device=self.device)
            self.lens = torch.zeros(self.max_reqs, dtype=torch.int32, device=self.device)
            self.table = torch.zeros(self.max_reqs, self.max_pages, dtype=torch.int32, device=self.device)
            self.slots = torch.zeros(self.max_tokens, dtype=torch.int64, device=self.device)

        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            common = common_attn_metadata
            reqs, pages = common.num_reqs, min(self.max_pages, common.block_table_tensor.shape[1])
            refilled = replace(
                common,
                query_start_loc=self.starts[: reqs + 1].copy_(common.query_start_loc_cpu, non_blocking=True),
                seq_lens=self.lens[:reqs].copy_(common.seq_lens_cpu, non_blocking=True),
                block_table_tensor=self.table[:reqs, :pages].copy_(common.block_table_tensor[:, :pages]),
                slot_mapping=self.slots[: len(common.slot_mapping)].copy_(common.slot_mapping),
            )
            return super().build(common_prefix_len, refilled, fast_build)


class PlansOnTheHost(Miniature):
    """The builder computes every row's request and position on the host and copies them into persistent buffers."""

    class Builder(BufferedBuilder):
        def __init__(self, *args):
            super().__init__(*args)
            self.request = torch.zeros(self.max_tokens, dtype=torch.int32, device=self.device)
            self.position = torch.zeros(self.max_tokens, dtype=torch.int32, device=self.device)

        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            num_rows = common_attn_metadata.num_actual_tokens
            rows = [(r, seq_len - end + t) for r, start, end, seq_len in metadata.requests() for t in range(start, end)]
            rows += [(0, graphs.NOWHERE)] * (num_rows - len(rows))
            planned = torch.tensor(rows, dtype=torch.int32).reshape(-1, 2)
            metadata.plan = (
                self.request[:num_rows].copy_(planned[:, 0]),
                self.position[:num_rows].copy_(planned[:, 1]),
            )
            return metadata

    class Impl(PlannedImpl):
        def locate(self, metadata, num_rows):
            return metadata.plan


class SplitsAtAThreshold(Miniature):
    """``UNIFORM_BATCH``: leading requests of equal length up to 1 + K are decodes; the host locates other rows.

    The number of decodes and their length are constants of the graph. Padding requests are decodes without visible
    keys.
    """

    level = AttentionCGSupport.UNIFORM_BATCH

    class Builder(PagedBuilder):
        def __init__(self, *args):
            super().__init__(*args)
            self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)

        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            rows, threshold = metadata.query_lens[0], self.reorder_batch_threshold or 1
            alike = [n == rows <= threshold for n in metadata.query_lens]
            metadata.plan = max(rows, 1), (*alike, False).index(False)
            return metadata

    class Impl(PlannedImpl):
        def locate(self, metadata, num_rows):
            query_len, decodes = metadata.plan
            front = graphs.locate_uniform(metadata.common, query_len * decodes, query_len)
            behind = graphs.locate_on_host(metadata, num_rows, first=decodes)
            return tuple(torch.cat(parts) for parts in zip(front, behind, strict=True))


class SyncsInPrefill(Miniature):
    """``UNIFORM_BATCH``: lengths of prompts and other long chunks, which no graph replays, are read from the device."""

    level = AttentionCGSupport.UNIFORM_BATCH

    class Impl(RowsImpl):
        def locate(self, metadata, num_rows):
            common = metadata.common
            if common.max_query_len > 8:
                starts, lens = common.query_start_loc.tolist(), common.seq_lens.tolist()
                read = replace(metadata, query_start_loc=tuple(starts), seq_lens=tuple(lens))
                return graphs.locate_on_host(read, num_rows)
            return graphs.locate_by(common, num_rows)


class LazyConstants(Miniature):
    """Constants of the layer are created in the first call, by a copy from the host, and kept."""

    class Impl(RowsImpl):
        scales = None

        def attend_rows(self, query, caches, table, request, position, metadata):
            if self.scales is None:
                self.scales = torch.tensor([self.scale] * self.num_heads, device=query.device)[:, None]
            key, value, seen = graphs.gather(caches, table, request, position)
            return graphs.attention(query.float() * self.scales, key, value, seen, 1.0)


class LazyOnMetadata(Miniature):
    """The first layer of a step computes on the device what all layers need, and stores it in the metadata."""

    class Impl(PlannedImpl):
        def locate(self, metadata, num_rows):
            if metadata.plan is None:
                metadata.plan = graphs.locate_by(metadata.common, num_rows)
            return metadata.plan


class WorkspaceFromTheStart(Miniature):
    """The builder allocates a workspace for the most requests of its config, which is written before it is read."""

    class Builder(BufferedBuilder):
        def __init__(self, *args):
            super().__init__(*args)
            self.workspace = torch.empty(self.max_reqs, self.max_pages, dtype=torch.int32, device=self.device)

        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            metadata.plan = self.workspace
            return metadata

    class Impl(PlannedImpl):
        def attend_rows(self, query, caches, table, request, position, metadata):
            common, width = metadata.common, min(table.shape[1], metadata.plan.shape[1])
            table, own = table[:, :width], metadata.plan[: len(table), :width]
            pages = torch.arange(width, device=table.device) * caches[0].shape[1]
            own.copy_(table.masked_fill(pages >= common.seq_lens[:, None], 0))
            return super().attend_rows(query, caches, own, request, position, metadata)


class GrowsToTheBound(Miniature):
    """The workspace is allocated on first use, for as many tokens as the config allows."""

    class Builder(BufferedBuilder):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            metadata.plan = self.max_tokens
            return metadata

    class Impl(PlannedImpl):
        workspace = None

        def attend_rows(self, query, *args):
            metadata = args[-1]
            if self.workspace is None:
                self.workspace = query.new_empty((metadata.plan, *query.shape[1:]), dtype=torch.float32)
            scaled = self.workspace[: len(query)].copy_(query)
            return super().attend_rows(scaled, *args)


class BoundsFromTheConfig(Miniature):
    """Reads at most as many pages as ``max_model_len`` needs, a host constant that no step exceeds."""

    class Builder(BufferedBuilder):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            metadata.plan = self.max_pages
            return metadata

    class Impl(PlannedImpl):
        def attend_rows(self, query, caches, table, request, position, metadata):
            return super().attend_rows(query, caches, table[:, : metadata.plan], request, position, metadata)


class BoundsFromMaxSeqLen(Miniature):
    """Reads at most as many pages as ``max_seq_len`` needs; its value at capture is a bound for every replay."""

    class Impl(RowsImpl):
        def attend_rows(self, query, caches, table, request, position, metadata):
            pages = -(-metadata.common.max_seq_len // caches[0].shape[1])
            return super().attend_rows(query, caches, table[:, :pages], request, position, metadata)


class WritesApart(Miniature):
    """The new K/V are written by ``do_kv_cache_update``, not by ``forward``."""

    forward_includes_kv_cache_update = False

    class Builder(PagedBuilder):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            if not common_attn_metadata.causal:  # the writer has no such argument, and forward runs too late
                raise NotImplementedError("a step that is not causal")
            return super().build(common_prefix_len, common_attn_metadata, fast_build)

    class Impl(RowsImpl):
        def write(self, *args):
            """Write nothing: the cache has the rows already."""

        def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
            super().write(layer, key, value, *self._cache_views(kv_cache), slot_mapping)


class MergesSplits(Miniature):
    """The number of splits is a constant of the graph; splits without a key for a row have a weight of 0."""

    class Impl(RowsImpl):
        splits = 3

        def attend_rows(self, query, caches, table, request, position, metadata):
            attend, width = super().attend_rows, -(-table.shape[1] // self.splits)
            keys = width * caches[0].shape[1]
            parts = [
                attend(query, caches, part, request, position - index * keys, metadata)
                for index, part in enumerate(table.split(width, dim=1))
            ]
            outs, lses = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
            lse = lses.logsumexp(0)
            weights = (lses - lse.masked_fill(lse == -torch.inf, 0)).exp()
            return (outs * weights[..., None]).sum(0), lse


class NeedsOneKey(Miniature):
    """A kernel that needs a key for every row: it declares the padding it needs, and that it reads there.

    Its output for rows of no request is masked afterwards.
    """

    conventions = Conventions(pad_seq_len=1, needs_finite_pool=True)

    class Impl(RowsImpl):
        def locate(self, metadata, num_rows):
            request, position = super().locate(metadata, num_rows)
            return request, position.clamp(min=0)

        def finish(self, out, lse, output, output_lse, metadata, position):
            _, position = super().locate(metadata, len(out))
            kept = out.masked_fill((position < 0)[:, None, None], 0)
            super().finish(kept, lse, output, output_lse, metadata, position)


class LeavesPaddingAlone(Miniature):
    """Rows of no request keep the previous contents of the output."""

    conventions = Conventions(padded_rows="untouched")

    class Impl(RowsImpl):
        def finish(self, out, lse, output, output_lse, metadata, position):
            is_real, rows = position >= 0, output[: len(out)]
            kept = torch.where(is_real[:, None, None], out.to(output.dtype), rows)
            super().finish(kept, lse, output, output_lse, metadata, position)


class DeclaresByTheConfig(Miniature):
    """The attribute declares NEVER; the method that engines call returns the level of a layer."""

    level = AttentionCGSupport.NEVER

    class Builder(PagedBuilder):
        @classmethod
        def get_cudagraph_support(cls, vllm_config, kv_cache_spec):
            return AttentionCGSupport.ALWAYS
