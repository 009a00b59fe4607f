"""What the objects of vLLM mean to an observer."""

from collections.abc import Collection, Iterator, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

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
from attncheck.harness.recording.recorder import reason_against
from attncheck.reference import AttentionParams
from attncheck.reference.attention.mla import MLAParams
from attncheck.reference.attention.params import window_pair

# Requests and steps.


def added_request(new: Any) -> tuple[str, Sequence[int], str, str | None]:
    """Return id, prompt, prefix key, and why the request of a ``NewRequestData`` is not followed, or None."""
    lora = new.lora_request
    reason = None
    if new.prompt_embeds is not None or new.prompt_token_ids is None:
        reason = "requests with embeddings for tokens"
    elif new.mm_features:
        reason = "requests with images or other media"
    return new.req_id, list(new.prompt_token_ids or ()), "" if lora is None else f"LoRA={lora.lora_name}", reason


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


def engine_reason(runner: Any) -> str | None:
    """Return why no request of an engine can be followed, or None."""
    vllm_config = runner.vllm_config
    parallel = vllm_config.parallel_config
    speculative = getattr(vllm_config, "speculative_config", None)
    sizes = [getattr(parallel, f"{part}_context_parallel_size", 1) for part in ("decode", "prefill")]
    reasons = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "a number of drafts that is chosen on the device": getattr(runner, "adaptive_verification", None) is not None,
        "a KV connector": getattr(vllm_config, "kv_transfer_config", None) is not None,
        "models that do not compute one token after the other": getattr(
            vllm_config.model_config, "is_diffusion", False
        ),
        "a runner that changes the drafts of the plan (ngram_gpu)": is_v1(runner)
        and getattr(speculative, "method", None) == "ngram_gpu",
        "context parallelism": max(sizes) > 1,
    }
    return next((f"engines with {words}" for words, holds in reasons.items() if holds), None)


def kv_groups(kv_cache_config: Any, not_followed: str | None = None) -> tuple[KVGroup, ...]:
    """Return the groups of a ``KVCacheConfig``; ``not_followed``: why none of them is followed."""
    return tuple(
        KVGroup(group.kv_cache_spec.block_size, tuple(group.layer_names), not_followed or _group_reason(group))
        for group in kv_cache_config.kv_cache_groups
    )


_FOLLOWED_SPECS = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec")
"""The specs of vLLM whose blocks hold one key for each token, in the order of the table."""


def _group_reason(group: Any) -> str | None:
    spec = group.kv_cache_spec
    kinds = sorted({type(each).__name__ for each in getattr(spec, "kv_cache_specs", {"": spec}).values()})
    if getattr(group, "is_eagle_group", False):
        return "layers of a drafter"
    if getattr(group, "host_resident", False):
        return "layers whose keys are in host memory"
    unknown = " and ".join(kind for kind in kinds if kind not in _FOLLOWED_SPECS)
    return f"{OTHER_CACHES} {unknown}" if unknown else None


def page_sizes(runner: Any, groups: Sequence[KVGroup]) -> dict[str, int]:
    """Return the tokens of a page of each layer's cache, which may be a part of a block."""
    sizes = getattr(runner, "_kernel_block_sizes" if is_v1(runner) else "kernel_block_sizes", None) or ()
    return {layer: size for group, size in zip(groups, sizes, strict=False) for layer in group.layers}


def engine_facts(runner: Any) -> EngineFacts:
    """Return what is observed."""
    groups, layers = runner.kv_cache_config.kv_cache_groups, runner.compilation_config.static_forward_context
    of_groups = [layers[name] for group in groups for name in group.layer_names]
    return EngineFacts(
        vllm_version=import_module("vllm").__version__,
        runner=f"{type(runner).__name__} {'V1' if is_v1(runner) else 'V2'}",
        backends=tuple(dict.fromkeys(each.get_attn_backend().get_name() for each in of_groups)),
        dtype=str(runner.model_config.dtype).removeprefix("torch."),
        kv_cache_dtype=str(runner.cache_config.cache_dtype),
        block_sizes=tuple(group.kv_cache_spec.block_size for group in groups),
        is_async=bool(runner.vllm_config.scheduler_config.async_scheduling),
    )


# What an attention layer computes.

_LATENT = "MLAAttention"

