"""Driving layers with a latent cache: what their impl and codec are handed in place of keys and values.

Everything else of the harness sees heads: latent rows as keys ``[n, 1, L]``, rotated parts as values ``[n, 1, E]``, and
outputs ``[n, H, V]``. The two classes here translate for the contract.
"""

from typing import Any

import torch
from torch import Tensor

from attncheck.backends.caches.codecs import KVCacheCodec
from attncheck.harness.problem.latent import UpProjections
from attncheck.reference.spec import MLASpec


class KVBProj:
    """The fused up-projection, as a model's linear layer offers it."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, latent: Tensor) -> tuple[Tensor, None]:
        """``[n, kv_lora_rank]`` projected to ``[n, num_heads * (qk_nope_head_dim + v_head_dim)]``; there is no bias.

        Summed in float32 and rounded once, so that nothing but its own arithmetic is laid to a backend.
        """
        return torch.nn.functional.linear(latent.float(), self.weight.float()).to(latent.dtype), None


def latent_keywords(mla: MLASpec, weights: UpProjections, device: torch.device) -> dict[str, Any]:
    """What the constructor gets behind the ten arguments."""
    return {
        "q_lora_rank": None,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "qk_head_dim": mla.qk_nope_head_dim + mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "kv_b_proj": KVBProj(weights.fused().to(device)),
    }


class LatentImplView:
    """An impl of latent attention as one that takes heads; other attributes are the impl's own."""

    def __init__(self, impl: Any, act_dtype: torch.dtype) -> None:
        self._impl = impl
        if hasattr(impl, "process_weights_after_loading"):
            impl.process_weights_after_loading(act_dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._impl, name)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        **keywords: Any,
    ) -> object:
        """``output [tokens, H, V]`` is handed on as ``[tokens, H * V]``, the same memory."""
        latent = None if key is None else key[:, 0]
        return self._impl.forward(
            layer, query, latent, value, kv_cache, attn_metadata, output=output.flatten(1), **keywords
        )

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Latent rows ``[n, L]`` and rotated parts ``[n, 1, E]``, as ``forward`` gets them."""
        self._impl.do_kv_cache_update(layer, key[:, 0], value, kv_cache, slot_mapping)


class LatentCodecView:
    """A codec of a latent cache as one that takes heads."""

    def __init__(self, codec: KVCacheCodec) -> None:
        self.codec = codec

    def write(self, kv_cache: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """``key [n, 1, L]``, ``value [n, 1, E]``."""
        self.codec.write(kv_cache, slots, key[:, 0], value[:, 0])

    def read(self, kv_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """As :meth:`write` takes them."""
        latent, rotary = self.codec.read(kv_cache, slots)
        return latent[:, None], rotary[:, None]
