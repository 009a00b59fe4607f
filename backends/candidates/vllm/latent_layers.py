"""vLLM's ``MLAAttention`` layer around the backend in question, and the config of a model that has such layers."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from attncheck.backends.candidates.vllm import package
from attncheck.backends.candidates.vllm.layers import LAYER_NAME, LayerArguments, current
from attncheck.reference.spec import AttentionType


@dataclass(frozen=True)
class LatentSizes:
    """The sizes of a layer with a latent cache, by vLLM's names."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @classmethod
    def of(cls, layer: Any) -> "LatentSizes":
        """The sizes of vLLM's ``layer``."""
        return cls(**{name: getattr(layer, name) for name in cls.__dataclass_fields__})

    @classmethod
    def of_row(cls, head_size: int) -> "LatentSizes":
        """Return sizes that fit the width of a cache row: those of DeepSeek where there is room."""
        rotated = 64 if head_size > 64 else 0
        return cls(None, head_size - rotated, 128, rotated, 128)

    @property
    def row_size(self) -> int:
        """Columns of a cache row."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def model(self) -> Mapping[str, Any]:
        """What the ``config.json`` of a model with such layers says besides: one that vLLM takes for a latent one."""
        return {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", **asdict(self)}


class KVBProj(torch.nn.Module):
    """The fused up-projection, unquantised: what vLLM's linear layer does, which wants a group of processes."""

    quant_method = None

    def __init__(self, rank: int, width: int) -> None:
        """Of latent rows of ``rank`` to rows of ``width``, in torch's default dtype."""
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(width, rank), requires_grad=False)

    def forward(self, latent: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The projected rows; there is no bias."""
        return torch.nn.functional.linear(latent, self.weight), None


def make_latent_layer(their_backend: type[Any], config: Any, given: LayerArguments, sizes: LatentSizes) -> Any:
    """The layer, its impl and its ``kv_b_proj`` made, whose weights are still to be loaded; see :func:`load_weights`.

    What the backend, or vLLM's layer itself, refuses passes through.

    Raises:
        NotImplementedError: vLLM's layer has no argument for something in ``given``.
    """
    if foreign := _without_argument(given):
        raise NotImplementedError(f"{', '.join(foreign)}: vLLM's MLAAttention has no such argument")
    attention = package.find(
        "MLAAttention", "vllm.model_executor.layers.attention", "vllm.model_executor.layers.attention.mla_attention"
    )
    # Given only where it says something: not every version's layer takes the argument.
    extra: dict[str, Any] = {} if given.sliding_window is None else {"sliding_window": given.sliding_window}
    if hasattr(their_backend, "supports_non_causal") and their_backend.supports_non_causal():
        extra["non_causal_multi_token_decode"] = True
    with current(config), torch.device(package.platform().device_type):
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
    """Return what ``given`` says that ``MLAAttention`` cannot be made with."""
    said = {
        "alibi_slopes": given.alibi_slopes,
        "logits_soft_cap": given.logits_soft_cap or None,
        "attn_type": None if given.attn_type == AttentionType.DECODER.value else given.attn_type,
        "kv_sharing_target_layer_name": given.kv_sharing_target_layer_name,
    }
    return [f"{name} {value}" for name, value in said.items() if value is not None]


def has_writer(layer: Any) -> bool:
    """Whether this build of vLLM has the operators with which ``layer`` writes its cache.

    Whatever else a writer raises is for the checks to find.
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
    """Gives ``kv_b_proj`` its weight, and lets vLLM make of it what the layer keeps."""
    with current(config), torch.device(package.platform().device_type), torch.no_grad():
        layer.kv_b_proj.weight.copy_(weight)
        layer.process_weights_after_loading(act_dtype)
