"""Correct kernels that are not torch operators: one wrapped in a custom operator, others unwrapped."""

import ctypes

import numpy as np
import torch
from torch import Tensor

from attncheck.backends.mutants import graphs

Miniature, RowsImpl = graphs.Base, graphs.RowsImpl


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


class WrappedKernel(Miniature):
    """Correct: all of attention is one custom operator, on the CPU a kernel in numpy."""

    class Impl(RowsImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            common, rows = metadata.common, metadata.common.num_actual_tokens
            table, starts, lens = common.block_table_tensor, common.query_start_loc, common.seq_lens
            attend(query[:rows], *caches, table, starts, lens, self.scale, output[:rows], output_lse[:rows])


class RunsOnTheCPU(Miniature):
    """A backend for the CPU only, since addresses and numpy arrays have no other device."""

    supported_devices = ("cpu",)

    @classmethod
    def get_supported_dtypes(cls):
        return [torch.float32]


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
