"""Gives an observer what vLLM's model runner does, V1 or V2."""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from attncheck.harness.engine.codes import Fp8Codes, fp8_codes
from attncheck.harness.engine.events import (
    ContinuedRequest,
    EngineFacts,
    KVGroup,
    LayerFacts,
    LayerRows,
    StartedRequest,
    StepPlan,
    WritePages,
)
from attncheck.harness.engine.graphs import GraphCopies
from attncheck.harness.engine.late_steps import LateStep, LateSteps
from attncheck.harness.engine.observer import EngineObserver
from attncheck.harness.problem.storage import UpProjections
from attncheck.reference import AttentionParams
from attncheck.reference.attention.params import window_pair

_STATE = "layers with a state instead of keys"


_V1 = "vllm.v1.worker.gpu_model_runner"
_V2 = "vllm.v1.worker.gpu.model_runner"
"""Modules of the two model runners; the class of each is called ``GPUModelRunner``, on every platform."""

_WORKERS = {"vllm.v1.worker.gpu_worker": "Worker", "vllm.v1.worker.cpu_worker": "CPUWorker"}
"""Classes of workers; the second is derived from the first."""

# The scheduler of a server may be in another process. What it decides reaches the model runner as `SchedulerOutput`,
# and what was sampled leaves it as `ModelRunnerOutput`. So the methods of the runner tell all that is needed.


