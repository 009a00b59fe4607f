"""Gives an observer what vLLM's scheduler and model runner V1 do."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from attncheck.backends.caches.codecs import Coding
from attncheck.harness.engine.events import (
    ContinuedRequest,
    EngineFacts,
    KVGroup,
    LayerFacts,
    StartedRequest,
    StepPlan,
)
from attncheck.harness.engine.observer import EngineObserver
from attncheck.harness.problem.storage import UpProjections
from attncheck.reference import AttentionParams
from attncheck.reference.attention.params import window_pair

_STATE = "layers with a state instead of keys"


class Hooks:
    """The wrapped methods of vLLM, until :meth:`remove`."""

    def __init__(self, observer: EngineObserver) -> None:
        self.observer = observer
        self.receive_rows: Callable[..., None] = observer.layer_rows
        self._wrapped: list[tuple[Any, str, Any]] = []
        self._plan: Any = None
        self._scheduler: Any = None

    def install(self) -> None:
        """Watch the scheduler and the model runner of this process.

        Raises:
            ImportError: vLLM is not installed.
        """
        scheduler = import_module("vllm.v1.core.sched.scheduler").Scheduler
        runner = import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner
        self.wrap(scheduler, "add_request", before=self._request_added)
        self.wrap(scheduler, "update_from_output", before=self._step_ends)
        self.wrap(runner, "execute_model", before=self._step_begins)
        self.wrap(runner, "_model_forward", before=self._forward_begins, after=self._forward_ends)

    def remove(self) -> None:
        """Restore the original methods."""
        for owner, name, original in reversed(self._wrapped):
            setattr(owner, name, original)
        self._wrapped.clear()

    def wrap(
        self,
        owner: Any,
        name: str,
        before: Callable[..., None] | None = None,
        after: Callable[..., None] | None = None,
    ) -> None:
        """Call ``before`` and ``after`` with the arguments of a method; what they raise stops the observer only."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **keywords: Any) -> Any:
            self._guarded(before, *args, **keywords)
            made = original(*args, **keywords)
            self._guarded(after, *args, **keywords)
            return made

        setattr(owner, name, wrapped)
        self._wrapped.append((owner, name, original))

    def _guarded(self, watch: Callable[..., None] | None, *args: Any, **keywords: Any) -> None:
        if watch is None or self.observer.failure is not None:
            return
        try:
            with torch.inference_mode():
                watch(*args, **keywords)
        except Exception as error:  # noqa: BLE001 (a failure here must not stop the engine)
            self.observer.fail(error)

    def _request_added(self, scheduler: Any, request: Any) -> None:
        self._scheduler = scheduler
        self.observer.request_added(*added_request(request))

    def _step_begins(self, runner: Any, scheduler_output: Any, *_: Any, **__: Any) -> None:
        if not self.observer.is_started:
            self.watch_layers(runner)
        live = getattr(self._scheduler, "requests", {})
        for request_id in scheduler_output.finished_req_ids:
            if request_id not in live or live[request_id].is_finished():  # else the id of an aborted one is used again
                self.observer.request_finished(request_id)
        if self._plan is not None:
            raise RuntimeError("a step begins before the last one has ended, as with async scheduling")
        if scheduler_output.total_num_scheduled_tokens:
            self._plan = scheduler_output
            self.observer.step_begins(step_plan(scheduler_output))

    def watch_layers(self, runner: Any) -> None:
        """Give the observer the groups and layers of a model runner whose KV cache is made, and watch each layer."""
        layers = runner.compilation_config.static_forward_context
        groups = kv_groups(runner.kv_cache_config, engine_reason(runner.vllm_config))
        page_sizes = getattr(runner, "_kernel_block_sizes", None) or [group.block_size for group in groups]
        sizes = {name: size for group, size in zip(groups, page_sizes, strict=False) for name in group.layers}
        facts = {name: layer_facts(layer, sizes.get(name)) for name, layer in layers.items()}
        self.observer.engine_starts(groups, facts, engine_facts(runner))
        for name, layer in layers.items():
            self.watch_layer(name, layer)

    def watch_layer(self, name: str, layer: Any) -> None:
        """Give the observer the rows of each call of an attention layer."""
        if hasattr(layer, "forward_impl"):
            self.wrap(layer, "forward_impl", after=functools.partial(self._latent_rows, name))
        elif hasattr(getattr(layer, "impl", None), "forward"):
            self.wrap(layer.impl, "forward", after=functools.partial(self._rows, name))

    def _rows(
        self,
        name: str,
        _layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *_: Any,
        **__: Any,
    ) -> None:
        if attn_metadata is not None:
            self.receive_rows(name, query, key, value, output, kv_cache)

    def _latent_rows(
        self,
        name: str,
        q: Tensor,
        k_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *_: Any,
        **__: Any,
    ) -> None:
        if attn_metadata is not None:
            self.receive_rows(name, q, k_c_normed, k_pe, output, kv_cache)

    def _forward_begins(
        self, runner: Any, input_ids: Tensor | None = None, positions: Tensor | None = None, *_: Any, **__: Any
    ) -> None:
        if self._plan is not None:  # else a dummy batch
            self.observer.inputs(list(runner.input_batch.req_ids), input_ids, positions)

    def _forward_ends(self, *_: Any, **__: Any) -> None:
        self.observer.forward_ends()

    def _step_ends(self, _scheduler: Any, scheduler_output: Any, model_runner_output: Any) -> None:
        if scheduler_output is self._plan is not None:
            self._plan = None
            self.observer.step_ends(sampled_tokens(scheduler_output, model_runner_output))


