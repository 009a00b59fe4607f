"""The layer settings that a plan needs before any layer runs, and the check that all layers of a group share them."""

from dataclasses import dataclass
from typing import Any

import torch

from attncheck.backends.dtypes import FP8_DTYPES
from attncheck.backends.paged import PagedImpl

LEAST_SCALE = 2.0**-11
"""Minimum scale. The kernels mask a key with the score -5e4 before they scale.

At this scale a masked key has the weight ``exp(-24)``, about the resolution of float32. With a smaller scale masked
keys count, and a negative one turns the greatest score into the least.
"""

SUPPORTED_DTYPES = (torch.float16, torch.bfloat16)
"""Dtypes of query and output for which the library has kernels; with another one ``plan`` raises a KeyError."""


@dataclass(frozen=True, kw_only=True)
class LayerSettings:
    """Settings of one layer, as the library's ``plan`` takes them.

    Raise ``ValueError`` below :data:`LEAST_SCALE`, and ``NotImplementedError`` for an unsupported dtype.

    scale: multiplies the scores.
    window_left: how far back a row sees, its own key at distance 0; -1 means no limit.
    logits_soft_cap: None if off.
    dtype: that of query and output.
    kv_dtype: that of keys and values.
    has_cache: False for encoder layers, whose keys and values are passed with the step.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    window_left: int
    logits_soft_cap: float | None
    dtype: torch.dtype
    kv_dtype: torch.dtype
    has_cache: bool

    def __post_init__(self) -> None:
        if self.scale < LEAST_SCALE:
            raise ValueError(f"FLASHINFER: scale {self.scale}: must be at least {LEAST_SCALE}")
        if self.dtype not in SUPPORTED_DTYPES:
            names = ", ".join(map(str, SUPPORTED_DTYPES))
            raise NotImplementedError(f"FLASHINFER: {self.dtype} is not supported; supported are {names}")

    @classmethod
    def of(cls, impl: PagedImpl, dtype: torch.dtype) -> "LayerSettings":
        """Return the settings of a layer whose rows have ``dtype``."""
        return cls(
            num_heads=impl.num_heads,
            num_kv_heads=impl.num_kv_heads,
            head_size=impl.head_size,
            scale=impl.scale,
            window_left=impl.sliding_window[0],
            logits_soft_cap=impl.logits_soft_cap,
            dtype=dtype,
            kv_dtype=FP8_DTYPES.get(impl.kv_cache_dtype, dtype) if impl.attn_type.has_cache else dtype,
            has_cache=impl.attn_type.has_cache,
        )


def group_settings(vllm_config: Any, layer_names: list[str], impl_cls: type[PagedImpl]) -> LayerSettings:
    """Return the settings that all layers of a group share, found in the config's ``static_forward_context``.

    Raise ``TypeError`` for a layer with another impl, and ``NotImplementedError`` if two layers differ: one plan serves
    the whole group, and would apply one layer's window, cap or scale to another.
    """
    layers = vllm_config.compilation_config.static_forward_context
    found: dict[str, LayerSettings] = {}
    for name in layer_names:
        impl = layers[name].impl
        if not isinstance(impl, impl_cls):
            raise TypeError(
                f"FLASHINFER: {name} must have a {impl_cls.__qualname__}, and has a {type(impl).__qualname__}"
            )
        found[name] = LayerSettings.of(impl, vllm_config.model_config.dtype)
    first, *others = found.items()
    for name, settings in others:
        if settings != first[1]:
            raise NotImplementedError(
                f"FLASHINFER: one plan for layers that differ: {first[0]} {first[1]}, {name} {settings}"
            )
    return first[1]
