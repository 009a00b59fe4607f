"""Translate between heads and the arguments that impls and codecs of latent attention (MLA) take.

The rest of the harness works with heads: latent rows as keys ``[n, 1, L]``, rotary parts as values ``[n, 1, E]``, and
outputs ``[n, H, V]``.
"""

from typing import Any

import torch
from torch import Tensor

from attncheck.backends.caches.codecs import KVCacheCodec
from attncheck.harness.problem.latent import UpProjections
from attncheck.reference.spec import MLASpec


class KVBProj:
    """The fused up-projection, called like a model's linear layer."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, latent: Tensor) -> tuple[Tensor, None]:
        """Project ``[n, kv_lora_rank]`` to ``[n, num_heads * (qk_nope_head_dim + v_head_dim)]``; the bias is None."""
        # Sum in float32 and round once, so that a backend's error contains only its own arithmetic.
        return torch.nn.functional.linear(latent.float(), self.weight.float()).to(latent.dtype), None


def latent_keywords(mla: MLASpec, weights: UpProjections, device: torch.device) -> dict[str, Any]:
    """Return the keywords that an MLA impl's constructor takes after its ten positional arguments."""
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
    """An impl of latent attention behind an interface of heads; other attributes are those of the impl."""

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
        """Call the impl with ``output [tokens, H, V]`` as ``[tokens, H * V]`` in the same memory."""
        latent = None if key is None else key[:, 0]
        return self._impl.forward(
            layer, query, latent, value, kv_cache, attn_metadata, output=output.flatten(1), **keywords
        )

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Pass the impl latent rows ``[n, L]`` and rotary parts ``[n, 1, E]``, as in :meth:`forward`."""
        self._impl.do_kv_cache_update(layer, key[:, 0], value, kv_cache, slot_mapping)


class LatentCodecView:
    """A codec of a latent cache behind an interface of heads."""

    def __init__(self, codec: KVCacheCodec) -> None:
        self.codec = codec

    def write(self, kv_cache: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store ``key [n, 1, L]`` and ``value [n, 1, E]`` at ``slots``."""
        self.codec.write(kv_cache, slots, key[:, 0], value[:, 0])

    def read(self, kv_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``key [n, 1, L]`` and ``value [n, 1, E]`` at ``slots``."""
        latent, rotary = self.codec.read(kv_cache, slots)
        return latent[:, None], rotary[:, None]
