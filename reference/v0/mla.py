"""The sizes of multi-head latent attention in a model's configuration."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MLADims:
    """Widths of the projections and of the latent cache row."""

    q_lora_rank: int | None
    """Width of the query's latent; None if the query is projected directly."""
    kv_lora_rank: int
    """Width of the latent part of a cache row."""
    qk_nope_head_dim: int
    """Width of q and k without rotary embedding."""
    qk_rope_head_dim: int
    """Width of q and k with rotary embedding."""
    v_head_dim: int
    """Width of a value head."""


def get_mla_dims(model_config: Any) -> MLADims:
    """Return the sizes in ``model_config.hf_text_config``, whose ``q_lora_rank`` may be absent or None.

    ``hf_config`` is not read, because a multi-modal model has its language model's sizes in the text config. Raise
    ``AttributeError`` with the name of the first of the other four sizes that is missing.

    >>> from types import SimpleNamespace
    >>> sizes = SimpleNamespace(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    >>> get_mla_dims(SimpleNamespace(hf_text_config=sizes))
    MLADims(q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    """
    config = model_config.hf_text_config
    return MLADims(
        q_lora_rank=getattr(config, "q_lora_rank", None),
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
    )
