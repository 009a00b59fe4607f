"""``timing``: how long one step takes, measured on contents that are new at every call, each answer judged.

The times of ``forward``, which writes the new rows to the cache as the contract has it, of ``build`` on the host, and
of the decodes and the prefills of a mixed batch alone. Whatever makes a time that no honest kernel has breaks the
check: a wrong answer in any call, work that goes on when the clock has stopped, a clock that was replaced, a shape that
alone is fast. Cannot see: what the same kernel takes in another process (medians differ by tens of per cent on shared
machines), nor a backend that reads the harness's own objects to learn how the contents were made. Needs runs of the
backend.
"""

from collections.abc import Callable, Mapping
from statistics import median

import torch

from attncheck.backends.declarations import is_merged
from attncheck.backends.interpreter import ENVIRONMENT, MARK, is_interpreted
from attncheck.backends.registry import LoadedBackend
from attncheck.cases.model import Case
from attncheck.harness.clock import clock_for, tampered
from attncheck.harness.findings import Broken, Finding, Holds, NotExamined
from attncheck.harness.problem import Problem
from attncheck.harness.runner import Session
from attncheck.harness.stages import stage
from attncheck.harness.timing.cache_flush import Flush
from attncheck.harness.timing.ceilings import measure_ceilings
from attncheck.harness.timing.device_state import device_state
from attncheck.harness.timing.fresh import FreshContents
from attncheck.harness.timing.judgement import FoundOutError
from attncheck.harness.timing.kernels import kernels_of
from attncheck.harness.timing.neighbours import Neighbour, compare
from attncheck.harness.timing.parts import DISTANCES, neighbour_of, parts_of
from attncheck.harness.timing.sampling import Samples, sample
from attncheck.harness.timing.settings import TimingSettings
from attncheck.harness.timing.statistics import median_interval
from attncheck.harness.timing.step import TimedStep
from attncheck.harness.timing.work import work_of
from attncheck.harness.truth import Truth
from attncheck.reports.timings import Ceilings, Latency, Part, Timing

WARM_UPS = 2
"""Calls before any is timed: a first one may compile."""

Sampler = Callable[[Part, Callable[[], int], TimingSettings], Samples]
"""Takes samples of a part by calling what gives one, in nanoseconds: warm-ups first, the samples last."""

_PLAYED = ("split_kv", "dcp", "micro_batch")


def take_samples(_part: Part, take: Callable[[], int], settings: TimingSettings) -> Samples:
    """As many as the median of a part needs."""
    return sample(take, settings)


class TimingDesk:
    """Times backends on one device; what the device can do is measured once a dtype."""

    def __init__(self, device: torch.device, settings: TimingSettings, sampler: Sampler = take_samples) -> None:
        self._device, self._settings, self._sampler = device, settings, sampler
        self._flush = Flush(device)
        self._ceilings: dict[str, Ceilings] = {}

    def examine(self, backend: LoadedBackend, problem: Problem, truth: Truth) -> Finding:
        """The finding for one case. Raises StageError for what the backend raised."""
        reasons = unasked_reasons(problem.case, backend.features) or _interpreted_reasons(backend, self._device)
        if reasons:
            return NotExamined(reasons, "attncheck")
        try:
            return self._measure(backend, problem, truth)
        except FoundOutError as found:
            return found.finding

    def _measure(self, backend: LoadedBackend, problem: Problem, truth: Truth) -> Finding:
        ceilings = self._ceilings_of(problem.layer.dtype)
        before = device_state(self._device)
        session = Session(backend.backend, problem, self._device)
        own = self._step("forward", session, FreshContents(problem, truth, self._device))
        samples = self._sampler("forward", own.take, self._settings)
        latencies = [
            _latency("forward", own, samples, problem.case),
            _build_latency(own.build_ns[-len(samples.samples_ns) :], self._settings),
        ]
        for name, part in parts_of(problem).items():
            step = self._step(name, session, FreshContents(part, None, self._device))
            latencies.append(_latency(name, step, self._sampler(name, step.take, self._settings), part.case))
            step.finish()
        notes = self._look_at_neighbours(own, session, problem)
        kernels = kernels_of(own.bare(), self._device) if self._settings.kernels else ()
        own.finish()
        replaced = tampered()
        if replaced:
            raise FoundOutError(
                Broken(
                    f"replaced while the backend was loaded or ran: {', '.join(replaced)}",
                    meaning="clocks, events or synchronisation were patched; attncheck's own references were not",
                )
            )
        timing = Timing(
            latencies=tuple(latencies),
            cache="warm" if self._settings.warm or not self._flush.num_bytes else "cold",
            ceilings=ceilings,
            kernels=kernels,
            device=device_state(self._device) or before,
            notes=notes,
        )
        return Holds(_figures(timing, own.worst), timing.notes, timing=timing)

    def _step(self, name: str, session: Session, contents: FreshContents, like: TimedStep | None = None) -> TimedStep:
        """A step, warmed up."""
        flush = (lambda: None) if self._settings.warm else self._flush
        memory = None if like is None else like.memory
        step = TimedStep(name, session, contents, clock_for(self._device), flush, memory)
        for _ in range(WARM_UPS):
            step.take()
        return step

    def _look_at_neighbours(self, own: TimedStep, session: Session, problem: Problem) -> tuple[str, ...]:
        """Notes about shapes that are nearly the batch's; FoundOutError where it alone is fast."""
        seen: list[Neighbour] = []
        for distance in DISTANCES:
            asked = neighbour_of(problem, distance)
            if asked is None:
                continue
            name = f"the same batch, {distance} tokens shorter" if distance > 1 else "the same batch, a token shorter"
            step = self._step(name, session, FreshContents(asked, None, self._device), own)
            seen.append(compare(distance, own.take, step.take))
            step.finish()
            if not seen[-1].is_notable:
                return ()
        if not seen:
            return ()
        nearest = min(seen, key=lambda neighbour: neighbour.least)
        told = f"{nearest.ratio:.3g} times as long where every request is {nearest.distance} tokens shorter"
        if all(neighbour.is_suspect for neighbour in seen):
            raise FoundOutError(
                Broken(
                    f"forward takes {told}",
                    {"neighbour_ratio": nearest.ratio},
                    "a known shape is special-cased: its time says nothing about others",
                )
            )
        return (f"forward takes {told}",)

    def _ceilings_of(self, dtype: str) -> Ceilings:
        if dtype not in self._ceilings:
            self._ceilings[dtype] = measure_ceilings(self._device, dtype, clock_for(self._device))
        return self._ceilings[dtype]


