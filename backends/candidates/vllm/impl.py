"""The impl: forwards the contract's calls to vLLM's layer and the impl that the layer constructed."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from attncheck.backends.candidates.vllm import interpreted
from attncheck.backends.candidates.vllm.cache import their_spec
from attncheck.backends.candidates.vllm.config import soft_cap_entry, their_config
from attncheck.backends.candidates.vllm.declarations import fuses, refuse_as_vllm_does
from attncheck.backends.candidates.vllm.layers import (
    LatentSizes,
    current,
    has_value_size,
    load_weights,
    make_layer,
    set_value_size,
    take_scales,
)
from attncheck.backends.candidates.vllm.trial import names_missing_parts
from attncheck.backends.contract import KVCacheSpec, QuantKey
from attncheck.backends.impl import (
    AttentionImpl,
    AttentionLayer,
    LatentArguments,
    LayerArguments,
    get_current_vllm_config,
)
from attncheck.reference.step_spec import ROW_FORMATS


class VLLMImpl(AttentionImpl[Any]):
    """vLLM's ``Attention`` layer with the impl of :attr:`their_backend`."""

    their_backend: ClassVar[type[Any]]
    """vLLM's class."""

    _arguments: ClassVar[type[LayerArguments]] = LayerArguments
    _has_builder = False

    @names_missing_parts("constructor")
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """See the contract; the cache dtype is that of the current config, as in vLLM's layer."""
        self._given = self._arguments(*args, **kwargs)
        sizes = self._latent_sizes()
        model = soft_cap_entry(self._given.logits_soft_cap) if sizes is None else sizes.model()
        self.config = their_config(get_current_vllm_config(), model=model)
        refuse_as_vllm_does(self.their_backend, self.config, self._given)
        self.layer = make_layer(self.their_backend, self.config, self._given, sizes)
        """The layer object of vLLM."""
        self._scaled_as: AttentionLayer | None = None
        self._cache_seen = 0

    def join(self, attn_layer: AttentionLayer) -> Any:
        """Return the layer in vLLM's form for a builder's group, with the scales of the contract's ``attn_layer``."""
        self._has_builder = True
        self._take_scales(attn_layer)
        return self.layer

    @names_missing_parts("writer")
    def do_kv_cache_update(
        self, layer: AttentionLayer, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """See the contract; for a latent cache ``key`` is ``kv_c_normed``, and ``value`` is ``k_pe``."""
        self._prepare(layer, key.device)
        self._take_cache(kv_cache)
        with interpreted.launches():
            self._write(key, value, kv_cache, slot_mapping)

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
        self._take_cache(kv_cache)
        outputs = {"output": output, "output_scale": output_scale, "output_block_scale": output_block_scale}
        with interpreted.launches():
            self._attend(query, key, value, kv_cache, attn_metadata, **outputs)
        return output

    def _latent_sizes(self) -> LatentSizes | None:
        """Return the sizes of a latent layer, None for any other; raise for sizes that vLLM's layer does not refuse."""
        head_size_v = self._given.head_size_v
        if head_size_v != self._given.head_size and not has_value_size(self.their_backend):
            # vLLM's layer accepts it but does not pass it to the impl, which then writes past the end of the output.
            raise NotImplementedError(
                f"head_size_v {head_size_v}: vLLM passes one head size to an impl, and this is another"
            )
        return None

    def _write(self, *operands: Tensor) -> None:
        self.layer.impl.do_kv_cache_update(self.layer, *operands)

    def _attend(self, query: Tensor, *operands: Any, **outputs: Tensor | None) -> None:
        if query.itemsize > 1 and getattr(self.layer, "query_quant", None) is not None:
            codes, _ = self.layer.query_quant(query.flatten(1), self.layer._q_scale)
            query = codes.view(query.shape)
        self.layer.impl.forward(self.layer, query, *operands, **outputs)
        if hasattr(self.layer, "isa"):  # set by the CPU backend's builder
            self.chosen_kernels = (str(self.layer.isa),)

    @property
    def supports_quant_query_input(self) -> bool:  # type: ignore[override]  # vLLM's impl decides in its constructor
        """See the contract."""
        return bool(getattr(self.layer.impl, "supports_quant_query_input", False))

    def fused_output_quant_supported(self, quant_key: QuantKey) -> bool:
        """See the contract; the key is converted to vLLM's."""
        return fuses(self.layer.impl, quant_key)

    def _take_scales(self, attn_layer: AttentionLayer) -> None:
        if attn_layer is not self._scaled_as:
            if attn_layer._k_scale.numel() > 1 or attn_layer._v_scale.numel() > 1:
                # vLLM knows this from the checkpoint's config before it constructs the layer; the contract's layer
                # gets its scales afterwards.
                refuse_as_vllm_does(self.their_backend, self.config, self._given, scales_per_head=True)
            take_scales(self.layer, attn_layer)
            self._scaled_as = attn_layer

    def _take_cache(self, kv_cache: Tensor) -> None:
        """Have vLLM's impl make its views of the scales in ``kv_cache``, and keep the contents.

        It makes them at its first step, and then sets every scale to 1: in an engine, the cache is empty, and a layer
        has a single one.
        """
        impl = self.layer.impl
        if self._given.kv_cache_dtype not in ROW_FORMATS or not hasattr(impl, "_ensure_scale_caches"):
            return
        if kv_cache.data_ptr() != self._cache_seen and kv_cache.numel():
            self._cache_seen = kv_cache.data_ptr()
            contents = kv_cache.clone()
            impl._k_scale_cache = impl._v_scale_cache = None
            impl._ensure_scale_caches(kv_cache)
            kv_cache.copy_(contents)

    def _prepare(self, attn_layer: AttentionLayer, device: torch.device) -> None:
        """Bring the layer and its class to their state before a step; construct a builder for the layer's group."""
        self._take_scales(attn_layer)
        set_value_size(self.their_backend, self._given.head_size_v)
        if self._has_builder:
            return
        layer, config = self.layer, self.config
        spec = KVCacheSpec(
            block_size=config.cache_config.block_size,
            num_kv_heads=layer.num_kv_heads,
            head_size=layer.head_size,
            dtype=layer.kv_cache_torch_dtype,
            head_size_v=self._given.head_size_v,
        )
        with current(config):
            builder = self.their_backend.get_builder_cls()
            builder(their_spec(layer, self.their_backend, config, spec), [layer.layer_name], config, device)
        self._has_builder = True


class VLLMLatentImpl(VLLMImpl):
    """vLLM's ``MLAAttention`` layer with the impl of :attr:`their_backend`."""

    _arguments = LatentArguments
    _given: LatentArguments
    _has_builder = True  # each step has one, and vLLM's writer needs none

    @names_missing_parts("weights")
    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """See the contract."""
        load_weights(self.layer, self.config, self._given.kv_b_proj.weight, act_dtype)

    def _latent_sizes(self) -> LatentSizes:
        given, sizes = self._given, LatentSizes.of(self._given)
        if (given.num_kv_heads, given.head_size) != (1, sizes.row_size):
            found = f"num_kv_heads {given.num_kv_heads}, head_size {given.head_size}"
            raise ValueError(f"{found}: a latent cache has 1 and {sizes.row_size}")
        return sizes

    def _write(self, *operands: Tensor) -> None:
        self.layer.impl.do_kv_cache_update(*operands, self.layer.kv_cache_dtype, self.layer._k_scale)

    def _attend(self, query: Tensor, *operands: Any, **outputs: Tensor | None) -> None:
        # The layer's own forward_impl splits the step into decodes and prompts.
        self.layer.forward_impl(query, *operands, **outputs)
