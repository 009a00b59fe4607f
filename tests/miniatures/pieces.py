"""Correct backends that rely on promises of the contract about each call."""

import torch

from attncheck.backends.contract import Conventions
from attncheck.backends.mutants.plain import Base, PlainImpl


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