@contextmanager
def watching(observer: EngineObserver) -> Iterator[Hooks]:
    """Watch every engine that runs in this process, during the context."""
    hooks = Hooks(observer)
    hooks.install()
    try:
        yield hooks
    finally:
        hooks.remove()


# What vLLM's objects mean to an observer.


def added_request(request: Any) -> tuple[str, Sequence[int], str, str | None]:
    """Return id, prompt, prefix key, and why a ``Request`` or ``NewRequestData`` is not followed, or None."""
    lora = getattr(request, "lora_request", None)
    keys = [("LoRA", None if lora is None else lora.lora_name), ("salt", getattr(request, "cache_salt", None))]
    prefix_key = " ".join(f"{name}={value}" for name, value in keys if value is not None)
    reason = None
    if getattr(request, "prompt_embeds", None) is not None or request.prompt_token_ids is None:
        reason = "requests with embeddings for tokens"
    elif getattr(request, "mm_features", None):
        reason = "requests with images or other media"
    elif getattr(request, "resumable", False):
        reason = "requests whose prompt is streamed"
    elif getattr(request, "kv_transfer_params", None):
        reason = "requests whose keys a KV connector transfers"
    request_id = request.request_id if hasattr(request, "request_id") else request.req_id
    return request_id, list(request.prompt_token_ids or ()), prefix_key, reason


def step_plan(scheduler_output: Any) -> StepPlan:
    """Return the plan of a ``SchedulerOutput``."""
    started = [
        StartedRequest(new.req_id, _block_ids(new.block_ids), new.num_computed_tokens)
        for new in scheduler_output.scheduled_new_reqs
    ]
    continued = []
    cached = scheduler_output.scheduled_cached_reqs
    rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
    for request_id, new_block_ids, num_computed_tokens in rows:
        if request_id in cached.resumed_req_ids:
            started.append(StartedRequest(request_id, _block_ids(new_block_ids), num_computed_tokens, resumed=True))
        else:
            continued.append(ContinuedRequest(request_id, _block_ids(new_block_ids), num_computed_tokens))
    return StepPlan(
        started=tuple(started),
        continued=tuple(continued),
        num_scheduled_tokens=dict(scheduler_output.num_scheduled_tokens),
        drafts={name: tuple(ids) for name, ids in scheduler_output.scheduled_spec_decode_tokens.items()},
        block_copies=tuple(map(tuple, getattr(scheduler_output, "kv_cache_block_copies", None) or ())),
    )


