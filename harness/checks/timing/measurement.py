"""Time one backend on one problem: the batch, its parts, and neighbours to compare it with."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median

import torch

from attncheck.backends.contract import AttentionBackend
from attncheck.cases.model import Case
from attncheck.errors import QuestionError
from attncheck.harness.checks.cudagraph.check import unexamined_reasons
from attncheck.harness.checks.cudagraph.measurement import level_for
from attncheck.harness.checks.cudagraph.recorder import CaptureError, recorder_for
from attncheck.harness.checks.findings import Broken
from attncheck.harness.checks.timing.clock import GUARDS, Clock, EventClock, clock_for, do_nothing
from attncheck.harness.checks.timing.device_api import CacheFlush, cuda_api
from attncheck.harness.checks.timing.device_state import kernels_of
from attncheck.harness.checks.timing.fresh_contents import FreshContents
from attncheck.harness.checks.timing.judgement import UntrustworthyTimeError
from attncheck.harness.checks.timing.neighbours import DISTANCES, Neighbour, compare, neighbour_of, parts_of
from attncheck.harness.checks.timing.roofline import work_of
from attncheck.harness.checks.timing.sampling import Samples, samples_of
from attncheck.harness.checks.timing.settings import TimingSettings
from attncheck.harness.checks.timing.timed_step import LatestAnswer, TimedStep
from attncheck.harness.driver.foreign_code import StageError, declared_reasons
from attncheck.harness.driver.session import Session
from attncheck.harness.problem.problem import Problem
from attncheck.harness.truth.truth import Truth
from attncheck.reference.spec import AttentionCGSupport, BatchSpec
from attncheck.reports.run_file.timings import ClockName, ClockOverhead, Kernel, Latency, StepPart

WARM_UPS = 2
"""Untimed first calls, since a first call may compile."""

EMPTY_CALLS = 15
"""Number of empty calls. Their median is what a device's clock adds to a sample."""

Sampler = Callable[[StepPart, Callable[[], int], TimingSettings], Samples]
"""Takes samples of a part by calling a function that returns nanoseconds: warm-ups first, the samples last."""


@dataclass(frozen=True)
class TimingConditions:
    """The device, settings, sampler, cache flush and clock overhead of a measurement."""

    device: torch.device
    settings: TimingSettings
    sampler: Sampler
    flush: CacheFlush
    overhead: ClockOverhead | None = None

    @property
    def is_cold(self) -> bool:
        """Whether the device's last-level cache is flushed before each sample."""
        return not self.settings.warm and self.flush.num_bytes > 0

    @property
    def flusher(self) -> Callable[[], object]:
        """The function called before each sample."""
        return self.flush if self.is_cold else do_nothing


