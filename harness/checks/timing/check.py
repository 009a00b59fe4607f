"""The check ``timing``: times of a step that a backend cannot fake, and their finding."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median

import torch

from attncheck.backends.contract import AttentionBackend
from attncheck.backends.declarations import is_merged
from attncheck.backends.interpreter import ENVIRONMENT, MARK, is_interpreted
from attncheck.backends.registry import LoadedBackend
from attncheck.cases.model import Case
from attncheck.errors import QuestionError
from attncheck.harness.checks.cudagraph.capture import CapturedGraph, capture_graph
from attncheck.harness.checks.cudagraph.check import level_for, unexamined_reasons
from attncheck.harness.checks.cudagraph.recorder import CaptureError, Recorder, recorder_for
from attncheck.harness.checks.findings import Broken, Finding, FindingError, Holds, NotExamined, TimingSettings
from attncheck.harness.checks.interface import Check, CheckedCase
from attncheck.harness.checks.timing.clock import (
    GUARDS,
    CacheFlush,
    Clock,
    EventClock,
    HostClock,
    Samples,
    clock_for,
    do_nothing,
    kernels_of,
    median_interval,
    replaced_clocks,
    sample,
    samples_of,
    state_under_load,
)
from attncheck.harness.checks.timing.contents import (
    AnswerJudge,
    Contents,
    FreshContents,
    TimedAnswer,
    copy_answer,
    require_stored,
)
from attncheck.harness.checks.timing.roofline import measure_ceilings, work_of
from attncheck.harness.device import accelerator_of
from attncheck.harness.driver.foreign_code import call_backend, stage_named, unsupported_reasons
from attncheck.harness.driver.lending import PersistentInputs, changed_inputs, map_tensors, span
from attncheck.harness.driver.session import OutputBuffers, Session
from attncheck.harness.driver.step import ForwardCall, Step
from attncheck.harness.problem.problem import Problem, build_problem
from attncheck.harness.truth.truth import Truth
from attncheck.reference.spec import AttentionCGSupport
from attncheck.reference.step_spec import REGISTERED, BatchSpec, PaddingSpec, RequestSpec
from attncheck.reports.run_file.timings import (
    Ceilings,
    ClockName,
    ClockOverhead,
    DeviceState,
    Kernel,
    Latency,
    StepPart,
    Timing,
)

# Batches that are timed in addition to the case's own, and the comparison of their times.
#
# These are the decodes and the prefills of a mixed batch alone, and neighbours of nearly the same shape. Neighbours
# reveal a batch that is fast only because the backend special-cases its shape. Cannot see: a special case that is less
# than :data:`TOO_FAST` times as fast, or that covers the neighbours as well.

DISTANCES = (1, 8)
"""Numbers of tokens by which neighbours are shorter. One token breaks all alignment, which slows honest kernels too."""

TOO_FAST = 2.0
"""Ratio that all neighbours' times must exceed for the batch to count as special-cased."""

NOTABLE = 1.25
"""Ratio above which a note is added."""

FEW_SAMPLES, MORE_SAMPLES = 3, 10
"""Samples of each side: few to see that there is no difference, more to confirm one."""

Take = Callable[[], int]


def parts_of(problem: Problem) -> dict[StepPart, Problem]:
    """Return the decodes and the prefills of a mixed batch, each without padding. Empty for any other batch."""
    requests = problem.case.batch.requests
    decodes = tuple(request for request in requests if request.query_len == 1)
    prefills = tuple(request for request in requests if request.query_len > 1)
    if not decodes or not prefills or not problem.has_pool:
        return {}
    requests_of: dict[StepPart, tuple[RequestSpec, ...]] = {"decode": decodes, "prefill": prefills}
    parts = {name: _build(problem, name, own, PaddingSpec()) for name, own in requests_of.items()}
    return {name: part for name, part in parts.items() if part is not None}


def neighbour_of(problem: Problem, distance: int) -> Problem | None:
    """Return the batch with every context ``distance`` tokens shorter, or every query if no request has a context.

    Return None if no request is long enough, or if the path allows no other query lengths. Query lengths of batches
    with a context stay the same.
    """
    batch = problem.case.batch
    shorter = tuple(_shorter(request, distance) for request in batch.requests)
    if shorter == batch.requests and all(r.query_len > distance and not r.context_len for r in batch.requests):
        if batch.path.name not in ("paged", "mla", "encoder_only", "local"):
            return None
        shorter = tuple(
            replace(r, query_len=r.query_len - distance, seq_len=r.total_len - distance) for r in batch.requests
        )
    if shorter == batch.requests:
        return None
    return _build(problem, f"{distance}-shorter", shorter, batch.padding)


