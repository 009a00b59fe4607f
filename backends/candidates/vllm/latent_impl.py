"""The impl of a latent backend: forwards the contract's calls to vLLM's ``MLAAttention`` layer."""

from typing import Any

import torch
from torch import Tensor

from attncheck.backends.candidates.vllm import interpreted
from attncheck.backends.candidates.vllm.config import their_config
from attncheck.backends.candidates.vllm.impl import VLLMImpl
from attncheck.backends.candidates.vllm.latent_layers import LatentSizes, load_weights, make_latent_layer
from attncheck.backends.candidates.vllm.layers import LayerArguments
from attncheck.backends.candidates.vllm.trial import names_missing_parts
from attncheck.backends.candidates.vllm.validation import refuse_as_vllm_does
from attncheck.backends.impl import AttentionLayer, get_current_vllm_config
from attncheck.reference.spec import AttentionType


class VLLMLatentImpl(VLLMImpl):
    """vLLM's ``MLAAttention`` layer with the impl of :attr:`their_backend`."""

    @names_missing_parts("constructor")
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        *,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        qk_head_dim: int,
        v_head_dim: int,
        kv_b_proj: Any,
    ) -> None:
        """See the contract; the cache dtype is that of the current config, as in vLLM's layer."""
        sizes = LatentSizes(q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim)
        if (num_kv_heads, head_size) != (1, sizes.row_size):
            raise ValueError(
                f"num_kv_heads {num_kv_heads}, head_size {head_size}: a latent cache has 1 and {sizes.row_size}"
            )
        given = LayerArguments(
            num_heads=num_heads,
            head_size=head_size,
            scale=scale,
            num_kv_heads=1,
            alibi_slopes=alibi_slopes,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            attn_type=str(attn_type),
            kv_sharing_target_layer_name=kv_sharing_target_layer_name,
            sinks=None,
        )
        self.config = their_config(get_current_vllm_config(), model=sizes.model())
        refuse_as_vllm_does(self.their_backend, self.config, given, use_mla=True)
        self.layer = make_latent_layer(self.their_backend, self.config, given, sizes)
        """The layer object of vLLM."""
        self._kv_b_proj = kv_b_proj
        self._has_builder = True  # each step has one, and vLLM's writer needs none
        self._scaled_as: AttentionLayer | None = None

    @names_missing_parts("weights")
    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """See the contract."""
        load_weights(self.layer, self.config, self._kv_b_proj.weight, act_dtype)

    @names_missing_parts("writer")
    def do_kv_cache_update(
        self, layer: AttentionLayer, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """See the contract; ``key`` is ``kv_c_normed``, ``value`` is ``k_pe``."""
        self._take_scales(layer)
        theirs = self.layer
        with interpreted.launches():
            theirs.impl.do_kv_cache_update(key, value, kv_cache, slot_mapping, theirs.kv_cache_dtype, theirs._k_scale)

    @names_missing_parts("forward")
    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor | None = None,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """See the contract; the layer's own ``forward_impl`` splits the step into decodes and prompts."""
        if output is None:
            raise ValueError("output is None: vLLM's layer always gives one")
        self._take_scales(layer)
        with interpreted.launches():
            self.layer.forward_impl(
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output=output,
                output_scale=output_scale,
                output_block_scale=output_block_scale,
            )
        return output
