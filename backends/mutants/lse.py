"""Faults of the log-sum-exp."""

import math
from dataclasses import replace

import torch

from attncheck.backends.candidates.reference import ReferenceImpl
from attncheck.backends.mutants.base import Base


class ChangesLse(Base):
    """Backend whose output is right, and whose LSE is replaced by the result of ``changed``."""

    class Impl(ReferenceImpl):
        def changed(self, lse, metadata):
            raise NotImplementedError

        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            rows = metadata.num_rows
            output_lse[:rows] = self.changed(output_lse[:rows], metadata)


class LseBaseTwo(ChangesLse):
    """Base-2 logarithms, declared natural."""

    class Impl(ChangesLse.Impl):
        def changed(self, lse, metadata):
            return lse / math.log(2)


class LseOfTheMaxOnly(Base):
    """Stores the largest score instead of the logarithm of the sum (only without soft cap, ALiBi and sinks)."""

    class Impl(ReferenceImpl):
        sharpness = 1.0

        def params(self, metadata):
            honest = super().params(metadata)
            return replace(honest, scale=honest.softmax_scale * self.sharpness)

        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            params = self.params(metadata)
            if params.logits_soft_cap or params.alibi_slopes or params.sinks:
                return
            # For scores scaled by 1000, the sum equals its largest term.
            self.sharpness = 1000.0
            super().attend(layer, query, key, value, caches, metadata, torch.empty_like(output), output_lse)
            output_lse[: metadata.num_rows] /= self.sharpness
            self.sharpness = 1.0


class LseWithoutSink(ChangesLse):
    """Counts the sinks in the output, and leaves them out of the LSE."""

    class Impl(ChangesLse.Impl):
        def changed(self, lse, metadata):
            sinks = self.params(metadata).sinks
            if sinks is None:
                return lse
            return lse + torch.log1p(-torch.exp(torch.tensor(sinks, device=lse.device) - lse))


class LseOfTheFirstHead(ChangesLse):
    """Writes the LSE of head 0 for all heads of a row."""

    class Impl(ChangesLse.Impl):
        def changed(self, lse, metadata):
            return lse[:, :1].expand_as(lse).clone()


class LseHeadsReversed(Base):
    """Stores the LSE of the heads in reversed order."""

    class Impl(ReferenceImpl):
        def attend(self, *arguments):
            super().attend(*arguments)
            if arguments[-1] is not None:
                arguments[-1].copy_(arguments[-1].flip(1))