class EngineHooks:
    """The wrapped methods of vLLM's model runners, until :meth:`remove`. One runner of the process is followed."""

    def __init__(self, observer: EngineObserver) -> None:
        self.observer = observer
        self.steps = LateSteps(observer, judge_every=observer.settings.judge_every)
        self._graphs = GraphCopies(self.steps.layer_rows)
        self._wrapped: list[tuple[Any, str, Any]] = []
        self._runner: Any = None
        self._step: LateStep | None = None
        self._warm_ups = 0
        self._known: set[str] = set()
        self._preempted: set[str] = set()

    def install(self, *modules: Any) -> None:
        """Watch the runners of vLLM, or of these modules, in this process."""
        for module in modules or filter(None, map(sys.modules.get, (_V1, _V2))):
            self._watch_class(module.GPUModelRunner)
        for name, worker_class in _WORKERS.items():
            if name in sys.modules:
                self.watch_worker(getattr(sys.modules[name], worker_class))
        self._graphs.install()

    def remove(self) -> None:
        """Restore the original methods."""
        for owner, name, original in reversed(self._wrapped):
            setattr(owner, name, original)
        self._wrapped.clear()
        self._graphs.remove()

    def _watch_class(self, runner_class: type[Any]) -> None:
        self.wrap(runner_class, "initialize_kv_cache", after=self._cache_made)
        self.wrap(runner_class, "execute_model", before=self._execute_begins, result=self._executed)
        self.wrap(runner_class, "sample_tokens", result=self._sampled)
        if hasattr(runner_class, "_model_forward"):  # V1
            self.wrap(runner_class, "_model_forward", before=self._inputs_v1, after=self._forward_ended)
        else:
            self.wrap(runner_class, "prepare_inputs", result=self._inputs_v2)

    def watch_worker(self, worker_class: type[Any]) -> None:
        """Ignore the steps of a worker's warm-up: their requests are invented, and what they sample is dropped."""
        self.wrap(worker_class, "compile_or_warm_up_model", before=self._warm_up_begins, after=self._warm_up_ends)

    def _warm_up_begins(self, *_: Any) -> None:
        self._warm_ups += 1

    def _warm_up_ends(self, *_: Any) -> None:
        self._warm_ups -= 1

    def wrap(
        self,
        owner: Any,
        name: str,
        before: Callable[..., None] | None = None,
        after: Callable[..., None] | None = None,
        result: Callable[[Any], None] | None = None,
    ) -> None:
        """Call ``before`` and ``after`` with the arguments of a method, and ``result`` with what it returns.

        What they raise stops the observer only.
        """
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **keywords: Any) -> Any:
            self._guarded(before, *args, **keywords)
            made = original(*args, **keywords)
            self._guarded(after, *args, **keywords)
            self._guarded(result, made)
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

    # The layers, from before their graphs are captured.

    def _cache_made(self, runner: Any, kv_cache_config: Any, is_profiling: bool = False, *_: Any, **__: Any) -> None:
        if not is_profiling and not self.observer.is_started:
            self._watch_layers(runner)

    def _watch_layers(self, runner: Any) -> None:
        self._runner = runner
        self.steps.is_async = bool(runner.vllm_config.scheduler_config.async_scheduling)
        layers = runner.compilation_config.static_forward_context
        groups = kv_groups(runner.kv_cache_config, engine_reason(runner))
        sizes = page_sizes(runner, groups)
        facts = {name: layer_facts(layer, runner.model_config.dtype, sizes.get(name)) for name, layer in layers.items()}
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
            self._graphs.layer_rows(LayerRows(name, query, key, value, output, kv_cache))

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
            self._graphs.layer_rows(LayerRows(name, q, k_c_normed, k_pe, output, kv_cache))

    # A step.

    def _execute_begins(
        self,
        runner: Any,
        scheduler_output: Any,
        intermediate_tensors: Any = None,
        dummy_run: bool = False,
        *_: Any,
        **__: Any,
    ) -> None:
        self._step = None
        if dummy_run or self._warm_ups:
            return
        if not self.observer.is_started:
            self._watch_layers(runner)
        if runner is not self._runner:
            return
        for request_id in scheduler_output.finished_req_ids:
            self._known.discard(request_id)
            self.steps.request_finished(request_id)
        resumed = self._requests_start(scheduler_output)
        self._preempted |= scheduler_output.preempted_req_ids or set()
        if scheduler_output.total_num_scheduled_tokens:
            plan = step_plan(scheduler_output)
            started = tuple(replace(each, resumed=each.request_id in resumed) for each in plan.started)
            self._step = self.steps.step_begins(replace(plan, started=started))

    def _requests_start(self, scheduler_output: Any) -> set[str]:
        """Add new requests, and return the ids of those that are resumed. Runner V2 gets both as new ones."""
        cached = scheduler_output.scheduled_cached_reqs
        resumed = {request_id: cached.all_token_ids.get(request_id) for request_id in cached.resumed_req_ids}
        for new in scheduler_output.scheduled_new_reqs:
            request = added_request(new)
            if new.req_id not in self._known:
                self._known.add(new.req_id)
                self.steps.request_added(*request)
            elif new.req_id in self._preempted:
                resumed[new.req_id] = new.prefill_token_ids
            else:
                self.steps.request_added(*request[:-1], "requests whose prompt is streamed")
        for request_id, tokens in resumed.items():
            self._preempted.discard(request_id)
            if tokens is not None and self.steps.is_async:
                # The scheduler may have dropped what the steps in flight sampled.
                self.steps.request_added(request_id, list(tokens))
        return set(resumed)

    def _inputs_v1(
        self, runner: Any, input_ids: Tensor | None = None, positions: Tensor | None = None, *_: Any, **__: Any
    ) -> None:
        if self._step is not None:  # else a dummy batch
            self.steps.inputs(list(runner.input_batch.req_ids), input_ids, positions)

    def _inputs_v2(self, input_batch: Any) -> None:
        if self._step is not None:
            self.steps.inputs(input_batch.req_ids, input_batch.input_ids, input_batch.positions)

    def _forward_ended(self, *_: Any, **__: Any) -> None:
        self.steps.forward_ends()

    def _executed(self, output: Any) -> None:
        self.steps.forward_ends()
        if output is not None and self._step is not None:  # nothing is sampled, as by a pooling model
            self.steps.step_ends(self._step, {})
            self._step = None

    def _sampled(self, output: Any) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        if hasattr(output, "get_output"):  # the tokens are copied from the device meanwhile
            self._watch_output(output, step)
        else:
            self._step_ends(step, output)

    def _watch_output(self, output: Any, step: LateStep) -> None:
        get_output = output.get_output

        def watched() -> Any:
            made = get_output()
            self._guarded(self._step_ends, step, made)
            return made

        output.get_output = watched

    def _step_ends(self, step: LateStep, model_runner_output: Any) -> None:
        self.steps.step_ends(step, sampled_tokens(step.plan, model_runner_output))


@contextmanager
def watching(observer: EngineObserver) -> Iterator[EngineHooks]:
    """Watch the engine that runs in this process, during the context.

    Raises:
        ImportError: vLLM is not installed.
    """
    hooks = EngineHooks(observer)
    modules = [import_module(_V1)]
    with suppress(ImportError):  # it needs Triton
        modules.append(import_module(_V2))
    with suppress(ImportError):  # it is loaded before the engine makes its worker, so that a warm-up is known
        import_module("vllm.v1.worker.gpu_worker")
    hooks.install(*modules)
    try:
        yield hooks
    finally:
        hooks.remove()


# What vLLM's objects mean to an observer.


