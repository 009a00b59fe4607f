"""What the objects of vLLM mean to an observer."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from attncheck.backends.dtypes import FP8_DTYPES
from attncheck.errors import ReferenceArgumentError, SpecError
from attncheck.harness.engine.codes import Fp8Codes, fp8_codes
from attncheck.harness.engine.events import (
    OTHER_CACHES,
    EngineFacts,
    KVGroup,
    LayerFacts,
    ScheduledRequest,
    StepPlan,
    WritePages,
)
from attncheck.harness.problem.storage import UpProjections
from attncheck.harness.recording.recorder import NOT_DESCRIBED, layer_spec
from attncheck.reference import AttentionParams, layer_params, mla_params
from attncheck.reference.spec import AttentionType, LayerSpec
from attncheck.reports.run_file.header import BackendInfo

# What is not followed or not judged, and why.

_REASONS = {
    "pipeline_parallel_size": "engines with pipeline parallelism",
    "decode_context_parallel_size": "engines with context parallelism",
    "prefill_context_parallel_size": "engines with context parallelism",
    "adaptive_verification": "engines with a number of drafts that is chosen on the device",
    "kv_transfer_config": "engines with a KV connector",
    "is_diffusion": "engines with models that do not compute one token after the other",
    "prompt_embeds": "requests with embeddings for tokens",
    "mm_features": "requests with images or other media",
    "is_eagle_group": "layers of a drafter",
    "host_resident": "layers whose keys are in host memory",
    "dcp_world_size": "layers with context parallelism",
}
"""Attributes of vLLM's objects: if one is set, or a size is above 1, they are not followed for this reason."""


def _reason(*objects: Any) -> str | None:
    """Return the first reason by which one of ``objects`` is not followed, or None."""
    for attribute, reason in _REASONS.items():
        if any(_is_set(getattr(each, attribute, None)) for each in objects):
            return reason
    return None


def _is_set(value: Any) -> bool:
    if type(value) is int:  # a size; -1 of a layer that has not got one yet
        return value > 1
    return isinstance(value, Tensor) or bool(value)


def engine_reason(runner: Any) -> str | None:
    """Return why no request of an engine can be followed, or None."""
    config = runner.vllm_config
    if is_v1(runner) and getattr(config.speculative_config, "method", None) == "ngram_gpu":
        return "engines with a runner that changes the drafts of the plan (ngram_gpu)"
    return _reason(runner, config, config.parallel_config, config.model_config)


_FOLLOWED_SPECS = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec")
"""The specs of vLLM whose blocks hold one key for each token, in the order of the table."""


def _group_reason(group: Any) -> str | None:
    spec = group.kv_cache_spec
    kinds = {type(each).__name__ for each in getattr(spec, "kv_cache_specs", {"": spec}).values()}
    unknown = " and ".join(sorted(kinds.difference(_FOLLOWED_SPECS)))
    return _reason(group) or (f"{OTHER_CACHES} {unknown}" if unknown else None)


def _layer_reason(layer: Any, spec: LayerSpec, *, has_values: bool) -> str | None:
    """Return why a layer is not judged. ``has_values``: its cache's values are known."""
    kept, is_latent = str(layer.kv_cache_dtype), spec.mla is not None
    if spec.attn_type != AttentionType.DECODER:
        return f"layers of the type {spec.attn_type}"
    if getattr(layer.impl, "chunk_lookback", -1) > -1:
        return "layers whose chunks look back"
    if is_latent and kept != "auto":
        return f"latent layers with a cache of {kept}"
    if kept not in (*FP8_DTYPES, "auto", "bfloat16", "float16", "half", "float"):
        return f"layers with a cache of {kept}"
    if not has_values:
        unknown = f"{kept} codes or scales follow no rule that is known"
        return "latent layers without W_UK_T and W_UV" if is_latent else f"layers whose {unknown}"
    return _reason(layer.impl)


# Requests and steps.


