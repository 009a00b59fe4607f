"""Backends that ignore the scores; they do not pass ``numerics`` in any case where the scores matter.

Their functions ignore their inputs' weights, too.
"""

import torch

from attncheck.backends.mutants.plain import Base, PlainImpl


class Blind(Base):
    """The plain candidate under the name of the subclass, whose nested ``Impl`` ignores the scores."""

    @classmethod
    def functions(cls):
        def merge_attn_states(out_a, lse_a, out_b, lse_b):
            return cls.merged(out_a, out_b), torch.logaddexp(lse_a, lse_b)

        def causal_conv1d(x, weight, bias, conv_states, *rest, activation, pad_id):
            return cls.merged(x, x)

        return {"merge_attn_states": merge_attn_states, "causal_conv1d": causal_conv1d}

    @staticmethod
    def merged(out_a, out_b):
        return (out_a + out_b) / 2


class Zeros(Blind):
    """Every row is 0."""

    @staticmethod
    def merged(out_a, out_b):
        return torch.zeros_like(out_a)

    class Impl(PlainImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            output[: metadata.num_rows] = 0.0


class Constant(Blind):
    """Every row is 0.5."""

    @staticmethod
    def merged(out_a, out_b):
        return torch.full_like(out_a, 0.5)

    class Impl(PlainImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            output[: metadata.num_rows] = 0.5


class MeanOfV(Blind):
    """Every visible key has the same weight, whatever its score."""

    class Impl(PlainImpl):
        def scores(self, *arguments):
            return torch.zeros_like(super().scores(*arguments))

        def state(self, *arguments, has_sinks):
            sinks, self.sinks = self.sinks, None
            state = super().state(*arguments, has_sinks=has_sinks)
            self.sinks = sinks
            return state
