"""The config that a builder reads and the layer that ``forward`` reads, with only the attributes the contract names.

Reading any other attribute of a config fails with its name, so that a backend that relies on one fails at once.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from attncheck.harness.problem.draft_trees import token_tree
from attncheck.reference.spec import CacheSpec, LayerSpec, PathSpec, SpecDecodeOptions, TreeOptions


class ConfigNode:
    """Attributes given at construction. Reading any other raises AttributeError with its name and the known ones."""

    def __init__(self, path: str, **values: object) -> None:
        self._path = path
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        known = ", ".join(sorted(key for key in self.__dict__ if not key.startswith("_")))
        raise AttributeError(f"{self._path} has no {name!r}: the contract provides {known}")


def vllm_config(
    layer: LayerSpec,
    cache: CacheSpec,
    dtype: torch.dtype,
    *,
    max_model_len: int,
    max_num_seqs: int,
    max_tokens: int,
    num_blocks: int = 0,
    path: PathSpec = PathSpec(),  # noqa: B008 (frozen)
    capture_sizes: tuple[int, ...] = (),
    layers: Mapping[str, "LayerStub"] = MappingProxyType({}),
) -> ConfigNode:
    """Return the ``vllm_config`` that a builder reads, for one layer, cache and execution path.

    ``num_blocks``: pages of the pool. ``capture_sizes``: token counts of the graphs that will be captured, ascending.
    ``layers``: the layers constructed so far, by name.
    """
    model = ConfigNode(
        "vllm_config.model_config",
        dtype=dtype,
        max_model_len=max_model_len,
        get_num_attention_heads=lambda _parallel_config: layer.num_heads,
        get_num_kv_heads=lambda _parallel_config: layer.num_kv_heads,
        get_head_size=lambda: layer.head_size,
    )
    return ConfigNode(
        "vllm_config",
        model_config=model,
        cache_config=ConfigNode(
            "vllm_config.cache_config",
            block_size=cache.block_size,
            cache_dtype=cache.kv_cache_dtype,
            kv_cache_layout=cache.layout,
            num_gpu_blocks=num_blocks or 1,  # as in vLLM: 1 without a pool
        ),
        scheduler_config=ConfigNode(
            "vllm_config.scheduler_config", max_num_seqs=max_num_seqs, max_num_batched_tokens=max_tokens
        ),
        parallel_config=ConfigNode(
            "vllm_config.parallel_config",
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
        ),
        compilation_config=ConfigNode(
            "vllm_config.compilation_config",
            cudagraph_capture_sizes=list(capture_sizes),
            max_cudagraph_capture_size=max(capture_sizes, default=0),
            static_forward_context=dict(layers),
        ),
        speculative_config=_speculative_config(path),
    )


def _speculative_config(path: PathSpec) -> ConfigNode | None:
    """Return the config of a path that verifies drafts, with the tree of drafts if it has one; None for other paths."""
    match path.options:
        case SpecDecodeOptions(num_speculative_tokens=drafts):
            tree = None
        case TreeOptions(parents=parents):
            drafts, tree = len(parents) - 1, token_tree(parents)
        case _:
            return None
    return ConfigNode("vllm_config.speculative_config", num_speculative_tokens=drafts, speculative_token_tree=tree)


class LayerStub:
    """The ``AttentionLayer`` that ``forward`` takes: scales as float32 tensors, and their host copies."""

    impl: Any
    """The impl that runs the layer, set once it is constructed; builders find it by the layer's name."""

    def __init__(self, cache: CacheSpec, device: torch.device) -> None:
        self._q_scale, self._q_scale_float = _scale(cache.q_scale, device)
        self._k_scale, self._k_scale_float = _scale(cache.k_scale, device)
        self._v_scale, self._v_scale_float = _scale(cache.v_scale, device)
        self._prob_scale, _ = _scale(1.0, device)


def _scale(scale: float | tuple[float, ...], device: torch.device) -> tuple[Tensor, float]:
    """Return a scale's tensor (one element, or one per KV head) and its host copy, which is NaN for per-head scales."""
    values = scale if isinstance(scale, tuple) else (scale,)
    tensor = torch.tensor(values, dtype=torch.float32, device=device)
    return tensor, float(values[0]) if len(values) == 1 else math.nan
