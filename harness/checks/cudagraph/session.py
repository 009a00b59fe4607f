"""Act as the model runner for one probe: capture its graphs, then run steps by replaying them.

The impl, builders, cache and input buffers live as long as the session. Everything that a backend raises becomes a
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
from attncheck.harness.checks.cudagraph.capture import CapturedGraph, Group, alone, capture_group
from attncheck.harness.checks.cudagraph.graph_inputs import GraphInputs, allocate_inputs, dummy_call, some_steps_earlier
from attncheck.harness.checks.cudagraph.metadata_trace import MetadataTrace, parts_of, trace
from attncheck.harness.checks.cudagraph.probe import BLOCK_TABLE, DRAFT_UPDATE, Bucket, Probe, ProbeStep
from attncheck.harness.checks.cudagraph.recorder import CaptureError, Recorder, UnseenError
from attncheck.harness.driver.construction import construct_builder, construct_impl, max_model_len
from attncheck.harness.driver.foreign_code import call_backend
from attncheck.harness.driver.forward import BackendLayer, OutputBuffers
from attncheck.harness.driver.forward_calls import ForwardCall, forward_calls_of, micro_batches_of
from attncheck.harness.driver.kv_pool import KVPool
from attncheck.harness.driver.observation import Observation
from attncheck.harness.driver.pool_filling import new_pool
from attncheck.harness.driver.results import observed, placed
from attncheck.harness.driver.step import Step, make_step, request_order
from attncheck.harness.driver.vllm_config import LayerStub
from attncheck.harness.problem.problem import Problem

T = TypeVar("T")


@dataclass(frozen=True)
class CapturedBucket:
    """The graphs of one bucket, the cache's bytes before and after capture, and inputs that ``forward`` changed."""

    graphs: tuple[CapturedGraph, ...]
    pool: KVPool
    before: Tensor
    after: Tensor
    changed: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepResult:
    """One step by one graph: the observation, the pool it ran over, and the trace of its metadata."""

    seen: Observation
    pool: KVPool
    trace: MetadataTrace


