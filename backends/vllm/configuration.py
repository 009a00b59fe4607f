"""vLLM's own check of a configuration, with the values that it leaves out. Must not know: what the bridge declares."""

import inspect
from typing import Any

from attncheck.backends.declarations import DTYPES, has_cache
from attncheck.backends.vllm import package
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
"""How reasons begin that follow from predicates which the declarations are made of."""


def configuration_problems(their_backend: type[Any], layer: LayerSpec, cache: CacheSpec, *, told: bool) -> list[str]:
    """What ``validate_configuration`` of vLLM's class says against a layer; empty where it has none.

    told: the declarations have given reasons, values and limits with them, so that those of the predicates, which have
    no values, are left out.
    """
    if not hasattr(their_backend, "validate_configuration"):
        return []
    capability = package.platform().get_device_capability()
    asked = {
        "head_size": layer.head_size,
        "dtype": DTYPES[layer.dtype],
        "kv_cache_dtype": "auto" if cache.kv_cache_dtype == layer.dtype else cache.kv_cache_dtype,
        "block_size": cache.block_size if has_cache(layer) else None,
        "use_mla": layer.mla is not None,
        "has_sink": layer.sink_logits is not None,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": isinstance(cache.k_scale, tuple) or isinstance(cache.v_scale, tuple),
        # Without a GPU there is none to compare: a class that needs one says so of the lowest.
        "device_capability": capability or package.module("vllm.platforms.interface").DeviceCapability(0, 0),
        "attn_type": layer.attn_type.value,
        "has_sliding_window": layer.sliding_window is not None,
        "use_non_causal": layer.attn_type == AttentionType.DECODER and not layer.is_causal,
    }
    known = inspect.signature(their_backend.validate_configuration).parameters
    given = {name: value for name, value in asked.items() if name in known}
    reasons = their_backend.validate_configuration(**given)
    shown = f"head_size {layer.head_size}, dtype {layer.dtype}, kv_cache_dtype {cache.kv_cache_dtype}, block_size "
    shown += f"{cache.block_size}"
    return [
        f"vLLM's validate_configuration: {reason} ({shown})"
        for reason in reasons
        if not (told and reason.startswith(_PREDICATES))
    ]
