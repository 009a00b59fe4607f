"""Correct backends that rely on promises of the contract about each call."""

import torch

from attncheck.backends.contract import Conventions
from attncheck.backends.mutants.pieces import ChangesAnswers, Parted
from attncheck.backends.mutants.plain import Base


class CannotTakeZero(Parted):
    """A kernel that needs a key for every request, including padding."""

    features = Parted.features - {"short_keys"}
    conventions = Conventions(pad_seq_len=1)

    class Impl(ChangesAnswers):
        def spoil(self, metadata, output, output_lse):
            if min(metadata.seq_lens) < 1:
                output.fill_(float("nan"))


class FromTheFirstRow(Parted):
    """ALiBi distances, and thus the LSE, count from the first new row of a request in the call."""

    conventions = Conventions(alibi_reference="context")

    class Impl(ChangesAnswers):
        def spoil(self, metadata, output, output_lse):
            if self.alibi_slopes is not None:
                slopes = torch.tensor(self.alibi_slopes)
                for _, start, end, _ in metadata.requests():
                    output_lse[start:end] += torch.arange(end - start)[:, None] * slopes


class Merged(Base):
    """Declares neither cascade nor local attention."""

    features = Base.features - {"cascade", "local"}
