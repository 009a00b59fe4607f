"""Looks and writes where nobody should: tails of pages, table entries past the end, padding.

Each class is the reference backend but for its own lines. ``test_miniatures.py`` names the check that must catch it.
"""

from pathlib import Path

from attncheck.backends.candidates.reference import ReferenceImpl
from attncheck.backends.registry import import_file

Miniature = import_file("base.py", Path(__file__).with_name("base.py")).Miniature


# What lies outside.


class FollowsTheTableToItsEnd(Miniature):
    """Loads every page of the table row and gives what lies past the length weight 0."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            if caches is None:
                return
            for request, start, end, seq_len in metadata.requests():
                table = metadata.common.block_table_tensor[request]
                pages = caches[1][table[-(-seq_len // caches[1].shape[1]) :].long()]
                output[start:end] += (0.0 * pages.float().sum()).to(output.dtype)


class MaskedValuesLeak(Miniature):
    """Multiplies the values of keys that a window hides by 0 instead of leaving them out."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            if caches is None:
                return
            block_size = caches[1].shape[1]
            for request, start, end, seq_len in metadata.requests():
                table = metadata.common.block_table_tensor[request, : -(-seq_len // block_size)].long()
                values = caches[1][table].flatten(0, 1)[:seq_len]
                output[start:end] += (0.0 * values.float().sum()).to(output.dtype)


class WritesPaddedRowsNaN(Miniature):
    """Computes padding rows like any other: 0 / 0."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            output[metadata.num_rows :] = float("nan")


class WritesBehindTheOutput(Miniature):
    """Stores whole tiles of rows, whether or not the output has that many."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            row = output[0].numel()
            output.as_strided((row,), (1,), output.storage_offset() + output.numel()).zero_()


class LetsPaddingIn(Miniature):
    """Normalises by a maximum over all rows of the query, padding included."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            output[: metadata.num_rows] += 0.0 * query.abs().amax()
