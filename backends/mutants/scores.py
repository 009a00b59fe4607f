"""Faults of scores: the scale, the soft cap, ALiBi, sinks."""

from dataclasses import replace

from attncheck.backends.candidates.reference import ReferenceImpl
from attncheck.backends.mutants.base import Base


class ScaleIgnored(Base):
    """Multiplies scores by head_size ** -0.5, whatever the layer's scale."""

    class Impl(ReferenceImpl):
        def params(self, metadata):
            return replace(super().params(metadata), scale=None)


class CapBeforeScale(Base):
    """Caps the unscaled product of query and key, and scales afterwards: cap * tanh(qk / cap) * scale."""

    class Impl(ReferenceImpl):
        def params(self, metadata):
            # With cap' = cap * scale, cap' * tanh(scale * qk / cap') is scale * cap * tanh(qk / cap).
            honest = super().params(metadata)
            cap = honest.logits_soft_cap
            return honest if cap is None else replace(honest, logits_soft_cap=cap * honest.softmax_scale)


class AlibiDropped(Base):
    """Declares ALiBi and accepts the slopes, but leaves them out."""

    class Impl(ReferenceImpl):
        def params(self, metadata):
            return replace(super().params(metadata), alibi_slopes=None)


class SlopesReversed(Base):
    """Head h gets the slope of head H - 1 - h."""

    class Impl(ReferenceImpl):
        def params(self, metadata):
            honest = super().params(metadata)
            return honest if honest.alibi_slopes is None else replace(honest, alibi_slopes=honest.alibi_slopes[::-1])


class SinksIgnored(Base):
    """Declares sinks and accepts them, but leaves them out."""

    class Impl(ReferenceImpl):
        def params(self, metadata):
            return replace(super().params(metadata), sinks=None)


class SinksScaled(Base):
    """Treats a sink as one more score, and multiplies it by the scale."""

    class Impl(ReferenceImpl):
        def params(self, metadata):
            honest = super().params(metadata)
            if honest.sinks is None:
                return honest
            return replace(honest, sinks=tuple(sink * honest.softmax_scale for sink in honest.sinks))


class IgnoresSoftCap(Base):
    """Declares the soft cap and accepts it, but leaves it out."""

    class Impl(ReferenceImpl):
        def params(self, metadata):
            return replace(super().params(metadata), logits_soft_cap=None)
