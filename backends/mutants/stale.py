"""Faults of state kept from earlier calls, and of bounds taken as exact values; the first call is right."""

from dataclasses import replace

import torch

from attncheck.backends.candidates.reference import ReferenceImpl
from attncheck.backends.mutants.base import Base


class ChangesMetadata(ReferenceImpl):
    """Impl that attends with the common metadata that ``changed`` returns."""

    def changed(self, common):
        raise NotImplementedError

    def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
        if caches is not None:
            metadata = replace(metadata, common=self.changed(metadata.common))
        super().attend(layer, query, key, value, caches, metadata, output, output_lse)


class KeepsFirstTable(Base):
    """Plans once: the block table of the first batch is used for all later batches that fit into it."""

    class Impl(ChangesMetadata):
        table = None

        def changed(self, common):
            if self.table is None:
                self.table = common.block_table_tensor.clone()
            rows, pages = common.block_table_tensor.shape
            if self.table.shape[0] < rows or self.table.shape[1] < pages:
                return common
            table = self.table[:rows, :pages] % max(1, int(common.block_table_tensor.max()) + 1)
            return replace(common, block_table_tensor=table)


class CountsItsCalls(Base):
    """Clears a workspace only before the first call: from the second on, rows are scaled."""

    class Impl(ReferenceImpl):
        calls = 0

        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            self.calls += 1
            if self.calls > 1:
                output[: metadata.num_rows] *= 2


class KeepsFirstLengths(Base):
    """Reads lengths only in the first step; later batches with other lengths use them, too."""

    class Impl(ChangesMetadata):
        lens = None

        def changed(self, common):
            if self.lens is None:
                self.lens = common.seq_lens.clone()
            elif len(self.lens) == len(common.seq_lens):
                self.lens = torch.minimum(self.lens, common.seq_lens)
            return replace(common, seq_lens=torch.minimum(self.lens, common.seq_lens))


class TrustsMaxSeqLen(Base):
    """Uses ``max_seq_len`` as the length of the longest request, although it is only an upper bound."""

    class Impl(ChangesMetadata):
        def changed(self, common):
            lens = common.seq_lens.clone()
            lens[lens == lens.max()] = min(common.max_seq_len, common.block_table_tensor.shape[1])
            return common if common.max_seq_len == int(common.seq_lens.max()) else replace(common, seq_lens=lens)


class TrustsMaxQueryLen(Base):
    """Uses ``max_query_len`` as the length of the longest query, and writes zeros if no request is that long."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            if metadata.common.max_query_len > max(metadata.query_lens):
                output[: metadata.num_rows] = 0