def _shorter(request: RequestSpec, distance: int) -> RequestSpec:
    left = request.context_len - distance
    if left < max(1, request.shared_prefix):
        return request
    encoder_len = request.encoder_len
    if encoder_len is not None and encoder_len > distance:
        encoder_len -= distance
    return replace(request, seq_len=request.total_len - distance, encoder_len=encoder_len)


def _build(problem: Problem, name: str, requests: tuple[RequestSpec, ...], padding: PaddingSpec) -> Problem | None:
    """Return such a batch over the problem's cache, or None if no problem can be built from it."""
    case = problem.case
    try:
        batch = replace(case.batch, requests=requests, padding=padding)
        cache = replace(case.cache, num_blocks=problem.num_blocks) if problem.has_pool else case.cache
        changed: Case = replace(case, id=f"{case.id}.{name}", batch=batch, cache=cache)
        return build_problem(changed, problem.seed)
    except QuestionError:
        return None


@dataclass(frozen=True)
class Neighbour:
    """The time of a neighbour relative to the batch: the ratio of medians, and a lower bound of the ratio."""

    distance: int
    ratio: float
    least: float

    @property
    def is_notable(self) -> bool:
        """Whether a note reports the neighbour."""
        return self.least > NOTABLE

    @property
    def is_suspect(self) -> bool:
        """Whether the batch is faster than its shape explains."""
        return self.least > TOO_FAST


def compare(distance: int, own: Take, neighbour: Take) -> Neighbour:
    """Compare alternating samples of both, which must be warmed up. Take more samples only if the first ones differ."""
    pairs = [(own(), neighbour()) for _ in range(FEW_SAMPLES)]
    ratio, _ = _compared(pairs)
    if ratio <= NOTABLE:
        return Neighbour(distance, ratio, 0.0)
    pairs = [(own(), neighbour()) for _ in range(MORE_SAMPLES)]
    return Neighbour(distance, *_compared(pairs))


def _compared(pairs: list[tuple[int, int]]) -> tuple[float, float]:
    """Return the ratio of the medians of pairs of times, and a lower bound of the ratio."""
    owns, others = ([pair[side] for pair in pairs] for side in (0, 1))
    least = median_interval(others)[0] / max(1.0, median_interval(owns)[1])
    return median(others) / max(1.0, median(owns)), least


# Time one batch of one backend repeatedly, with new inputs in the same memory, and judge every output.
#
# The order is that of a model runner. Cache and metadata are ready, and `build` is timed on the host. Then the layer's
# rows arrive, and the cache write and `forward` are timed together, with no code of the harness in between.

Flusher = Callable[[], object]

EMPTY_CALLS = 15
"""Number of empty calls whose median time is subtracted from each sample; for a host clock, the latest ones."""

_FEW = 0.1
"""Share of calls in which the host may fall behind without a note, since so few hardly move a median."""


@dataclass(frozen=True)
class LentMemory:
    """The memory that a backend is given in every call: inputs to read, and buffers to write."""

    inputs: PersistentInputs
    buffers: OutputBuffers


@dataclass
class LatestAnswer:
    """The judge of a session's latest output, which must not change until the next call of any batch."""

    judge: AnswerJudge | None = None

    def start_next(self, judge: AnswerJudge | None) -> None:
        """Check that the latest output has not changed, and make ``judge`` responsible for the next call.

        Raise FindingError if it has changed.
        """
        if self.judge is not None:
            self.judge.require_unchanged()
        self.judge = judge