def added_request(new: Any) -> tuple[str, Sequence[int], str, str | None]:
    """Return id, prompt, prefix key, and why the request of a ``NewRequestData`` is not followed, or None."""
    prefix_key = "" if new.lora_request is None else f"LoRA={new.lora_request.lora_name}"
    reason = _REASONS["prompt_embeds"] if new.prompt_token_ids is None else _reason(new)
    return new.req_id, list(new.prompt_token_ids or ()), prefix_key, reason


def step_plan(scheduler_output: Any, resumed: Collection[str]) -> StepPlan:
    """Return the plan of a ``SchedulerOutput``. ``resumed``: ids of requests that start again."""
    new = [(each.req_id, each.block_ids, each.num_computed_tokens) for each in scheduler_output.scheduled_new_reqs]
    cached = scheduler_output.scheduled_cached_reqs
    running = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
    started = {name for name, *_ in new} | set(resumed)
    chosen = {
        name: ScheduledRequest(name, _block_ids(ids), computed, name in started, name in resumed)
        for name, ids, computed in (*running, *new)
    }
    return StepPlan(
        requests=tuple(chosen[name] for name in scheduler_output.num_scheduled_tokens),
        num_scheduled_tokens=dict(scheduler_output.num_scheduled_tokens),
        drafts={name: tuple(ids) for name, ids in scheduler_output.scheduled_spec_decode_tokens.items()},
        block_copies=tuple(map(tuple, getattr(scheduler_output, "kv_cache_block_copies", None) or ())),
    )


def _block_ids(ids: Sequence[Sequence[int]] | None) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, ids or ()))


def sampled_tokens(plan: StepPlan, model_runner_output: Any) -> dict[str, tuple[int, ...]]:
    """Return the tokens of a ``ModelRunnerOutput`` by request."""
    sampled, place = model_runner_output.sampled_token_ids, model_runner_output.req_id_to_index
    return {
        request_id: tuple(sampled[place[request_id]]) if sampled and request_id in place else ()
        for request_id in plan.num_scheduled_tokens
    }


# The engine.


def is_v1(runner: Any) -> bool:
    """Return whether it is model runner V1."""
    return hasattr(runner, "_model_forward")


def kv_groups(kv_cache_config: Any, not_followed: str | None = None) -> tuple[KVGroup, ...]:
    """Return the groups of a ``KVCacheConfig``; ``not_followed``: why none of them is followed."""
    return tuple(
        KVGroup(group.kv_cache_spec.block_size, tuple(group.layer_names), not_followed or _group_reason(group))
        for group in kv_cache_config.kv_cache_groups
    )


def page_sizes(runner: Any, groups: Sequence[KVGroup]) -> dict[str, int]:
    """Return the tokens of a page of each layer's cache, which may be a part of a block."""
    sizes = getattr(runner, "_kernel_block_sizes" if is_v1(runner) else "kernel_block_sizes", None) or ()
    return {layer: size for group, size in zip(groups, sizes, strict=False) for layer in group.layers}


def engine_facts(runner: Any) -> EngineFacts:
    """Return what is observed."""
    groups, layers = runner.kv_cache_config.kv_cache_groups, runner.compilation_config.static_forward_context
    of_groups = [layers[name] for group in groups for name in group.layer_names]
    classes = dict.fromkeys(each.get_attn_backend().get_name() for each in of_groups)
    name = ":".join(filter(None, ["vllm", "+".join(classes)]))
    version = f"{type(runner).__name__} {'V1' if is_v1(runner) else 'V2'}"
    dtype, kept = str(runner.model_config.dtype).removeprefix("torch."), str(runner.cache_config.cache_dtype)
    sizes = ", ".join(dict.fromkeys(str(group.kv_cache_spec.block_size) for group in groups))
    return EngineFacts(
        BackendInfo(
            name=name,
            ref=name,
            version=import_module("vllm").__version__,
            conventions={"runner": version, "dtype": dtype, "kv_cache_dtype": kept},
        ),
        shape=f"{dtype}, KV cache {kept}, blocks of {sizes} tokens, runner {version}",
        dtype=dtype,
        is_async=bool(runner.vllm_config.scheduler_config.async_scheduling),
    )