def added_request(new: Any) -> tuple[str, Sequence[int], str, str | None]:
    """Return id, prompt, prefix key, and why the request of a ``NewRequestData`` is not followed, or None."""
    lora = new.lora_request
    reason = None
    if new.prompt_embeds is not None or new.prompt_token_ids is None:
        reason = "requests with embeddings for tokens"
    elif new.mm_features:
        reason = "requests with images or other media"
    return new.req_id, list(new.prompt_token_ids or ()), "" if lora is None else f"LoRA={lora.lora_name}", reason


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


def engine_reason(runner: Any) -> str | None:
    """Return why no request of an engine can be followed, or None."""
    vllm_config = runner.vllm_config
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        return "engines with pipeline parallelism"
    if getattr(runner, "adaptive_verification", None) is not None:
        return "engines that choose the number of drafts on the device"
    if getattr(vllm_config, "kv_transfer_config", None) is not None:
        return "engines with a KV connector"
    if getattr(vllm_config.model_config, "is_diffusion", False):
        return "engines that do not compute one token after the other"
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is not None and speculative.method == "ngram_gpu" and hasattr(runner, "_model_forward"):
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


def page_sizes(runner: Any, groups: Sequence[KVGroup]) -> dict[str, int]:
    """Return the tokens of a page of each layer's cache, which may be a part of a block."""
    name = "_kernel_block_sizes" if hasattr(runner, "_model_forward") else "kernel_block_sizes"
    sizes = getattr(runner, name, None) or ()
    return {layer: size for group, size in zip(groups, sizes, strict=False) for layer in group.layers}


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
        runner=f"{type(runner).__name__} {'V1' if hasattr(runner, '_model_forward') else 'V2'}",
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


def layer_facts(layer: Any, dtype: torch.dtype, page_size: int | None = None) -> LayerFacts:
    """Return the facts of a layer of vLLM's ``static_forward_context``.

    ``dtype``: of its keys and values. ``page_size``: tokens of a kernel's block; without it, pages are not
    compared.
    """
    name = type(layer).__name__
    if name not in _KNOWN_LAYERS:
        sizes = AttentionParams(1, 1, 1)
        reason = _STATE if hasattr(layer, "get_state_shape") else f"layers of the class {name}"
        return LayerFacts(sizes, not_judged=reason)
    reasons = [words for attribute, words in _NOT_JUDGED.items() if getattr(layer, attribute, None)]
    if getattr(layer.impl, "chunk_lookback", -1) > -1:
        reasons.append("layers whose chunks look back")
    attn_type = getattr(layer, "attn_type", "decoder")
    attn_type = str(getattr(attn_type, "value", attn_type))
    if attn_type != "decoder":
        reasons.append(f"layers of the type {attn_type}")
    facts = _latent_facts(layer, reasons) if name == "MLAAttention" else _paged_facts(layer, dtype, reasons)
    return replace(facts, page_size=page_size, write=facts.write if page_size else None)


def _paged_facts(layer: Any, dtype: torch.dtype, reasons: list[str]) -> LayerFacts:
    impl, window = layer.impl, layer.sliding_window
    kept = str(layer.kv_cache_dtype)
    code = None
    if kept in _CODE_DTYPES:
        code = _codes_of(layer, dtype, _CODE_DTYPES[kept])
        if code is None:
            reasons.append(f"layers whose {kept} codes or scales follow no rule that is known")
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


def _writer(layer: Any) -> WritePages | None:
    update = getattr(layer.impl, "do_kv_cache_update", None)
    if update is None:
        return None

    def write(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        if type(layer).__name__ == "MLAAttention":
            update(key, value, kv_cache, slot_mapping, layer.kv_cache_dtype, layer._k_scale)
        else:
            update(layer, key, value, kv_cache, slot_mapping)

    return write


def _codes_of(layer: Any, dtype: torch.dtype, code_dtype: torch.dtype) -> Fp8Codes | None:
    write, kv_cache = _writer(layer), layer.kv_cache
    scales = [float(getattr(layer, f"_{part}_scale_float", 1.0)) for part in ("k", "v")]
    if write is None or not isinstance(kv_cache, Tensor) or kv_cache.dim() < 2:
        return None
    value_size = getattr(layer, "head_size_v", layer.head_size)
    like = [
        torch.zeros(1, layer.num_kv_heads, size, dtype=dtype, device=kv_cache.device)
        for size in (layer.head_size, value_size)
    ]
    return fp8_codes(write, kv_cache, (like[0], like[1]), code_dtype, (scales[0], scales[1]))


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
        write=_writer(layer),
    )
