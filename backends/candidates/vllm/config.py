"""vLLM's config object for a builder, constructed from the plain one, without a model and without a download.

vLLM reads a model's sizes from a ``config.json``. One with the case's sizes is written to a temporary folder, which is
all that its constructors read.
"""

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch

from attncheck.backends.candidates.vllm import package
from attncheck.backends.candidates.vllm.cache import THEIR_LAYOUTS


def their_config(
    plain: Any,
    layers: Mapping[str, Any] = MappingProxyType({}),
    *,
    model: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Return a ``VllmConfig`` with the values of ``plain``, and ``layers`` (vLLM's, by name) in its forward context.

    model: entries of the model's ``config.json`` that are added, or replace those derived from ``plain``.

    Raises:
        NotImplementedError: drafts are verified as a tree, for which vLLM's configs have no field.
    """
    speculative = plain.speculative_config
    if speculative is not None and speculative.speculative_token_tree is not None:
        raise NotImplementedError("speculative_token_tree: vLLM's SpeculativeConfig has no tree of drafts")
    config = deepcopy(_made(_sizes_of(plain, model)))
    _restore(config, plain)
    config.compilation_config.static_forward_context.update(layers)
    return config


@dataclass(frozen=True)
class _Sizes:
    """The values of a plain config that vLLM's constructors read."""

    dtype: torch.dtype
    max_model_len: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    cache_dtype: str
    max_num_seqs: int
    max_num_batched_tokens: int
    num_drafts: int | None
    more: str
    """Further entries of the model's ``config.json``, as JSON."""


def _sizes_of(plain: Any, more: Mapping[str, Any]) -> _Sizes:
    model, speculative = plain.model_config, plain.speculative_config
    prefixes = {"is_mm_prefix_lm": uses_image_spans(plain), "rswa_window": uses_rswa_window(plain)}
    more = {**more, **{name: value for name, value in prefixes.items() if value}}
    return _Sizes(
        dtype=model.dtype,
        max_model_len=model.max_model_len,
        num_heads=model.get_num_attention_heads(None),
        num_kv_heads=model.get_num_kv_heads(None),
        head_size=model.get_head_size(),
        block_size=plain.cache_config.block_size,
        cache_dtype=plain.cache_config.cache_dtype,
        max_num_seqs=plain.scheduler_config.max_num_seqs,
        max_num_batched_tokens=plain.scheduler_config.max_num_batched_tokens,
        num_drafts=None if speculative is None else speculative.num_speculative_tokens,
        more=json.dumps(dict(more), sort_keys=True),
    )


def uses_image_spans(plain: Any) -> bool:
    """Return whether requests have image spans (``is_mm_prefix_lm``); a config of no case has none."""
    return bool(getattr(plain.model_config, "is_mm_prefix_lm", False))


def uses_rswa_window(plain: Any) -> int | None:
    """Return the window beside first keys (``rswa_window``), or None."""
    found: int | None = getattr(plain.model_config, "rswa_window", None)
    return found


@lru_cache(maxsize=64)
def _made(sizes: _Sizes) -> Any:
    """Return vLLM's config of these sizes. Copy it before use: constructing one takes ten times as long as a copy."""
    configs = package.module("vllm.config")
    with package.kept_environment():
        model = _model_config(configs, sizes)
        return configs.VllmConfig(
            model_config=model,
            cache_config=configs.CacheConfig(block_size=sizes.block_size, cache_dtype=sizes.cache_dtype),
            parallel_config=configs.ParallelConfig(),
            scheduler_config=_scheduler_config(configs, sizes),
            compilation_config=configs.CompilationConfig(),
            speculative_config=_speculative_config(configs, sizes, model),
        )


def soft_cap_entry(logits_soft_cap: float | None) -> Mapping[str, Any]:
    """Return the entry of a model's ``config.json`` by which vLLM chooses kernels that cap logits; {} without a cap."""
    return {"attn_logit_softcapping": logits_soft_cap} if logits_soft_cap else {}


def plain_config(
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    *,
    block_size: int,
    cache_dtype: str = "auto",
    kv_cache_layout: str = "NHD",
    num_gpu_blocks: int | None = None,
    max_tokens: int = 1024,
) -> Any:
    """Return a config like those of the contract, for a layer that belongs to no case."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            dtype=dtype,
            max_model_len=max_tokens,
            get_num_attention_heads=lambda _parallel_config: num_heads,
            get_num_kv_heads=lambda _parallel_config: num_kv_heads,
            get_head_size=lambda: head_size,
        ),
        cache_config=SimpleNamespace(
            block_size=block_size,
            cache_dtype=cache_dtype,
            kv_cache_layout=kv_cache_layout,
            num_gpu_blocks=num_gpu_blocks,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=max_tokens),
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=[], max_cudagraph_capture_size=0, static_forward_context={}
        ),
        speculative_config=None,
    )


def _restore(config: Any, plain: Any) -> None:
    """Undo the changes that vLLM's platforms made to the config, which prepare an engine."""
    compilation = config.compilation_config
    modes = package.find("CUDAGraphMode", "vllm.config", "vllm.config.compilation")
    sizes = list(plain.compilation_config.cudagraph_capture_sizes)
    # Builders that report what a graph freezes need a graph mode, also on a CPU.
    compilation.cudagraph_mode = modes.FULL if sizes else modes.NONE
    compilation.cudagraph_capture_sizes = sizes
    compilation.max_cudagraph_capture_size = plain.compilation_config.max_cudagraph_capture_size
    config.cache_config.block_size = plain.cache_config.block_size
    config.cache_config.num_gpu_blocks = plain.cache_config.num_gpu_blocks
    if hasattr(config.cache_config, "kv_cache_layout"):  # an engine sets it once all of its layers are known
        config.cache_config.kv_cache_layout = THEIR_LAYOUTS[plain.cache_config.kv_cache_layout]
    config.scheduler_config.max_num_seqs = plain.scheduler_config.max_num_seqs
    config.scheduler_config.max_num_batched_tokens = plain.scheduler_config.max_num_batched_tokens


def _model_config(configs: Any, sizes: _Sizes) -> Any:
    described = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": sizes.num_heads * sizes.head_size,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_size,
        "num_hidden_layers": 2,
        "intermediate_size": 32,
        "vocab_size": 32,
        "max_position_embeddings": sizes.max_model_len,
    }
    with TemporaryDirectory(prefix="attncheck-vllm-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(described | json.loads(sizes.more)))
        return configs.ModelConfig(
            model=folder,
            tokenizer=folder,
            skip_tokenizer_init=True,
            dtype=sizes.dtype,
            max_model_len=sizes.max_model_len,
        )


def _scheduler_config(configs: Any, sizes: _Sizes) -> Any:
    """Return the bounds of a step."""
    make = getattr(configs.SchedulerConfig, "default_factory", configs.SchedulerConfig)
    return make(
        max_model_len=sizes.max_model_len,
        max_num_seqs=sizes.max_num_seqs,
        # vLLM requires room for one whole request; _restore sets the real bound afterwards.
        max_num_batched_tokens=max(sizes.max_num_batched_tokens, sizes.max_model_len, sizes.max_num_seqs),
        is_encoder_decoder=False,
    )


def _speculative_config(configs: Any, sizes: _Sizes, model: Any) -> Any:
    """Return drafts from the prompt's own n-grams, the only method without a model; None if there are no drafts."""
    if sizes.num_drafts is None:
        return None
    return configs.SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=sizes.num_drafts,
        prompt_lookup_max=2,
        target_model_config=model,
        target_parallel_config=configs.ParallelConfig(),
    )