# What an attention layer computes.


def layer_facts(layer: Any, dtype: torch.dtype, page_size: int | None = None) -> LayerFacts:
    """Return the facts of a layer of vLLM's ``static_forward_context``.

    ``dtype``: of its keys and values. ``page_size``: tokens of a kernel's block; without it, pages are not
    compared.
    """
    try:
        spec = layer_spec(layer, dtype)
        params = _params(layer, spec)
    except (SpecError, ReferenceArgumentError) as error:
        reason = getattr(error, "reason", "")
        is_kind = reason.startswith(NOT_DESCRIBED)  # layers of this kind are not described, whatever their values
        words = reason.removeprefix(NOT_DESCRIBED) if is_kind else f"layers with {error}"
        return LayerFacts(AttentionParams(1, 1, 1), not_judged=words)
    projections = code = None
    if spec.mla is not None:
        projections = _up_projections(layer)
        has_values = projections is not None
    else:
        code = _codes_of(layer, dtype)
        has_values = code is not None or str(layer.kv_cache_dtype) not in FP8_DTYPES
    return LayerFacts(
        params=params,
        up_projections=projections,
        kv_sharing_target=getattr(layer, "kv_sharing_target_layer_name", None),
        page_size=page_size,
        not_judged=_layer_reason(layer, spec, has_values=has_values),
        code=code,
        write=_writer(layer) if page_size else None,
    )


def _params(layer: Any, spec: LayerSpec) -> AttentionParams:
    if spec.mla is not None:
        return mla_params(spec).naive
    slopes, sinks = _numbers(layer.impl, "alibi_slopes"), _numbers(layer.impl, "sinks")
    return replace(layer_params(spec), alibi_slopes=slopes, sinks=sinks)


def _numbers(impl: Any, name: str) -> tuple[float, ...] | None:
    per_head = getattr(impl, name, None)
    return None if per_head is None else tuple(torch.as_tensor(per_head).detach().float().flatten().tolist())


def _up_projections(layer: Any) -> UpProjections | None:
    keys, values = getattr(layer, "W_UK_T", None), getattr(layer, "W_UV", None)
    if keys is None or values is None:
        return None
    return UpProjections(keys.permute(2, 0, 1), values.permute(1, 0, 2))  # [H, P, L] and [H, L, V]


def _writer(layer: Any) -> WritePages | None:
    update = getattr(layer.impl, "do_kv_cache_update", None)
    if update is None:
        return None

    def write(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        if hasattr(layer, "kv_lora_rank"):
            update(key, value, kv_cache, slot_mapping, layer.kv_cache_dtype, layer._k_scale)
        else:
            update(layer, key, value, kv_cache, slot_mapping)

    return write


def _codes_of(layer: Any, dtype: torch.dtype) -> Fp8Codes | None:
    """Return what the cache of a layer makes of keys and values; None if it has no FP8 codes of a known rule."""
    kept, write, kv_cache = str(layer.kv_cache_dtype), _writer(layer), getattr(layer, "kv_cache", None)
    if kept not in FP8_DTYPES or write is None or not isinstance(kv_cache, Tensor) or kv_cache.dim() < 2:
        return None
    sizes = (layer.head_size, getattr(layer, "head_size_v", layer.head_size))
    key, value = (torch.zeros(1, layer.num_kv_heads, size, dtype=dtype, device=kv_cache.device) for size in sizes)
    k_scale, v_scale = (float(getattr(layer, f"_{part}_scale_float", 1.0)) for part in ("k", "v"))
    return fp8_codes(write, kv_cache, (key, value), FP8_DTYPES[kept], (k_scale, v_scale))