class TimedStep:
    """A batch on a session's layer and cache. ``build_ns``: ``build`` times of all calls. May raise StageError."""

    def __init__(
        self,
        name: str,
        session: Session,
        contents: FreshContents,
        clock: Clock,
        flush: Flusher,
        latest: LatestAnswer,
        memory: LentMemory | None = None,
        recorder: Recorder | None = None,
        overhead: ClockOverhead | None = None,
    ) -> None:
        """``latest``: shared by all steps of the session. ``memory``: that of a step of at least this size, to reuse.

        ``recorder``: captures the graph whose replays are timed instead of ``forward``; None for no graph.
        ``overhead``: what ``clock`` adds to each sample; None if nothing, or if the clock is the host's.
        """
        problem = contents.bases[0].problem
        self._session = session.following(problem)  # the cache holds what the last call left; each call adds its own
        self._contents, self._clock, self._flush = contents, clock, flush
        self._backend, self._device, self._latest = session.backend, session.device, latest
        self._judge = AnswerJudge(name, contents, self._backend.conventions)
        self._host = HostClock(clock.wait)
        self._recorder, self._overhead = recorder, overhead
        self._replay: CapturedGraph | None = None
        self._notes: tuple[str, ...] = ()
        self.build_ns: list[int] = []
        self._empty_ns: deque[int] = deque(maxlen=EMPTY_CALLS)
        if memory is None:
            _, (call,) = self._session.step_of(problem)
            memory = LentMemory(PersistentInputs(call), session.layer.output_buffers(problem, call))
        self.memory = memory

    @property
    def worst(self) -> float:
        """The largest error so far, in budgets."""
        return self._judge.worst

    def take(self) -> int:
        """Return the nanoseconds of one ``forward`` on inputs that no call has seen.

        Raise StageError if the backend raised, and FindingError if its output is not valid.
        """
        contents, step, fresh, call = self._begin(self._judge)
        lent = map_tensors(call, torch.Tensor.detach)
        metadata_alone = replace(call, query=call.query[:0], key=None, value=None)  # the rows are loaded later
        pristine = replace(fresh, common=map_tensors(metadata_alone, torch.Tensor.clone).common)
        if self._recorder is not None and self._replay is None:
            self._capture(self._recorder, call, fresh)
        metadata = self._build(lent)
        answer, forward_ns = self._forward(lent, fresh, metadata)
        self._judge.judge(contents, step.row_order[fresh.rows].to(self._device), answer)
        changed = ", ".join(changed_inputs(pristine, lent))
        if changed:
            raise FindingError(Broken(f"{self._judge.name}: the call changed what it was lent to read: {changed}"))
        if self._session.impl.brings_writer and step.key is not None and self._session.pool is not None:
            require_stored(self._judge.name, self._session.pool, step.problem, self._contents)
        return forward_ns

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes that a reader of the times needs."""
        return (*self._notes, *self._judge.notes, *self._clock_notes())

    @property
    def clock_name(self) -> ClockName:
        """The name of the clock that times ``forward``, or "graph" if replays of a graph are timed."""
        return self._clock.name if self._replay is None else "graph"

    def unjudged_call(self) -> Callable[[], object]:
        """Return a function that runs one more ``forward`` on new inputs, for the profiler. It is not judged."""
        _, _, fresh, held = self._begin(None)
        lent = map_tensors(held, torch.Tensor.detach)
        forward = self._session.layer.bind(lent, self._kv_cache, self._build(lent), self.memory.buffers)
        self.memory.inputs.load_rows(fresh)

        def call() -> object:
            with torch.no_grad():
                return call_backend("forward", forward)

        return call

    def finish(self) -> None:
        """Judge the last output in full. Raise FindingError if it has changed or is wrong."""
        if self._latest.judge is self._judge:
            self._judge.require_unchanged()
        self._judge.finish()

    def _clock_notes(self) -> Iterator[str]:
        clock = self._clock
        if not isinstance(clock, EventClock):
            return
        if clock.is_overlapped:
            yield (
                f"{self._judge.name}: the device was not held back, because work seemed to go on elsewhere on it after "
                "the warm-up's calls; gaps between launches count"
            )
        if clock.num_behind > clock.num_taken * _FEW:
            yield (
                f"{self._judge.name}: in {clock.num_behind} of {clock.num_taken} calls the host fell behind the "
                "device, and gaps between launches count"
            )
        if clock.num_late:
            yield (
                f"{self._judge.name}: in {clock.num_late} of {clock.num_taken} calls work went on elsewhere on the "
                "device when the stream was done; it counts"
            )

    def _begin(self, judge: AnswerJudge | None) -> tuple[Contents, Step, ForwardCall, ForwardCall]:
        """Put new contents into the cache and the metadata into the lent memory; ``judge``: judges the next call.

        Return the contents, their step, its call, and that call in the lent memory, whose rows are yet to be loaded.
        """
        self._latest.start_next(judge)
        contents = self._contents.next()
        problem = contents.problem()
        step, (fresh,) = self._session.step_of(problem)
        pool = self._session.pool
        if pool is not None:
            old = problem.old_keys
            pool.write((problem.key_slots[old], problem.keys[old], problem.values[old]))
            self._session.layer.store_new_rows(pool, step, ())
        return contents, step, fresh, self.memory.inputs.load_metadata(fresh)

    def _capture(self, recorder: Recorder, call: ForwardCall, fresh: ForwardCall) -> None:
        inputs = self.memory.inputs
        buffers = self.memory.buffers
        layer = self._session.layer
        recorder.mark_host(*inputs.host_twins)
        inputs.load_rows(fresh)
        group = [(self._session.builder, call)]
        captured = capture_graph(recorder, layer, group, self._kv_cache, [buffers])
        if isinstance(captured, CapturedGraph):
            self._replay = captured
        else:
            self._recorder = None
            self._notes = (f"{self._judge.name} is not replayed from a graph, though one is declared: {captured}",)

    def _build(self, call: ForwardCall) -> object:
        made: list[object] = []

        def build() -> None:
            made.append(
                self._session.builder.build(common_prefix_len=call.common_prefix_len, common_attn_metadata=call.common)
            )

        self.build_ns.append(call_backend("build", lambda: self._host.time(build)))
        return made[0]

    def _forward(self, call: ForwardCall, fresh: ForwardCall, metadata: object) -> tuple[TimedAnswer, int]:
        inputs = self.memory.inputs
        buffers = self.memory.buffers
        num_rows = call.num_rows
        kv_cache = self._kv_cache
        spans = inputs.spans()
        if kv_cache is not None:
            spans["the cache"] = span(kv_cache)
        replay = self._replay
        if replay is None:
            forward = self._session.layer.bind(call, kv_cache, metadata, buffers)
        else:
            forward = replay.recording.launch
        returned: list[object] = []
        answers: list[TimedAnswer] = []

        def kept(run: Callable[[], object]) -> Callable[[], None]:
            return lambda: returned.append(run())

        def before() -> None:
            self._flush()
            buffers.refill(num_rows)
            inputs.load_rows(fresh)
            if isinstance(self._clock, HostClock):  # the overhead of an event clock is measured beforehand
                self._empty_ns.append(self._clock.time(kept(do_nothing)))
                returned.clear()

        def after() -> None:
            answers.append(
                copy_answer(
                    returned[0] if replay is None else replay.returned[0],
                    buffers.out,
                    buffers.lse,
                    num_rows,
                    spans,
                    must_be_buffer=self._backend.accept_output_buffer,
                )
            )

        with torch.no_grad():
            taken = call_backend(
                "forward",
                lambda: self._clock.time(kept(forward), before=before, after=after),
            )
        return answers[0], max(1, taken - self._overhead_ns())  # the difference may be 0 or negative for an empty call

    def _overhead_ns(self) -> int:
        if self._overhead is None:
            return int(median(self._empty_ns)) if self._empty_ns else 0
        return self._overhead.empty_ns + (0 if self._replay is None else self._overhead.replay_ns or 0)

    @property
    def _kv_cache(self) -> torch.Tensor | None:
        return None if self._session.pool is None else self._session.pool.kv_cache


# Time one backend on one problem: the batch, its parts, and neighbours to compare it with.

WARM_UPS = 2
"""Untimed first calls, since a first call may compile."""

Sampler = Callable[[StepPart, Callable[[], int], TimingSettings], Samples]
"""Takes samples of a part by calling a function that returns nanoseconds: warm-ups first, the samples last."""


def _take_samples(_part: StepPart, take: Callable[[], int], settings: TimingSettings) -> Samples:
    return sample(take, settings)


@dataclass(frozen=True)
class TimingConditions:
    """How every batch is timed: on which device, and by which samples."""

    device: torch.device
    settings: TimingSettings
    sampler: Sampler = _take_samples

    @cached_property
    def flush(self) -> CacheFlush:
        """The flush of the device's last-level cache. It allocates device memory."""
        return CacheFlush(self.device)

    @cached_property
    def overhead(self) -> ClockOverhead | None:
        """What the clock of the device adds to each sample; None for the clock of the host."""
        return measure_overhead(self.device, self.flusher)

    @property
    def is_cold(self) -> bool:
        """Whether the device's last-level cache is flushed before each sample."""
        return not self.settings.warm and self.flush.num_bytes > 0

    @property
    def flusher(self) -> Callable[[], object]:
        """The function called before each sample."""
        return self.flush if self.is_cold else do_nothing


