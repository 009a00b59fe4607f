"""Gives an observer what a worker of vLLM does, with model runner V1 or V2."""

import functools
from collections.abc import Callable
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from attncheck.errors import QuestionError
from attncheck.harness.engine.events import LayerRows
from attncheck.harness.engine.graphs import GraphCopies
from attncheck.harness.engine.observer import LOGGER, EngineObserver, RecordedStep
from attncheck.harness.engine.vllm_facts import (
    added_request,
    engine_facts,
    engine_reason,
    is_v1,
    kv_groups,
    layer_facts,
    page_sizes,
    sampled_tokens,
    step_plan,
)

Watch = Callable[..., None] | None
"""What is called before or after a method, if anything."""

# The scheduler of a server may be in another process. What it decides reaches the model runner as `SchedulerOutput`,
# and what was sampled leaves it as `ModelRunnerOutput`. So the methods of the runner show all that is needed.


class EngineHooks:
    """The wrapped methods of one worker, its model runner and its layers, until :meth:`remove`."""

    def __init__(self, observer: EngineObserver) -> None:
        self.observer = observer
        self._graphs = GraphCopies(observer.layer_rows)
        self._wrapped: list[tuple[Any, str, Any]] = []
        self._runner: Any = None
        self._step: RecordedStep | None = None
        self._is_warming_up = False
        self._known: set[str] = set()
        self._preempted: set[str] = set()

    def install(self, worker: Any) -> None:
        """Watch a worker that has its model runner. What this raises stops the observer only."""
        self._guarded(self._install, worker)

    def _install(self, worker: Any) -> None:
        runner = self._runner = worker.model_runner
        self.wrap(worker, "compile_or_warm_up_model", self._warm_up_begins, self._warm_up_ended)
        self.wrap(runner, "sample_tokens", after=self._sampled)
        if is_v1(runner):
            self.wrap(runner, "execute_model(scheduler_output)", self._execute_begins, self._executed)
            self.wrap(runner, "_model_forward(input_ids, positions)", self._inputs_v1)
        else:
            execute = "execute_model(scheduler_output, intermediate_tensors, dummy_run)"
            self.wrap(runner, execute, self._execute_begins, self._executed)
            self.wrap(runner, "prepare_inputs", after=self._inputs_v2)
        self._graphs.install(self.wrap)

    def remove(self) -> None:
        """Restore the original methods."""
        for owner, name, original in reversed(self._wrapped):
            setattr(owner, name, original)
        self._wrapped.clear()

    def wrap(self, owner: Any, method: str, before: Watch = None, after: Watch = None) -> None:
        """Call ``before`` with the arguments of a method, and ``after`` with what it returns and the arguments.

        ``method``: its name, or ``name(a, b)`` with its first parameters. What the calls raise stops the observer only:
        a failure of ours must not stop the engine.

        Raises:
            QuestionError: the owner has no such method.
        """
        name, _, parameters = method.rstrip(")").partition("(")
        original = getattr(owner, name, None)
        expected = parameters.split(", ") if parameters else []
        given = list(signature(original).parameters) if original is not None and expected else []
        if original is None or given[: len(expected)] != expected:
            kind = type(owner).__name__
            raise QuestionError(f"attncheck engine does not know this version of vLLM: its {kind} has no {method}")
        setattr(owner, name, self._around(original, before, after))
        self._wrapped.append((owner, name, original))

    def _around(self, original: Callable[..., Any], before: Watch, after: Watch) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapped(*args: Any, **keywords: Any) -> Any:
            self._guarded(before, *args, **keywords)
            made = original(*args, **keywords)
            self._guarded(after, made, *args, **keywords)
            return made

        return wrapped

    def _guarded(self, watch: Watch, *args: Any, **keywords: Any) -> None:
        if watch is None or self.observer.failure is not None:
            return
        try:
            with torch.inference_mode():
                watch(*args, **keywords)
        except Exception as error:  # noqa: BLE001 (it must not stop the engine)
            self.observer.fail(error)

    # The layers, from before their graphs are captured.

    def _warm_up_begins(self, *_: Any, **__: Any) -> None:
        """Ignore the steps of a warm-up: their requests are invented, and what they sample is dropped."""
        self._is_warming_up = True
        self._watch_layers()

    def _warm_up_ended(self, *_: Any, **__: Any) -> None:
        self._is_warming_up = False

    def _watch_layers(self) -> None:
        """Watch the layers, unless they are watched already."""
        if self.observer.is_started:
            return
        runner = self._runner
        layers = runner.compilation_config.static_forward_context
        groups = kv_groups(runner.kv_cache_config, engine_reason(runner))
        sizes = page_sizes(runner, groups)
        facts = {name: layer_facts(layer, runner.model_config.dtype, sizes.get(name)) for name, layer in layers.items()}
        self.observer.engine_starts(groups, facts, engine_facts(runner))
        for name, layer in layers.items():
            if hasattr(layer, "forward_impl"):  # of a latent layer
                forward = "forward_impl(q, k_c_normed, k_pe, kv_cache, attn_metadata, output)"
                self.wrap(layer, forward, after=functools.partial(self._rows, name, layer))
            elif hasattr(getattr(layer, "impl", None), "forward"):  # whose first argument is the layer
                self.wrap(layer.impl, "forward", after=functools.partial(self._rows, name))

    def _rows(
        self,
        name: str,
        _: Any,
        __: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *___: Any,
        **____: Any,
    ) -> None:
        """Take the rows of a layer's call, with the names of ``AttentionImpl.forward``."""
        if attn_metadata is not None:
            self._graphs.layer_rows(LayerRows(name, query, key, value, output, kv_cache))

    # A step.

    def _execute_begins(
        self, scheduler_output: Any, intermediate_tensors: Any = None, dummy_run: bool = False, *_: Any, **__: Any
    ) -> None:
        self._step = None
        if dummy_run or self._is_warming_up:
            return
        self._watch_layers()
        self._preempted |= scheduler_output.preempted_req_ids or set()  # V2 may resume them in the same plan
        for request_id in scheduler_output.finished_req_ids:
            self._known.discard(request_id)
            self._preempted.discard(request_id)
            self.observer.request_finished(request_id)
        resumed = self._requests_start(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens:
            self._step = self.observer.step_begins(step_plan(scheduler_output, resumed))

    def _requests_start(self, scheduler_output: Any) -> set[str]:
        """Add new requests, and return the ids of those that are resumed. Runner V2 gets both as new ones."""
        cached = scheduler_output.scheduled_cached_reqs
        resumed = {request_id: cached.all_token_ids.get(request_id) for request_id in cached.resumed_req_ids}
        for new in scheduler_output.scheduled_new_reqs:
            request = added_request(new)
            if new.req_id not in self._known:
                self._known.add(new.req_id)
                self.observer.request_added(*request)
            elif new.req_id in self._preempted:
                resumed[new.req_id] = new.prefill_token_ids
            else:
                self.observer.request_added(*request[:-1], "requests whose prompt is streamed")
        is_async = self._runner.vllm_config.scheduler_config.async_scheduling
        for request_id, tokens in resumed.items():
            self._preempted.discard(request_id)
            if tokens is not None and is_async:
                # The scheduler may have dropped what the steps in flight sampled.
                self.observer.request_added(request_id, list(tokens))
        return set(resumed)

    def _inputs_v1(self, input_ids: Any = None, positions: Any = None, *_: Any, **__: Any) -> None:
        if self._step is not None:  # else a dummy batch
            self.observer.inputs(self._runner.input_batch.req_ids, input_ids, positions)

    def _inputs_v2(self, input_batch: Any, *_: Any, **__: Any) -> None:
        if self._step is not None:
            self.observer.inputs(input_batch.req_ids, input_batch.input_ids, input_batch.positions)

    def _executed(self, output: Any, *_: Any, **__: Any) -> None:
        self.observer.forward_ends()
        if output is not None and self._step is not None:  # nothing is sampled, as by a pooling model
            self.observer.step_ends({}, self._step)
            self._step = None

    def _sampled(self, output: Any, *_: Any, **__: Any) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        if hasattr(output, "get_output"):  # the tokens are copied from the device meanwhile
            step_ends = functools.partial(self._step_ends, step)
            output.get_output = self._around(output.get_output, before=None, after=step_ends)
        else:
            self._step_ends(step, output)

    def _step_ends(self, step: RecordedStep, model_runner_output: Any) -> None:
        self.observer.step_ends(sampled_tokens(step.plan, model_runner_output), step)


def watch_workers(start: Callable[[Any], None]) -> None:
    """Call ``start`` with the worker that this process makes, if it makes one. A second call does nothing.

    Raises:
        ImportError: vLLM is not installed.
    """
    wrapper_class = import_module("vllm.v1.worker.worker_base").WorkerWrapperBase
    init_device = wrapper_class.init_device
    if hasattr(init_device, "__wrapped__"):
        return

    @functools.wraps(init_device)
    def watched(wrapper: Any, *args: Any, **keywords: Any) -> Any:
        made = init_device(wrapper, *args, **keywords)
        try:
            # Other tensor-parallel ranks get the same batches. Of data-parallel engines, the first is watched.
            parallel = wrapper.worker.vllm_config.parallel_config
            if not wrapper.worker.rank and not parallel.data_parallel_rank:
                start(wrapper.worker)
        except Exception:  # noqa: BLE001 (it must not stop the engine)
            LOGGER.exception("attncheck cannot watch this engine, which is not affected")
        return made

    wrapper_class.init_device = watched