class GraphSession:
    """A backend under one probe; ``problems`` are those of its turns. Raise StageError if set-up fails.

    ``is_pool_finite``: fill slots that no request owns with huge finite numbers instead of NaN.
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
        self._updates_drafts = probe.claim == DRAFT_UPDATE
        first = problems[0]
        self._attn_layer = LayerStub(first.cache, device)
        self.impl = self._attn_layer.impl = self._enter("construct", lambda: construct_impl(backend, first, device))
        self._layer = BackendLayer(backend, self.impl, self._attn_layer)
        num_builders = max(probe.num_builders, probe.num_micro_batches)
        self.builders = [self._enter("builder", self._new_builder) for _ in range(num_builders)]
        sizes = [(problem.case.batch.num_requests + problem.case.batch.padding.requests) for problem in problems]
        tokens = [(problem.case.batch.num_tokens + problem.case.batch.padding.tokens) for problem in problems]
        num_reqs = max(*sizes, *(bucket.num_reqs for bucket in probe.buckets))
        num_tokens = max(*tokens, *(bucket.num_tokens for bucket in probe.buckets))
        self._max_model_len = max_model_len(backend, problems)
        self._inputs = GraphInputs(
            [
                allocate_inputs(first, num_reqs, num_tokens, self._max_model_len, device)
                for _ in range(probe.num_micro_batches)
            ]
        )
        recorder.mark_host(*self._inputs.host_twins)
        self._pool = call_backend("cache", lambda: new_pool(backend, first, device, self.impl))
        self._pools: dict[Case, KVPool] = {first.case: self._pool}

    def capture(self, bucket: Bucket) -> CapturedBucket | CaptureError | UnseenError:
        """Capture and return the bucket's graphs. Raise StageError if building or warming up fails."""
        self._pool.filled()
        part = bucket.part(self._probe.num_micro_batches)
        dummy = dummy_call(self._problems[0], part, self._max_model_len, longest=self._probe.dummy_lens == "longest")
        fresh = [dummy] * self._probe.num_micro_batches
        calls = self._inputs.load(fresh)
        pristine = self._inputs.copied(calls)

        def build(builder: Any, common: CommonAttentionMetadata) -> Any:
            return builder.build_for_cudagraph_capture(common)

        captured = self._captured(calls, self._pool, build)
        if not isinstance(captured, CapturedBucket):
            return captured
        changed = self._inputs.changed(calls, pristine)
        if changed:  # build_for_cudagraph_capture may fill in inputs; subtract what it changes without forward
            calls = self._inputs.load(fresh)
            pristine = self._inputs.copied(calls)
            for group in self._groups(calls):
                self._built(build, group)
            changed -= self._inputs.changed(calls, pristine)
        return replace(captured, changed=tuple(sorted(changed)))

    def step(self, turn: ProbeStep, problem: Problem, capture: CapturedBucket | None) -> list[StepResult]:
        """Run one step by the graphs of ``capture``, or without a graph if None.

        Return one result per builder, or one in total for micro-batches. Raise StageError.
        """
        step, pool, fresh = self._begin(turn, problem)
        if turn.gains_pages:
            self._pass_a_page_earlier(turn, step, pool, fresh, capture)
        calls = self._inputs.load(fresh)
        pristine = self._inputs.copied(calls)
        taken = []
        for buffers, run, made_of in self._forwards(turn, problem, pool, calls, capture):
            self._fill(pool, step)
            for call, own in zip(calls, buffers, strict=True):
                own.refill(call.num_rows)
            before = pool.bytes().clone()
            returned = call_backend("forward" if capture is None else "replay", run, self.device)
            results = [self._layer.result_of(*each) for each in zip(calls, returned, buffers, strict=True)]
            seen = observed(
                placed(results),
                step,
                results,
                pool_before=before,
                pool_after=pool.bytes().clone(),
                changed=sorted(self._inputs.changed(calls, pristine)),
            )
            taken.append(StepResult(seen, pool, made_of))
        return taken

    def capture_step(self, turn: ProbeStep, problem: Problem) -> CapturedBucket | CaptureError | UnseenError:
        """Capture graphs with the inputs of this step instead of dummies. Raise StageError as :meth:`capture` does."""
        step, pool, fresh = self._begin(turn, problem)
        self._fill(pool, step)
        return self._captured(
            self._inputs.load(fresh), pool, lambda builder, common: self._build(builder, turn, common)
        )

    def _new_builder(self) -> Any:
        parts = [bucket.part(self._probe.num_micro_batches) for bucket in self._probe.buckets]
        sizes = tuple(sorted(part.num_tokens for part in parts))
        return construct_builder(self.backend, self._problems, self.device, self._attn_layer, capture_sizes=sizes)

    def _enter(self, name: str, call: Callable[[], T]) -> T:
        def watched() -> T:
            with self.recorder.watching():
                return call()

        return call_backend(name, watched)

    def _begin(self, turn: ProbeStep, problem: Problem) -> tuple[Step, KVPool, Sequence[ForwardCall]]:
        """Return the step, a cache that is yet to be filled, and calls that are yet to be loaded into the buffers.

        For ``draft_index`` 1 and higher, first build the metadata of the previous draft in the same pages.
        """
        order, threshold = call_backend("builder", partial(self._request_order, problem))
        step = make_step(problem, self.device, order, pad_seq_len=self.backend.conventions.pad_seq_len)
        if self._probe.num_micro_batches > 1:
            fresh = micro_batches_of(step, (len(step.query) // 2,), threshold)
        else:
            fresh = forward_calls_of(step, self.backend.features, threshold)
        if problem.case not in self._pools:
            self._pools[problem.case] = self._pool.beside(problem)
        if turn.draft_index and not self._updates_drafts:
            before = replace(turn, draft_index=turn.draft_index - 1)
            for group in self._groups(self._inputs.load([some_steps_earlier(call, 1) for call in fresh])):
                self._built(lambda builder, common: self._build(builder, before, common), group)
        return step, self._pools[problem.case], fresh

    def _pass_a_page_earlier(
        self,
        turn: ProbeStep,
        step: Step,
        pool: KVPool,
        fresh: Sequence[ForwardCall],
        capture: CapturedBucket | None,
    ) -> None:
        """Run a step of the same requests with one page less each. Its output is not judged."""
        size = step.problem.cache.block_size
        calls = self._inputs.load([some_steps_earlier(call, size, size) for call in fresh])
        pool.filled(0.0)
        for _, run, _ in self._forwards(turn, step.problem, pool, calls, capture):
            call_backend("forward" if capture is None else "replay", run, self.device)

    def _forwards(
        self,
        turn: ProbeStep,
        problem: Problem,
        pool: KVPool,
        calls: Sequence[ForwardCall],
        capture: CapturedBucket | None,
    ) -> list[tuple[tuple[OutputBuffers, ...], Callable[[], list[object]], MetadataTrace]]:
        """Build metadata for each group of calls; return each group's buffers, a function to run it, and its trace."""
        forwards = []
        for index, group in enumerate(self._groups(calls)):
            metadata: list[Any] = []
            if capture is None or not self._updates_drafts:
                metadata = self._built(lambda builder, common: self._build(builder, turn, common), group)
                made_of = trace(parts_of(alone(metadata)))
            else:
                made_of = capture.graphs[index].trace
            if capture is None:
                buffers = tuple(self._layer.output_buffers(problem, call) for call in calls)
                run = self._eager(calls, pool, metadata, buffers)
            else:
                buffers, run = capture.graphs[index].buffers, capture.graphs[index].replay
            forwards.append((buffers, run, made_of))
            del metadata  # the graph must not depend on memory that the step's metadata keep alive
        return forwards

    def _groups(self, calls: Sequence[ForwardCall]) -> list[Group]:
        """Return the calls of each graph, each with its builder. Micro-batches share one graph."""
        if len(calls) > 1:
            return [list(zip(self.builders, calls, strict=True))]
        return [[(builder, calls[0])] for builder in self.builders]

    def _built(self, build: Callable[[Any, CommonAttentionMetadata], Any], group: Group) -> list[Any]:
        return [self._enter("build", partial(build, builder, call.common)) for builder, call in group]

    def _request_order(self, problem: Problem) -> tuple[list[int], int | None]:
        """Return the order in which the model runner sorts the batch, and the threshold that it sorts by."""
        threshold: int | None = getattr(self.builders[0], "reorder_batch_threshold", None)
        return request_order(problem, threshold), threshold

    def _fill(self, pool: KVPool, step: Step) -> None:
        """Fill the cache before a step: poison in slots that no request owns, and new rows if no writer stores them."""
        huge = float(torch.finfo(step.problem.dtype).max) / 4
        pool.filled(huge if self.is_pool_finite else math.nan)
        self._layer.store_new_rows(pool, step)

    def _build(self, builder: Any, turn: ProbeStep, common: CommonAttentionMetadata) -> Any:
        if turn.draft_index is not None:
            return builder.build_for_drafting(common_attn_metadata=common, draft_index=turn.draft_index)
        if self._probe.claim == BLOCK_TABLE:
            table, slots = common.block_table_tensor, common.slot_mapping
            other = replace(common, block_table_tensor=torch.zeros_like(table), slot_mapping=torch.full_like(slots, -1))
            return builder.update_block_table(builder.build(0, other), table, slots)
        return builder.build(common_prefix_len=0, common_attn_metadata=common)

    def _captured(
        self, calls: Sequence[ForwardCall], pool: KVPool, build: Callable[[Any, CommonAttentionMetadata], Any]
    ) -> CapturedBucket | CaptureError | UnseenError:
        before = pool.bytes().clone()
        graphs = []
        for group in self._groups(calls):
            graph = capture_group(
                self.recorder,
                self._layer,
                self._problems[0],
                group,
                pool.kv_cache,
                build,
                is_updated=self._updates_drafts,
            )
            if not isinstance(graph, CapturedGraph):
                return graph
            graphs.append(graph)
        return CapturedBucket(tuple(graphs), pool, before, pool.bytes().clone())

    def _eager(
        self, calls: Sequence[ForwardCall], pool: KVPool, metadata: Sequence[Any], buffers: Sequence[OutputBuffers]
    ) -> Callable[[], list[object]]:
        def run() -> list[object]:
            with self.recorder.watching():
                return [
                    self._layer.enter(call, pool.kv_cache, own, answer)
                    for call, own, answer in zip(calls, metadata, buffers, strict=True)
                ]

        return run
