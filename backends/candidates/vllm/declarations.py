"""The declarations of a vLLM class, in the contract's terms.

Its predicates are called with every value of the contract. vLLM has no predicate for ALiBi, soft cap, a shared cache or
a quantised output. These are declared if an impl accepts them: a small layer of each kind is constructed once.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch

from attncheck.backends.candidates.vllm import package
from attncheck.backends.candidates.vllm.cache import kernel_block_sizes
from attncheck.backends.candidates.vllm.config import plain_config, their_config, uses_image_spans, uses_rswa_window
from attncheck.backends.candidates.vllm.layers import LatentSizes, has_value_size, has_writer, load_weights, make_layer
from attncheck.backends.candidates.vllm.trial import absent_part
from attncheck.backends.claims import PREDICATES
from attncheck.backends.declarations import MultipleOf
from attncheck.backends.dtypes import DTYPES
from attncheck.backends.impl import STATIC_FP8, LatentArguments, LayerArguments, QuantKey
from attncheck.reference.spec import AttentionType, LayerSpec
from attncheck.reference.step_spec import FP8_CACHES, BatchSpec, CacheSpec, KVCacheDType

_PLAIN = LayerArguments(num_heads=2, head_size=64, scale=0.125, num_kv_heads=1)

_TRIED: Mapping[str, dict[str, Any]] = {
    "alibi": {"alibi_slopes": [0.5, 0.25]},
    "logits_soft_cap": {"logits_soft_cap": 30.0},
    "kv_sharing": {"kv_sharing_target_layer_name": "layer.0"},
}
"""The constructor arguments of a layer with each feature."""


@dataclass(frozen=True)
class VLLMDeclarations:
    """The declarations of a class.

    layer_error: why not even a plain layer can be constructed here, or its weights loaded; "" if they can.
    sinks_dtypes: dtypes of sinks. has_writer: for a latent cache, whether this build has the operators that write it.
    """

    dtypes: tuple[torch.dtype, ...]
    head_sizes: tuple[int, ...]
    kv_cache_dtypes: tuple[str, ...]
    attn_types: tuple[str, ...]
    features: frozenset[str]
    layer_error: str
    sinks_dtypes: tuple[str, ...]
    has_writer: bool = True


def declarations_of(their_backend: type[Any]) -> VLLMDeclarations:
    """Return the declarations of vLLM's class."""
    kv_cache_dtypes = tuple(name for name in get_args(KVCacheDType) if _takes_cache(their_backend, name))
    features = {name for name, predicate in PREDICATES.items() if _declares(their_backend, predicate)}
    features.discard("dcp")  # the bridge gives vLLM's classes no group of ranks
    if any(name in FP8_CACHES for name in kv_cache_dtypes):
        features.add("fp8_kv")
    if is_mla(their_backend):
        features.add("mla")
    if has_value_size(their_backend):
        features.add("head_size_v")
    dtypes = tuple(dtype for dtype in DTYPES.values() if _takes_dtype(their_backend, dtype))
    head_sizes = tuple(their_backend.get_supported_head_sizes())
    usual = 576 if is_mla(their_backend) else 64
    size = usual if usual in head_sizes or not head_sizes else head_sizes[0]
    plain = replace(_PLAIN, head_size=size, head_size_v=size)
    layer, layer_error = _made(their_backend, plain, dtypes)
    if layer is not None:
        features |= {name for name, extra in _TRIED.items() if _is_made(their_backend, replace(plain, **extra), dtypes)}
        features |= {"output_quant"} if fuses(layer.impl, STATIC_FP8) else set()
    if _takes_fp8_queries(their_backend, plain, dtypes):
        features.add("fp8_query")
    return VLLMDeclarations(
        dtypes=dtypes,
        head_sizes=head_sizes,
        kv_cache_dtypes=kv_cache_dtypes,
        attn_types=tuple(kind.value for kind in AttentionType if _takes_type(their_backend, kind)),
        features=frozenset(features),
        layer_error=layer_error,
        sinks_dtypes=_sinks_dtypes(their_backend, plain, dtypes) if "sinks" in features else (),
        has_writer=layer is None or not is_mla(their_backend) or has_writer(layer),
    )


def is_mla(their_backend: type[Any]) -> bool:
    """Return whether vLLM's class serves only layers with a latent cache."""
    return _declares(their_backend, "is_mla")


def _declares(their_backend: type[Any], predicate: str) -> bool:
    return hasattr(their_backend, predicate) and bool(getattr(their_backend, predicate)())


def _takes_dtype(their_backend: type[Any], dtype: torch.dtype) -> bool:
    if hasattr(their_backend, "supports_dtype"):
        return bool(their_backend.supports_dtype(dtype))
    return dtype in their_backend.get_supported_dtypes()


def _takes_cache(their_backend: type[Any], name: str) -> bool:
    """Return whether the class supports a cache dtype; without a predicate (older classes), only ``auto``."""
    if hasattr(their_backend, "supports_kv_cache_dtype"):
        return bool(their_backend.supports_kv_cache_dtype(name))
    return name == "auto"


def _takes_type(their_backend: type[Any], kind: AttentionType) -> bool:
    if hasattr(their_backend, "supports_attn_type"):
        return bool(their_backend.supports_attn_type(kind.value))
    return kind == AttentionType.DECODER


