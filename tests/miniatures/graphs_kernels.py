"""Kernels that are not torch operators: wrapped in a custom operator, correctly or not, and unwrapped."""

import ctypes

import numpy as np
import torch
from torch import Tensor

from attncheck.backends.mutants import graphs
from attncheck.backends.paged_metadata import PagedBuilder

Miniature, RowsImpl, PlannedImpl = graphs.Base, graphs.RowsImpl, graphs.PlannedImpl


@torch.library.custom_op("attncheck_graphs::attend", mutates_args=("output", "output_lse"), device_types="cpu")
def attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    table: Tensor,
    starts: Tensor,
    seq_lens: Tensor,
    scale: float,
    output: Tensor,
    output_lse: Tensor,
) -> None:
    """A CPU kernel in numpy, which reads its tensors whenever it runs."""
    size, groups = key_cache.shape[1], query.shape[1] // key_cache.shape[2]
    bounds, pages = starts.numpy(), table.numpy()
    rows = query.float().numpy()
    out, lse = np.zeros_like(rows), np.full(rows.shape[:2], -np.inf, dtype=np.float32)
    for request, seq_len in enumerate(seq_lens.numpy()):
        positions = np.arange(seq_len)
        slots = torch.from_numpy(pages[request, positions // size].astype(np.int64) * size + positions % size)
        key, value = (
            cache[slots // size, slots % size].float().numpy().repeat(groups, axis=1)
            for cache in (key_cache, value_cache)
        )
        for row in range(bounds[request], bounds[request + 1]):
            seen = seq_len - bounds[request + 1] + row + 1
            scores = np.einsum("hd,nhd->hn", rows[row], key[:seen]) * np.float32(scale)
            largest = scores.max(axis=1, keepdims=True)
            with np.errstate(invalid="ignore"):  # a key may contain Inf
                weights = np.exp(scores - largest)
            total = weights.sum(axis=1, keepdims=True)
            out[row] = np.einsum("hn,nhd->hd", weights / total, value[:seen])
            lse[row] = (largest + np.log(total))[:, 0]
    output.copy_(torch.from_numpy(out))
    output_lse.copy_(torch.from_numpy(lse))


@attend.register_kernel("cuda")
def attend_on_the_device(query, key_cache, value_cache, table, starts, seq_lens, scale, output, output_lse):
    request, position = graphs.locate(starts, seq_lens, len(query))
    key, value, seen = graphs.gather((key_cache, value_cache), table, request, position)
    out, lse = graphs.attention(query, key, value, seen, scale)
    output.copy_(out)
    output_lse.copy_(lse)


@torch.library.custom_op("attncheck_graphs::clean_table", mutates_args=())
def clean_table(table: Tensor, lens: Tensor, block_size: int) -> Tensor:
    """Return the table with zeros beyond the longest length, whose value is read on the host."""
    longest = -(-int(lens.max().item()) // block_size)
    cleaned = torch.zeros_like(table)
    cleaned[:, :longest] = table[:, :longest]
    return cleaned


CONTEXT = {}
"""The step's metadata by layer name, as an engine keeps them for its operators; the builder writes them here."""


@torch.library.custom_op("attncheck_graphs::narrow_table", mutates_args=())
def narrow_table(table: Tensor, layer_name: str) -> Tensor:
    """Return the table with zeros beyond the pages of the longest request, a host number that a graph freezes."""
    kept = torch.zeros_like(table)
    kept[:, : CONTEXT[layer_name]] = table[:, : CONTEXT[layer_name]]
    return kept


class WrappedKernel(Miniature):
    """Correct: all of attention is one custom operator, on the CPU a kernel in numpy."""

    class Impl(RowsImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            common, rows = metadata.common, metadata.common.num_actual_tokens
            table, starts, lens = common.block_table_tensor, common.query_start_loc, common.seq_lens
            attend(query[:rows], *caches, table, starts, lens, self.scale, output[:rows], output_lse[:rows])


class ItemInsideAnOperator(Miniature):
    """A custom operator contains an ``.item()``, which no capture allows."""

    class Impl(RowsImpl):
        def attend_rows(self, query, caches, table, request, position, metadata):
            table = clean_table(table, metadata.common.seq_lens, caches[0].shape[1])
            return super().attend_rows(query, caches, table, request, position, metadata)


class TwinInsideAnOperator(Miniature):
    """A custom operator takes the lengths on the host, so that its work with them happens only at capture."""

    class Impl(RowsImpl):
        def attend_rows(self, query, caches, table, request, position, metadata):
            table = clean_table(table, metadata.common.seq_lens_cpu, caches[0].shape[1])
            return super().attend_rows(query, caches, table, request, position, metadata)


class ContextInsideAnOperator(Miniature):
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


class RunsOnTheCPU(Miniature):
    """A backend for the CPU only, since addresses and numpy arrays have no other device."""

    supported_devices = ("cpu",)

    @classmethod
    def get_supported_dtypes(cls):
        return [torch.float32]


class WritesThroughNumpy(RunsOnTheCPU):
    """Writes the output through a numpy array that shares its memory, which torch does not observe."""

    class Impl(RowsImpl):
        def finish(self, out, lse, output, output_lse, metadata, position):
            output.numpy()[: len(out)] = out.numpy()
            output_lse.numpy()[: len(lse)] = lse.numpy()


class WritesThroughPointers(RunsOnTheCPU):
    """A C library writes to the output's address; no torch operator shows that it ran."""

    class Impl(RowsImpl):
        def finish(self, out, lse, output, output_lse, metadata, position):
            for made, given in ((out, output), (lse, output_lse)):
                found = made.contiguous()
                ctypes.memmove(given.data_ptr(), found.data_ptr(), found.nbytes)


class ScratchThroughPointers(RunsOnTheCPU):
    """A C library copies the lengths to the backend's own memory, which torch operators read."""

    class Impl(RowsImpl):
        scratch = None

        def locate(self, metadata, num_rows):
            lens = metadata.common.seq_lens
            if self.scratch is None:
                self.scratch = torch.zeros(64, dtype=lens.dtype, device=lens.device)
            ctypes.memmove(self.scratch.data_ptr(), lens.data_ptr(), lens.nbytes)
            return graphs.locate_by(metadata.common, num_rows, self.scratch[: len(lens)])


class ReadsThroughPointers(RunsOnTheCPU):
    """A C library reads the lengths by their address and returns the number of pages to gather."""

    class Impl(RowsImpl):
        def attend_rows(self, query, caches, table, request, position, metadata):
            lens = metadata.common.seq_lens
            longest = max((ctypes.c_int32 * len(lens)).from_address(lens.data_ptr()))
            pages = -(-longest // caches[0].shape[1])
            return super().attend_rows(query, caches, table[:, :pages], request, position, metadata)


class WritesTheCacheThroughPointers(RunsOnTheCPU):
    """A C library writes the new rows to the cache."""

    class Impl(RowsImpl):
        def write(self, layer, key, value, key_cache, value_cache, slot_mapping):
            slots = (ctypes.c_int64 * len(slot_mapping)).from_address(slot_mapping.data_ptr())
            for new, cache in ((key, key_cache), (value, value_cache)):
                for row, slot in zip(new, slots, strict=False):
                    if slot >= 0:
                        for head, vector in enumerate(row.contiguous()):
                            place = cache[slot // cache.shape[1], slot % cache.shape[1], head]
                            ctypes.memmove(place.data_ptr(), vector.data_ptr(), vector.nbytes)