class TimingMeasurement:
    """One backend on one problem.

    Raises StageError if the backend raised, and UntrustworthyTimeError if it manipulates its times.
    """

    def __init__(
        self, conditions: TimingConditions, backend: type[AttentionBackend], problem: Problem, truth: Truth
    ) -> None:
        self._conditions, self._backend, self._problem = conditions, backend, problem
        self._parts = parts_of(problem)
        self._session = Session(backend, problem, conditions.device, capture_sizes=self._capture_sizes())
        self._latest = LatestAnswer()
        self._fresh = FreshContents(problem, truth, conditions.device)
        self._own = self._step("forward", self._fresh)
        self._notes: list[str] = []

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes that a reader of the times needs."""
        return (*self._own.notes, *self._notes)

    @property
    def chosen_kernels(self) -> tuple[str, ...]:
        """Names of the kernels that a library chose so far. Empty if not known."""
        return self._session.chosen_kernels

    @property
    def worst(self) -> float:
        """The largest error of the batch's outputs, in budgets."""
        return self._own.worst

    def latencies(self) -> tuple[Latency, ...]:
        """Return the latencies of the batch, of ``build``, and of the batch's parts."""
        samples = self._sampled("forward", self._own)
        builds = self._own.build_ns[-len(samples.samples_ns) :]  # one before each sample
        found = [
            _latency("forward", self._own.clock_name, samples, self._problem.case),
            _latency("build", "host", samples_of(builds, self._conditions.settings)),
        ]
        for name, part in self._parts.items():
            contents = self._contents(part, at_least=2)
            if contents is None:
                self._notes.append(f"{name}: not timed alone: the backend does not serve it, or it has no right answer")
                continue
            with _named(f"the {name} part alone"):
                step = self._step(name, contents)
                found.append(_latency(name, step.clock_name, self._sampled(name, step), part.case))
            step.finish()
            self._notes += step.notes
        return tuple(found)

    def call_once_more(self) -> None:
        """Run one call of the batch as for a sample, without recording its time."""
        self._own.take()

    def compare_neighbours(self) -> None:
        """Raise UntrustworthyTimeError if all batches of nearly the same shape take much longer."""
        seen: list[Neighbour] = []
        for distance in DISTANCES:
            problem = neighbour_of(self._problem, distance)
            contents = None if problem is None else self._contents(problem, at_least=1)
            if contents is None:
                continue
            name = f"the same batch, {_tokens(distance)} shorter"
            with _named(name):
                step = self._step(name, contents, like=self._own)
                seen.append(compare(distance, self._own.take, step.take))
            step.finish()
            if not seen[-1].is_notable:
                break
        if seen and all(neighbour.is_suspect for neighbour in seen):
            nearest = min(seen, key=lambda neighbour: neighbour.least)
            raise UntrustworthyTimeError(
                Broken(
                    _slower(nearest),
                    {"neighbour_ratio": nearest.ratio},
                    "a known shape is special-cased: its time does not hold for other shapes",
                )
            )
        self._notes += [_slower(neighbour) for neighbour in seen if neighbour.is_notable]

    def finish(self) -> None:
        """Judge the last output in full."""
        self._own.finish()

    def kernels(self) -> tuple[Kernel, ...]:
        """Return the kernels that one ``forward`` runs."""
        return kernels_of(self._own.unjudged_call(), self._conditions.device)

    def _contents(self, problem: Problem, *, at_least: int) -> FreshContents | None:
        """Return inputs for ``problem``, or None if the backend does not declare it or its truth cannot be computed."""
        case = problem.case
        if declared_reasons(lambda: self._backend.unsupported_reasons(case.layer, case.cache, case.batch)):
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
            self._session,
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
        return self._conditions.device.type == "cuda" and allows_graph(self._backend, problem)

    def _capture_sizes(self) -> tuple[int, ...]:
        replayed = [each for each in (self._problem, *self._parts.values()) if self._is_replayed(each)]
        batches = [problem.case.batch for problem in replayed]
        return tuple(sorted({batch.num_tokens + batch.padding.tokens for batch in batches}))


def measure_overhead(device: torch.device, flush: Callable[[], object] = do_nothing) -> ClockOverhead | None:
    """Return what the clock of ``device`` adds to a sample; None for the host, where each sample measures it."""
    if device.type != "cuda":
        return None
    api = cuda_api(device)

    def launch() -> None:
        api.hold(0)

    try:
        replay = recorder_for(device).record(lambda: launch).launch
    except CaptureError:  # no graph will be timed either
        replay = None
    return overhead_of(lambda: EventClock(device, api), launch, replay, flush)


def overhead_of(
    new_clock: Callable[[], Clock],
    launch: Callable[[], object],
    replay: Callable[[], object] | None,
    flush: Callable[[], object] = do_nothing,
) -> ClockOverhead:
    """Return what a clock adds to a sample. ``launch``: launches an empty kernel. ``replay``: replays its graph."""

    def taken_ns(call: Callable[[], object]) -> int:
        clock = new_clock()
        times = [clock.time(call, before=flush) for _ in range(2 * GUARDS + EMPTY_CALLS)]  # first calls adjust the hold
        return round(median(times[-EMPTY_CALLS:]))

    replay_ns = None if replay is None else max(0, taken_ns(replay) - taken_ns(launch))
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


@contextmanager
def _named(batch: str) -> Iterator[None]:
    """Add the name of the batch to the stage of what the backend raises in this context."""
    try:
        yield
    except StageError as failure:
        raise StageError(replace(failure.raised, stage=f"{failure.raised.stage} of {batch}")) from failure


def _slower(neighbour: Neighbour) -> str:
    return f"forward takes {neighbour.ratio:.3g} times as long where requests are {_tokens(neighbour.distance)} shorter"


def _tokens(count: int) -> str:
    return "a token" if count == 1 else f"{count} tokens"


def _latency(part: StepPart, clock: ClockName, samples: Samples, case: Case | None = None) -> Latency:
    """``case``: the case whose work is counted, or None to count none."""
    work = None if case is None else work_of(case)
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
