"""Work that torch operators do not show: in a custom operator, in numpy, or through an address. One fault each."""

import ctypes

import torch
from torch import Tensor

from attncheck.backends.mutants import graphs
from attncheck.backends.mutants.graphs_forward import GathersTheLongest
from attncheck.backends.paged_metadata import PagedBuilder

Base, RowsImpl, PlannedImpl = graphs.Base, graphs.RowsImpl, graphs.PlannedImpl

CONTEXT: dict[str, int] = {}
"""Pages of the step's longest request by layer name, as an engine keeps metadata for its operators."""


@torch.library.custom_op("attncheck_graphs::clean_table", mutates_args=())
def clean_table(table: Tensor, lens: Tensor, block_size: int) -> Tensor:
    """Return the table with zeros beyond the longest length, whose value is read on the host."""
    longest = -(-int(lens.max().item()) // block_size)
    cleaned = torch.zeros_like(table)
    cleaned[:, :longest] = table[:, :longest]
    return cleaned


@torch.library.custom_op("attncheck_graphs::narrow_table", mutates_args=())
def narrow_table(table: Tensor, layer_name: str) -> Tensor:
    """Return the table with zeros beyond the pages of the longest request, a host number that a graph freezes."""
    kept = torch.zeros_like(table)
    kept[:, : CONTEXT[layer_name]] = table[:, : CONTEXT[layer_name]]
    return kept


class ItemInsideAnOperator(Base):
    """A custom operator contains an ``.item()``, which no capture allows."""

    class Impl(RowsImpl):
        def attend_rows(self, query, caches, table, request, position, metadata):
            table = clean_table(table, metadata.common.seq_lens, caches[0].shape[1])
            return super().attend_rows(query, caches, table, request, position, metadata)


class TwinInsideAnOperator(Base):
    """A custom operator takes the lengths on the host, so that its work with them happens only at capture."""

    class Impl(RowsImpl):
        def attend_rows(self, query, caches, table, request, position, metadata):
            table = clean_table(table, metadata.common.seq_lens_cpu, caches[0].shape[1])
            return super().attend_rows(query, caches, table, request, position, metadata)


class ContextInsideAnOperator(Base):
    """A custom operator takes a layer's name and looks up the step's numbers, which a replay does not repeat."""

    class Builder(PagedBuilder):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            CONTEXT[self.layer_names[0]] = -(-max(metadata.seq_lens) // self.kv_cache_spec.block_size)
            metadata.plan = self.layer_names[0]
            return metadata

    class Impl(PlannedImpl):
        def attend_rows(self, query, caches, table, request, position, metadata):
            return super().attend_rows(query, caches, narrow_table(table, metadata.plan), request, position, metadata)


class WritesThroughNumpy(Base):
    """Writes the output through a numpy array that shares its memory, which torch does not observe."""

    supported_devices = ("cpu",)

    class Impl(RowsImpl):
        def finish(self, out, lse, output, output_lse, metadata, position):
            for made, given in ((out, output), (lse, output_lse)):
                if given is not None:
                    rows = made.to(given.dtype).contiguous().view(torch.uint8)  # numpy has no bfloat16
                    given.view(torch.uint8).numpy()[: len(rows)] = rows.numpy()


class ReadsThroughPointers(Base):
    """A C library reads the lengths by their address and returns the longest, for which pages are gathered."""

    supported_devices = ("cpu",)

    class Impl(GathersTheLongest):
        def longest(self, metadata):
            lens = metadata.common.seq_lens
            return max((ctypes.c_int32 * len(lens)).from_address(lens.data_ptr()))