def _is_made(their_backend: type[Any], given: LayerArguments, dtypes: tuple[torch.dtype, ...]) -> bool:
    return _made(their_backend, given, dtypes)[0] is not None


def _made(their_backend: type[Any], given: LayerArguments, dtypes: tuple[torch.dtype, ...]) -> tuple[Any, str]:
    """Return a layer with the arguments ``given``, or None, and the error of its construction."""
    try:
        size = kernel_block_sizes(their_backend)[0]
        sizes = LatentSizes.of_row(given.head_size) if is_mla(their_backend) else None
        plain = plain_config(
            dtype=dtypes[0] if dtypes else torch.bfloat16,
            num_heads=given.num_heads,
            num_kv_heads=given.num_kv_heads,
            head_size=given.head_size,
            block_size=max(16, size.base) if isinstance(size, MultipleOf) else size,
            cache_dtype=given.kv_cache_dtype,
        )
        config = their_config(plain, model={} if sizes is None else sizes.model())
        layer = make_layer(their_backend, config, given, sizes)
        return layer, "" if sizes is None else _weights_error(layer, config)
    except Exception as error:  # noqa: BLE001 (someone else's code: whatever it raises is the answer)
        return None, f"making a plain layer raised {type(error).__name__}: {error}"


def _takes_fp8_queries(their_backend: type[Any], plain: LayerArguments, dtypes: tuple[torch.dtype, ...]) -> bool:
    """Return whether the impl takes FP8 queries beside an FP8 cache. vLLM quantises those of a latent layer itself."""
    if is_mla(their_backend) or not _takes_cache(their_backend, "fp8"):
        return False
    layer, _ = _made(their_backend, replace(plain, kv_cache_dtype="fp8"), dtypes)
    return layer is not None and getattr(layer, "query_quant", None) is not None


def _sinks_dtypes(their_backend: type[Any], plain: LayerArguments, dtypes: tuple[torch.dtype, ...]) -> tuple[str, ...]:
    """Return the dtypes of sinks that the kernels take. FlashAttention 3 and 4 take bfloat16 alone."""
    sinks = torch.zeros(plain.num_heads, dtype=torch.bfloat16, device=package.platform().device_type)
    layer, _ = _made(their_backend, replace(plain, sinks=sinks), dtypes)
    version = getattr(getattr(layer, "impl", None), "vllm_flash_attn_version", None)
    return ("bfloat16",) if version in (3, 4) else tuple(DTYPES)


def _weights_error(layer: Any, config: Any) -> str:
    """Return which part this build lacks to load the weights of a latent layer; "" if none."""
    weight = layer.kv_b_proj.weight
    try:
        load_weights(layer, config, torch.zeros_like(weight), weight.dtype)
    except Exception as error:  # noqa: BLE001 (someone else's code; other errors are left to the checks)
        return "; ".join(absent_part("weights", error))
    return ""


def fuses(impl: Any, key: QuantKey) -> bool:
    """Return whether vLLM's ``impl`` supports a quantisation fused into attention."""
    keys = package.module("vllm.model_executor.layers.quantization.utils.quant_utils")
    scale = key.scale
    described = keys.ScaleDesc(scale.dtype, scale.static, keys.GroupShape(*scale.group_shape))
    return bool(impl.fused_output_quant_supported(keys.QuantKey(key.dtype, described)))


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
    "partial multimodal token",
    "R-SWA",
    "MLA",
    "non-MLA",
)
"""Beginnings of reasons from predicates that the declarations already use."""


def configuration_problems(
    their_backend: type[Any], layer: LayerSpec, cache: CacheSpec, batch: BatchSpec, *, refused: bool
) -> list[str]:
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
        use_mm_prefix=any(request.mm_req_doc_ranges for request in batch.requests),
        use_rswa=layer.rswa_window is not None,
    )
    shown = f"head_size {layer.head_size}, dtype {layer.dtype}, kv_cache_dtype {cache.kv_cache_dtype}, "
    shown += f"block_size {cache.block_size}"
    return [
        f"vLLM's validate_configuration: {reason} ({shown})"
        for reason in reasons
        if not (refused and reason.startswith(_PREDICATES))
    ]


def refuse_as_vllm_does(
    their_backend: type[Any], config: Any, given: LayerArguments, *, scales_per_head: bool = False
) -> None:
    """Raise ``ValueError`` if vLLM would not construct such a layer with this backend, although it is named explicitly.

    vLLM's GPU platforms call ``validate_configuration`` before they construct a layer. Its CPU platform accepts
    everything, and then so does the bridge. scales_per_head: whether the cache has one scale for each KV head.
    """
    if package.platform().is_cpu():
        return
    reasons = _reasons(
        their_backend,
        head_size=given.head_size,
        dtype=config.model_config.dtype,
        kv_cache_dtype=config.cache_config.cache_dtype,
        block_size=config.cache_config.block_size if AttentionType(given.attn_type).has_cache else None,
        use_mla=isinstance(given, LatentArguments),
        has_sink=given.sinks is not None,
        attn_type=str(given.attn_type),
        has_sliding_window=given.sliding_window is not None,
        use_per_head_quant_scales=scales_per_head,
        use_non_causal=False,
        use_mm_prefix=uses_image_spans(config),
        use_rswa=uses_rswa_window(config) is not None,
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
    config |= {"device_capability": capability, "use_sparse": False}
    return list(their_backend.validate_configuration(**{name: config[name] for name in config if name in known}))
