"""Faults that show only if a property of the inputs changes that must not matter; right for usual inputs."""

from dataclasses import replace

import torch

from attncheck.backends.candidates.reference import ReferenceImpl
from attncheck.backends.mutants.base import Base


def _in_a_run(rows):
    """Return ``rows`` read as if the heads of a row were adjacent."""
    return rows.as_strided(rows.shape, (rows.stride(0), rows.shape[2], 1), rows.storage_offset())


def _move_last_bits(rows):
    """Change the last bit of small elements of each row, as another summation order does."""
    is_small = rows.abs() < rows.abs().amax(dim=-1, keepdim=True) / 4
    rows.copy_(torch.where(is_small, torch.nextafter(rows, torch.zeros_like(rows)), rows))


class TakesHeadsForARun(Base):
    """The cache writer assumes that the heads of a key row are adjacent, whatever the stride of the heads is."""

    class Impl(ReferenceImpl):
        def write(self, layer, key, value, key_cache, value_cache, slot_mapping):
            super().write(layer, _in_a_run(key), value, key_cache, value_cache, slot_mapping)


class TakesKeyStridesForValue(Base):
    """The cache writer reads value with the strides of key."""

    class Impl(ReferenceImpl):
        def write(self, layer, key, value, key_cache, value_cache, slot_mapping):
            if key.shape == value.shape:
                value = value.as_strided(value.shape, key.stride(), value.storage_offset())
            super().write(layer, key, value, key_cache, value_cache, slot_mapping)


class TakesQueryHeadsForARun(Base):
    """The attention kernel assumes that the heads of a query row are adjacent."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            super().attend(layer, _in_a_run(query), key, value, caches, metadata, output, output_lse)


class WritesRowsWithoutRoom(Base):
    """Writes the output as if its rows were adjacent."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            packed = (output.shape[1] * output.shape[2], output.shape[2], 1)
            flat = output.as_strided(output.shape, packed, output.storage_offset())
            super().attend(layer, query, key, value, caches, metadata, flat, output_lse)


class LosesTheCapAlone(Base):
    """A request that is alone in its batch uses another kernel, which has no soft cap."""

    class Impl(ReferenceImpl):
        def params(self, metadata):
            params = super().params(metadata)
            alone = metadata.common.num_reqs == 1
            return replace(params, logits_soft_cap=None) if alone else params


class EndsAtTheFirstLength(Base):
    """With sinks, the loop over keys ends at the length of the first request."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            lens = metadata.common.seq_lens
            if caches is not None and self.sinks is not None:
                common = replace(metadata.common, seq_lens=torch.minimum(lens, lens[0]))
                metadata = replace(metadata, common=common)
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)


class SplitsByMaxSeqLen(Base):
    """Splits a batch of single tokens by max_seq_len, and assumes that the last split is full."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            common = metadata.common
            if common.max_query_len == 1 and common.max_seq_len > int(common.seq_lens.max()):
                output[: metadata.num_rows] *= 0.5


class StepsOverNarrowTables(Base):
    """In a batch of single tokens, assumes that the block table is at most two pages wider than needed."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            if caches is not None and metadata.common.max_query_len == 1:
                table, lens = metadata.common.block_table_tensor, metadata.common.seq_lens
                width = -(-int(lens.max()) // caches[0].shape[1]) + 2
                if width < table.shape[1]:
                    common = replace(
                        metadata.common, block_table_tensor=table.flatten()[: len(table) * width].view(-1, width)
                    )
                    metadata = replace(metadata, common=common)
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)


class PlansOncePerLengths(Base):
    """With a window, an impl reuses the block table of the first batch with context for all batches of its lengths."""

    class Impl(ReferenceImpl):
        def __init__(self, *args, **keywords):
            super().__init__(*args, **keywords)
            self.tables = {}

        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            common = metadata.common
            has_context = all(n > q for n, q in zip(common.seq_lens.tolist(), metadata.query_lens, strict=False))
            if caches is not None and self.sliding_window[0] >= 0 and has_context:
                lengths = (tuple(metadata.query_lens), tuple(common.seq_lens.tolist()), common.block_table_tensor.shape)
                table = self.tables.setdefault(lengths, common.block_table_tensor.clone())
                table = table.clamp(max=caches[0].shape[0] - 1)
                metadata = replace(metadata, common=replace(common, block_table_tensor=table))
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)


class PlansOncePerProcess(Base):
    """All impls with ALiBi in a process share block tables, keyed by the lengths of the requests."""

    class Impl(ReferenceImpl):
        tables: dict = {}  # noqa: RUF012 (the fault)

        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            if caches is not None and self.alibi_slopes is not None:
                common = metadata.common
                kind = self.params(metadata), query.dtype, float(layer._k_scale.max()), caches[0].stride()
                lengths = (*kind, tuple(metadata.query_lens), tuple(common.seq_lens.tolist()))
                table = self.tables.setdefault(lengths, common.block_table_tensor.clone())
                fits = table.shape == common.block_table_tensor.shape and int(table.max()) < caches[0].shape[0]
                table = table if fits else common.block_table_tensor
                metadata = replace(metadata, common=replace(common, block_table_tensor=table))
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)


class AddsInAnyOrder(Base):
    """Adds partial sums in order of arrival, so that the last bits change from call to call."""

    class Impl(ReferenceImpl):
        calls = 0

        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            self.calls += 1
            if self.calls % 2 == 0 and output.element_size() > 1:
                _move_last_bits(output[: metadata.num_rows])


class SplitsByTheCount(Base):
    """Every second impl of a process sums the keys in another order: a counter of the process selects the kernel."""

    class Impl(ReferenceImpl):
        made = [0]  # noqa: RUF012 (the fault)

        def __init__(self, *args, **keywords):
            super().__init__(*args, **keywords)
            self.made[0] += 1
            self.number = self.made[0]

        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            if self.number % 2 == 0 and output.element_size() > 1:
                _move_last_bits(output[: metadata.num_rows])


class CompilesWindowsInPairs(Base):
    """Compiles one kernel for a window and the next larger one, with the window of the first layer that uses it."""

    class Impl(ReferenceImpl):
        compiled: dict = {}  # noqa: RUF012 (the fault)

        def params(self, metadata):
            params = super().params(metadata)
            if params.window[0] < 1 or params.window[1] != 0:
                return params
            key = params.window[0] // 2, self.num_heads, self.head_size, tuple(metadata.query_lens)
            return replace(params, window=self.compiled.setdefault(key, params.window))


class CompilesWithTheScale(Base):
    """Compiles the scale of the first layer with given sizes and modifiers into the kernel for all of them."""

    class Impl(ReferenceImpl):
        compiled: dict = {}  # noqa: RUF012 (the fault)

        def params(self, metadata):
            params = super().params(metadata)
            key = replace(params, scale=None), tuple(metadata.query_lens), tuple(metadata.common.seq_lens.tolist())
            return replace(params, scale=self.compiled.setdefault(key, params.scale))