class TimingMeasurement:
    """One backend on one problem. ``session``: that of the problem. ``own``: the step that is timed.

    Raises StageError if the backend raised, and FindingError if it manipulates its times.
    """

    def __init__(
        self, conditions: TimingConditions, backend: type[AttentionBackend], problem: Problem, truth: Truth
    ) -> None:
        self._conditions, self._backend, self._problem = conditions, backend, problem
        self._parts = parts_of(problem)
        self.session = Session(backend, problem, conditions.device, capture_sizes=self._capture_sizes())
        self._latest = LatestAnswer()
        self.own = self._step("forward", FreshContents(problem, truth, conditions.device))
        self._notes: list[str] = []

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes that a reader of the times needs."""
        return (*self.own.notes, *self._notes)

    def latencies(self) -> tuple[Latency, ...]:
        """Return the latencies of the batch, of ``build``, and of the batch's parts."""
        samples = self._sampled("forward", self.own)
        builds = self.own.build_ns[-len(samples.samples_ns) :]  # one before each sample
        found = [
            _latency("forward", self.own.clock_name, samples, self._problem.case),
            _latency("build", "host", samples_of(builds, self._conditions.settings)),
        ]
        for name, part in self._parts.items():
            contents = self._contents(part, at_least=2)
            if contents is None:
                self._notes.append(f"{name}: not timed alone: the backend does not serve it, or it has no right answer")
                continue
            with stage_named(f"of the {name} part alone"):
                step = self._step(name, contents)
                found.append(_latency(name, step.clock_name, self._sampled(name, step), part.case))
            step.finish()
            self._notes += step.notes
        return tuple(found)

    def compare_neighbours(self) -> None:
        """Raise FindingError if all batches of nearly the same shape take much longer."""
        seen: list[Neighbour] = []
        for distance in DISTANCES:
            problem = neighbour_of(self._problem, distance)
            contents = None if problem is None else self._contents(problem, at_least=1)
            if contents is None:
                continue
            name = f"the same batch, {_tokens(distance)} shorter"
            with stage_named(f"of {name}"):
                step = self._step(name, contents, like=self.own)
                seen.append(compare(distance, self.own.take, step.take))
            step.finish()
            if not seen[-1].is_notable:
                break
        if seen and all(neighbour.is_suspect for neighbour in seen):
            nearest = min(seen, key=lambda neighbour: neighbour.least)
            raise FindingError(
                Broken(
                    _slower(nearest),
                    {"neighbour_ratio": nearest.ratio},
                    "a known shape is special-cased: its time does not hold for other shapes",
                )
            )
        self._notes += [_slower(neighbour) for neighbour in seen if neighbour.is_notable]

    def kernels(self) -> tuple[Kernel, ...]:
        """Return the kernels that one ``forward`` runs."""
        return kernels_of(self.own.unjudged_call(), self._conditions.device)

    def _contents(self, problem: Problem, *, at_least: int) -> FreshContents | None:
        """Return inputs for ``problem``, or None if the backend does not declare it or its truth cannot be computed."""
        if unsupported_reasons(self._backend, problem.case):
            return None
        try:
            return FreshContents(problem, None, self._conditions.device, at_least=at_least)
        except QuestionError:
            return None

    def _step(self, name: str, contents: FreshContents, like: TimedStep | None = None) -> TimedStep:
        """Return a step after its warm-up. It reuses the memory of ``like`` if given."""
        conditions, clock = self._conditions, clock_for(self._conditions.device)
        step = TimedStep(
            name,
            self.session,
            contents,
            clock,
            conditions.flusher,
            self._latest,
            None if like is None else like.memory,
            recorder_for(conditions.device) if self._is_replayed(contents.bases[0].problem) else None,
            conditions.overhead,
        )
        for _ in range(GUARDS if isinstance(clock, EventClock) else WARM_UPS):
            step.take()
        return step

    def _sampled(self, part: StepPart, step: TimedStep) -> Samples:
        return self._conditions.sampler(part, step.take, self._conditions.settings)

    def _is_replayed(self, problem: Problem) -> bool:
        accelerator = accelerator_of(self._conditions.device)
        return accelerator is not None and accelerator.graph_class != "" and allows_graph(self._backend, problem)

    def _capture_sizes(self) -> tuple[int, ...]:
        replayed = [each for each in (self._problem, *self._parts.values()) if self._is_replayed(each)]
        batches = [problem.case.batch for problem in replayed]
        return tuple(sorted({batch.num_tokens + batch.padding.tokens for batch in batches}))


