"""Correct backends of other designs, each valid in a captured graph at its declared level: none may cause an alarm.

Much of their code resembles something that no graph can hold.
"""

from dataclasses import replace
from functools import cache

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
    """The builder has persistent buffers, which every build refills; it waits for the device, which is not captured.

    The buffer of lengths has a host buffer, pinned if there is a GPU, which numpy fills.
    """

    conventions = replace(Miniature.conventions, host_lens="exact")

    class Builder(BufferedBuilder):
        def __init__(self, *args):
            super().__init__(*args)
            self.starts = torch.zeros(self.max_reqs + 1, dtype=torch.int32, device=self.device)
            is_pinned = self.device.type == "cuda"
            self.lens_on_host = torch.zeros(self.max_reqs, dtype=torch.int32, device="cpu", pin_memory=is_pinned)
            self.lens = torch.zeros_like(self.lens_on_host, device=self.device)
            self.table = torch.zeros(self.max_reqs, self.max_pages, dtype=torch.int32, device=self.device)
            self.slots = torch.zeros(self.max_tokens, dtype=torch.int64, device=self.device)

        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            common = common_attn_metadata
            assert common.seq_lens.max().item() <= common.max_seq_len
            reqs, pages = common.num_reqs, min(self.max_pages, common.block_table_tensor.shape[1])
            self.lens_on_host.numpy()[:reqs] = common.seq_lens_cpu.numpy()
            slots = torch.tensor(common.slot_mapping.tolist(), dtype=torch.int64, device=self.device)
            refilled = replace(
                common,
                query_start_loc=self.starts[: reqs + 1].copy_(common.query_start_loc_cpu, non_blocking=True),
                seq_lens=self.lens[:reqs].copy_(self.lens_on_host[:reqs], non_blocking=True),
                block_table_tensor=self.table[:reqs, :pages].copy_(common.block_table_tensor[:, :pages]),
                slot_mapping=self.slots[: len(slots)].copy_(slots),
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
    keys. Lengths of prompts and other long chunks, which no graph replays, are read from the device.
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
            common, (query_len, decodes) = metadata.common, metadata.plan
            if common.max_query_len > 8:
                starts, lens = common.query_start_loc.tolist(), common.seq_lens.tolist()
                metadata = replace(metadata, query_start_loc=tuple(starts), seq_lens=tuple(lens))
            front = graphs.locate_uniform(common, query_len * decodes, query_len)
            behind = graphs.locate_on_host(metadata, num_rows, first=decodes)
            return tuple(torch.cat(parts) for parts in zip(front, behind, strict=True))


@cache
def first_positions(pages, block_size, device):
    """Return the first position of each page, cached for the process."""
    return torch.arange(pages, device=device) * block_size


class LazyOnMetadata(Miniature):
    """Creates on first use what a step, a layer and the process need, and keeps it: metadata, impl, module."""

    class Impl(PlannedImpl):
        scales = None

        def locate(self, metadata, num_rows):
            if metadata.plan is None:
                metadata.plan = graphs.locate_by(metadata.common, num_rows)
            return metadata.plan

        def attend_rows(self, query, caches, table, request, position, metadata):
            if self.scales is None:
                self.scales = torch.tensor([self.scale] * self.num_heads, device=query.device)[:, None]
            starts = first_positions(table.shape[1], caches[0].shape[1], query.device)
            table = table.masked_fill(starts >= metadata.common.seq_lens[:, None], 0)
            key, value, seen = graphs.gather(caches, table, request, position)
            return graphs.attention(query.float() * self.scales, key, value, seen, 1.0)


class MovesOnFirstUse(Miniature):
    """Constants of the impl are on the host until the first ``forward`` on a device, which moves them there."""

    class Impl(RowsImpl):
        def __init__(self, *args, **keywords):
            super().__init__(*args, **keywords)
            self.scales = torch.full((self.num_heads, 1), self.scale)
            self.scale = 1.0

        def attend_rows(self, query, *args):
            if self.scales.device != query.device:
                self.scales = self.scales.to(query.device)
            return super().attend_rows(query.float() * self.scales, *args)


class BoundsFromTheConfig(Miniature):
    """Reads at most as many pages as ``max_model_len`` and ``max_seq_len`` need, which are bounds for every replay.

    The builder allocates a workspace for the most requests of its config, which is written before it is read. Another
    is allocated on first use, for as many tokens as the config allows.
    """

    class Builder(BufferedBuilder):
        def __init__(self, *args):
            super().__init__(*args)
            self.workspace = torch.empty(self.max_reqs, self.max_pages, dtype=torch.int32, device=self.device)

        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            metadata.plan = self.workspace, self.max_tokens
            return metadata

    class Impl(PlannedImpl):
        rows = None

        def attend_rows(self, query, caches, table, request, position, metadata):
            common, (workspace, max_tokens) = metadata.common, metadata.plan
            width = min(table.shape[1], workspace.shape[1], -(-common.max_seq_len // caches[0].shape[1]))
            table, own = table[:, :width], workspace[: len(table), :width]
            starts = torch.arange(width, device=table.device) * caches[0].shape[1]
            own.copy_(table.masked_fill(starts >= common.seq_lens[:, None], 0))
            if self.rows is None:
                self.rows = query.new_empty((max_tokens, *query.shape[1:]), dtype=torch.float32)
            rows = self.rows[: len(query)].copy_(query)
            return super().attend_rows(rows, caches, own, request, position, metadata)


class DeclaresOtherwise(Miniature):
    """Declares a separate writer of the cache, untouched padding rows, and its level by the method.

    The attribute, which engines do not read then, declares NEVER.
    """

    level = AttentionCGSupport.NEVER
    forward_includes_kv_cache_update = False
    conventions = Conventions(padded_rows="untouched")

    class Builder(PagedBuilder):
        @classmethod
        def get_cudagraph_support(cls, vllm_config, kv_cache_spec):
            return AttentionCGSupport.ALWAYS

        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            if not common_attn_metadata.causal:  # the writer has no such argument, and forward runs too late
                raise NotImplementedError("a step that is not causal")
            return super().build(common_prefix_len, common_attn_metadata, fast_build)

    class Impl(RowsImpl):
        def write(self, *args):
            """Write nothing: the cache has the rows already."""

        def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
            super().write(layer, key, value, *self._cache_views(kv_cache), slot_mapping)

        def finish(self, out, lse, output, output_lse, metadata, position):
            is_real, rows = position >= 0, output[: len(out)]
            kept = torch.where(is_real[:, None, None], out.to(output.dtype), rows)
            super().finish(kept, lse, output, output_lse, metadata, position)


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


class MergesSplits(Miniature):
    """The number of splits is a constant of the graph; splits without a key for a row have a weight of 0.

    Its operators resemble others that copy, wait or have shapes that depend on data.
    """

    class Impl(RowsImpl):
        splits = 2

        def locate(self, metadata, num_rows):
            starts, lens = metadata.common.query_start_loc, metadata.common.seq_lens
            ends = torch.cat([starts[1:], starts.new_full((1,), num_rows)])  # padding is one more request
            requests = torch.arange(len(ends), device=starts.device)
            request = requests.repeat_interleave(ends - starts, output_size=num_rows)
            rows, is_real = torch.arange(num_rows, device=starts.device), request < len(lens)
            request = request.clamp(max=len(lens) - 1)
            return request, (lens[request] - ends[request] + rows).masked_fill(~is_real, graphs.NOWHERE)

        def attend_rows(self, query, caches, table, request, position, metadata):
            table = torch.as_tensor(table, device=query.device).to(query.device, non_blocking=True)
            scaled = torch.empty(query.shape, dtype=torch.float32, device=query.device)
            torch.mul(query, torch.tensor(2.0), out=scaled.view(-1, query.shape[-1]).view(query.shape))
            scaled.unbind(1)[0].mul_(0.5)
            scaled[:, 1:].div_(2)
            attend, width = super().attend_rows, -(-table.shape[1] // self.splits)
            keys = width * int(caches[0].size(1)) * bool(query.numel())
            parts = [
                attend(scaled, caches, part, request, position - index * keys, metadata)
                for index, part in enumerate(table.split(width, dim=1))
            ]
            outs, lses = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
            lse = lses.logsumexp(0)
            weights = (lses - lse.masked_fill(lse == -torch.inf, 0)).exp()
            return (outs * weights[..., None]).sum(0), lse

        def finish(self, out, lse, output, output_lse, metadata, position):
            super().finish(out, lse, output, output_lse, metadata, position)
            output[: len(out)][position < 0] = 0.0  # a fill, whose shape does not depend on data
            output_lse[: len(lse)][position < 0] = -torch.inf


class DraftsInTheSamePages(Miniature):
    """Only the first draft of a chain refreshes the block table; one metadata object is updated in place."""

    class Builder(BufferedBuilder):
        metadata = None

        def __init__(self, *args):
            super().__init__(*args)
            self.table = torch.zeros(self.max_reqs, self.max_pages, dtype=torch.int32, device=self.device)

        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            return self.planned(common_attn_metadata, is_new=True)

        def build_for_drafting(self, common_attn_metadata, draft_index):
            return self.planned(common_attn_metadata, is_new=draft_index == 0)

        def planned(self, common, *, is_new):
            given = common.block_table_tensor
            table = self.table[: common.num_reqs, : given.shape[1]]
            if is_new:
                table.copy_(given)
            metadata = super().build(0, replace(common, block_table_tensor=table))
            if self.metadata is None:
                self.metadata = metadata
            self.metadata.__dict__.update(metadata.__dict__)
            return self.metadata
