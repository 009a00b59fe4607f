"""vLLM's ``Attention`` or ``MLAAttention`` layer for a backend; the layer constructs the impl, as for a model."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from attncheck.backends.candidates.vllm import package
from attncheck.backends.impl import AttentionLayer, LayerArguments
from attncheck.reference.spec import AttentionType

LAYER_NAME = "layer.1"
"""Layer names hold a number, by which vLLM orders them. A layer whose cache is shared must precede this one."""


def make_layer(their_backend: type[Any], config: Any, given: LayerArguments, sizes: "LatentSizes | None" = None) -> Any:
    """Return the layer, with its impl, registered with ``config`` (vLLM's, made current during construction).

    With ``sizes`` it is an ``MLAAttention`` layer with its ``kv_b_proj``, whose weights are not loaded yet; see
    :func:`load_weights`. Exceptions of the backend, or of vLLM's layer itself, are not caught.

    Raises:
        NotImplementedError: ``MLAAttention`` has no argument for something in ``given``.
    """
    if sizes is not None and (foreign := _without_argument(given)):
        raise NotImplementedError(f"{', '.join(foreign)}: vLLM's MLAAttention has no such argument")
    make = _make_dense if sizes is None else partial(_make_latent, sizes)
    with current(config), torch.device(package.platform().device_type):
        return make(their_backend, config, given)


def _make_dense(their_backend: type[Any], config: Any, given: LayerArguments) -> Any:
    attention = package.find("Attention", "vllm.model_executor.layers.attention", "vllm.attention.layer")
    kinds = package.find("AttentionType", "vllm.v1.attention.backend", "vllm.attention.backends.abstract")
    # Passed only if set, because not every version's layer has the arguments.
    extra: dict[str, Any] = {} if given.sinks is None else {"sinks": given.sinks}
    if given.head_size_v != given.head_size:
        extra["head_size_v"] = given.head_size_v
    set_value_size(their_backend, given.head_size_v)

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
            attn_type=getattr(kinds, str(given.attn_type).upper()),
            kv_sharing_target_layer_name=target,
            attn_backend=their_backend,
            **extra,
        )

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


@dataclass(frozen=True)
class LatentSizes:
    """The sizes of a layer with a latent cache, with vLLM's names."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @classmethod
    def of(cls, layer: Any) -> "LatentSizes":
        """Return the sizes of vLLM's ``layer``, or of the arguments of an impl."""
        return cls(**{name: getattr(layer, name) for name in cls.__dataclass_fields__})

    @classmethod
    def of_row(cls, head_size: int) -> "LatentSizes":
        """Return sizes that fit the width of a cache row: those of DeepSeek where there is room."""
        rotated = 64 if head_size > 64 else 0
        return cls(None, head_size - rotated, 128, rotated, 128)

    @property
    def row_size(self) -> int:
        """Number of columns of a cache row."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def model(self) -> Mapping[str, Any]:
        """Return the further ``config.json`` entries of a model with such layers, by which vLLM treats it as latent."""
        return {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", **asdict(self)}


class KVBProj(torch.nn.Module):
    """The fused, unquantised up-projection. vLLM's own linear layer would need a process group."""

    quant_method = None

    def __init__(self, rank: int, width: int) -> None:
        """Allocate the weight for latent rows of ``rank`` and results of ``width``, in torch's default dtype."""
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(width, rank), requires_grad=False)

    def forward(self, latent: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the projected rows; there is no bias."""
        return torch.nn.functional.linear(latent, self.weight), None


def _make_latent(sizes: LatentSizes, their_backend: type[Any], config: Any, given: LayerArguments) -> Any:
    attention = package.find(
        "MLAAttention", "vllm.model_executor.layers.attention", "vllm.model_executor.layers.attention.mla_attention"
    )
    # Passed only if set, because not every version's layer has the argument.
    extra: dict[str, Any] = {} if given.sliding_window is None else {"sliding_window": given.sliding_window}
    if hasattr(their_backend, "supports_non_causal") and their_backend.supports_non_causal():
        extra["non_causal_multi_token_decode"] = True
    return attention(
        num_heads=given.num_heads,
        scale=given.scale,
        **asdict(sizes),
        kv_b_proj=KVBProj(sizes.kv_lora_rank, given.num_heads * (sizes.qk_nope_head_dim + sizes.v_head_dim)),
        cache_config=config.cache_config,
        prefix=LAYER_NAME,
        attn_backend=their_backend,
        **extra,
    )


def _without_argument(given: LayerArguments) -> list[str]:
    """Return the values in ``given`` for which ``MLAAttention`` has no argument."""
    values = {
        "alibi_slopes": given.alibi_slopes,
        "logits_soft_cap": given.logits_soft_cap or None,
        "attn_type": None if given.attn_type == AttentionType.DECODER else given.attn_type,
        "kv_sharing_target_layer_name": given.kv_sharing_target_layer_name,
    }
    return [f"{name} {value}" for name, value in values.items() if value is not None]


def has_writer(layer: Any) -> bool:
    """Return whether this build of vLLM has the operators with which ``layer`` writes its cache.

    Any other exception of the writer is left to the checks.
    """
    device = torch.device(package.platform().device_type)
    dtype = layer.kv_b_proj.weight.dtype
    latent = torch.zeros(1, layer.kv_lora_rank, dtype=dtype, device=device)
    rotated = torch.zeros(1, 1, layer.qk_rope_head_dim, dtype=dtype, device=device)
    kv_cache = torch.zeros(2, 64, layer.head_size, dtype=dtype, device=device)
    try:
        layer.impl.do_kv_cache_update(
            latent, rotated, kv_cache, torch.ones(1, dtype=torch.int64, device=device), "auto", layer._k_scale
        )
    except AttributeError as error:
        return package.ABSENT_OPERATOR not in str(error)
    except Exception:  # noqa: BLE001 (someone else's code)
        return True
    return True


def load_weights(layer: Any, config: Any, weight: torch.Tensor, act_dtype: torch.dtype) -> None:
    """Copy ``weight`` into ``kv_b_proj``, and let vLLM derive the layer's own tensors from it."""
    with current(config), torch.device(package.platform().device_type), torch.no_grad():
        layer.kv_b_proj.weight.copy_(weight)
        layer.process_weights_after_loading(act_dtype)
