"""Right at first, wrong later: what a backend keeps from earlier calls, or takes from bounds that need not be exact."""

from dataclasses import replace

import torch

from attncheck.backends.candidates.reference import ReferenceImpl
from attncheck.backends.mutants.base import Base


class ChangesMetadata(ReferenceImpl):
    """Attends under other common metadata, which ``changed`` makes of the step's."""

    def changed(self, common):
        raise NotImplementedError

    def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
        if caches is not None:
            metadata = replace(metadata, common=self.changed(metadata.common))
        super().attend(layer, query, key, value, caches, metadata, output, output_lse)


class KeepsFirstTable(Base):
    """Plans once: the block table of the first batch of a shape serves all later ones."""

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
    """A workspace is cleared before the first call only: from the second on, rows come out scaled."""

    class Impl(ReferenceImpl):
        calls = 0

        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            self.calls += 1
            if self.calls > 1:
                output[: metadata.num_rows] *= 2


class KeepsFirstLengths(Base):
    """Lengths are read in the first step only; later batches of other lengths are attended with those."""

    class Impl(ChangesMetadata):
        lens = None

        def changed(self, common):
            if self.lens is None:
                self.lens = common.seq_lens.clone()
            elif len(self.lens) == len(common.seq_lens):
                self.lens = torch.minimum(self.lens, common.seq_lens)
            return replace(common, seq_lens=torch.minimum(self.lens, common.seq_lens))


class TrustsMaxSeqLen(Base):
    """Takes ``max_seq_len`` for the length of the longest request, where it is only a bound."""

    class Impl(ChangesMetadata):
        def changed(self, common):
            lens = common.seq_lens.clone()
            lens[lens == lens.max()] = min(common.max_seq_len, common.block_table_tensor.shape[1])
            return common if common.max_seq_len == int(common.seq_lens.max()) else replace(common, seq_lens=lens)


class TrustsMaxQueryLen(Base):
    """Takes ``max_query_len`` for the length of the longest query, and gives up where no request is as long."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            if metadata.common.max_query_len > max(metadata.query_lens):
                output[: metadata.num_rows] = 0
