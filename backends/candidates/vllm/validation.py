"""The reasons of vLLM's own check of a configuration against a layer, with the values that its messages lack."""

import inspect
from typing import Any

from attncheck.backends.candidates.vllm import package
from attncheck.backends.candidates.vllm.layers import LayerArguments
from attncheck.backends.dtypes import DTYPES
from attncheck.reference.spec import AttentionType, CacheSpec, LayerSpec

_PREDICATES = (
    "head_size",
    "dtype",
    "kv_cache_dtype",
    "block_size",
    "attention sinks",
    "attention type",
    "sliding window",
    "non-causal",
    "per-head quant",
    "MLA",
    "non-MLA",
)
"""Beginnings of reasons from predicates that the declarations already use."""


def configuration_problems(their_backend: type[Any], layer: LayerSpec, cache: CacheSpec, *, refused: bool) -> list[str]:
    """Return the reasons of the class's ``validate_configuration`` against a layer; an empty list if it has none.

    refused: whether the declarations already refuse the layer, with values and limits. Reasons of predicates, which
    have no values, are then left out.
    """
    reasons = _reasons(
        their_backend,
        head_size=layer.head_size,
        dtype=DTYPES[layer.dtype],
        kv_cache_dtype="auto" if cache.kv_cache_dtype == layer.dtype else cache.kv_cache_dtype,
        block_size=cache.block_size if layer.has_cache else None,
        use_mla=layer.mla is not None,
        has_sink=layer.sink_logits is not None,
        attn_type=layer.attn_type.value,
        has_sliding_window=layer.sliding_window is not None,
        use_per_head_quant_scales=isinstance(cache.k_scale, tuple) or isinstance(cache.v_scale, tuple),
        use_non_causal=layer.attn_type == AttentionType.DECODER and not layer.is_causal,
    )
    shown = f"head_size {layer.head_size}, dtype {layer.dtype}, kv_cache_dtype {cache.kv_cache_dtype}, "
    shown += f"block_size {cache.block_size}"
    return [
        f"vLLM's validate_configuration: {reason} ({shown})"
        for reason in reasons
        if not (refused and reason.startswith(_PREDICATES))
    ]


def refuse_as_vllm_does(their_backend: type[Any], config: Any, given: LayerArguments, *, use_mla: bool = False) -> None:
    """Raise ``ValueError`` if vLLM would not construct such a layer with this backend, although it is named explicitly.

    vLLM's GPU platforms call ``validate_configuration`` before they construct a layer. Its CPU platform accepts
    everything, and then so does the bridge.
    """
    if package.platform().is_cpu():
        return
    reasons = _reasons(
        their_backend,
        head_size=given.head_size,
        dtype=config.model_config.dtype,
        kv_cache_dtype=config.cache_config.cache_dtype,
        block_size=config.cache_config.block_size if AttentionType(given.attn_type).has_cache else None,
        use_mla=use_mla,
        has_sink=given.sinks is not None,
        attn_type=given.attn_type,
        has_sliding_window=given.sliding_window is not None,
        use_per_head_quant_scales=False,
        use_non_causal=False,
    )
    if reasons:
        raise ValueError(f"{their_backend.get_name()} is not valid for this configuration: {'; '.join(reasons)}")


def _reasons(their_backend: type[Any], **config: Any) -> list[str]:
    """Return the reasons of ``validate_configuration``, called with those parameters that this version has."""
    if not hasattr(their_backend, "validate_configuration"):
        return []
    known = inspect.signature(their_backend.validate_configuration).parameters
    # Without a GPU, query the lowest capability: a class that needs a GPU does not support it.
    capability = package.platform().get_device_capability() or package.lowest_capability()
    config |= {"device_capability": capability, "use_sparse": False, "use_mm_prefix": False}
    return list(their_backend.validate_configuration(**{name: config[name] for name in config if name in known}))
