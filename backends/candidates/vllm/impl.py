"""The impl: forwards the contract's calls to vLLM's layer and the impl that the layer constructed."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from attncheck.backends.candidates.vllm import interpreted
from attncheck.backends.candidates.vllm.cache import their_spec
from attncheck.backends.candidates.vllm.config import soft_cap_entry, their_config
from attncheck.backends.candidates.vllm.declarations import fuses
from attncheck.backends.candidates.vllm.layers import (
    LayerArguments,
    current,
    has_value_size,
    make_layer,
    set_value_size,
    take_scales,
)
from attncheck.backends.candidates.vllm.trial import names_missing_parts
from attncheck.backends.candidates.vllm.validation import refuse_as_vllm_does
from attncheck.backends.contract import KVCacheSpec, QuantKey
from attncheck.backends.impl import AttentionImpl, AttentionLayer, get_current_vllm_config
from attncheck.reference.spec import AttentionType


class VLLMImpl(AttentionImpl[Any]):
    """vLLM's ``Attention`` layer with the impl of :attr:`their_backend`."""

    their_backend: ClassVar[type[Any]]
    """vLLM's class."""

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
        sinks: Tensor | None = None,
        head_size_v: int | None = None,
    ) -> None:
        """See the contract; the cache dtype is that of the current config, as in vLLM's layer."""
        plain = get_current_vllm_config()
        if head_size_v not in (None, head_size) and not has_value_size(self.their_backend):
            # vLLM's layer accepts it but does not pass it to the impl, which then writes past the end of the output.
            raise NotImplementedError(
                f"head_size_v {head_size_v}: vLLM passes one head size to an impl, and this is another"
            )
        given = LayerArguments(
            num_heads=num_heads,
            head_size=head_size,
            scale=scale,
            num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
            alibi_slopes=alibi_slopes,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            attn_type=str(attn_type),
            kv_sharing_target_layer_name=kv_sharing_target_layer_name,
            sinks=sinks,
            head_size_v=head_size_v,
        )
        self._head_size_v = head_size if head_size_v is None else head_size_v
        self.config = their_config(plain, model=soft_cap_entry(logits_soft_cap))
        refuse_as_vllm_does(self.their_backend, self.config, given)
        self.layer = make_layer(self.their_backend, self.config, given)
        """The layer object of vLLM."""
        self._has_builder = False
        self._scaled_as: AttentionLayer | None = None

    def join(self, attn_layer: AttentionLayer) -> Any:
        """Return the layer in vLLM's form for a builder's group, with the scales of the contract's ``attn_layer``."""
        self._has_builder = True
        self._take_scales(attn_layer)
        return self.layer

    @names_missing_parts("writer")
    def do_kv_cache_update(
        self, layer: AttentionLayer, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """See the contract."""
        self._prepare(layer, key.device)
        with interpreted.launches():
            self.layer.impl.do_kv_cache_update(self.layer, key, value, kv_cache, slot_mapping)

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
        """See the contract. Like vLLM's layer, this ignores what vLLM's impl returns; the result is ``output``."""
        if output is None:
            raise ValueError("output is None: vLLM's layer always gives one")
        self._prepare(layer, query.device)
        if getattr(self.layer, "query_quant", None) is not None:
            codes, _ = self.layer.query_quant(query.flatten(1), self.layer._q_scale)
            query = codes.view(query.shape)
        with interpreted.launches():
            self.layer.impl.forward(
                self.layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output=output,
                output_scale=output_scale,
                output_block_scale=output_block_scale,
            )
        if hasattr(self.layer, "isa"):  # set by the CPU backend's builder
            self.chosen_kernels = (str(self.layer.isa),)
        return output

    def fused_output_quant_supported(self, quant_key: QuantKey) -> bool:
        """See the contract; the key is converted to vLLM's."""
        return fuses(self.layer.impl, quant_key)

    def _take_scales(self, attn_layer: AttentionLayer) -> None:
        if attn_layer is not self._scaled_as:
            take_scales(self.layer, attn_layer)
            self._scaled_as = attn_layer

    def _prepare(self, attn_layer: AttentionLayer, device: torch.device) -> None:
        """Bring the layer and its class to their state before a step; construct a builder for the layer's group."""
        self._take_scales(attn_layer)
        set_value_size(self.their_backend, self._head_size_v)
        if self._has_builder:
            return
        layer, config = self.layer, self.config
        spec = KVCacheSpec(
            block_size=config.cache_config.block_size,
            num_kv_heads=layer.num_kv_heads,
            head_size=layer.head_size,
            dtype=layer.kv_cache_torch_dtype,
            head_size_v=self._head_size_v,
        )
        with current(config):
            builder = self.their_backend.get_builder_cls()
            builder(their_spec(layer, self.their_backend, config, spec), [layer.layer_name], config, device)
        self._has_builder = True
