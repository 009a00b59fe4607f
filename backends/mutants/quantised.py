"""Faults of FP8 caches and outputs: misused scales, wrong codes, values beyond the range."""

from types import SimpleNamespace

import torch

from attncheck.backends.candidates.reference import ReferenceImpl
from attncheck.backends.mutants.base import Base, fits_in_memory


def with_scales(layer, **scales):
    """Return the layer with other scales."""
    own = {name: getattr(layer, name) for name in ("_q_scale", "_k_scale", "_v_scale")}
    return SimpleNamespace(**own | scales)


class CodingImpl(ReferenceImpl):
    """Impl that writes the result of ``codes``, which gets values already divided by their scale."""

    def codes(self, x, dtype):
        raise NotImplementedError

    def write(self, layer, key, value, key_cache, value_cache, slot_mapping):
        if key_cache.itemsize > 1:
            super().write(layer, key, value, key_cache, value_cache, slot_mapping)
            return
        rows = (slot_mapping >= 0).nonzero().squeeze(1)
        slots = slot_mapping[rows]
        for new, cache, scale in ((key, key_cache, layer._k_scale), (value, value_cache, layer._v_scale)):
            codes = self.codes(new[rows].float() / scale.reshape(-1, 1), cache.dtype)
            cache.view(torch.uint8)[slots // cache.shape[1], slots % cache.shape[1]] = codes.view(torch.uint8)


# Writing.


class MultipliesByTheScale(Base):
    """Multiplies by the scale where it must divide."""

    class Impl(ReferenceImpl):
        def write(self, layer, *rest):
            inverse = {name: 1 / getattr(layer, name) for name in ("_k_scale", "_v_scale")}
            super().write(with_scales(layer, **inverse), *rest)


class DoesNotSaturate(Base):
    """Values beyond the largest code become NaN."""

    class Impl(CodingImpl):
        def codes(self, x, dtype):
            limit = torch.finfo(dtype).max
            nan = torch.full_like(x, torch.nan)
            return torch.where(x.abs() > limit, nan, x).to(dtype)


class TruncatesCodes(Base):
    """Truncates the bits that do not fit, instead of rounding to the nearest code."""

    class Impl(CodingImpl):
        def codes(self, x, dtype):
            limit = torch.finfo(dtype).max
            nearest = x.clamp(-limit, limit).to(dtype)
            too_far = nearest.float().abs() > x.abs()
            return torch.where(too_far, nearest.view(torch.uint8) - 1, nearest.view(torch.uint8)).view(dtype)


# Scales on reading.


class SwapsScales(Base):
    """Uses the scale of values for keys, and the scale of keys for values, consistently in writing and reading."""

    class Impl(ReferenceImpl):
        def write(self, layer, *rest):
            super().write(with_scales(layer, _k_scale=layer._v_scale, _v_scale=layer._k_scale), *rest)

        def attend(self, layer, *rest):
            super().attend(with_scales(layer, _k_scale=layer._v_scale, _v_scale=layer._k_scale), *rest)


class TakesFirstHeadsScale(Base):
    """Reads one element of every scale, whatever its shape."""

    class Impl(ReferenceImpl):
        def attend(self, layer, *rest):
            super().attend(with_scales(layer, _k_scale=layer._k_scale[:1], _v_scale=layer._v_scale[:1]), *rest)


class ForgetsValueScale(Base):
    """Uses codes of values as values, without their scale."""

    class Impl(ReferenceImpl):
        def attend(self, layer, *rest):
            super().attend(with_scales(layer, _v_scale=torch.ones(1)), *rest)


class ScalesFloatCache(Base):
    """Multiplies by k_scale and v_scale on reading, although the cache holds no codes."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, key, value, caches, *rest):
            if caches is not None and caches[0].itemsize > 1 and fits_in_memory(caches[0]):
                scales = (layer._k_scale, layer._v_scale)
                caches = tuple(
                    cache.float() * scale.reshape(-1, 1) for cache, scale in zip(caches, scales, strict=True)
                )
            super().attend(layer, query, key, value, caches, *rest)


class ScalesQuery(Base):
    """Multiplies by q_scale, although the query holds no codes."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, *rest):
            group = self.num_heads // layer._q_scale.numel() if layer._q_scale.numel() > 1 else 1
            scale = layer._q_scale.repeat_interleave(group).reshape(-1, 1)
            super().attend(layer, query.float() * scale, *rest)


# Quantised outputs.


class MultipliesTheOutput(Base):
    """Multiplies the output by output_scale where it must divide."""

    class Impl(ReferenceImpl):
        def attend_quantised(self, *arguments):
            *step, output_scale = arguments
            super().attend_quantised(*step, 1 / output_scale)


class IgnoresOutputScale(Base):
    """Rounds the output to codes without dividing by output_scale."""

    class Impl(ReferenceImpl):
        def attend_quantised(self, *arguments):
            *step, output_scale = arguments
            super().attend_quantised(*step, torch.ones_like(output_scale))


class OutputDoesNotSaturate(Base):
    """Outputs beyond the largest code become NaN."""

    class Impl(ReferenceImpl):
        def attend_quantised(self, layer, query, key, value, caches, metadata, output, output_lse, output_scale):
            plain = torch.zeros(output.shape)
            self.attend(layer, query, key, value, caches, metadata, plain, output_lse)
            scaled = plain / output_scale
            limit = torch.finfo(output.dtype).max
            codes = torch.where(scaled.abs() > limit, torch.nan, scaled).to(output.dtype)
            rows = slice(0, metadata.num_rows)
            output.view(torch.uint8)[rows] = codes.view(torch.uint8)[rows]
