"""vLLM's CPU backend with one fault in each subclass, and the same of a few in its Triton backend.

``attncheck run --backend vllm:tests/vllm/planted/faults.py:CapTooLarge`` examines one. vLLM's own files are untouched.
"""

from copy import copy
from dataclasses import replace

import torch
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl


class Spoiled:
    """An impl whose constructor ends with :meth:`spoil`."""

    def __init__(self, *args, **kwargs):
        """Make the impl, and change it."""
        super().__init__(*args, **kwargs)
        self.spoil()

    def spoil(self):
        """Change what the constructor has kept."""


class Impl(Spoiled, CPUAttentionBackendImpl):
    """The right impl; a fault overrides one step."""

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs):
        """Attend with the arguments that :meth:`given` returns."""
        if attn_metadata is None:
            return output
        layer, query, kv_cache = self.given(layer, query, kv_cache)
        super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        self.answered(output[: attn_metadata.num_actual_tokens])
        return output

    def given(self, layer, query, kv_cache):
        """Return layer, query and cache for the kernel."""
        return layer, query, kv_cache

    def answered(self, output):
        """Change the output rows of the requests."""


class Builder(CPUAttentionMetadataBuilder):
    """The right builder; a fault overrides the metadata that it is given."""

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        """Build from what :meth:`given` returns."""
        return super().build(common_prefix_len, self.given(common_attn_metadata), fast_build)

    def given(self, common):
        """Return the metadata of the step."""
        return common


def _backend(impl=Impl, builder=Builder, base=CPUAttentionBackend, **members):
    own = {"get_impl_cls": staticmethod(lambda: impl), "__module__": __name__}
    if builder is not None:
        own["get_builder_cls"] = staticmethod(lambda: builder)
    return type("Planted", (base,), own | members)


def _spoilt(name, change, impl=Impl):
    """Return an impl whose attribute ``name`` is ``change`` of what it was, where it was set."""

    def spoil(self):
        was = getattr(self, name)
        setattr(self, name, change(was))

    return type("Spoilt", (impl,), {"spoil": spoil})


def _lends(**methods):
    return type("Spoilt", (Impl,), methods)


def _scaled_layer(**scales):
    """Return a ``given`` that hands the kernel a layer with other scales."""

    def given(self, layer, query, kv_cache):
        other = copy(layer)
        for name, value in scales.items():
            object.__setattr__(other, name, value)
        return other, query, kv_cache

    return given


def _writes(change):
    """Return a writer that stores what ``change`` makes of key, value and slots."""

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        key, value, slot_mapping = change(key, value, slot_mapping)
        CPUAttentionBackendImpl.do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping)

    return _lends(do_kv_cache_update=do_kv_cache_update)


def _stale(builder, common):
    kept = builder.__dict__.setdefault("kept", {})
    return replace(common, seq_lens=kept.setdefault(len(common.seq_lens), common.seq_lens.clone()))


def _with_given(given):
    return type("Spoilt", (Builder,), {"given": given})


def _scale_in_place(self, layer, query, kv_cache):
    query.mul_(self.__dict__.setdefault("factor", self.scale))
    self.scale = 1.0
    return layer, query, kv_cache


def _without_subnormals(self, layer, query, kv_cache):
    if not self.is_fp8_kv_cache:
        return layer, query, kv_cache
    codes = kv_cache.clone().view(torch.uint8)
    mantissa = 2 if "e5m2" in self.kv_cache_dtype else 3
    return layer, query, codes.masked_fill_((codes & 0x7F) < 1 << mantissa, 0).view(kv_cache.dtype)


def _not_a_number(self, output):
    if self.logits_soft_cap:
        output[0, 0] = torch.nan


Right = _backend()
WindowLonger = _backend(_spoilt("sliding_window", lambda size: size + 1 if size > 0 else size))
CapTooLarge = _backend(_spoilt("logits_soft_cap", lambda cap: cap * 1.05))
SinksIgnored = _backend(_spoilt("sinks", lambda sinks: None), supports_sink=classmethod(lambda cls: True))
PaddingWritten = _backend(_writes(lambda key, value, slots: (key, value, slots.clamp(min=0))))
HeadsExchangedInCache = _backend(_writes(lambda key, value, slots: (key.flip(1), value.flip(1), slots)))
StaleLengths = _backend(builder=_with_given(_stale))
LevelRaised = _backend(builder=type("Spoilt", (Builder,), {"_cudagraph_support": AttentionCGSupport.ALWAYS}))
QueryScaledInPlace = _backend(_lends(given=_scale_in_place))
KeyScaleIgnored = _backend(_lends(given=_scaled_layer(_k_scale_float=1.0)))
SubnormalsFlushed = _backend(_lends(given=_without_subnormals))
NotANumberUnderACap = _backend(_lends(answered=_not_a_number))


class TritonImpl(Spoiled, TritonAttentionImpl):
    """The right impl; a fault changes one attribute."""


def _triton(name, change):
    return _backend(_spoilt(name, change, TritonImpl), None, TritonAttentionBackend)


TritonWindowLonger = _triton("sliding_window", lambda pair: (pair[0] + 1, pair[1]) if pair[0] > 0 else pair)
TritonSinksIgnored = _triton("sinks", lambda sinks: None)
