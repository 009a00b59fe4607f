"""Faults of builders while their graphs live, one each. Steps without a graph are right, unless stated otherwise.

A graph reads the tensors that it was captured with, so later results of ``build`` must be stored in them.
"""

from dataclasses import replace

import torch

from attncheck.backends.mutants import graphs
from attncheck.backends.paged_metadata import PagedBuilder

Base, RowsImpl = graphs.Base, graphs.RowsImpl


class ChangesCommon(PagedBuilder):
    """Builder that builds from the common metadata that ``changed`` returns."""

    def changed(self, common):
        raise NotImplementedError

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        return super().build(common_prefix_len, self.changed(common_attn_metadata), fast_build)


class AllocatesEachBuild(Base):
    """Every build allocates a new tensor of lengths, and the graph keeps reading that of its capture."""

    class Builder(ChangesCommon):
        def changed(self, common):
            return replace(common, seq_lens=common.seq_lens.clone())


class StaleSlots(Base):
    """Every build allocates a new slot mapping: replays write new rows to the slots of the dummies, which are none."""

    class Builder(ChangesCommon):
        def changed(self, common):
            return replace(common, slot_mapping=common.slot_mapping.clone())


class AlternatesBuffers(Base):
    """Two buffers of lengths alternate, so that a build need not wait for the step before: a graph reads only one."""

    class Builder(ChangesCommon):
        def __init__(self, *args):
            super().__init__(*args)
            most = self.vllm_config.scheduler_config.max_num_seqs
            self.buffers = [torch.zeros(most, dtype=torch.int32, device=self.device) for _ in range(2)]

        def changed(self, common):
            self.buffers.reverse()
            return replace(common, seq_lens=self.buffers[0][: common.num_reqs].copy_(common.seq_lens))


class BuffersOfTheCapture(Base):
    """The buffer of a capture is never refreshed: ``build`` has a separate one."""

    class Builder(ChangesCommon):
        def __init__(self, *args):
            super().__init__(*args)
            most = self.vllm_config.scheduler_config.max_num_seqs
            self.lens, self.lens_of_capture = torch.zeros(2, most, dtype=torch.int32, device=self.device)

        def changed(self, common):
            return replace(common, seq_lens=self.lens[: common.num_reqs].copy_(common.seq_lens))

        def build_for_cudagraph_capture(self, common_attn_metadata):
            metadata = self.build(0, common_attn_metadata)
            lens = self.lens_of_capture[: common_attn_metadata.num_reqs].copy_(metadata.common.seq_lens)
            metadata.common = replace(metadata.common, seq_lens=lens)
            return metadata


class NarrowsTheTable(Base):
    """Returns a view of as many pages as the step's longest request has: a graph keeps the view of its dummies."""

    class Builder(ChangesCommon):
        def changed(self, common):
            pages = -(-int(common.seq_lens_cpu.max()) // self.kv_cache_spec.block_size)
            return replace(common, block_table_tensor=common.block_table_tensor[:, :pages])


class ChangesTheCommonLengths(Base):
    """Subtracts the new rows from ``seq_lens`` in place: the next builder that gets the step subtracts them again."""

    class Builder(ChangesCommon):
        has_exact_lens = False

        def changed(self, common):
            common.seq_lens.sub_(common.query_start_loc.diff())
            return common

    class Impl(RowsImpl):
        def locate(self, metadata, num_rows):
            common = metadata.common
            return graphs.locate_by(common, num_rows, common.seq_lens + common.query_start_loc.diff())


class DraftsWithOldLengths(Base):
    """``build_for_drafting`` reuses the lengths of the step before: each draft sees one key too few."""

    class Builder(ChangesCommon):
        def __init__(self, *args):
            super().__init__(*args)
            most = self.vllm_config.scheduler_config.max_num_seqs
            self.lens, self.is_draft = torch.zeros(most, dtype=torch.int32, device=self.device), False

        def changed(self, common):
            lens = self.lens[: common.num_reqs]
            return replace(common, seq_lens=lens if self.is_draft else lens.copy_(common.seq_lens))

        def build_for_drafting(self, common_attn_metadata, draft_index):
            self.is_draft = True
            metadata = self.build(0, common_attn_metadata, fast_build=True)
            self.is_draft = False
            return metadata
