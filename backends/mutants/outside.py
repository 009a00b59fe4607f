"""Faults that read or write memory of no request: tails of pages, table entries past the end, padding."""

from attncheck.backends.candidates.reference import ReferenceImpl
from attncheck.backends.mutants.base import Base

# Memory of no request.


class FollowsTheTableToItsEnd(Base):
    """Loads every page of the table row, and gives keys past the length weight 0."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            if caches is None:
                return
            for request, start, end, seq_len in metadata.requests():
                table = metadata.common.block_table_tensor[request]
                pages = caches[1][table[-(-seq_len // caches[1].shape[1]) :].long()]
                output[start:end] += (0.0 * pages.float().sum()).to(output.dtype)


class MaskedValuesLeak(Base):
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


class WritesPaddedRowsNaN(Base):
    """Computes padding rows like any other: 0 / 0."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            output[metadata.num_rows :] = float("nan")


class WritesBehindTheOutput(Base):
    """Stores whole tiles of rows, even if the output has fewer rows."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            row = output[0].numel()
            output.as_strided((row,), (1,), output.storage_offset() + output.numel()).zero_()


class LetsPaddingIn(Base):
    """Normalises by a maximum over all rows of the query, padding included."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            output[: metadata.num_rows] += 0.0 * query.abs().amax()


class ReadsPastTheEnd(Base):
    """Loads the last page whole and gives the slots past the end weight 0: harmless until they hold NaN or Inf."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            if caches is None:
                return
            value_cache = caches[1].to(output.dtype)
            block_size = value_cache.shape[1]
            for request, start, end, seq_len in metadata.requests():
                if tail := seq_len % block_size:
                    page = value_cache[metadata.common.block_table_tensor[request, seq_len // block_size]]
                    past_the_end = 0.0 * page[tail:].sum(0)  # [Hkv, Dv]
                    output[start:end] += past_the_end.repeat_interleave(self.num_heads // self.num_kv_heads, 0)
