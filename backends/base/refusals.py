"""Raises for a layer or a call that a backend does not declare, before anything is computed.

A bad value raises ``ValueError``, an undeclared feature or combination ``NotImplementedError``. One message names all
problems.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from attncheck.backends.contract import AttentionBackend, AttentionType
from attncheck.backends.dtypes import DTYPES, FP8_DTYPES


def refuse_layer(
    backend: type[AttentionBackend],
    *,
    num_heads: int,
    head_size: int,
    scale: float,
    num_kv_heads: int,
    alibi_slopes: Sequence[float] | None,
    sliding_window: int | None,
    kv_cache_dtype: str,
    logits_soft_cap: float | None,
    attn_type: str,
    kv_sharing_target_layer_name: str | None,
    sinks: Tensor | None,
    head_size_v: int,
) -> None:
    """Raise for a layer that the backend does not support; called by an impl's constructor with resolved defaults."""
    wrong = []
    if min(num_heads, num_kv_heads) < 1 or num_heads % num_kv_heads:
        wrong.append(f"num_kv_heads {num_kv_heads} does not divide num_heads {num_heads}")
    supported_sizes = backend.get_supported_head_sizes()
    for name, size in (("head_size", head_size), ("head_size_v", head_size_v)):
        if size < 1 or (supported_sizes and size not in supported_sizes):
            wrong.append(f"{name} {size}: supported are {', '.join(map(str, supported_sizes)) or 'sizes from 1 on'}")
    if not math.isfinite(scale):
        wrong.append(f"scale {scale} is not finite")
    if sliding_window is not None and sliding_window < 1:
        wrong.append(f"sliding_window {sliding_window}: a window holds at least the query's own key")
    if logits_soft_cap is not None and logits_soft_cap < 0:
        wrong.append(f"logits_soft_cap {logits_soft_cap} is negative")
    for name, given in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if given is not None and len(given) != num_heads:
            wrong.append(f"{name} has {len(given)} values for {num_heads} query heads")
    known_types = [str(kind) for kind in AttentionType]
    if str(attn_type) not in known_types:
        wrong.append(f"attn_type {attn_type!r}: must be one of {', '.join(known_types)}")
    if kv_cache_dtype not in ("auto", *DTYPES, *FP8_DTYPES):
        wrong.append(f"kv_cache_dtype {kv_cache_dtype!r} is unknown")
    _raise(backend, ValueError, wrong)

    needs = {
        f"attn_type {attn_type}": str(attn_type) in [str(kind) for kind in backend.supported_attn_types],
        f"kv_cache_dtype {kv_cache_dtype}": _takes_cache_dtype(backend, kv_cache_dtype),
    }
    needed = {
        "alibi": alibi_slopes is not None,
        "sliding_window": sliding_window is not None,
        "logits_soft_cap": bool(logits_soft_cap),
        "sinks": sinks is not None,
        "head_size_v": head_size_v != head_size,
        "kv_sharing": kv_sharing_target_layer_name is not None,
    }
    needs |= {name: name in backend.features for name, is_needed in needed.items() if is_needed}
    _raise(backend, NotImplementedError, [f"{name} is not supported" for name, is_met in needs.items() if not is_met])


def refuse_undeclared_call(
    backend: type[AttentionBackend],
    *,
    attn_type: str,
    causal: bool,
    has_alibi: bool,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    has_per_head_scales: bool,
    has_output_scale: bool,
    has_output_block_scale: bool,
    has_output_lse: bool,
) -> None:
    """Raise for a step that the backend does not support; ``forward`` calls this."""
    if causal and attn_type != AttentionType.DECODER:
        _raise(
            backend, ValueError, [f"attention of type {attn_type} is not causal, but causal is True in the metadata"]
        )
    is_decoder = attn_type == AttentionType.DECODER
    # Rows are aligned to the end of the keys. Without a causal mask, rows before the first key need no position.
    short = [(q, s) for q, s in zip(query_lens, seq_lens, strict=True) if q > s] if is_decoder and causal else []
    needed = {
        "non_causal": (is_decoder and not causal, "a decoder layer that is not causal"),
        "alibi_non_causal": (has_alibi and not causal, "ALiBi without a causal mask"),
        "short_keys": (bool(short), f"(query_len, seq_len) {short[:1]}: more rows than keys"),
        "fp8_per_head": (has_per_head_scales, "k_scale or v_scale per head"),
        "output_quant": (has_output_scale, "output_scale"),
        "lse": (has_output_lse, "output_lse"),
    }
    missing = [text for name, (is_needed, text) in needed.items() if is_needed and name not in backend.features]
    missing += ["output_block_scale"] if has_output_block_scale else []
    _raise(backend, NotImplementedError, [f"{text} is not supported" for text in missing])


def wrong_cache_dtype(
    backend: type[AttentionBackend], kv_cache_dtype: str, stored: torch.dtype, layer_dtype: torch.dtype
) -> list[str]:
    """Return what is wrong with a cache of dtype ``stored``; an empty list if nothing is."""
    if kv_cache_dtype in FP8_DTYPES:
        expected = {torch.uint8, FP8_DTYPES[kv_cache_dtype]}
    else:
        expected = {layer_dtype, *(DTYPES[name] for name in backend.supported_kv_cache_dtypes if name in DTYPES)}
    return [] if stored in expected else [f"kv_cache has dtype {stored} for kv_cache_dtype {kv_cache_dtype}"]


def _takes_cache_dtype(backend: type[AttentionBackend], kv_cache_dtype: str) -> bool:
    """Return whether the cache dtype may be supported; ``forward``, which has the layer's dtype, decides."""
    if kv_cache_dtype in FP8_DTYPES:
        return kv_cache_dtype in backend.supported_kv_cache_dtypes and "fp8_kv" in backend.features
    return any(name in backend.supported_kv_cache_dtypes for name in ("auto", kv_cache_dtype))


def _raise(backend: type[AttentionBackend], kind: type[Exception], problems: Sequence[str]) -> None:
    if problems:
        raise kind(f"{backend.get_name()}: {'; '.join(problems)}")
