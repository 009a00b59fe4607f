"""vLLM's ``Attention`` layer for the backend under test; vLLM constructs the impl, as for a model."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from attncheck.backends.candidates.vllm import package
from attncheck.backends.impl import AttentionLayer

LAYER_NAME = "layer.1"
"""Layer names hold a number, by which vLLM orders them. A layer whose cache is shared must precede this one."""


@dataclass(frozen=True)
class LayerArguments:
    """The arguments of the contract's impl constructor."""

    num_heads: int
    head_size: int
    scale: float
    num_kv_heads: int
    alibi_slopes: list[float] | None
    sliding_window: int | None
    logits_soft_cap: float | None
    attn_type: str
    kv_sharing_target_layer_name: str | None
    sinks: torch.Tensor | None
    head_size_v: int | None = None


def make_layer(their_backend: type[Any], config: Any, given: LayerArguments) -> Any:
    """Return the layer, with its impl, registered with ``config`` (vLLM's, made current during construction).

    Exceptions of the backend, or of vLLM's layer itself, are not caught.
    """
    attention = package.find("Attention", "vllm.model_executor.layers.attention", "vllm.attention.layer")
    kinds = package.find("AttentionType", "vllm.v1.attention.backend", "vllm.attention.backends.abstract")
    extra: dict[str, Any] = {} if given.sinks is None else {"sinks": given.sinks}
    if given.head_size_v is not None:
        extra["head_size_v"] = given.head_size_v
    set_value_size(their_backend, given.head_size_v or given.head_size)

    def made(name: str, target: str | None) -> Any:
        return attention(
            given.num_heads,
            given.head_size,
            given.scale,
            num_kv_heads=given.num_kv_heads,
            alibi_slopes=given.alibi_slopes,
            cache_config=config.cache_config,
            logits_soft_cap=given.logits_soft_cap,
            per_layer_sliding_window=given.sliding_window,
            prefix=name,
            attn_type=getattr(kinds, given.attn_type.upper()),
            kv_sharing_target_layer_name=target,
            attn_backend=their_backend,
            **extra,
        )

    with current(config), torch.device(package.platform().device_type):
        target = given.kv_sharing_target_layer_name
        if target is not None:
            made(target, None)
        layer = made(LAYER_NAME, target)
        layer.process_weights_after_loading(config.model_config.dtype)
    return layer


def has_value_size(their_backend: type[Any]) -> bool:
    """Return whether the class takes values of another head size than keys."""
    return hasattr(their_backend, "set_head_size_v")


def set_value_size(their_backend: type[Any], head_size_v: int) -> None:
    """Set the head size of values where vLLM's models do: it is an attribute of the class, which each call reads."""
    if has_value_size(their_backend):
        their_backend.set_head_size_v(head_size_v)


@contextmanager
def current(config: Any) -> Iterator[None]:
    """Make ``config`` vLLM's current config, and its dtype torch's default, as during the construction of a model."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(config.model_config.dtype)
    try:
        with package.find("set_current_vllm_config", "vllm.config", "vllm.config.vllm")(config):
            yield
    finally:
        torch.set_default_dtype(before)


def take_scales(layer: Any, attn_layer: AttentionLayer) -> None:
    """Set the scales of the contract's layer on vLLM's ``layer``, in every form in which vLLM keeps them."""
    for name in ("_q_scale", "_k_scale", "_v_scale", "_prob_scale"):
        scale = getattr(attn_layer, name)
        # vLLM stores a scale for the whole tensor without dimensions.
        scale = scale.reshape(()) if scale.numel() == 1 else scale
        setattr(layer, name, scale)
        number = getattr(attn_layer, f"{name}_float", 1.0)
        setattr(layer, f"{name}_float", number)
        setattr(layer, f"{name}_cpu", scale.cpu())
