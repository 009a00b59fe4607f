"""``timing``: how long one step takes, measured on contents that are new at every call, each answer judged.

The times of ``forward``, which writes the new rows to the cache as the contract has it, of ``build`` on the host, and
of the decodes and the prefills of a mixed batch alone. A time that no honest kernel has breaks the check: a wrong
answer in any call, work that goes on when the clock has stopped, a clock that was replaced, a shape that alone is fast.
Cannot see: what the same kernel takes in another process; a backend that attacks the interpreter of its own process
(``docs/timing.md`` has the threat model). Needs runs of the backend.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property

import torch

from attncheck.backends.declarations import is_merged
from attncheck.backends.interpreter import ENVIRONMENT, MARK, is_interpreted
from attncheck.backends.registry import LoadedBackend
from attncheck.cases.model import Case
from attncheck.harness.checks.findings import Broken, Finding, Holds, NotExamined
from attncheck.harness.checks.interface import Check, CheckedCase
from attncheck.harness.checks.timing.clock import clock_for
from attncheck.harness.checks.timing.device_api import CacheFlush, replaced_clocks
from attncheck.harness.checks.timing.device_state import state_under_load
from attncheck.harness.checks.timing.judgement import UntrustworthyTimeError
from attncheck.harness.checks.timing.measurement import Sampler, TimingConditions, TimingMeasurement, measure_overhead
from attncheck.harness.checks.timing.roofline import measure_ceilings
from attncheck.harness.checks.timing.sampling import Samples, sample
from attncheck.harness.checks.timing.settings import TimingSettings
from attncheck.harness.driver.foreign_code import call_backend
from attncheck.harness.problem.problem import Problem
from attncheck.harness.truth.truth import Truth
from attncheck.reports.run_file.timings import Ceilings, DeviceState, StepPart, Timing

LOW_CLOCK = 0.8
"""The share of the highest SM clock below which a time is noted to be of a slow device."""

_PLAYED = ("split_kv", "dcp", "micro_batch")


def take_samples(_part: StepPart, take: Callable[[], int], settings: TimingSettings) -> Samples:
    """As many as the median of a part needs."""
    return sample(take, settings)


class TimingCheck:
    """Times backends on one device; what the device can do is measured once a dtype."""

    def __init__(self, device: torch.device, settings: TimingSettings, sampler: Sampler = take_samples) -> None:
        self._device, self._settings, self._sampler = device, settings, sampler
        self._ceilings: dict[str, Ceilings] = {}

    @cached_property
    def _conditions(self) -> TimingConditions:
        """Made when it is needed: what it flushes a cache with takes memory of the device."""
        conditions = TimingConditions(self._device, self._settings, self._sampler, CacheFlush(self._device))
        return replace(conditions, overhead=measure_overhead(self._device, conditions.flusher))

    def examine(self, backend: LoadedBackend, problem: Problem, truth: Truth) -> Finding:
        """The finding for one case. Raises StageError for what the backend raised."""
        reasons = unasked_reasons(problem.case, backend.features) or _interpreted_reasons(backend, self._device)
        if reasons:
            return NotExamined(reasons, "attncheck")
        try:
            return self._measure(backend, problem, truth)
        except UntrustworthyTimeError as found:
            return found.finding
        except (MemoryError, torch.OutOfMemoryError) as error:
            return NotExamined((f"out of memory for the contents of several problems: {error}",), "attncheck")

    def _measure(self, backend: LoadedBackend, problem: Problem, truth: Truth) -> Finding:
        conditions = self._conditions
        ceilings = self._ceilings_of(problem.layer.dtype)
        measurement = TimingMeasurement(conditions, backend.backend, problem, truth)
        latencies = measurement.latencies()
        chosen = measurement.chosen_kernels
        state = state_under_load(conditions.device, measurement.call_once_more)
        measurement.compare_neighbours()
        kernels = measurement.kernels() if conditions.settings.kernels else ()
        measurement.finish()
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
        figures = _figures(timing) | {"budget_share": measurement.worst}
        return Holds(figures, notes, chosen_kernels=chosen, timing=timing)

    def _ceilings_of(self, dtype: str) -> Ceilings:
        if dtype not in self._ceilings:
            flusher = self._conditions.flusher
            self._ceilings[dtype] = measure_ceilings(self._device, dtype, clock_for(self._device), flusher)
        return self._ceilings[dtype]


def check_timing(
    backend: LoadedBackend, problem: Problem, truth: Truth, device: torch.device, settings: TimingSettings
) -> Finding:
    """Time one case. Raises StageError for what the backend raised."""
    return TimingCheck(device, settings).examine(backend, problem, truth)


def unasked_reasons(case: Case, features: frozenset[str]) -> tuple[str, ...]:
    """Why such a case is not timed for a backend of these features; empty: it is."""
    path = case.batch.path.name
    if path in _PLAYED or is_merged(case.batch, features):
        return (f"path {path}: the harness plays it by several calls, and times only what one forward does",)
    return ()


def _interpreted_reasons(backend: LoadedBackend, device: torch.device) -> tuple[str, ...]:
    required: Mapping[str, str] = call_backend(
        "required_environment", lambda: backend.backend.required_environment(str(device))
    )
    if ENVIRONMENT.keys() <= required.keys() or (is_interpreted() and MARK in backend.version):
        return ("its kernels are interpreted here: their times say nothing",)
    return ()


def _device_notes(state: DeviceState | None) -> Iterator[str]:
    """What speaks against times that were taken in this state."""
    if state is None:
        return
    if state.throttle_reasons:
        yield f"the device was held back: {', '.join(state.throttle_reasons)}"
    clock, most = state.sm_clock_mhz, state.max_sm_clock_mhz
    if clock is not None and most is not None and clock < LOW_CLOCK * most:
        yield f"the SM clock under load was {clock} MHz of at most {most} MHz: another run may be faster"


def _figures(timing: Timing) -> dict[str, float | int]:
    """Medians in microseconds, and how much of the roofline ``forward`` reaches."""
    figures: dict[str, float | int] = {f"{each.part}_us": each.median_ns / 1e3 for each in timing.latencies}
    forward = timing.latency("forward")
    if forward is not None and (share := timing.roofline_share(forward)) is not None:
        figures["roofline_share"] = share
    return figures


def _check(case: CheckedCase) -> Finding:
    settings = case.shared.get(TimingSettings, TimingSettings)
    timing = case.shared.get(TimingCheck, lambda: TimingCheck(case.device, settings))
    return timing.examine(case.loaded, case.problem, case.truth)


def _not_applicable(case: Case, features: frozenset[str]) -> NotExamined | None:
    reasons = unasked_reasons(case, features)
    return NotExamined(reasons, "attncheck") if reasons else None


CHECK = Check(_check, _not_applicable)