def measure_overhead(device: torch.device, flush: Callable[[], object] = do_nothing) -> ClockOverhead | None:
    """Return what the clock of ``device`` adds to a sample; None for the host, where each sample measures it."""
    accelerator = accelerator_of(device)
    if accelerator is None:
        return None

    def launch() -> None:
        accelerator.hold(0)

    def taken_ns(call: Callable[[], object]) -> int:
        clock = EventClock(accelerator)
        times = [clock.time(call, before=flush) for _ in range(2 * GUARDS + EMPTY_CALLS)]  # first calls adjust the hold
        return round(median(times[-EMPTY_CALLS:]))

    try:
        replay = recorder_for(device).record(lambda: launch).launch
    except CaptureError:  # no graph will be timed either
        replay_ns = None
    else:
        replay_ns = max(0, taken_ns(replay) - taken_ns(launch))
    return ClockOverhead(empty_ns=taken_ns(do_nothing), replay_ns=replay_ns)


def allows_graph(backend: type[AttentionBackend], problem: Problem) -> bool:
    """Return whether the level that the backend declares allows a graph of such a batch.

    Raise StageError if it declares no valid level.
    """
    if unexamined_reasons(problem.case):
        return False
    return level_for(backend, problem).value >= level_of(problem.case.batch).value