def _block_ids(ids: Sequence[Sequence[int]] | None) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(of_group) for of_group in ids or ())


def sampled_tokens(scheduler_output: Any, model_runner_output: Any) -> dict[str, tuple[int, ...]]:
    """Return the tokens of a ``ModelRunnerOutput`` by request."""
    sampled, place = model_runner_output.sampled_token_ids, model_runner_output.req_id_to_index
    return {
        request_id: tuple(sampled[place[request_id]]) if sampled and request_id in place else ()
        for request_id in scheduler_output.num_scheduled_tokens
    }


def engine_reason(vllm_config: Any) -> str | None:
    """Return why no request of an engine can be followed, or None."""
    parallel = vllm_config.parallel_config
    if getattr(vllm_config, "kv_transfer_config", None) is not None:
        return "engines with a KV connector"
    if getattr(vllm_config.model_config, "is_diffusion", False):
        return "engines that do not compute one token after the other"
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is not None and speculative.method == "ngram_gpu":
        return "engines whose runner changes the drafts of the plan (ngram_gpu)"
    sizes = [getattr(parallel, f"{part}_context_parallel_size", 1) for part in ("decode", "prefill")]
    return "engines with context parallelism" if max(sizes) > 1 else None


def kv_groups(kv_cache_config: Any, not_followed: str | None = None) -> tuple[KVGroup, ...]:
    """Return the groups of a ``KVCacheConfig``; ``not_followed``: why none of them is followed."""
    groups = []
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        reason = not_followed
        if "Mamba" in type(spec).__name__:
            reason = _STATE
        elif getattr(group, "is_eagle_group", False):
            reason = "layers of a drafter"
        elif getattr(group, "host_resident", False):
            reason = "layers whose keys are in host memory"
        elif type(spec).__name__ in ("CrossAttentionSpec", "EncoderOnlyAttentionSpec"):
            reason = "layers that attend to an encoder"
        groups.append(KVGroup(spec.block_size, tuple(group.layer_names), reason))
    return tuple(groups)


def engine_facts(runner: Any) -> EngineFacts:
    """Return what is observed."""
    backends = {}
    for group in kv_groups(runner.kv_cache_config):
        for name in group.layers:
            layer = runner.compilation_config.static_forward_context[name]
            if hasattr(layer, "get_attn_backend"):
                backends[_kind_of(layer)] = layer.get_attn_backend().get_name()
    try:
        vllm_version = version("vllm")
    except PackageNotFoundError:
        vllm_version = getattr(import_module("vllm"), "__version__", "")
    return EngineFacts(
        vllm_version=vllm_version,
        runner=f"{type(runner).__module__}.{type(runner).__name__}",
        backends=backends,
        dtype=str(runner.model_config.dtype).removeprefix("torch."),
        kv_cache_dtype=str(runner.cache_config.cache_dtype),
        block_sizes=tuple(group.kv_cache_spec.block_size for group in runner.kv_cache_config.kv_cache_groups),
    )


def _kind_of(layer: Any) -> str:
    if hasattr(layer, "kv_lora_rank"):
        return "latent"
    return "full" if getattr(layer, "sliding_window", None) is None else "window"


# What an attention layer computes.

_NOT_JUDGED = {
    "use_mm_prefix": "layers with prefix ranges of images",
    "use_sparse": "layers that choose their keys",
    "non_causal_multi_token_decode": "layers whose decodes see later keys",
    "use_alibi_sqrt": "layers with square-root ALiBi",
    "hisparse_cache": "layers whose keys are in host memory",
}
"""Attributes of a layer that change the right output in a way that the truth cannot express."""

_CODE_DTYPES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}

_KNOWN_LAYERS = ("Attention", "ChunkedLocalAttention", "MLAAttention")


