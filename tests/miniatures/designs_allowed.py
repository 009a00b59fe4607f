"""Correct backends that look wrong, but do what the contract allows: none may fail a check.

Some keep a constant on the host until the first ``forward`` moves it to the device of the query. On a GPU that is
before any capture. Others write the log-sum-exp in their own order, refuse exactly what they declare to refuse, or
rely on a promise of the contract about each call.
"""

from types import MappingProxyType

import torch

from attncheck.backends.contract import Conventions, MultipleOf
from attncheck.backends.mutants.graph_bases import GraphPaged, PagedGraphImpl
from attncheck.backends.mutants.plain import Base, PlainImpl


class MovingImpl(PagedGraphImpl):
    """Multiplies queries by a factor of each head, 1, which the constructor makes on the host."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.factors = torch.ones(self.num_heads, 1)

    def factors_for(self, query):
        """Return the factors on the device of ``query``."""
        raise NotImplementedError

    def attend(self, layer, query, *rest):
        super().attend(layer, query * self.factors_for(query).to(query.dtype), *rest)


class MovedByDevice(GraphPaged):
    """Moves the constant if its device is not that of the query."""

    class Impl(MovingImpl):
        def factors_for(self, query):
            if self.factors.device != query.device:
                self.factors = self.factors.to(query.device)
            return self.factors


class MovedByDeviceType(GraphPaged):
    """Moves the constant if the query is on a GPU and the constant is not."""

    class Impl(MovingImpl):
        def factors_for(self, query):
            if query.is_cuda and not self.factors.is_cuda:
                self.factors = self.factors.to(query.device)
            return self.factors


class MovedByDeviceIndex(GraphPaged):
    """Moves the constant if its device has another index than that of the query; the index of a CPU is -1."""

    class Impl(MovingImpl):
        def factors_for(self, query):
            if self.factors.get_device() != query.get_device():
                self.factors = self.factors.to(query.device)
            return self.factors


class MovedOnce(GraphPaged):
    """Moves the constant in the first call of forward, whatever the devices."""

    class Impl(MovingImpl):
        is_moved = False

        def factors_for(self, query):
            if not self.is_moved:
                self.factors = self.factors.to(query.device)
                self.is_moved = True
            return self.factors


class MovedForEachDevice(GraphPaged):
    """Keeps a copy of the constant for each device on which a query was."""

    class Impl(MovingImpl):
        copies = MappingProxyType({})

        def factors_for(self, query):
            if query.device not in self.copies:
                self.copies = MappingProxyType({**self.copies, query.device: self.factors.to(query.device)})
            return self.copies[query.device]


class LseHeadsFirst(Base):
    """Computes the log-sum-exp as ``[H, T]``, and copies it into ``output_lse`` of any strides."""

    class Impl(PlainImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            rows = metadata.num_rows
            own = torch.empty(self.num_heads, rows, device=query.device)
            super().attend(layer, query, key, value, caches, metadata, output, own.T)
            if output_lse is not None:
                output_lse[:rows].copy_(own.T)


class LseByStrides(Base):
    """Writes the log-sum-exp as a kernel does: at the address that row, head and the strides of ``output_lse`` give."""

    class Impl(PlainImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            rows = metadata.num_rows
            own = torch.empty(rows, self.num_heads, device=query.device)
            super().attend(layer, query, key, value, caches, metadata, output, own)
            if output_lse is None or not rows:
                return
            row, head = (torch.arange(size, device=query.device) for size in own.shape)
            place = row[:, None] * output_lse.stride(0) + head * output_lse.stride(1)
            output_lse.as_strided((int(place.max()) + 1,), (1,))[place] = own


class LseContiguous(Base):
    """Takes ``output_lse`` to be contiguous, as is the output of a backend that declares ``operand_strides="rows"``."""

    conventions = Conventions(padded_rows="untouched", operand_strides="rows")

    class Impl(PlainImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            flat = None if output_lse is None else output_lse.view(-1).view(-1, self.num_heads)
            super().attend(layer, query, key, value, caches, metadata, output, flat)


class DeclaresMultiples(Base):
    """Takes head sizes that are multiples of 16 and pages that are multiples of 16, declares both, and refuses others."""

    @classmethod
    def get_supported_kernel_block_sizes(cls):
        return [MultipleOf(16)]

    @classmethod
    def unsupported_reasons(cls, layer, cache, batch):
        sizes = {"head_size": layer.head_size, "head_size_v": layer.value_head_size}
        own = [f"{name} {size}: supported are multiples of 16" for name, size in sizes.items() if size % 16]
        return [*super().unsupported_reasons(layer, cache, batch), *own]

    class Impl(PlainImpl):
        def __init__(self, num_heads, head_size, *rest, **more):
            for size in (head_size, more.get("head_size_v", head_size)):
                if size % 16:
                    raise ValueError(f"head size {size}: supported are multiples of 16")
            super().__init__(num_heads, head_size, *rest, **more)


class RefusesScalesOfHeads(Base):
    """Declares one scale for all heads, and refuses a scale for each head in forward, before it writes."""

    features = Base.features - {"fp8_per_head"}

    class Impl(PlainImpl):
        def forward(self, layer, query, key, value, kv_cache, attn_metadata, *rest, **more):
            has_codes = self.kv_cache_dtype.startswith("fp8")
            if attn_metadata is not None and has_codes and max(layer._k_scale.numel(), layer._v_scale.numel()) > 1:
                raise NotImplementedError("k_scale or v_scale per head is not supported")
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, *rest, **more)


class Merged(Base):
    """Declares neither cascade nor local attention, and refuses what a subclass does not declare."""

    features = Base.features - {"cascade", "local"}

    @classmethod
    def get_impl_cls(cls):
        return type("Impl", (cls.Impl,), {"backend": cls})

    @classmethod
    def get_builder_cls(cls):
        return type("Builder", (cls.Builder,), {"backend": cls})


class CannotTakeZero(Merged):
    """A kernel that needs a key for every request, including padding."""

    features = Merged.features - {"short_keys"}
    conventions = Conventions(pad_seq_len=1)

    class Impl(PlainImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            if min(metadata.seq_lens) < 1:
                output.fill_(float("nan"))


class FromTheFirstRow(Merged):
    """ALiBi distances, and thus the LSE, count from the first new row of a request in the call."""

    conventions = Conventions(alibi_reference="context")

    class Impl(PlainImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            if self.alibi_slopes is not None:
                slopes = torch.tensor(self.alibi_slopes)
                for _, start, end, _ in metadata.requests():
                    output_lse[start:end] += torch.arange(end - start)[:, None] * slopes
