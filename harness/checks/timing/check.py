"""``timing``: how long one step takes, measured on inputs that are new in every call, with every output judged.

Timed are ``forward`` with its cache write, ``build`` on the host, and the decodes and the prefills of a mixed batch
alone. The check fails on times that no honest kernel has: a wrong output in any call, work that continues after the
clock stopped, a replaced clock, or one shape that is much faster than its neighbours. Cannot see: how long the same
kernel takes in another process, or a backend that attacks the interpreter of its process (threat model:
``docs/timing.md``). Needs further runs of the backend.
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
"""Share of the highest SM clock. Below it, a note states that the device was slow."""

_PLAYED = ("split_kv", "dcp", "micro_batch")


def take_samples(_part: StepPart, take: Callable[[], int], settings: TimingSettings) -> Samples:
    """Take as many samples as the median of a part needs."""
    return sample(take, settings)


class TimingCheck:
    """Times backends on one device. The device's ceilings are measured once per dtype."""

    def __init__(self, device: torch.device, settings: TimingSettings, sampler: Sampler = take_samples) -> None:
        self._device, self._settings, self._sampler = device, settings, sampler
        self._ceilings: dict[str, Ceilings] = {}

    @cached_property
    def _conditions(self) -> TimingConditions:
        """Created on first use, because the cache flush allocates device memory."""
        conditions = TimingConditions(self._device, self._settings, self._sampler, CacheFlush(self._device))
        return replace(conditions, overhead=measure_overhead(self._device, conditions.flusher))

    def examine(self, backend: LoadedBackend, problem: Problem, truth: Truth) -> Finding:
        """Return the finding for one case. Raise StageError if the backend raised."""
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
    """Time one case. Raise StageError if the backend raised."""
    return TimingCheck(device, settings).examine(backend, problem, truth)


def unasked_reasons(case: Case, features: frozenset[str]) -> tuple[str, ...]:
    """Return why this case is not timed for a backend with these features. Empty if it is timed."""
    path = case.batch.path.name
    if path in _PLAYED or is_merged(case.batch, features):
        return (f"path {path}: the harness plays it by several calls, and times only what one forward does",)
    return ()


def _interpreted_reasons(backend: LoadedBackend, device: torch.device) -> tuple[str, ...]:
    required: Mapping[str, str] = call_backend(
        "required_environment", lambda: backend.backend.required_environment(str(device))
    )
    if ENVIRONMENT.keys() <= required.keys() or (is_interpreted() and MARK in backend.version):
        return ("its kernels are interpreted here: their times are not those of a GPU",)
    return ()


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
    timing = case.shared.get(TimingCheck, lambda: TimingCheck(case.device, settings))
    return timing.examine(case.loaded, case.problem, case.truth)


def _not_applicable(case: Case, features: frozenset[str]) -> NotExamined | None:
    reasons = unasked_reasons(case, features)
    return NotExamined(reasons, "attncheck") if reasons else None


CHECK = Check(_check, _not_applicable)