def layer_facts(layer: Any, page_size: int | None = None) -> LayerFacts:
    """Return the facts of a layer of vLLM's ``static_forward_context``; ``page_size``: tokens of a kernel's block."""
    name = type(layer).__name__
    if name not in _KNOWN_LAYERS:
        sizes = AttentionParams(1, 1, 1)
        reason = _STATE if hasattr(layer, "get_state_shape") else f"layers of the class {name}"
        return LayerFacts(sizes, not_judged=reason)
    reasons = [words for attribute, words in _NOT_JUDGED.items() if getattr(layer, attribute, None)]
    if getattr(layer.impl, "chunk_lookback", -1) > -1:
        reasons.append("layers whose chunks look back")
    attn_type = str(getattr(getattr(layer, "attn_type", "decoder"), "value", getattr(layer, "attn_type", "decoder")))
    if attn_type != "decoder":
        reasons.append(f"layers of the type {attn_type}")
    facts = _latent_facts(layer, reasons) if name == "MLAAttention" else _paged_facts(layer, reasons)
    return replace(facts, page_size=page_size)


def _paged_facts(layer: Any, reasons: list[str]) -> LayerFacts:
    impl, window = layer.impl, layer.sliding_window
    kept = str(layer.kv_cache_dtype)
    code = None
    if kept in _CODE_DTYPES:
        code = functools.partial(_through_codes, layer, _CODE_DTYPES[kept])
    elif kept != "auto" and kept not in ("bfloat16", "float16", "half", "float"):
        reasons.append(f"layers with a cache of {kept}")
    slopes, sinks = getattr(impl, "alibi_slopes", None), getattr(impl, "sinks", None)
    params = AttentionParams(
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
    return LayerFacts(
        params=params,
        kv_sharing_target=getattr(layer, "kv_sharing_target_layer_name", None),
        not_judged=reasons[0] if reasons else None,
        code=code,
        write=_writer(layer),
    )


def _writer(layer: Any) -> Callable[[Tensor, Tensor, Tensor, Tensor], None] | None:
    update = getattr(layer.impl, "do_kv_cache_update", None)
    if update is None:
        return None

    def write(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        update(layer, key, value, kv_cache, slot_mapping)

    return write


def _through_codes(layer: Any, code_dtype: torch.dtype, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the float32 values of the FP8 codes of keys and values."""
    scales = [_scale(layer, part) for part in ("k", "v")]
    coding = Coding(torch.float32, code_dtype, *scales)
    return coding.decode(*coding.encode(key, value))


def _scale(layer: Any, part: str) -> float:
    return float(getattr(layer, f"_{part}_scale_float", 1.0))


def _latent_facts(layer: Any, reasons: list[str]) -> LayerFacts:
    kept = str(layer.kv_cache_dtype)
    if kept != "auto":
        reasons.append(f"latent layers with a cache of {kept}")
    if getattr(layer.impl, "dcp_world_size", 1) > 1:
        reasons.append("layers with context parallelism")
    keys, values = getattr(layer, "W_UK_T", None), getattr(layer, "W_UV", None)
    if keys is None or values is None:
        reasons.append("latent layers without W_UK_T and W_UV")
    head_size = layer.qk_nope_head_dim + layer.qk_rope_head_dim
    params = AttentionParams(
        layer.num_heads, layer.num_heads, head_size, layer.v_head_dim, scale=float(layer.impl.scale)
    )
    projections = None
    if keys is not None and values is not None:
        projections = UpProjections(keys.permute(2, 0, 1), values.permute(1, 0, 2))  # [H, P, L] and [H, L, V]
    return LayerFacts(
        params=params,
        up_projections=projections,
        not_judged=reasons[0] if reasons else None,
        write=_latent_writer(layer),
    )


def _latent_writer(layer: Any) -> Callable[[Tensor, Tensor, Tensor, Tensor], None] | None:
    update = getattr(layer.impl, "do_kv_cache_update", None)
    if update is None:
        return None

    def write(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        update(key, value, kv_cache, slot_mapping, layer.kv_cache_dtype, layer._k_scale)

    return write