def level_of(batch: BatchSpec) -> AttentionCGSupport:
    """Return the lowest CUDA-graph level that covers such a batch."""
    query_lens = {request.query_len for request in batch.requests}
    if query_lens == {1}:
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    return AttentionCGSupport.UNIFORM_BATCH if len(query_lens) == 1 else AttentionCGSupport.ALWAYS


def _slower(neighbour: Neighbour) -> str:
    return f"forward takes {neighbour.ratio:.3g} times as long where requests are {_tokens(neighbour.distance)} shorter"


def _tokens(count: int) -> str:
    return "a token" if count == 1 else f"{count} tokens"


def _latency(part: StepPart, clock: ClockName, samples: Samples, case: Case | None = None) -> Latency:
    """``case``: the case whose work is counted, or None to count none. How large a registered cache is is unknown."""
    work = None if case is None or case.cache.kv_cache_dtype == REGISTERED else work_of(case)
    return Latency(
        part=part,
        clock=clock,
        median_ns=samples.median_ns,
        low_ns=samples.low_ns,
        high_ns=samples.high_ns,
        samples_ns=samples.samples_ns,
        is_settled=samples.is_settled,
        moved_bytes=None if work is None else work.moved_bytes,
        flops=None if work is None else work.flops,
    )


# `timing`: how long one step takes, measured on inputs that are new in every call, with every output judged.
#
# Timed are `forward` with its cache write, `build` on the host, and the decodes and the prefills of a mixed batch
# alone. The check fails on times that no honest kernel has: a wrong output in any call, work that continues after the
# clock stopped, a replaced clock, or one shape that is much faster than its neighbours. Cannot see: how long the same
# kernel takes in another process, or a backend that attacks the interpreter of its process (threat model:
# `docs/timing.md`). Needs further runs of the backend.

LOW_CLOCK = 0.8
"""Share of the highest SM clock. Below it, a note states that the device was slow."""

_SEVERAL_CALLS = ("split_kv", "dcp", "pcp", "micro_batch")


