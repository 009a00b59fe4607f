"""Correct backends whose code resembles, in one place each, something that no graph can capture.

All of them are ``ALWAYS``, and none may cause an alarm.
"""

from dataclasses import replace
from functools import cache

import torch

from attncheck.backends.mutants import graphs
from attncheck.backends.paged_metadata import PagedBuilder

Miniature, RowsImpl = graphs.Base, graphs.RowsImpl


class SyncsInBuild(Miniature):
    """Waits for the device in ``build``, which is not captured, and plans on the host."""

    class Builder(PagedBuilder):
        def __init__(self, *args):
            super().__init__(*args)
            most = self.vllm_config.scheduler_config.max_num_seqs
            self.lens = torch.zeros(most, dtype=torch.int32, device=self.device)

        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            common = common_attn_metadata
            assert common.seq_lens.max().item() <= common.max_seq_len
            planned = torch.tensor(common.seq_lens.tolist(), dtype=torch.int32, device=self.device)
            lens = self.lens[: common.num_reqs].copy_(planned)
            return super().build(common_prefix_len, replace(common, seq_lens=lens), fast_build)


class BuffersInPairs(Miniature):
    """Each device buffer has a host buffer, pinned if there is a GPU, which numpy fills."""

    class Builder(PagedBuilder):
        def __init__(self, *args):
            super().__init__(*args)
            most, is_pinned = self.vllm_config.scheduler_config.max_num_seqs, self.device.type == "cuda"
            self.on_host = torch.zeros(most, dtype=torch.int32, device="cpu", pin_memory=is_pinned)
            self.array, self.on_device = self.on_host.numpy(), torch.zeros_like(self.on_host, device=self.device)

        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            common, reqs = common_attn_metadata, common_attn_metadata.num_reqs
            self.array[:reqs] = common.seq_lens_cpu.numpy()
            lens = self.on_device[:reqs].copy_(self.on_host[:reqs], non_blocking=True)
            return super().build(common_prefix_len, replace(common, seq_lens=lens), fast_build)


class OneMetadataObject(Miniature):
    """Creates its metadata object once and updates it in place."""

    class Builder(PagedBuilder):
        metadata = None

        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            if self.metadata is None:
                self.metadata = metadata
            self.metadata.__dict__.update(metadata.__dict__)
            return self.metadata


class RepeatsInterleaved(Miniature):
    """``repeat_interleave`` with ``output_size``, so that no shape depends on data; padding is one more request."""

    class Impl(RowsImpl):
        def locate(self, metadata, num_rows):
            starts, lens = metadata.common.query_start_loc, metadata.common.seq_lens
            ends = torch.cat([starts[1:], starts.new_full((1,), num_rows)])
            requests = torch.arange(len(ends), device=starts.device)
            request = requests.repeat_interleave(ends - starts, output_size=num_rows)
            rows, is_real = torch.arange(num_rows, device=starts.device), request < len(lens)
            request = request.clamp(max=len(lens) - 1)
            return request, (lens[request] - ends[request] + rows).masked_fill(~is_real, graphs.NOWHERE)


class ClearsByMask(Miniature):
    """Assigns a number under a mask: a fill, whose shape does not depend on data."""

    class Impl(RowsImpl):
        def finish(self, out, lse, output, output_lse, metadata, position):
            output[: len(out)] = out.to(output.dtype)
            output[: len(out)][position < 0] = 0.0
            output_lse[: len(lse)] = lse
            output_lse[: len(lse)][position < 0] = -torch.inf


class ScalarOnTheHost(Miniature):
    """Multiplies by a zero-dimensional host tensor, which a kernel takes as a number."""

    class Impl(RowsImpl):
        def attend_rows(self, query, caches, table, request, position, metadata):
            key, value, seen = graphs.gather(caches, table, request, position)
            return graphs.attention(query.float() * torch.tensor(self.scale), key, value, seen, 1.0)


class WritesIntoOut(Miniature):
    """Computes into given buffers, with ``out=`` and in place, through views."""

    class Impl(RowsImpl):
        def attend_rows(self, query, *args):
            scaled = torch.empty(query.shape, dtype=torch.float32, device=query.device)
            torch.mul(query, 2, out=scaled.view(-1, query.shape[-1]).view(query.shape))
            scaled.unbind(1)[0].mul_(0.5)
            scaled[:, 1:].div_(2)
            return super().attend_rows(scaled, *args)


@cache
def causal_pages(pages, block_size, device):
    """Return the first positions of pages, cached for the process."""
    return torch.arange(pages, device=device) * block_size


class ConstantsOfTheModule(Miniature):
    """A constant is created once for all layers, in the first call that needs it."""

    class Impl(RowsImpl):
        def attend_rows(self, query, caches, table, request, position, metadata):
            starts = causal_pages(table.shape[1], caches[0].shape[1], query.device)
            table = table.masked_fill(starts >= metadata.common.seq_lens[:, None], 0)
            return super().attend_rows(query, caches, table, request, position, metadata)


class MovesNothing(Miniature):
    """``.to`` the tensor's own device, ``as_tensor`` of a tensor, and shapes as numbers: none of these copies."""

    class Impl(RowsImpl):
        def attend_rows(self, query, caches, table, request, position, metadata):
            table = torch.as_tensor(table, device=query.device).to(query.device, non_blocking=True)
            rows = int(query.size(0)) * bool(query.numel()) + len(query[:0])
            return super().attend_rows(query[:rows], caches, table, request, position, metadata)


class DraftsInTheSamePages(Miniature):
    """Only the first draft of a chain refreshes the block table, since further drafts are in the same pages."""

    class Builder(PagedBuilder):
        def __init__(self, *args):
            super().__init__(*args)
            most = self.vllm_config.scheduler_config.max_num_seqs
            pages = -(-self.vllm_config.model_config.max_model_len // self.kv_cache_spec.block_size)
            self.table = torch.zeros(most, pages, dtype=torch.int32, device=self.device)

        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            return self.planned(common_attn_metadata, is_new=True)

        def build_for_drafting(self, common_attn_metadata, draft_index):
            return self.planned(common_attn_metadata, is_new=draft_index == 0)

        def planned(self, common, *, is_new):
            given = common.block_table_tensor
            table = self.table[: common.num_reqs, : given.shape[1]]
            if is_new:
                table.copy_(given)
            return super().build(0, replace(common, block_table_tensor=table))
