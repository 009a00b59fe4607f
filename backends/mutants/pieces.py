"""Faults of data that several calls share."""

from dataclasses import replace
from typing import ClassVar

import torch

from attncheck.backends.candidates.reference import ReferenceBuilder, ReferenceImpl
from attncheck.backends.mutants.base import Base


class Parted(Base):
    """The reference without cascade and chunks, run in parts; a subclass's ``Impl`` or ``Builder`` has the fault."""

    features = Base.features - {"cascade", "local"}

    @classmethod
    def get_impl_cls(cls):
        return type("Impl", (cls.Impl,), {"backend": cls})

    @classmethod
    def get_builder_cls(cls):
        return type("Builder", (cls.Builder,), {"backend": cls})


class ChangesAnswers(ReferenceImpl):
    """Impl that attends, and then changes the result by ``spoil``."""

    def spoil(self, metadata, output, output_lse):
        raise NotImplementedError

    def attend(self, *args):
        super().attend(*args)
        self.spoil(args[5], args[6], args[7])


class TreeOfPaddedStride(Parted):
    """Reads the tree's rows as if their length were padded to a power of two."""

    class Impl(ReferenceImpl):
        def _tree_of_step(self, metadata):
            tree = super()._tree_of_step(metadata)
            if tree is None:
                return None
            width = 1 << (len(tree) - 1).bit_length()
            memory = torch.zeros(len(tree) * width, dtype=torch.bool)
            memory[: tree.numel()] = tree.flatten()
            return memory.reshape(-1, width)[:, : len(tree)].contiguous()


class DraftsPackedByEight(Parted):
    """Reads queries with equally many rows each as if that number were a power of two."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, *args):
            lens = {n for n in args[3].query_lens if n}
            if len(lens) == 1 and max(lens) <= 8:
                rows, (width,) = torch.arange(len(query)), lens
                query = query[
                    (rows // width * (1 << (width - 1).bit_length()) + rows % width).clamp(max=len(query) - 1)
                ]
            super().attend(layer, query, *args)


class RowsOfTheLastBuild(Parted):
    """Leaves out rows beyond the longest query of the batch that was built last."""

    longest: ClassVar[list] = [0]

    class Builder(ReferenceBuilder):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            RowsOfTheLastBuild.longest[0] = common_attn_metadata.max_query_len
            return super().build(common_prefix_len, common_attn_metadata, fast_build)

    class Impl(ChangesAnswers):
        def spoil(self, metadata, output, output_lse):
            for _, start, end, _ in metadata.requests():
                output[start + RowsOfTheLastBuild.longest[0] : end] = 0


class BuildersShareATable(Parted):
    """All builders of the process share one block table: a later build overwrites an earlier one."""

    tables: ClassVar[dict] = {}

    class Builder(ReferenceBuilder):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            table = common_attn_metadata.block_table_tensor
            shared = BuildersShareATable.tables.setdefault("table", torch.zeros(64, 256, dtype=table.dtype))
            shared[: table.shape[0], : table.shape[1]] = table
            changed = replace(common_attn_metadata, block_table_tensor=shared[: table.shape[0], : table.shape[1]])
            return super().build(common_prefix_len, changed, fast_build)


class CausalOfTheFirstBuild(Parted):
    """Reads ``causal`` only in the first step, and uses it for all."""

    class Builder(ReferenceBuilder):
        is_causal = None

        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            if self.is_causal is None:
                self.is_causal = common_attn_metadata.causal
            return super().build(common_prefix_len, replace(common_attn_metadata, causal=self.is_causal), fast_build)


class LSEOfAnotherGrouping(Parted):
    """Writes the LSE of query heads in the order of tiles over KV heads."""

    class Impl(ChangesAnswers):
        def spoil(self, metadata, output, output_lse):
            groups = output_lse.unflatten(1, (self.num_kv_heads, -1))
            output_lse.copy_(groups.transpose(1, 2).flatten(1))


class LSETransposed(Parted):
    """Writes the LSE with heads first."""

    class Impl(ChangesAnswers):
        def spoil(self, metadata, output, output_lse):
            output_lse.copy_(output_lse.T.contiguous().view_as(output_lse))


class WithoutKeysNoNewTokens(Parted):
    """A layer that gets no keys sees only the context."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            if key is None:
                lens = torch.tensor(
                    [max(s - q, 1) for q, s in zip(metadata.query_lens, metadata.seq_lens, strict=True)]
                )
                common = replace(metadata.common, seq_lens=lens.int(), causal=False)
                metadata = replace(metadata, common=common)
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)


class PaddedLogitsAreRows(Parted):
    """Computes the row that padded logits indices name once more, from a query that is padding."""

    class Impl(ChangesAnswers):
        def spoil(self, metadata, output, output_lse):
            indices = getattr(metadata, "logits_indices_padded", None)
            if indices is not None:
                output[indices[metadata.num_logits_indices :]] = 0
