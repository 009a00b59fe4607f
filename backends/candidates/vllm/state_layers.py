"""vLLM's own layers with a state: the method of each that has the convolution and the recurrence.

A layer of vLLM's consists of projections, a short convolution and a recurrence. Its method runs on a layer object with
the sizes and weights of a case, but without projections, whose results are the inputs of the case. The weights of the
convolution are 0, but 1 for the newest row, so that it returns its input. Decodes, prompts and drafts are divided by
vLLM's code, and its kernels read and write the states.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from attncheck.backends.candidates.vllm import interpreted, package
from attncheck.backends.candidates.vllm.config import their_config
from attncheck.backends.candidates.vllm.layers import LAYER_NAME, current
from attncheck.backends.candidates.vllm.trial import names_missing_parts
from attncheck.backends.impl import get_current_vllm_config
from attncheck.backends.state import StateImpl
from attncheck.reference.spec import LayerSpec
from attncheck.reference.step_spec import RecurrenceOptions, RecurrenceRule

_MAMBA = "vllm.model_executor.layers.mamba"

_WIDTH = 4
"""Rows of a convolution, which is that of all models with such layers."""


class VLLMStateImpl(StateImpl):
    """A layer of vLLM's. ``forward`` of the contract calls :meth:`run` of a subclass."""

    their_rule: ClassVar[RecurrenceRule]
    max_drafts: ClassVar[int | None] = None
    """The most draft tokens of a decode; None for any number."""

    head_sizes: ClassVar[tuple[int, ...]] = ()
    """The head sizes of the kernels; empty for all."""

    is_of_triton: ClassVar[bool] = False
    """Whether its kernels are Triton's on every device. Those of other layers are run on a CPU alone."""

    @names_missing_parts("constructor")
    def __init__(self, **sizes: Any) -> None:
        """See the contract; dtype and number of drafts are those of the current config."""
        super().__init__(**sizes)
        plain = get_current_vllm_config()
        self._config = their_config(plain, model=even_head_size(plain))
        self._dtype = plain.model_config.dtype
        speculative = plain.speculative_config
        self._num_drafts = 0 if speculative is None else speculative.num_speculative_tokens
        with current(self._config), torch.device(package.platform().device_type):
            self._layer = self.made()

    @classmethod
    def refusals(cls, layer: LayerSpec, options: RecurrenceOptions) -> list[str]:
        """Return why vLLM's layer cannot have the sizes, dtypes and options of a case."""
        if not cls.head_sizes or layer.head_size == layer.value_head_size in cls.head_sizes:
            return []
        supported = " or ".join(map(str, cls.head_sizes))
        sizes = f"head_size {layer.head_size} and head_size_v {layer.value_head_size}"
        return [f"{sizes}: vLLM's kernels require {supported} for both"]

    def made(self) -> Any:
        """Return vLLM's layer object, with all that its method reads but weights, caches and metadata."""
        raise NotImplementedError

    def run(self, layer: Any, inputs: Mapping[str, Tensor], states: Tensor, metadata: Any, output: Tensor) -> None:
        """Run the method of vLLM's layer, in its forward context."""
        raise NotImplementedError

    @names_missing_parts("forward")
    def forward(
        self, layer: Any, inputs: Mapping[str, Tensor], states: Tensor, attn_metadata: Any, output: Tensor
    ) -> None:
        """See the contract."""
        self._layer.kv_cache = (*self._conv_states(states), states)
        context = SimpleNamespace(
            attn_metadata={LAYER_NAME: attn_metadata}, no_compile_layers={LAYER_NAME: self._layer}
        )
        module = package.module("vllm.forward_context")
        with module.override_forward_context(context), interpreted.launches():
            self.run(layer, inputs, states, attn_metadata, output)

    def _conv_states(self, states: Tensor) -> tuple[Tensor, ...]:
        """Return a new cache of the convolution, ``[num_slots, rows, channels]``; its layer reads nothing of it."""
        channels = self._layer.conv1d.weight.shape[0]
        rows = _WIDTH - 1 + self._num_drafts
        return (torch.zeros(len(states), rows, channels, dtype=self._dtype, device=states.device),)


