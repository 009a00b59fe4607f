"""Describes the layers of an engine by the keys of a case, read once from vLLM's layer objects.

No weights are read: of ALiBi slopes and sinks, only whether the layer has them.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any, get_args

from attncheck.errors import SpecError
from attncheck.harness.recording.traffic import LayerKind
from attncheck.reference.spec import AttentionType, CacheSpec, DType, KVCacheDType, LayerSpec, MLASpec

_KNOWN_LAYERS = ("Attention", "ChunkedLocalAttention", "EncoderOnlyAttention", "MLAAttention")
"""vLLM layer classes whose attention a case can describe; other classes change the mask or the keys."""

_LAYOUTS = {"NHD": "NHD", "LBNHC": "NHD", "HND": "HND", "LBHNC": "HND"}
"""Layout of a case by vLLM's current or former name."""

_NO_WORD = {
    "use_alibi_sqrt": "square-root ALiBi",
    "use_mm_prefix": "prefix ranges of images",
    "use_sparse": "chosen keys",
    "non_causal_multi_token_decode": "decodes that see later keys",
}
"""Attributes of a layer that change the correct result, and that no case key expresses."""


def layer_kinds(
    layers: Iterable[Any], config: Any, block_size: int
) -> tuple[tuple[tuple[LayerKind, int], ...], dict[str, int]]:
    """Return the kinds of ``layers`` with their numbers, and reasons why others cannot be described, with theirs.

    ``config``: the engine's ``VllmConfig``. ``block_size``: tokens per page of the kernels.
    """
    kinds: Counter[LayerKind] = Counter()
    left_out: Counter[str] = Counter()
    for layer in layers:
        try:
            kinds[_kind(layer, config, block_size)] += 1
        except SpecError as error:
            left_out[error.reason] += 1
    return tuple(kinds.items()), dict(left_out)


def _kind(layer: Any, config: Any, block_size: int) -> LayerKind:
    """Return the kind of one layer.

    Raises:
        SpecError: no case can describe the layer.
    """
    name = type(layer).__name__
    if name not in _KNOWN_LAYERS:
        raise _unsayable("layers of the class", name)
    for attribute, words in _NO_WORD.items():
        if getattr(layer, attribute, False):
            raise _unsayable("layers with", words)
    dtype = str(config.model_config.dtype).removeprefix("torch.")
    if dtype not in get_args(DType):
        raise _unsayable("layers of dtype", dtype)
    impl, sizes = layer.impl, {"num_heads": layer.num_heads, "num_kv_heads": layer.num_kv_heads}
    common: dict[str, Any] = {**sizes, "head_size": layer.head_size, "dtype": dtype}
    if name == "MLAAttention":
        mla = MLASpec(
            kv_lora_rank=layer.kv_lora_rank,
            qk_nope_head_dim=layer.qk_nope_head_dim,
            qk_rope_head_dim=layer.qk_rope_head_dim,
            v_head_dim=layer.v_head_dim,
        )
        described = LayerSpec(**common, mla=mla)
    else:
        size_v = getattr(layer, "head_size_v", layer.head_size)
        described = LayerSpec(
            **common,
            head_size_v=None if size_v == layer.head_size else size_v,
            attn_type=AttentionType(str(getattr(layer.attn_type, "value", layer.attn_type))),
            sliding_window=getattr(layer, "sliding_window", None),
            logits_soft_cap=getattr(impl, "logits_soft_cap", None) or None,
            alibi=getattr(impl, "alibi_slopes", None) is not None,
            sinks=getattr(impl, "sinks", None) is not None,
            attn_chunk_size=getattr(layer, "attention_chunk_size", None),
            kv_sharing=getattr(layer, "kv_sharing_target_layer_name", None) is not None,
        )
    scale = float(getattr(layer, "scale", getattr(impl, "scale", described.softmax_scale)))
    if abs(scale / described.softmax_scale - 1) > 1e-6:
        described = LayerSpec(**{**vars(described), "scale": scale})
    return LayerKind(described, _cache(layer, config, block_size, has_cache=described.has_cache))


def _cache(layer: Any, config: Any, block_size: int, *, has_cache: bool) -> CacheSpec:
    if not has_cache:
        return CacheSpec()
    kept = str(layer.kv_cache_dtype)
    if kept not in get_args(KVCacheDType):
        raise _unsayable("layers with a cache of", kept)
    layout = _LAYOUTS.get(str(getattr(config.cache_config, "kv_cache_layout", None)), "NHD")
    cache: dict[str, Any] = {"block_size": block_size, "layout": layout, "kv_cache_dtype": kept}
    if kept.startswith("fp8"):
        cache |= {f"{name}_scale": float(getattr(layer, f"_{name}_scale_float", 1.0)) for name in ("k", "v")}
    return CacheSpec(**cache)


def _unsayable(what: str, which: str) -> SpecError:
    return SpecError(f"no case describes {what} {which}", field="layer", value=which, allowed="other layers")
