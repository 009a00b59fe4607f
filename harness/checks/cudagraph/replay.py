"""Run a probe: capture its graphs, replay them with the inputs of other steps, and judge each step."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Literal, cast

import torch
from torch import Tensor

from attncheck.backends.contract import AttentionBackend, CommonAttentionMetadata
from attncheck.backends.conventions import Conventions
from attncheck.cases.consistency import implied_path
from attncheck.cases.model import Case
from attncheck.harness.checks import cache_write, containment, numerics
from attncheck.harness.checks.containment import padding_rows
from attncheck.harness.checks.cudagraph.capture import (
    Build,
    CapturedGraph,
    Group,
    MetadataTrace,
    Refusal,
    allocate_inputs,
    alone,
    build_for_capture,
    capture_graph,
    dummy_call,
    parts_of,
    some_steps_earlier,
    trace,
)
from attncheck.harness.checks.cudagraph.probes import BLOCK_TABLE, DRAFT_UPDATE, Bucket, Probe, ProbeStep, probes_of
from attncheck.harness.checks.cudagraph.recorder import (
    BranchError,
    CaptureError,
    Recorder,
    Released,
    UnseenError,
    record_unwatched,
)
from attncheck.harness.checks.findings import Broken
from attncheck.harness.checks.numerics import check_numerics
from attncheck.harness.driver.construction import max_model_len
from attncheck.harness.driver.foreign_code import StageError, call_backend, unsupported_reasons
from attncheck.harness.driver.lending import lend_in_place
from attncheck.harness.driver.observation import Observation
from attncheck.harness.driver.pool import KVPool
from attncheck.harness.driver.session import BegunStep, Fill, Session
from attncheck.harness.driver.step import ForwardCall, micro_batches_of
from attncheck.harness.problem.pages import RandomStream, key_places, lay_out
from attncheck.harness.problem.problem import Problem, build_problem, place_requests
from attncheck.harness.truth.truth import Truth, TruthCache
from attncheck.reference.step_spec import BatchSpec, CacheSpec, PaddingSpec, PathSpec, RequestSpec, SpecDecodeOptions
from attncheck.reports.analysis.phrases import plural
from attncheck.reports.analysis.reasons import named
from attncheck.reports.run_file.causes import ALTERNATIVE, UNKNOWN, likely_causes
from attncheck.reports.run_file.graph_levels import PaddingRows, worst_padding

# Build the problem and truth of each probe step, on first use and once for all backends.
#
# A step costs many small operations, so the steps of several probes are computed as one batch. Each step takes its rows
# and keys from the batch and has its own pages.


class ProbeProblems:
    """The probes of one layer and cache, which are those of ``case``; each probe brings its own batch.

    ``cache``: stores truths. If None, each truth is computed. ``smallest``: the case with one request of one token.
    """

    def __init__(self, case: Case, seed: int, device: torch.device, cache: TruthCache | None = None) -> None:
        self._case, self._seed = case, seed
        self._cache = cache or TruthCache(device)
        self.probes = probes_of(case.layer, case.cache)
        one_token = BatchSpec(requests=(RequestSpec(query_len=1),), path=implied_path(case.layer))
        self.smallest = replace(case, batch=one_token)
        self._cases: dict[tuple[Probe, ProbeStep, bool], Case] = {}
        self._problems: dict[Case, Problem] = {}
        self._truths: dict[Case, Truth] = {}
        self._batches: dict[Case, tuple[Case, int]] = {}

    def compute_together(self, probes: Iterable[Probe]) -> None:
        """Compute the steps of these probes as one batch, on first use of any of them."""
        cases = list(dict.fromkeys(self.case(probe, step) for probe in probes for step in probe.steps))
        cases = [case for case in cases if case not in self._problems and case not in self._batches]
        if len(cases) < 2:
            return
        requests = tuple(chain.from_iterable(case.batch.requests for case in cases))
        batch = replace(self._case, batch=BatchSpec(requests=requests, path=implied_path(self._case.layer)))
        first = 0
        for case in cases:
            self._batches[case] = batch, first
            first += case.batch.num_requests

    def case(self, probe: Probe, step: ProbeStep, *, is_padded: bool = True) -> Case:
        """Return the case of one step. If ``is_padded``, it is padded to the size of its graph."""
        key = probe, step, is_padded
        if key not in self._cases:
            self._cases[key] = self._case_of(probe, step, is_padded=is_padded)
        return self._cases[key]

    def _case_of(self, probe: Probe, step: ProbeStep, *, is_padded: bool) -> Case:
        requests = tuple(RequestSpec(query_len=query_len, seq_len=seq_len) for query_len, seq_len in step.requests)
        padding = PaddingSpec()
        if step.bucket is not None and is_padded:
            bucket = probe.buckets[step.bucket]
            tokens = sum(request.query_len for request in requests)
            padding = PaddingSpec(requests=bucket.num_reqs - len(requests), tokens=bucket.num_tokens - tokens)
        path = implied_path(self._case.layer)
        if probe.drafts and step.bucket is not None:
            path = PathSpec(name="spec_decode", options=SpecDecodeOptions(num_speculative_tokens=probe.drafts))
        return replace(
            self._case,
            batch=BatchSpec(requests=requests, padding=padding, path=path),
            cache=replace(self._case.cache, num_blocks=_num_blocks(probe, self._case.cache), first_block=None),
        )

    def problem(self, case: Case) -> Problem:
        """Return the case as tensors."""
        if case not in self._problems:
            batch = self._batches.get(case)
            self._problems[case] = (
                build_problem(case, self._seed) if batch is None else _part(self.problem(batch[0]), case, batch[1])
            )
        return self._problems[case]

    def truth(self, case: Case) -> Truth:
        """Return the truth of a case, even if the case is too small to show the effect of a modifier."""
        if case not in self._truths:
            batch = self._batches.get(case)
            self._truths[case] = (
                self._cache.truth_of(self.problem(case), refuse_blindness=False)
                if batch is None
                else self.truth(batch[0]).of_requests(batch[1], batch[1] + case.batch.num_requests)
            )
        return self._truths[case]


def _part(batch: Problem, case: Case, first: int) -> Problem:
    """Return the problem of ``case``: rows and keys of ``batch`` from request ``first`` on, in separate pages."""
    requests = tuple(place_requests(case))
    lengths = [request.num_keys for request in requests]
    row = batch.requests[first].first_row
    key = batch.requests[first].base
    rows = slice(row, row + sum(request.rows for request in requests))
    keys = slice(key, key + sum(lengths))
    layout = lay_out(case, lengths, key_places(lengths), RandomStream(batch.seed, case.hash))()
    return replace(
        batch,
        case=case,
        requests=tuple(replace(each, pages=pages) for each, pages in zip(requests, layout.pages, strict=True)),
        query=batch.query[rows],
        keys=batch.keys[keys],
        values=batch.values[keys],
        layout=layout,
        topk_indices=None if batch.topk_indices is None else batch.topk_indices[rows],
    )


def _num_blocks(probe: Probe, cache: CacheSpec) -> int:
    """Return one number of pages for all steps of a probe, since a model runner does not reallocate its cache.

    They fill whole blocks of the cache manager.
    """
    block_size = cache.block_size * cache.pages_per_block
    needed = max(sum(-(-seq_len // block_size) for _, seq_len in step.requests) for step in probe.steps)
    return (4 + 2 * needed) * cache.pages_per_block


# Act as the model runner for one probe: capture its graphs, then run steps by replaying them.
#
# The impl, builders, cache and input buffers live as long as the session. Everything that a backend raises becomes a
# :class:`~attncheck.harness.driver.foreign_code.StageError`.


@dataclass(frozen=True)
class ProbedBackend:
    """A backend on the layer and cache of ``problems``, with the recorder of its graphs."""

    backend: type[AttentionBackend]
    problems: ProbeProblems
    device: torch.device
    recorder: Recorder


@dataclass(frozen=True)
class CapturedBucket:
    """The graphs of one bucket. ``fault``: what the capture changed in inputs or cache, or None."""

    graphs: tuple[CapturedGraph, ...]
    fault: str | None


@dataclass(frozen=True)
class StepResult:
    """One step by one graph: the observation, the pool it ran over, and the trace of its metadata."""

    seen: Observation
    pool: KVPool
    trace: MetadataTrace


Launch = Callable[[BegunStep], None]
"""Makes the calls of a step, by a graph or without one."""


class GraphSession:
    """A backend under one probe. Raise StageError if set-up fails.

    ``steps``: those of the probe, except steps without a graph whose batches the backend declares unsupported.
    ``is_pool_finite``: fill slots that no request owns with huge finite numbers instead of NaN.
    """

    def __init__(self, probed: ProbedBackend, probe: Probe, *, is_pool_finite: bool = False) -> None:
        self.probed, self.probe = probed, probe
        self.is_pool_finite = is_pool_finite or probed.backend.conventions.needs_finite_pool
        self.steps = [step for step in probe.steps if step.bucket is not None or self._is_supported(step)]
        self._updates_drafts = probe.claim == DRAFT_UPDATE
        problems = [self.problem(step) for step in self.steps]
        first, *later = problems
        parts = [bucket.part(probe.num_micro_batches) for bucket in probe.buckets]
        self._session = Session(
            probed.backend,
            first,
            probed.device,
            tuple(later),
            capture_sizes=tuple(sorted(part.num_tokens for part in parts)),
            least_builders=max(probe.num_builders, probe.num_micro_batches),
            watching=probed.recorder.watching,
        )
        self._sessions = {first.case: self._session}
        batches = [problem.case.batch for problem in problems]
        num_reqs = [batch.num_requests + batch.padding.requests for batch in batches]
        num_tokens = [batch.num_tokens + batch.padding.tokens for batch in batches]
        num_reqs += [bucket.num_reqs for bucket in probe.buckets]
        num_tokens += [bucket.num_tokens for bucket in probe.buckets]
        self._max_model_len = max_model_len(probed.backend, problems)
        self._inputs = [
            allocate_inputs(first, max(num_reqs), max(num_tokens), self._max_model_len, probed.device)
            for _ in range(probe.num_micro_batches)
        ]
        for inputs in self._inputs:
            probed.recorder.mark_host(*inputs.host_twins)

    def _is_supported(self, step: ProbeStep) -> bool:
        return not unsupported_reasons(self.probed.backend, self.probed.problems.case(self.probe, step))

    @property
    def builders(self) -> list[Any]:
        """The builders of the graphs, or of the micro-batches in one graph."""
        return self._session.builders

    def problem(self, step: ProbeStep, *, is_padded: bool = True) -> Problem:
        """Return the problem of a step. If ``is_padded``, it is padded to the size of its graph."""
        problems = self.probed.problems
        return problems.problem(problems.case(self.probe, step, is_padded=is_padded))

    def capture(self, bucket: Bucket) -> CapturedBucket | Refusal:
        """Capture and return the bucket's graphs. Raise StageError if building or warming up fails."""
        pool = _pool_of(self._session)
        pool.filled()
        before = pool.bytes().clone()
        part = bucket.part(self.probe.num_micro_batches)
        longest = self.probe.dummy_lens == "longest"
        dummy = dummy_call(self._session.problem, part, self._max_model_len, longest=longest)
        fresh = [dummy] * self.probe.num_micro_batches
        lent = lend_in_place(self._inputs, fresh)
        graphs = self._graphs_of(lent.calls, self._session, build_for_capture)
        if not isinstance(graphs, tuple):
            return graphs
        fault = _change_of_cache(self._session.problem, pool, before)
        changed = set(lent.changed())
        if changed:  # build_for_cudagraph_capture may fill in inputs; subtract what it changes without forward
            lent = lend_in_place(self._inputs, fresh)
            for group in self._groups(lent.calls):
                self._built(build_for_capture, group)
            changed -= set(lent.changed())
        if changed:
            fault = f"forward changed its inputs at capture: {', '.join(sorted(changed))}"
        return CapturedBucket(graphs, fault)

    def run(self, step: ProbeStep, problem: Problem, graphs: Sequence[CapturedGraph] = ()) -> list[StepResult]:
        """Run one step by its graphs, or without a graph if there is none. ``problem``: that of the step.

        Return one result per builder, or one in total for micro-batches. Raise StageError.
        """
        session, fresh = self._begin(step, problem)
        if step.gains_pages:
            self._pass_a_page_earlier(step, session, fresh, graphs)
        lent = lend_in_place(self._inputs, fresh)
        results = []
        for launch, made_of in self._launches(step, session, lent.calls, graphs):
            begun = session.begin(self._fill(problem), lent=lent)
            launch(begun)
            results.append(StepResult(session.finish(begun), _pool_of(session), made_of))
        return results

    def capture_step(self, step: ProbeStep, problem: Problem) -> tuple[CapturedGraph, ...] | Refusal:
        """Capture graphs with the inputs of this step instead of dummies. Raise StageError as :meth:`capture` does."""
        session, fresh = self._begin(step, problem)
        begun = session.begin(self._fill(problem), images=False, lent=lend_in_place(self._inputs, fresh))
        return self._graphs_of(begun.calls, session, partial(self._build, step))

    def _begin(self, step: ProbeStep, problem: Problem) -> tuple[Session, Sequence[ForwardCall]]:
        """Return the session of the step, and calls that are yet to be loaded into the buffers.

        For ``draft_index`` 1 and higher, first build the metadata of the previous draft in the same pages.
        """
        if problem.case not in self._sessions:
            self._sessions[problem.case] = self._session.in_place(problem)
        session = self._sessions[problem.case]
        fresh = session.prepared().calls
        if self.probe.num_micro_batches > 1:
            whole = session.prepared().step
            fresh = micro_batches_of(whole, (len(whole.query) // 2,), session.threshold)
        if step.draft_index and not self._updates_drafts:
            before = replace(step, draft_index=step.draft_index - 1)
            earlier = lend_in_place(self._inputs, [some_steps_earlier(call, 1) for call in fresh])
            for group in self._groups(earlier.calls):
                self._built(partial(self._build, before), group)
        return session, fresh

    def _pass_a_page_earlier(
        self, step: ProbeStep, session: Session, fresh: Sequence[ForwardCall], graphs: Sequence[CapturedGraph]
    ) -> None:
        """Run a step of the same requests with one page less each. Its output is not judged."""
        size = session.problem.cache.block_size
        lent = lend_in_place(self._inputs, [some_steps_earlier(call, size, size) for call in fresh])
        begun = session.begin(Fill(poison=0.0), images=False, lent=lent)
        for launch, _ in self._launches(step, session, lent.calls, graphs):
            launch(begun)

    def _launches(
        self, step: ProbeStep, session: Session, calls: Sequence[ForwardCall], graphs: Sequence[CapturedGraph]
    ) -> list[tuple[Launch, MetadataTrace]]:
        """Build metadata for each group of calls; return a function that runs the group, and its trace."""
        launches: list[tuple[Launch, MetadataTrace]] = []
        for index, group in enumerate(self._groups(calls)):
            replay = partial(_replay, session, graphs[index]) if graphs else None
            if replay is not None and self._updates_drafts:
                launches.append((replay, graphs[index].trace))
                continue
            metadata = self._built(partial(self._build, step), group)
            launches.append((replay or partial(_call, session, metadata), trace(parts_of(alone(metadata)))))
            del metadata  # the graph must not depend on memory that the step's metadata keep alive
        return launches

    def _groups(self, calls: Sequence[ForwardCall]) -> list[Group]:
        """Return the calls of each graph, each with its builder. Micro-batches share one graph."""
        if len(calls) > 1:
            return [list(zip(self.builders, calls, strict=True))]
        return [[(builder, calls[0])] for builder in self.builders]

    def _built(self, build: Build, group: Group) -> list[Any]:
        watching = self.probed.recorder.watching
        return [
            call_backend("build", partial(build, builder, call.common), within=watching()) for builder, call in group
        ]

    def _fill(self, problem: Problem) -> Fill:
        """Return the poison in slots that no request owns."""
        huge = float(torch.finfo(problem.dtype).max) / 4
        return Fill(poison=huge if self.is_pool_finite else math.nan)

    def _build(self, step: ProbeStep, builder: Any, common: CommonAttentionMetadata) -> Any:
        if step.draft_index is not None:
            return builder.build_for_drafting(common_attn_metadata=common, draft_index=step.draft_index)
        if self.probe.claim == BLOCK_TABLE:
            table, slots = common.block_table_tensor, common.slot_mapping
            other = replace(common, block_table_tensor=torch.zeros_like(table), slot_mapping=torch.full_like(slots, -1))
            return builder.update_block_table(builder.build(0, other), table, slots)
        return builder.build(common_prefix_len=0, common_attn_metadata=common)

    def _graphs_of(
        self, calls: Sequence[ForwardCall], session: Session, build: Build
    ) -> tuple[CapturedGraph, ...] | Refusal:
        """Capture each group of calls in a graph."""
        kv_cache = _pool_of(session).kv_cache
        graphs = []
        for group in self._groups(calls):
            buffers = [session.layer.output_buffers(session.problem, call) for _, call in group]
            graph = capture_graph(
                self.probed.recorder, session.layer, group, kv_cache, buffers, build, is_updated=self._updates_drafts
            )
            if not isinstance(graph, CapturedGraph):
                return graph
            graphs.append(graph)
        return tuple(graphs)


def _pool_of(session: Session) -> KVPool:
    """Return the pool of a layer for which graphs are captured, which has one."""
    return cast(KVPool, session.pool)


def _call(session: Session, metadata: Sequence[Any], begun: BegunStep) -> None:
    for call, own in zip(begun.calls, metadata, strict=True):
        session.take(begun, call, own)


def _replay(session: Session, graph: CapturedGraph, begun: BegunStep) -> None:
    for call, buffers in zip(begun.calls, graph.buffers, strict=True):
        buffers.refill(call.num_rows)
    call_backend("replay", graph.recording.replay, session.device)
    begun.results.extend(map(session.layer.result_of, begun.calls, graph.returned, graph.buffers))


# Describe in one line what is wrong with a capture or with one step of a graph, using the judges of other checks.


def _change_of_cache(problem: Problem, pool: KVPool, before: Tensor) -> str | None:
    """Return what a capture changed in the cache, or None if it changed no byte. All its slots are -1."""
    after = pool.bytes()
    if torch.equal(before, after):
        return None
    changed = "capture changed the cache, although every slot of its dummies is -1"
    if pool.codec is None:
        return changed
    slots = torch.arange(problem.num_blocks * problem.cache.block_size, device=before.device)
    pairs = [pool.read_image(image, slots) for image in (before, after)]
    wrong = torch.stack([_differs(was, now) for was, now in zip(*pairs, strict=True)]).any(0).nonzero().flatten()
    if not len(wrong):
        return f"{changed}: bytes between the slots"
    name = problem.slot_name(int(wrong[0]))
    text = f"{changed}: {f'1 slot, {name}' if len(wrong) == 1 else f'{len(wrong)} slots, the first is {name}'}"
    if int(wrong[0]) >= problem.cache.block_size:
        return text
    spoilt = torch.stack([~torch.isfinite(rows[wrong].double()).flatten(1).all(1) for rows in pairs[1]]).any()
    what = "NaN or Inf now is" if bool(spoilt) else "another value now is"
    return f"{text}; {what} in the null page, which every padding row points to"


def _differs(was: Tensor, now: Tensor) -> Tensor:
    return (was.contiguous().view(torch.uint8) != now.contiguous().view(torch.uint8)).flatten(1).any(1)


def step_fault(
    problem: Problem, truth: Truth, conventions: Conventions, seen: Observation, pool: KVPool | None
) -> str | None:
    """Return what is wrong with one step over ``pool``, or None. Padding rows of the output do not count.

    Judges guard zones, the cache, inputs, rows never written, the output and the LSE, in this order.
    """
    if seen.breaches:
        return containment.breach(seen)
    if pool is not None and pool.codec is not None:
        rows = problem.keys, problem.values
        written = cache_write.judge_pool(problem, pool, seen, rows, [rows])
        if isinstance(written, Broken):
            return written.summary + (f" ({written.meaning})" if written.meaning else "")
    elif seen.changed:
        return f"inputs were changed: {', '.join(seen.changed)}"
    output = check_numerics(problem, truth, replace(seen, protocol=()), explains=False)
    if isinstance(output, Broken):
        return output.summary
    log_sum = numerics.check_lse(problem, truth, seen, conventions) if seen.lse is not None else None
    return f"LSE: {log_sum.summary}" if isinstance(log_sum, Broken) else None


# Run one probe of a CUDA-graph level, from its captures to its last step, and return what came of it.

_MOST_LENGTHS = 10
"""Most requests whose lengths a message lists."""

_MOST_NAMES = 3
"""Most tensors or numbers that a cause names."""


@dataclass(frozen=True)
class ProbeOutcome:
    """What came of a probe. ``why``: the likely cause, if found. ``is_leak``: it also occurs without a graph.

    ``what``: where and how much is wrong, or why this machine cannot judge it. A leak is NaN in slots that no request
    owns. ``padding_rows``: their worst state after right steps.
    """

    outcome: Literal["passed", "failed", "not examined"]
    what: str = ""
    why: str | None = None
    is_leak: bool = False
    padding_rows: PaddingRows = "not examined"

    @property
    def reason(self) -> str:
        """Why the probe did not pass; empty if it did."""
        if self.outcome == "not examined":
            return f"cannot be examined here: {self.what}"
        return self.what if self.why is None else f"{self.what}; {self.why}"


def run_probe(probed: ProbedBackend, probe: Probe, *, is_pool_finite: bool) -> ProbeOutcome:
    """Run one probe from capture to its last step.

    Raise StageError if the backend cannot be set up, or cannot run a step even without a graph.
    """
    refused = refused_batches(probed.backend, probe, probed.problems)
    if refused:
        return ProbeOutcome("failed", f"the backend declares that it does not serve such batches: {refused}")
    session = GraphSession(probed, probe, is_pool_finite=is_pool_finite)
    captures: list[CapturedBucket] = []
    for bucket in probe.buckets:
        capture = _captured(session, bucket)
        if isinstance(capture, ProbeOutcome):
            if capture.outcome == "not examined":
                return _failed_unwatched(probed, probe, len(captures) + 1) or capture
            return capture
        captures.append(capture)
    padding: PaddingRows = "not examined"
    for step in session.steps:
        result = _run_step(session, step, () if step.bucket is None else captures[step.bucket].graphs)
        if result.outcome != "passed":
            is_leak = result.outcome == "failed" and _lets_nan_through(session, step)
            return replace(result, is_leak=is_leak, padding_rows=padding)
        padding = worst_padding([padding, result.padding_rows])
    return ProbeOutcome("passed", padding_rows=padding)


def refused_batches(backend: type[AttentionBackend], probe: Probe, problems: ProbeProblems) -> str:
    """Return why the backend declares that it refuses batches of the probe's graphs; empty if it refuses none."""
    for step in probe.steps:
        if step.bucket is not None and (reasons := unsupported_reasons(backend, problems.case(probe, step))):
            return "; ".join(reasons)
    return ""


def _captured(session: GraphSession, bucket: Bucket) -> CapturedBucket | ProbeOutcome:
    """Capture and return the graphs of a bucket. Raise StageError if the backend fails even without a graph."""
    try:
        capture = session.capture(bucket)
    except StageError as failure:
        first = session.steps[0]
        session.run(first, session.problem(first))
        return ProbeOutcome("failed", f"{failure.raised.in_words} ({bucket})")
    if isinstance(capture, BranchError):
        capture = _refused_with_device_of_gpu(session, bucket) or capture
    if isinstance(capture, UnseenError):
        return ProbeOutcome("not examined", str(capture))
    if isinstance(capture, CaptureError):
        return ProbeOutcome("failed", f"forward cannot be captured ({bucket}): {capture}")
    return capture if capture.fault is None else ProbeOutcome("failed", f"{capture.fault} ({bucket})")


def _refused_with_device_of_gpu(session: GraphSession, bucket: Bucket) -> CaptureError | None:
    """Return why a new impl cannot be captured that reads the device of a GPU from its construction on, or None.

    It keeps no tensor of the CPU's branch. An exception proves nothing, since a CPU cannot run all that a GPU can.
    """
    start = session.probed.recorder.with_device_of_gpu
    if start is None:
        return None
    probed = replace(session.probed, recorder=start())
    try:
        capture = GraphSession(probed, session.probe, is_pool_finite=session.is_pool_finite).capture(bucket)
    except Exception:  # noqa: BLE001 (code for a GPU may raise anything here)
        return None
    return capture if isinstance(capture, CaptureError) else None


def _failed_unwatched(probed: ProbedBackend, probe: Probe, num_buckets: int) -> ProbeOutcome | None:
    """Return what the backend raises in a capture with a new impl and no watch, or None if it raises nothing.

    A new impl raises again what the first impl raised once only, such as on the first call of a shape. An exception
    caused by the watch does not occur here.
    """
    session = GraphSession(replace(probed, recorder=Recorder("emulated", record_unwatched)), probe)
    for bucket in probe.buckets[:num_buckets]:
        try:
            session.capture(bucket)
        except StageError as failure:
            return ProbeOutcome("failed", f"{failure.raised.in_words} ({bucket})")
    return None


def _run_step(session: GraphSession, step: ProbeStep, graphs: tuple[CapturedGraph, ...]) -> ProbeOutcome:
    """Run one step of a probe; return the fault and its cause, or the state of the padding rows if it is right."""
    problem, conventions = session.problem(step), session.probed.backend.conventions
    for graph in graphs:
        for memory in graph.recording.released():
            return _use_of_released(graph, memory)
    truth = session.probed.problems.truth(problem.case)
    failed = partial(ProbeOutcome, "failed")
    try:
        results = session.run(step, problem, graphs)
        for index, result in enumerate(results):
            fault = step_fault(problem, truth, conventions, result.seen, result.pool)
            if fault is None:
                continue
            what = f"{_in_words(session, step)}: {fault}"
            if not graphs:
                return failed(what, f"{UNKNOWN}this step was made without a graph, between replays")
            if result.seen.changed:
                return failed(what, "build or the graph writes to buffers of the model runner")
            if session.probed.recorder.name == "emulated" and (hidden := _hidden_work(session, step)):
                return ProbeOutcome("not examined", hidden)
            return failed(what, _why_wrong(session, step, graphs[index], result.trace))
    except StageError as failure:
        return failed(f"{_in_words(session, step)}: {failure.raised.in_words}")
    states = (padding_rows(problem, result.seen, conventions)[0] for result in results)
    return ProbeOutcome("passed", padding_rows=worst_padding(states))


def _use_of_released(graph: CapturedGraph, memory: Released) -> ProbeOutcome:
    """Return the fault of a graph that uses released memory, which the allocator may give to another tensor."""
    what = "the graph uses memory that was released after the capture"
    path = graph.trace.path_of(memory.start, memory.end)
    if path is None:
        why = "a workspace or constant was replaced, or belonged to one run alone"
        return ProbeOutcome("failed", f"{what}: {memory}", why)
    why = f"build puts {path} into new memory; the graph reads that of capture"
    return ProbeOutcome("failed", f"{what}: {path} ({memory})", why)


def _in_words(session: GraphSession, step: ProbeStep) -> str:
    requests = step.requests
    lengths = named([f"{query_len}/{seq_len}" for query_len, seq_len in requests], _MOST_LENGTHS)
    bucket = None if step.bucket is None else session.probe.buckets[step.bucket]
    where = "step without a graph, with" if bucket is None else f"graph captured for {bucket}, replayed with"
    draft = "" if step.draft_index is None else f"draft {step.draft_index} by build_for_drafting, "
    return f"{draft}{where} {plural(len(requests), 'request')} (query_len/seq_len {lengths})"


# Find why a graph's step is wrong: moved memory, frozen values, or a cause that is not the graph.
#
# Runs only after a fault, so it may be slow. It repeats the step without a graph, with a new impl and builder, and
# without padding.


def _fault_without_graph(session: GraphSession, step: ProbeStep, *, is_padded: bool = True) -> str | None:
    """Return what is wrong with this step if ``forward`` runs without a graph, or None if it is right."""
    problem = session.problem(step, is_padded=is_padded)
    try:
        return _first_fault(session, problem, session.run(step, problem))
    except StageError as failure:
        return failure.raised.in_words


def _first_fault(session: GraphSession, problem: Problem, results: Sequence[StepResult]) -> str | None:
    """Return what is wrong with the first wrong result of a step, or None if all are right."""
    truth = session.probed.problems.truth(problem.case)
    conventions = session.probed.backend.conventions
    faults = (step_fault(problem, truth, conventions, result.seen, result.pool) for result in results)
    return next((fault for fault in faults if fault is not None), None)


def _lets_nan_through(session: GraphSession, step: ProbeStep) -> bool:
    """Return whether the step is wrong only because of NaN in slots that no request owns.

    If so, the graph is not the cause. The step runs without a graph, with a new impl and builder, and without padding,
    whose NaN rows are another fault.
    """
    if session.is_pool_finite:
        return False

    def is_wrong(*, is_pool_finite: bool) -> bool:
        anew = GraphSession(session.probed, session.probe, is_pool_finite=is_pool_finite)
        return _fault_without_graph(anew, step, is_padded=False) is not None

    try:
        return is_wrong(is_pool_finite=False) and not is_wrong(is_pool_finite=True)
    except StageError:  # a new session cannot be set up
        return False


def _why_wrong(session: GraphSession, step: ProbeStep, graph: CapturedGraph, made_of: MetadataTrace) -> str:
    """Return the cause in words. ``made_of``: trace of the step's metadata, by the builder of ``graph``."""
    without_graph = _fault_without_graph(session, step)
    if without_graph is not None:
        return _why_wrong_anyway(session, step, without_graph)
    moved = [path for path in graph.trace.moved(made_of) if path in graph.read]
    reshaped = [path for path in graph.trace.reshaped(made_of) if path in graph.read]
    changed = graph.trace.changed(made_of)
    builder = "build_for_drafting" if step.draft_index is not None else "build"
    causes = []
    if moved:
        buffers = named(moved, _MOST_NAMES)
        causes.append(f"{builder} puts {buffers} into new memory; the graph reads the memory of capture")
    if reshaped:
        shapes = ", ".join(reshaped[:_MOST_NAMES])
        causes.append(f"shapes are frozen at capture, and {builder} gives {shapes} another one")
    if read := graph.recording.host_reads:
        reads = "; ".join(read[:_MOST_NAMES])
        causes.append(f"numbers are frozen at capture, which forward took from the host: {reads}")
    elif changed:
        causes.append(f"numbers are frozen at capture, such as these: {'; '.join(changed[:_MOST_NAMES])}")
    if not causes:
        causes.append("something that forward read or decided at capture is frozen (a plan, a shape, a branch)")
    return f"the same step is right without a graph: {'; and '.join(causes)}"


def _why_wrong_anyway(session: GraphSession, step: ProbeStep, fault: str) -> str:
    first = replace(step, gains_pages=False)  # omits the earlier, shorter step
    try:
        anew = GraphSession(session.probed, session.probe, is_pool_finite=session.is_pool_finite)
        fault_anew = _fault_without_graph(anew, first)
    except StageError as failure:
        fault_anew = failure.raised.message
    if fault_anew is None:
        return "wrong without a graph, too, but right with a new impl and builder: something is kept from earlier steps"
    padding = session.problem(step).case.batch.padding
    if (padding.requests or padding.tokens) and _fault_without_graph(session, step, is_padded=False) is None:
        return (
            "wrong without a graph, too, and right without padding: padding (query length 0, seq_lens "
            f"{session.probed.backend.conventions.pad_seq_len}, slot -1, rows of NaN) is not left alone"
        )
    cause, *others = (_cause_without_graph(session, step) or "").split(ALTERNATIVE)
    if not cause:
        return f"{UNKNOWN}wrong without a graph, too: {fault}"
    return ALTERNATIVE.join((f"{cause}, without a graph, too", *others))


def _cause_without_graph(session: GraphSession, step: ProbeStep) -> str | None:
    """Return the likely cause of a wrong output of this step without a graph, or None if none is known."""
    problem = session.problem(step)
    truth = session.probed.problems.truth(problem.case)
    try:
        results = session.run(step, problem)
    except StageError:
        return None
    findings = (check_numerics(problem, truth, result.seen) for result in results)
    meanings = (finding.meaning for finding in findings if isinstance(finding, Broken))
    return next((meaning for meaning in meanings if likely_causes(meaning)), None)


def _hidden_work(session: GraphSession, step: ProbeStep) -> str | None:
    """Return why work of ``forward`` is hidden from the emulation, whose replays then prove nothing, or None.

    Work is hidden if the step is right without a graph, but wrong with a graph captured at this very step.
    """
    if _fault_without_graph(session, step) is not None:
        return None
    problem = session.problem(step)
    try:
        graphs = session.capture_step(step, problem)
        if isinstance(graphs, UnseenError):
            return str(graphs)
        if isinstance(graphs, CaptureError):
            return None
        others = [other for other in session.probe.steps if other.requests != step.requests]
        if others and any(graph.recording.hands_out_memory for graph in graphs):
            # Overwrite what hidden work left in the backend's own memory by running another step.
            session.run(others[0], session.problem(others[0]))
        results = session.run(step, problem, graphs)
    except StageError as failure:
        return failure.raised.in_words
    if _first_fault(session, problem, results) is None:
        return None
    return (
        "forward does work that torch's dispatcher does not see, and that replaying its operators does not repeat "
        "(a kernel launched outside of a custom operator: torch.library.custom_op makes it visible)"
    )