class GatedDeltaNet(VLLMStateImpl):
    """The layer of Qwen3-Next and Qwen3.5, which computes ``g`` and ``beta`` from ``a`` and ``b``."""

    their_rule = "gdn"
    head_sizes = (64, 128)

    @classmethod
    def refusals(cls, layer: LayerSpec, options: RecurrenceOptions) -> list[str]:
        """See the base class; the scale and the normalisation are those of the models."""
        reasons = super().refusals(layer, options)
        if not options.qk_l2norm:
            reasons.append("qk_l2norm false: vLLM's layer normalises queries and keys")
        if layer.scale not in (None, layer.head_size**-0.5):
            reasons.append(f"scale {layer.scale}: vLLM's layer has the default")
        if layer.dtype != "bfloat16":
            reasons.append(f"dtype {layer.dtype}: vLLM's layer requires bfloat16 on a CPU")
        return reasons

    def made(self) -> Any:
        """See the base class."""
        kind = package.find("QwenGatedDeltaNetAttention", f"{_MAMBA}.gdn.qwen_gdn_linear_attn")
        key_dim, value_dim = self.num_kv_heads * self.head_size, self.num_heads * self.head_size_v
        return _layer(
            kind,
            tp_size=1,
            num_k_heads=self.num_kv_heads,
            num_v_heads=self.num_heads,
            head_k_dim=self.head_size,
            head_v_dim=self.head_size_v,
            key_dim=key_dim,
            value_dim=value_dim,
            conv1d=_convolution(2 * key_dim + value_dim, self._dtype)[1],
            activation=None,
        )

    def run(self, layer: Any, inputs: Mapping[str, Tensor], states: Tensor, metadata: Any, output: Tensor) -> None:
        """See the base class."""
        self._layer.A_log, self._layer.dt_bias = layer.A_log, layer.dt_bias.to(self._dtype)
        mixed = torch.cat([inputs[name].flatten(1) for name in ("query", "key", "value")], dim=1)
        core = package.module(f"{_MAMBA}.ops.cpu.gdn_attention").cpu_gdn_attention_core
        with _transposed(states):
            core(mixed, inputs["b"], inputs["a"], output, LAYER_NAME)


class Mamba2(VLLMStateImpl):
    """The layer of Mamba-2, without gate and skip connection."""

    their_rule = "mamba2"

    def made(self) -> Any:
        """See the base class."""
        kind = package.find("MambaMixer2", f"{_MAMBA}.mamba_mixer2")
        inner, of_groups = self.num_heads * self.head_size_v, self.num_kv_heads * self.head_size
        weight, convolution = _convolution(inner + 2 * of_groups, self._dtype)
        _initialise_state_update(self._config)
        return _layer(
            kind,
            tp_size=1,
            num_heads=self.num_heads,
            head_dim=self.head_size_v,
            n_groups=self.num_kv_heads,
            ssm_state_size=self.head_size,
            tped_intermediate_size=inner,
            tped_conv_size=inner + 2 * of_groups,
            tped_dt_size=self.num_heads,
            conv1d=convolution,
            conv_weights=weight.view(-1, _WIDTH),
            conv_kernel_size=_WIDTH,
            activation=None,
            split_hidden_states_B_C_fn=lambda rows: rows.split([inner, of_groups, of_groups], dim=-1),
            D=torch.zeros(self.num_heads, dtype=self._dtype),
            num_spec=self._num_drafts,
            use_replayssm=False,
            is_blackwell=False,
            cache_config=self._config.cache_config,
        )

    def run(self, layer: Any, inputs: Mapping[str, Tensor], states: Tensor, metadata: Any, output: Tensor) -> None:
        """See the base class."""
        self._layer.A, self._layer.dt_bias = layer.A, layer.dt_bias.to(self._dtype)
        gate = torch.zeros_like(inputs["x"])
        projected = torch.cat([each.flatten(1) for each in (gate, *(inputs[name] for name in "xBC"), inputs["dt"])], 1)
        self._layer.conv_ssm_forward(projected, output.flatten(1))


class LinearAttention(VLLMStateImpl):
    """The layer of MiniMax-Text-01 behind its activation, in float32. Its queries are those of a case, scaled."""

    their_rule = "linear"
    max_drafts = 0
    head_sizes = (64, 128)
    is_of_triton = True

    def made(self) -> Any:
        """See the base class."""
        kind = package.find("MiniMaxText01LinearAttention", f"{_MAMBA}.linear.minimax_linear_attn")
        return _layer(kind, BLOCK=256, layer_idx=0)

    def run(self, layer: Any, inputs: Mapping[str, Tensor], states: Tensor, metadata: Any, output: Tensor) -> None:
        """See the base class."""
        theirs, slots = self._layer, metadata.state_indices_tensor
        theirs.tp_slope = layer.slopes.view(-1, 1, 1)
        count = metadata.num_prefill_tokens + metadata.num_decode_tokens
        query, key, value = (inputs[name][:count].float() for name in ("query", "key", "value"))
        arguments = query * self.scale, key, value, states, slots, metadata
        clear = package.find("clear_linear_attention_cache_for_new_sequences", f"{_MAMBA}.linear.minimax_linear_attn")
        clear(states, slots, metadata)
        run = theirs._prefill_and_mix_infer if metadata.num_prefills else theirs._decode_infer
        output[:count] = run(*arguments).view(count, *output.shape[1:])

    def _conv_states(self, states: Tensor) -> tuple[Tensor, ...]:
        return ()


