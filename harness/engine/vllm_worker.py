"""Gives an observer what a worker's model runner does, V1 or V2, without its scheduler.

The scheduler of a server may be in another process. What it decides reaches the worker as ``SchedulerOutput``, and what
was sampled leaves it as ``ModelRunnerOutput``.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from attncheck.errors import QuestionError
from attncheck.harness.engine.events import ObserverResult
from attncheck.harness.engine.graphs import GraphCopies
from attncheck.harness.engine.late_steps import LateSteps, Step
from attncheck.harness.engine.observer import EngineObserver
from attncheck.harness.engine.vllm_runner import (
    Hooks,
    added_request,
    engine_facts,
    kv_groups,
    layer_facts,
    sampled_tokens,
    step_plan,
)


class WorkerHooks(Hooks):
    """The wrapped methods of one model runner."""

    def __init__(self, observer: EngineObserver, runner: Any) -> None:
        super().__init__(observer)
        self._runner = runner
        self._steps = LateSteps(observer, is_async=bool(runner.vllm_config.scheduler_config.async_scheduling))
        self._graphs = GraphCopies(self._steps.layer_rows)
        self.receive_rows = self._graphs.layer_rows
        self._step: Step | None = None
        self._known: set[str] = set()
        self._preempted: set[str] = set()

    def install(self) -> None:
        """Watch the runner, from before its KV cache is made.

        Raises:
            QuestionError: the engine cannot be followed.
        """
        reason = not_followed(self._runner)
        if reason is not None:
            raise QuestionError(f"attncheck engine does not follow {reason}")
        self.wrap(self._runner, "initialize_kv_cache", after=self._cache_made)
        self.wrap(self._runner, "execute_model", before=self._execute_begins)
        self.wrap_result(self._runner, "execute_model", self._executed)
        self.wrap_result(self._runner, "sample_tokens", self._sampled)
        if hasattr(self._runner, "_model_forward"):  # V1
            self.wrap(self._runner, "_model_forward", before=self._inputs_v1, after=self._forward_ended)
        else:
            self.wrap_result(self._runner, "prepare_inputs", self._inputs_v2)
        self._graphs.install()

    def remove(self) -> None:
        """Restore the original methods."""
        super().remove()
        self._graphs.remove()

    def result(self) -> ObserverResult:
        """Return what was observed so far; called in any thread."""
        with self._steps.lock:
            return self.observer.result()

    def wrap_result(self, owner: Any, name: str, watch: Callable[[Any], None]) -> None:
        """Call ``watch`` with what a method returns; what it raises stops the observer only."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **keywords: Any) -> Any:
            made = original(*args, **keywords)
            self._guarded(watch, made)
            return made

        setattr(owner, name, wrapped)
        self._wrapped.append((owner, name, original))

    def _cache_made(self, kv_cache_config: Any, is_profiling: bool = False, *_: Any, **__: Any) -> None:
        if is_profiling or self.observer.is_started:
            return
        layers = self._runner.compilation_config.static_forward_context
        facts = {name: layer_facts(layer) for name, layer in layers.items()}
        self.observer.engine_starts(kv_groups(self._runner.kv_cache_config), facts, engine_facts(self._runner))
        for name, layer in layers.items():
            self.watch_layer(name, layer)

    def _execute_begins(
        self,
        scheduler_output: Any,
        intermediate_tensors: Any = None,
        dummy_run: bool = False,
        *_: Any,
        **__: Any,
    ) -> None:
        self._step = None
        if dummy_run:
            return
        for request_id in scheduler_output.finished_req_ids:
            self._known.discard(request_id)
            self._steps.request_changes(functools.partial(self.observer.request_finished, request_id))
        resumed = self._requests_start(scheduler_output)
        self._preempted |= scheduler_output.preempted_req_ids or set()
        if scheduler_output.total_num_scheduled_tokens:
            plan = step_plan(scheduler_output)
            started = tuple(replace(each, resumed=each.request_id in resumed) for each in plan.started)
            self._step = self._steps.step_begins(replace(plan, started=started))

    def _requests_start(self, scheduler_output: Any) -> set[str]:
        """Add new requests, and return the ids of those that are resumed. Runner V2 gets both as new ones."""
        cached = scheduler_output.scheduled_cached_reqs
        resumed = {request_id: cached.all_token_ids.get(request_id) for request_id in cached.resumed_req_ids}
        for new in scheduler_output.scheduled_new_reqs:
            request = added_request(new)
            if new.req_id not in self._known:
                self._known.add(new.req_id)
                self._add(*request)
            elif new.req_id in self._preempted:
                resumed[new.req_id] = new.prefill_token_ids
            else:
                self._add(*request[:-1], "requests whose prompt is streamed")
        for request_id, tokens in resumed.items():
            self._preempted.discard(request_id)
            if tokens is not None and self._steps.is_in_flight(request_id):
                self._add(request_id, list(tokens))  # the scheduler drops what the steps in flight sample
        return set(resumed)

    def _add(self, *request: Any) -> None:
        self._steps.request_changes(functools.partial(self.observer.request_added, *request))

    def _inputs_v1(self, input_ids: Tensor | None = None, positions: Tensor | None = None, *_: Any, **__: Any) -> None:
        if self._step is not None:
            self._steps.inputs(list(self._runner.input_batch.req_ids), input_ids, positions)

    def _inputs_v2(self, input_batch: Any) -> None:
        if self._step is not None:
            self._steps.inputs(input_batch.req_ids, input_batch.input_ids, input_batch.positions)

    def _executed(self, output: Any) -> None:
        self._steps.forward_ends()
        if output is not None and self._step is not None:  # a pooling model samples nothing
            self._steps.step_ends(self._step, {})
            self._step = None

    def _forward_ended(self, *_: Any, **__: Any) -> None:
        self._steps.forward_ends()

    def _sampled(self, output: Any) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        if hasattr(output, "get_output"):  # the tokens are copied from the device meanwhile
            self.wrap_result(output, "get_output", functools.partial(self._step_ends, step))
        else:
            self._step_ends(step, output)

    def _step_ends(self, step: Step, model_runner_output: Any) -> None:
        self._steps.step_ends(step, sampled_tokens(step.plan, model_runner_output))


def not_followed(runner: Any) -> str | None:
    """Return why the engine of a model runner cannot be followed, or None."""
    parallel = runner.vllm_config.parallel_config
    reasons = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": parallel.decode_context_parallel_size > 1
        or getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        "KV connectors": runner.vllm_config.kv_transfer_config is not None,
        "drafts whose number is chosen on the device": getattr(runner, "adaptive_verification", None) is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
