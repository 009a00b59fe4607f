"""Right backends whose code looks, in one place each, like something a graph cannot hold: none may raise an alarm.

All of them are ``ALWAYS``.
"""

from dataclasses import replace
from functools import cache

import torch

from attncheck.backends.mutants import graphs
from attncheck.backends.paged_metadata import PagedBuilder

Miniature, RowsImpl = graphs.Base, graphs.RowsImpl


class SyncsInBuild(Miniature):
    """Waits for the device in ``build``, which no graph holds, and plans on the host."""

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
    """A buffer on the device has one on the host beside it, pinned where there is a GPU, which numpy fills."""

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
    """Builds its metadata once, and from then on changes them in place."""

    class Builder(PagedBuilder):
        metadata = None

        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            made = super().build(common_prefix_len, common_attn_metadata, fast_build)
            if self.metadata is None:
                self.metadata = made
            self.metadata.__dict__.update(made.__dict__)
            return self.metadata


class RepeatsInterleaved(Miniature):
    """``repeat_interleave`` told the size of its result, which then depends on no data; padding is one request more."""

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
    """Assigns a number where a mask is set: a fill, whose shape depends on no data."""

    class Impl(RowsImpl):
        def finish(self, out, lse, output, output_lse, metadata, position):
            output[: len(out)] = out.to(output.dtype)
            output[: len(out)][position < 0] = 0.0
            output_lse[: len(lse)] = lse
            output_lse[: len(lse)][position < 0] = -torch.inf


class ScalarOnTheHost(Miniature):
    """Multiplies by a tensor of the host without dimensions: a kernel takes it as a number."""

    class Impl(RowsImpl):
        def attend_rows(self, query, caches, table, request, position, metadata):
            key, value, seen = graphs.gather(caches, table, request, position)
            return graphs.attention(query.float() * torch.tensor(self.scale), key, value, seen, 1.0)


class WritesIntoOut(Miniature):
    """Computes into buffers it was given, by ``out=`` and in place, through views."""

    class Impl(RowsImpl):
        def attend_rows(self, query, *args):
            scaled = torch.empty(query.shape, dtype=torch.float32, device=query.device)
            torch.mul(query, 2, out=scaled.view(-1, query.shape[-1]).view(query.shape))
            scaled.unbind(1)[0].mul_(0.5)
            scaled[:, 1:].div_(2)
            return super().attend_rows(scaled, *args)


@cache
def causal_pages(pages, block_size, device):
    """First positions of pages, made once in a process."""
    return torch.arange(pages, device=device) * block_size


class ConstantsOfTheModule(Miniature):
    """A constant is made once for all layers, in whichever call needs it first."""

    class Impl(RowsImpl):
        def attend_rows(self, query, caches, table, request, position, metadata):
            starts = causal_pages(table.shape[1], caches[0].shape[1], query.device)
            table = table.masked_fill(starts >= metadata.common.seq_lens[:, None], 0)
            return super().attend_rows(query, caches, table, request, position, metadata)


class MovesNothing(Miniature):
    """``.to`` the device a tensor lies on, ``as_tensor`` of a tensor, and shapes as numbers: none of it copies."""

    class Impl(RowsImpl):
        def attend_rows(self, query, caches, table, request, position, metadata):
            table = torch.as_tensor(table, device=query.device).to(query.device, non_blocking=True)
            rows = int(query.size(0)) * bool(query.numel()) + len(query[:0])
            return super().attend_rows(query[:rows], caches, table, request, position, metadata)


class DraftsInTheSamePages(Miniature):
    """A further draft lies in the pages of the one before: only the first of a chain refreshes the table."""

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