_CODE_DTYPES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def layer_facts(layer: Any, dtype: torch.dtype, page_size: int | None = None) -> LayerFacts:
    """Return the facts of a layer of vLLM's ``static_forward_context``.

    ``dtype``: of its keys and values. ``page_size``: tokens of a kernel's block; without it, pages are not
    compared.
    """
    reason = reason_against(layer)
    if reason is not None:
        return LayerFacts(AttentionParams(1, 1, 1), not_judged=reason)
    is_latent = type(layer).__name__ == _LATENT
    code = None if is_latent else _codes_of(layer, dtype)
    projections = _up_projections(layer) if is_latent else None
    return LayerFacts(
        params=_latent_params(layer) if is_latent else _paged_params(layer),
        up_projections=projections,
        kv_sharing_target=getattr(layer, "kv_sharing_target_layer_name", None),
        page_size=page_size,
        not_judged=next(_reasons(layer, has_values=code is not None or projections is not None), None),
        code=code,
        write=_writer(layer) if page_size else None,
    )


def _reasons(layer: Any, *, has_values: bool) -> Iterator[str]:
    """Yield why the truth cannot express a layer. ``has_values``: its cache's values are known."""
    kept, is_latent = str(layer.kv_cache_dtype), type(layer).__name__ == _LATENT
    attn_type = getattr(layer, "attn_type", "decoder")
    attn_type = str(getattr(attn_type, "value", attn_type))
    if getattr(layer.impl, "chunk_lookback", -1) > -1:
        yield "layers whose chunks look back"
    if attn_type != "decoder":
        yield f"layers of the type {attn_type}"
    if getattr(layer.impl, "dcp_world_size", 1) > 1:
        yield "layers with context parallelism"
    if is_latent and kept != "auto":
        yield f"latent layers with a cache of {kept}"
    if is_latent and not has_values:
        yield "latent layers without W_UK_T and W_UV"
    if kept in _CODE_DTYPES and not has_values:
        yield f"layers whose {kept} codes or scales follow no rule that is known"
    if kept not in (*_CODE_DTYPES, "auto", "bfloat16", "float16", "half", "float"):
        yield f"layers with a cache of {kept}"


def _paged_params(layer: Any) -> AttentionParams:
    impl, window = layer.impl, layer.sliding_window
    slopes, sinks = getattr(impl, "alibi_slopes", None), getattr(impl, "sinks", None)
    return AttentionParams(
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_size=layer.head_size,
        head_size_v=getattr(layer, "head_size_v", None),
        scale=float(impl.scale),
        window=window_pair(window if window and window > 0 else None),
        logits_soft_cap=getattr(impl, "logits_soft_cap", None) or None,
        alibi_slopes=None if slopes is None else tuple(torch.as_tensor(slopes).flatten().tolist()),
        sinks=None if sinks is None else tuple(sinks.detach().float().flatten().tolist()),
        attn_chunk_size=getattr(layer, "attention_chunk_size", None),
    )


def _latent_params(layer: Any) -> AttentionParams:
    sizes = (layer.kv_lora_rank, layer.qk_nope_head_dim, layer.qk_rope_head_dim, layer.v_head_dim)
    return MLAParams(layer.num_heads, *sizes, scale=float(layer.impl.scale)).naive


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
        if type(layer).__name__ == _LATENT:
            update(key, value, kv_cache, slot_mapping, layer.kv_cache_dtype, layer._k_scale)
        else:
            update(layer, key, value, kv_cache, slot_mapping)

    return write


def _codes_of(layer: Any, dtype: torch.dtype) -> Fp8Codes | None:
    """Return what the cache of a layer makes of keys and values; None if it has no FP8 codes of a known rule."""
    code_dtype = _CODE_DTYPES.get(str(layer.kv_cache_dtype))
    write, kv_cache = _writer(layer), getattr(layer, "kv_cache", None)
    if code_dtype is None or write is None or not isinstance(kv_cache, Tensor) or kv_cache.dim() < 2:
        return None
    sizes = (layer.head_size, getattr(layer, "head_size_v", layer.head_size))
    key, value = (torch.zeros(1, layer.num_kv_heads, size, dtype=dtype, device=kv_cache.device) for size in sizes)
    k_scale, v_scale = (float(getattr(layer, f"_{part}_scale_float", 1.0)) for part in ("k", "v"))
    return fp8_codes(write, kv_cache, (key, value), code_dtype, (k_scale, v_scale))
