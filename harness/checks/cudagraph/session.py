"""Plays the model runner for one probe: captures its graphs, then steps by replaying them, and never looks inside.

One impl, builders, a cache and input buffers live as long as the session. Whatever a backend raises becomes a
:class:`~attncheck.harness.driver.foreign_code.StageError`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from attncheck.backends.contract import AttentionBackend, CommonAttentionMetadata
from attncheck.cases.model import Case
from attncheck.harness.checks.cudagraph.capture import CapturedForward, capture_forward
from attncheck.harness.checks.cudagraph.graph_inputs import a_step_earlier, allocate_inputs, dummy_call
from attncheck.harness.checks.cudagraph.metadata_trace import MetadataTrace, tensors_in, trace
from attncheck.harness.checks.cudagraph.probes import Bucket, Probe, ProbeStep
from attncheck.harness.checks.cudagraph.recorder import CaptureError, Forward, Recorder, UnseenError
from attncheck.harness.driver.construction import construct_builder, construct_impl
from attncheck.harness.driver.foreign_code import call_backend
from attncheck.harness.driver.forward import BackendLayer, OutputBuffers
from attncheck.harness.driver.forward_calls import ForwardCall, changed_inputs, forward_calls_of
from attncheck.harness.driver.kv_pool import KVPool
from attncheck.harness.driver.observation import Observation
from attncheck.harness.driver.persistent_inputs import map_tensors
from attncheck.harness.driver.pool_filling import new_pool
from attncheck.harness.driver.results import CallResult, observed, placed
from attncheck.harness.driver.step import Step, make_step, request_order
from attncheck.harness.driver.vllm_config import LayerStub
from attncheck.harness.problem.problem import Problem

T = TypeVar("T")


@dataclass(frozen=True)
class CapturedGraph(CapturedForward):
    """One captured graph of one builder, and what its metadata were made of. ``read``: paths the graph reads."""

    buffers: OutputBuffers
    trace: MetadataTrace
    read: frozenset[str]


@dataclass(frozen=True)
class CapturedBucket:
    """The graphs of one bucket, one a builder, and the cache's memory before and after."""

    graphs: tuple[CapturedGraph, ...]
    pool: KVPool
    before: Tensor
    after: Tensor


@dataclass(frozen=True)
class StepResult:
    """One step of one builder: what was seen, over which pool, and the trace of the metadata it was made with."""

    seen: Observation
    pool: KVPool
    trace: MetadataTrace