def examine(
    backend: LoadedBackend, problem: Problem, truth: Truth, device: torch.device, settings: TimingSettings
) -> Finding:
    """The finding for one case, by a desk of its own. Raises StageError for what the backend raised."""
    return TimingDesk(device, settings).examine(backend, problem, truth)


def unasked_reasons(case: Case, features: frozenset[str]) -> tuple[str, ...]:
    """Why such a case is not timed for a backend of these features; empty: it is."""
    path = case.batch.path.name
    if path in _PLAYED or is_merged(case.batch, features):
        return (f"path {path}: the harness plays it by several calls, and times only what one forward does",)
    return ()


def _interpreted_reasons(backend: LoadedBackend, device: torch.device) -> tuple[str, ...]:
    required: Mapping[str, str] = stage(
        "required_environment", lambda: backend.backend.required_environment(str(device))
    )
    if ENVIRONMENT.keys() <= required.keys() or (is_interpreted() and MARK in backend.version):
        return ("its kernels are interpreted here: their times say nothing",)
    return ()


def _latency(part: Part, step: TimedStep, samples: Samples, case: Case) -> Latency:
    work = work_of(case)
    return Latency(
        part=part,
        clock=step.clock_name,
        median_ns=samples.median_ns,
        low_ns=samples.low_ns,
        high_ns=samples.high_ns,
        samples_ns=samples.samples_ns,
        is_settled=samples.is_settled,
        moved_bytes=work.moved_bytes,
        flops=work.flops,
    )


def _build_latency(taken: list[int], settings: TimingSettings) -> Latency:
    """Of the builds before the samples of ``forward``: they end with those, settled or not."""
    low, high = median_interval(taken)
    middle = float(median(taken))
    is_settled = len(taken) >= settings.min_samples and high - low <= settings.relative_width * middle
    return Latency(
        part="build",
        clock="host",
        median_ns=middle,
        low_ns=low,
        high_ns=high,
        samples_ns=tuple(taken),
        is_settled=is_settled,
    )


def _figures(timing: Timing, worst: float) -> dict[str, float | int]:
    figures: dict[str, float | int] = {f"{each.part}_us": each.median_ns / 1e3 for each in timing.latencies}
    forward = timing.latency("forward")
    if forward is not None and timing.ceilings is not None and forward.moved_bytes is not None:
        least_s = max(
            forward.moved_bytes / timing.ceilings.copy_bytes_per_s,
            (forward.flops or 0) / timing.ceilings.matmul_flops_per_s,
        )
        figures["roofline_share"] = least_s * 1e9 / forward.median_ns
    return figures | {"budget_share": worst}
