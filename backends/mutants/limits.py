"""Faults of integer widths, grid limits, split keys, and block tables."""

from dataclasses import replace

import torch

from attncheck.backends.candidates.reference import ReferenceImpl
from attncheck.backends.mutants.base import Base


def with_table(metadata, table):
    """Return the same step with another block table."""
    return replace(metadata, common=replace(metadata.common, block_table_tensor=table))


def wrapped(numbers, bits):
    """Return the numbers as a signed integer with ``bits`` bits holds them."""
    half = 2 ** (bits - 1)
    return (numbers + half) % 2**bits - half


class ReadsOtherTable(Base):
    """The reference with a changed block table, which ``Impl.table_of`` returns."""

    class Impl(ReferenceImpl):
        def table_of(self, common, cache):
            return common.block_table_tensor

        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            if caches is not None:
                metadata = with_table(metadata, self.table_of(metadata.common, caches[0]))
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)


# Integers with too few bits.


class PositionsInSixteenBits(ReadsOtherTable):
    """Counts key positions in 16 bits: key 65,536 is read from the place of key 0."""

    class Impl(ReadsOtherTable.Impl):
        bits = 16

        def table_of(self, common, cache):
            table, columns = common.block_table_tensor, torch.arange(common.block_table_tensor.shape[1])
            return table[:, columns % max(1, 2**self.bits // cache.shape[1])]


class PositionsInFifteenBits(ReadsOtherTable):
    """Counts key positions in a signed 16-bit integer and drops the sign: key 32,768 is read from key 0's place."""

    class Impl(PositionsInSixteenBits.Impl):
        bits = 15


class PagesInTwentyFourBits(ReadsOtherTable):
    """Packs page numbers into 24 bits."""

    class Impl(ReadsOtherTable.Impl):
        def table_of(self, common, cache):
            return common.block_table_tensor % 2**24


class ElementsInThirtyTwoBits(ReadsOtherTable):
    """Multiplies page number and page stride in 32 bits: a pool of more than 2**31 elements is read at wrong places."""

    class Impl(ReadsOtherTable.Impl):
        def table_of(self, common, cache):
            page = cache.stride(0)
            table = common.block_table_tensor.long()
            return (wrapped(table * page, 32) // page % cache.shape[0]).int()


class BytesInUnsignedThirtyTwoBits(ReadsOtherTable):
    """Counts bytes of the pool in unsigned 32 bits."""

    class Impl(ReadsOtherTable.Impl):
        def table_of(self, common, cache):
            page = cache.stride(0) * cache.element_size()
            return (common.block_table_tensor.long() * page % 2**32 // page).int()


class SlotsInThirtyTwoBits(Base):
    """Casts the slot mapping to int32: a slot beyond 2**31 becomes negative, and is not written."""

    class Impl(ReferenceImpl):
        def write(self, layer, key, value, key_cache, value_cache, slot_mapping):
            super().write(layer, key, value, key_cache, value_cache, wrapped(slot_mapping, 32))


class WritesElementsInThirtyTwoBits(Base):
    """Multiplies slot and row stride in 32 bits when it writes the cache."""

    class Impl(ReferenceImpl):
        def write(self, layer, key, value, key_cache, value_cache, slot_mapping):
            row = key_cache.shape[2] * key_cache.shape[3]
            slots = torch.where(slot_mapping < 0, -1, wrapped(slot_mapping * row, 32) // row)
            super().write(layer, key, value, key_cache, value_cache, slots)


# Grids.


class GridOfRows(Base):
    """Starts one program per row along an axis of at most 65,535: further rows are never written."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            kept = output[65535:].clone()
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            output[65535:] = kept


class GridOfRequestsAndHeads(Base):
    """Starts one program per request and head along an axis of at most 65,535, only in decodes."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            programs = output[: metadata.num_rows].flatten(0, 1)
            kept = programs[65535:].clone()
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            if metadata.common.max_query_len == 1:
                programs[65535:] = kept


# Split keys, and windows in them.


class HidesKeys(Base):
    """The reference without the keys that ``Impl.hidden`` hides from a row."""

    class Impl(ReferenceImpl):
        def hidden(self, nth, query_len, last, seq_len):
            """Return the keys ``lo .. hi - 1`` that row ``nth`` of a request, at position ``last``, does not see."""
            return 0, 0

        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            for request, start, end, seq_len in metadata.requests() if caches is not None else ():
                for row in range(start, end):
                    last = seq_len - (end - row)
                    lo, hi = self.hidden(row - start, end - start, last, seq_len)
                    if lo < hi:
                        self._answer_without(lo, hi, row, last, request, layer, query, caches, metadata, output)

        def _answer_without(self, lo, hi, row, last, request, layer, query, caches, metadata, output):
            """Attend from one row over the remaining keys, one per page."""
            size = caches[0].shape[1]
            left = self.sliding_window[0]
            begin = max(0, last - left) if left >= 0 else 0
            kept = torch.tensor([j for j in range(begin, last + 1) if not lo <= j < hi], dtype=torch.int64)
            table = metadata.common.block_table_tensor[request].long()
            pages = [cache[table[kept // size], kept % size][:, None] for cache in caches]
            common = replace(
                metadata.common,
                query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
                seq_lens=torch.tensor([len(kept)], dtype=torch.int32),
                block_table_tensor=torch.arange(max(len(kept), 1), dtype=torch.int32)[None],
            )
            alone = replace(metadata, common=common, query_start_loc=(0, 1), seq_lens=(len(kept),))
            window, self._window_size = self._window_size, None
            ReferenceImpl.attend(self, layer, query[row : row + 1], None, None, pages, alone, output[row:], None)
            self._window_size = window


class MergesSixtyFourRows(HidesKeys):
    """Splits 512 or more keys if a request has up to 128 rows, and merges the parts of the first 64 rows only."""

    class Impl(HidesKeys.Impl):
        def hidden(self, nth, query_len, last, seq_len):
            is_split = seq_len > 512 and query_len <= 128
            return (0, last // 256 * 256) if is_split and nth >= 64 else (0, 0)


class LosesThePartOfTheWindow(HidesKeys):
    """If a window is longer than a part of 256 keys, leaves out the part in which it begins."""

    class Impl(HidesKeys.Impl):
        def hidden(self, nth, query_len, last, seq_len):
            left = self.sliding_window[0]
            begin = last - left
            if left < 256 or begin <= 0 or begin % 256 == 0:
                return 0, 0
            return begin, min(last, -(-begin // 256) * 256)


class TileOfTheLastRow(HidesKeys):
    """After 512 keys of context, all of 64 rows begin at the key tile in which the last row's window begins."""

    class Impl(HidesKeys.Impl):
        def hidden(self, nth, query_len, last, seq_len):
            left, context_len = self.sliding_window[0], seq_len - query_len
            if left < 0 or context_len <= 512:
                return 0, 0
            end = min(query_len, (nth // 64 + 1) * 64)
            begin = (context_len + end - 1 - left) // 64 * 64
            return max(0, last - left), min(last, begin)


# Block tables.


class StrideOfTheShape(ReadsOtherTable):
    """Uses the width of the block table as the stride of its rows."""

    class Impl(ReadsOtherTable.Impl):
        def table_of(self, common, cache):
            table = common.block_table_tensor
            return table.as_strided(table.shape, (table.shape[1], 1))


class StrideInTenBits(ReadsOtherTable):
    """Stores the row stride of the block table in ten bits."""

    class Impl(ReadsOtherTable.Impl):
        def table_of(self, common, cache):
            table = common.block_table_tensor
            return table.as_strided(table.shape, (table.stride(0) % 1024, 1))


class DropsNullPages(ReadsOtherTable):
    """Packs the non-null pages to the front of a table row, and reads them as the first ones."""

    class Impl(ReadsOtherTable.Impl):
        def table_of(self, common, cache):
            table = common.block_table_tensor
            return table.gather(1, (table == 0).sort(dim=1, stable=True).indices)


class EndsAtTheNullPage(Base):
    """Treats page 0 as the end of a request's pages: later pages are not read."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            if caches is None:
                return
            size, table = caches[0].shape[1], metadata.common.block_table_tensor
            for request, start, end, seq_len in metadata.requests():
                if (table[request, : -(-seq_len // size)] == 0).any():
                    output[start:end] = 0


# Rows without a slot.


class WritesEveryKeyRow(Base):
    """Starts one program per row of the key: rows beyond the slot mapping are written after its last slot."""

    class Impl(ReferenceImpl):
        def write(self, layer, key, value, key_cache, value_cache, slot_mapping):
            surplus = len(key) - len(slot_mapping)
            if surplus > 0 and len(slot_mapping) and int(slot_mapping[-1]) >= 0:
                last = key_cache.shape[0] * key_cache.shape[1] - 1
                behind = (slot_mapping[-1] + 1 + torch.arange(surplus)).clamp(max=last).unique()
                slot_mapping = torch.cat([slot_mapping, behind])
            super().write(layer, key, value, key_cache, value_cache, slot_mapping)


class RowsByTheQuery(Base):
    """In a step of decodes, uses query rows divided by requests as the number of rows per request."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            common = metadata.common
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            rows = len(query) // max(common.num_reqs, 1)
            if caches is not None and common.max_query_len == 1 and rows > 1:
                real = output[: metadata.num_rows].clone()
                output[: metadata.num_rows] = 0
                output[: rows * common.num_reqs : rows] = real[: len(output[: rows * common.num_reqs : rows])]