class GraphSession:
    """A backend under one probe; ``problems`` are those of its turns. Raises StageError where set-up breaks.

    ``is_pool_finite``: slots that nobody owns hold huge finite numbers in place of NaN.
    """

    def __init__(
        self,
        backend: type[AttentionBackend],
        probe: Probe,
        problems: Sequence[Problem],
        device: torch.device,
        recorder: Recorder,
        *,
        is_pool_finite: bool = False,
    ) -> None:
        self.backend, self.device, self.recorder = backend, device, recorder
        self.is_pool_finite = is_pool_finite or backend.conventions.needs_finite_pool
        self._probe, self._problems = probe, problems
        first = problems[0]
        self._attn_layer = LayerStub(first.cache, device)
        self.impl = self._attn_layer.impl = self._enter("construct", lambda: construct_impl(backend, first, device))
        self._layer = BackendLayer(backend, self.impl, self._attn_layer)
        self._builders = [self._enter("builder", self._new_builder) for _ in range(probe.num_builders)]
        sizes = [(problem.case.batch.num_requests + problem.case.batch.padding.requests) for problem in problems]
        tokens = [(problem.case.batch.num_tokens + problem.case.batch.padding.tokens) for problem in problems]
        num_reqs = max(*sizes, *(bucket.num_reqs for bucket in probe.buckets))
        num_tokens = max(*tokens, *(bucket.num_tokens for bucket in probe.buckets))
        self._width = max(problem.block_table.shape[1] for problem in problems)
        self._inputs = allocate_inputs(first, num_reqs, num_tokens, self._width, device)
        recorder.mark_host(*self._inputs.host_twins)
        self._pool = call_backend("cache", lambda: new_pool(backend, first, device, self.impl))
        self._pools: dict[Case, KVPool] = {first.case: self._pool}

    def capture(self, bucket: Bucket) -> CapturedBucket | CaptureError | UnseenError:
        """The bucket's graphs. Raises StageError where building or warming up breaks."""
        self._pool.filled()
        dummy = dummy_call(self._problems[0], bucket, self._width, longest=self._probe.dummy_lens == "longest")
        call = self._inputs.load(dummy)
        return self._captured(call, self._pool, lambda builder, common: builder.build_for_cudagraph_capture(common))

    def step(self, turn: ProbeStep, problem: Problem, capture: CapturedBucket | None) -> list[StepResult]:
        """One step by the graphs of ``capture``, or without any; one result a builder. Raises StageError."""
        step, pool, call = self._begin(turn, problem)
        lent = map_tensors(call, Tensor.clone)
        traces, forwards = [], []
        for index, builder in enumerate(self._builders):
            metadata = self._enter("build", partial(self._build, builder, turn, call.common))
            traces.append(trace(metadata))
            if capture is None:
                buffers = self._layer.output_buffers(problem, call)
                forwards.append((buffers, self._eager(call, pool, metadata, buffers)))
            else:
                graph = capture.graphs[index]
                forwards.append((graph.buffers, graph.replay))
            del metadata  # a graph must not live on what a step's metadata would have let go of
        taken = []
        for (buffers, run), made_of in zip(forwards, traces, strict=True):
            self._fill(pool, step)
            buffers.refill(step.num_rows)
            before = pool.bytes().clone()
            returned = call_backend("forward" if capture is None else "replay", run)
            result = self._layer.result_of(call, returned, buffers)
            taken.append(StepResult(self._observe(step, lent, result, pool, before), pool, made_of))
        return taken

    def capture_step(self, turn: ProbeStep, problem: Problem) -> CapturedBucket | CaptureError | UnseenError:
        """Graphs captured at this very step, in place of dummies. Raises StageError as :meth:`capture` does."""
        step, pool, call = self._begin(turn, problem)
        self._fill(pool, step)
        return self._captured(call, pool, lambda builder, common: self._build(builder, turn, common))

    def _new_builder(self) -> Any:
        sizes = tuple(sorted(bucket.num_tokens for bucket in self._probe.buckets))
        return construct_builder(self.backend, self._problems, self.device, self._attn_layer, capture_sizes=sizes)

    def _enter(self, name: str, call: Callable[[], T]) -> T:
        def watched() -> T:
            with self.recorder.watching():
                return call()

        return call_backend(name, watched)

    def _begin(self, turn: ProbeStep, problem: Problem) -> tuple[Step, KVPool, ForwardCall]:
        """The step's tensors in the persistent buffers, and a cache for it, to be filled.

        A further draft follows one in the same pages, for which metadata were built.
        """
        order, threshold = call_backend("builder", partial(self._request_order, problem))
        step = make_step(problem, self.device, order, pad_seq_len=self.backend.conventions.pad_seq_len)
        (fresh,) = forward_calls_of(step, self.backend.features, threshold)
        if problem.case not in self._pools:
            self._pools[problem.case] = self._pool.beside(problem)
        if turn.draft_index:
            before = replace(turn, draft_index=turn.draft_index - 1)
            earlier = self._inputs.load(a_step_earlier(fresh)).common
            for builder in self._builders:
                self._enter("build", partial(self._build, builder, before, earlier))
        return step, self._pools[problem.case], self._inputs.load(fresh)

    def _request_order(self, problem: Problem) -> tuple[list[int], int | None]:
        """As the model runner sorts the batch, and the threshold it sorts by."""
        threshold: int | None = getattr(self._builders[0], "reorder_batch_threshold", None)
        return request_order(problem, threshold), threshold

    def _fill(self, pool: KVPool, step: Step) -> None:
        """The cache before a step: poison where nobody owns it, and new rows that no writer brings."""
        huge = float(torch.finfo(step.problem.dtype).max) / 4
        pool.filled(huge if self.is_pool_finite else math.nan)
        self._layer.store_new_rows(pool, step)

    def _build(self, builder: Any, turn: ProbeStep, common: CommonAttentionMetadata) -> Any:
        if turn.draft_index is not None:
            return builder.build_for_drafting(common_attn_metadata=common, draft_index=turn.draft_index)
        return builder.build(common_prefix_len=0, common_attn_metadata=common)

    def _captured(
        self, call: ForwardCall, pool: KVPool, build: Callable[[Any, CommonAttentionMetadata], Any]
    ) -> CapturedBucket | CaptureError | UnseenError:
        before = pool.bytes().clone()
        graphs = []
        for builder in self._builders:
            graph = self._record(call, pool.kv_cache, partial(build, builder))
            if not isinstance(graph, CapturedGraph):
                return graph
            graphs.append(graph)
        return CapturedBucket(tuple(graphs), pool, before, pool.bytes().clone())

    def _record(
        self, call: ForwardCall, kv_cache: Tensor, build: Callable[[CommonAttentionMetadata], Any]
    ) -> CapturedGraph | CaptureError | UnseenError:
        buffers = self._layer.output_buffers(self._problems[0], call)
        latest: dict[str, Tensor] = {}
        traces: list[MetadataTrace] = []

        def on_metadata(metadata: Any) -> None:
            latest.clear()
            latest.update(tensors_in(metadata))
            traces.append(trace(metadata))

        captured = capture_forward(
            self.recorder,
            call,
            build,
            lambda lent, metadata: self._layer.enter(lent, kv_cache, metadata, buffers),
            on_metadata,
        )
        if not isinstance(captured, CapturedForward):
            return captured
        recording = captured.recording
        read = frozenset(path for path, tensor in latest.items() if recording.reads(tensor) is not False)
        latest.clear()
        return CapturedGraph(recording, captured.returned, buffers, traces[-1], read)

    def _eager(self, call: ForwardCall, pool: KVPool, metadata: Any, buffers: OutputBuffers) -> Forward:
        def run() -> object:
            with self.recorder.watching():
                returned = self._layer.enter(call, pool.kv_cache, metadata, buffers)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            return returned

        return run

    def _observe(self, step: Step, lent: ForwardCall, result: CallResult, pool: KVPool, before: Tensor) -> Observation:
        return observed(
            placed([result]),
            step,
            [result],
            pool_before=before,
            pool_after=pool.bytes().clone(),
            changed=changed_inputs(lent, result.call),
        )