class ShortConvolution(VLLMStateImpl):
    """The layer of LFM2 with gates of 1."""

    their_rule = "short_conv"

    @classmethod
    def refusals(cls, layer: LayerSpec, options: RecurrenceOptions) -> list[str]:
        """See the base class; the models have no activation."""
        return [] if options.activation is None else [f"activation {options.activation}: vLLM's layer has none"]

    def made(self) -> Any:
        """See the base class."""
        kind = package.find("ShortConv", f"{_MAMBA}.short_conv")

        def projected(x: Tensor) -> tuple[Tensor, None]:
            gate = torch.ones_like(x)
            return torch.cat([gate, gate, x], dim=-1), None

        return _layer(kind, in_proj=projected, out_proj=lambda rows: (rows, None))

    def run(self, layer: Any, inputs: Mapping[str, Tensor], states: Tensor, metadata: Any, output: Tensor) -> None:
        """See the base class."""
        self._layer.conv = SimpleNamespace(weight=layer.weight[:, None], bias=layer.bias)
        self._layer.forward_native(inputs["x"], output)

    def _conv_states(self, states: Tensor) -> tuple[Tensor, ...]:
        return ()


def even_head_size(plain: Any) -> dict[str, int]:
    """Return the entry of a model's config for its head size, rounded up: vLLM refuses an odd one, as of 5 taps."""
    size = plain.model_config.get_head_size()
    return {"head_dim": size + size % 2}


def _layer(kind: type[Any], **attributes: Any) -> Any:
    """Return an object of vLLM's class ``kind`` with these attributes, whose constructor would need a model."""
    made = object.__new__(kind)
    torch.nn.Module.__init__(made)
    for name, value in {"prefix": LAYER_NAME, **attributes}.items():
        setattr(made, name, value)
    return made


def _convolution(channels: int, dtype: torch.dtype) -> tuple[Tensor, Any]:
    """Return the weight of a depthwise convolution that returns its input, and the module, whose weight is packed.

    vLLM packs weights when they are loaded. Some layers keep a view of the plain one.
    """
    made: Any = torch.nn.Module()
    weight = torch.zeros(channels, 1, _WIDTH, dtype=dtype)
    weight[:, :, -1] = 1
    made.weight, made.bias = torch.nn.Parameter(weight, requires_grad=False), None
    if package.platform().is_cpu():
        package.module("vllm.model_executor.layers.utils").dispatch_cpu_unquantized_gemm(made, remove_weight=False)
    return weight, made


@contextmanager
def _transposed(states: Tensor) -> Iterator[None]:
    """Store each matrix ``[V, K]`` as ``[K, V]`` in the same memory inside the context, as vLLM's CPU kernels do."""
    slots, heads, values, keys = states.shape
    states.copy_(states.transpose(-1, -2).clone(memory_format=torch.contiguous_format).view(states.shape))
    try:
        yield
    finally:
        theirs = states.clone(memory_format=torch.contiguous_format).view(slots, heads, keys, values)
        states.copy_(theirs.transpose(-1, -2))


def _initialise_state_update(config: Any) -> None:
    """Let vLLM choose its function for decodes of Mamba, as its model runner does."""
    module = package.module(f"{_MAMBA}.ops.ssu_dispatch")
    kinds = package.find("MambaAttentionBackendEnum", "vllm.v1.attention.backends.registry")
    specs = package.module("vllm.v1.kv_cache_interface")
    spec = specs.MambaSpec(block_size=1, shapes=((1,),), dtypes=(torch.float32,), mamba_type=kinds.MAMBA2)
    module.initialize_mamba_ssu_backend(
        config.mamba_config, SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
    )


LAYERS: Mapping[str, type[VLLMStateImpl]] = MappingProxyType(
    {
        "GDN_ATTN": GatedDeltaNet,
        "MAMBA2_ATTN": Mamba2,
        "LINEAR_ATTN": LinearAttention,
        "SHORT_CONV_ATTN": ShortConvolution,
    }
)
"""The layer by the name of its class."""