class TimingCheck:
    """Times backends on one device. The device's ceilings are measured once per dtype."""

    def __init__(self, conditions: TimingConditions) -> None:
        self._conditions = conditions
        self._ceilings: dict[str, Ceilings] = {}

    def examine(self, backend: LoadedBackend, problem: Problem, truth: Truth) -> Finding:
        """Return the finding for one case. Raise StageError if the backend raised, and FindingError as a check does."""
        if _runs_interpreted(backend, self._conditions.device):
            reason = "its kernels are interpreted here: their times are not those of a GPU"
            return NotExamined((reason,), "attncheck")
        try:
            return self._measure(backend, problem, truth)
        except (MemoryError, torch.OutOfMemoryError) as error:
            return NotExamined((f"out of memory for the contents of several problems: {error}",), "attncheck")

    def _measure(self, backend: LoadedBackend, problem: Problem, truth: Truth) -> Finding:
        conditions = self._conditions
        ceilings = self._ceilings_of(problem.layer.dtype)
        measurement = TimingMeasurement(conditions, backend.backend, problem, truth)
        latencies = measurement.latencies()
        chosen = measurement.session.chosen_kernels
        state = state_under_load(conditions.device, measurement.own.take)
        measurement.compare_neighbours()
        kernels = measurement.kernels() if conditions.settings.kernels else ()
        measurement.own.finish()
        if replaced := replaced_clocks():
            return Broken(
                f"replaced while the backend was loaded or ran: {', '.join(replaced)}",
                meaning="clocks, events or synchronisation were patched; attncheck's own references were not",
            )
        notes = (*measurement.notes, *_device_notes(state))
        timing = Timing(
            latencies=latencies,
            cache="cold" if conditions.is_cold else "warm",
            ceilings=ceilings,
            kernels=kernels,
            device=state,
            overhead=conditions.overhead,
            notes=notes,
        )
        figures = _figures(timing) | {"budget_share": measurement.own.worst}
        return Holds(figures, notes, chosen_kernels=chosen, timing=timing)

    def _ceilings_of(self, dtype: str) -> Ceilings:
        if dtype not in self._ceilings:
            device, flusher = self._conditions.device, self._conditions.flusher
            self._ceilings[dtype] = measure_ceilings(device, dtype, clock_for(device), flusher)
        return self._ceilings[dtype]


def _runs_interpreted(backend: LoadedBackend, device: torch.device) -> bool:
    required: Mapping[str, str] = call_backend(
        "required_environment", lambda: backend.backend.required_environment(str(device))
    )
    return ENVIRONMENT.keys() <= required.keys() or (is_interpreted() and MARK in backend.version)


def _device_notes(state: DeviceState | None) -> Iterator[str]:
    """Yield notes on properties of the device's state that make the times doubtful."""
    if state is None:
        return
    if state.throttle_reasons:
        yield f"the device was held back: {', '.join(state.throttle_reasons)}"
    clock, most = state.sm_clock_mhz, state.max_sm_clock_mhz
    if clock is not None and most is not None and clock < LOW_CLOCK * most:
        yield f"the SM clock under load was {clock} MHz of at most {most} MHz: another run may be faster"


def _figures(timing: Timing) -> dict[str, float | int]:
    """Return medians in microseconds, and the share of the roofline that ``forward`` reaches."""
    figures: dict[str, float | int] = {f"{each.part}_us": each.median_ns / 1e3 for each in timing.latencies}
    forward = timing.latency("forward")
    if forward is not None and (share := timing.roofline_share(forward)) is not None:
        figures["roofline_share"] = share
    return figures


def _check(case: CheckedCase) -> Finding:
    settings = case.shared.get(TimingSettings, TimingSettings)
    timing = case.shared.get(TimingCheck, lambda: TimingCheck(TimingConditions(case.device, settings)))
    return timing.examine(case.loaded, case.problem, case.truth)


def _not_applicable(case: Case, features: frozenset[str]) -> NotExamined | None:
    path = case.batch.path.name
    if case.layer.index_topk is not None:
        reason = "index_topk: the operations and bytes that the chosen keys need are not counted"
        return NotExamined((reason,), "attncheck")
    if path not in _SEVERAL_CALLS and not is_merged(case.batch, features):
        return None
    reason = f"path {path}: it takes several calls of forward, and a time is that of one"
    return NotExamined((reason,), "attncheck")


CHECKS = {"timing": Check(_check, _not_applicable)}
