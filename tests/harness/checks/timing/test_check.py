"""What the check ``timing`` hands on: records' values, notes, and what a check keeps."""

from dataclasses import replace

import pytest
import torch

from attncheck.backends.registry import load
from attncheck.harness.checks.findings import Broken, Holds, NotExamined, TimingSettings
from attncheck.harness.checks.timing import check as timing
from attncheck.harness.checks.timing.check import CHECKS, TimingCheck, TimingConditions
from attncheck.harness.checks.timing.clock import CacheFlush, Samples
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.truth.truth import truth_of
from attncheck.reports.run_file.timings import Ceilings, ClockOverhead, DeviceState

CPU = torch.device("cpu")
SETTINGS = TimingSettings(limit_s=60, min_samples=2, max_samples=2)
CEILINGS = Ceilings(copy_bytes_per_s=1e9, matmul_flops_per_s=1e12, dtype="float32")


@pytest.fixture(autouse=True)
def measured(monkeypatch):
    """The dtypes whose ceilings were measured."""
    dtypes = []

    def measure_ceilings(_device, dtype, _clock, flush):
        dtypes.append(dtype)
        flush()
        return CEILINGS

    monkeypatch.setattr(timing, "measure_ceilings", measure_ceilings)
    return dtypes


def steady(part, take, settings):
    """Samples of a millisecond, of two calls."""
    take()
    take()
    return Samples((1_000_000, 1_000_000), 1e6, 1e6, 1e6, is_settled=True)


@pytest.fixture
def question(make_case):
    problem = build_problem(make_case((1, 21), (1, 40), dtype="float32"), 0)
    return problem, truth_of(problem, CPU, refuse_blindness=False)


def test_a_finding_has_figures_and_times(question):
    found = TimingCheck(TimingConditions(CPU, SETTINGS, steady)).examine(load("reference"), *question)
    assert isinstance(found, Holds)
    forward, build = found.timing.latencies
    assert (forward.part, forward.clock, forward.median_ns, forward.is_settled) == ("forward", "host", 1e6, True)
    assert (build.part, build.clock, len(build.samples_ns)) == ("build", "host", 2)
    assert found.figures["forward_us"] == 1000
    # Bytes at a gigabyte a second, since the flops take far less.
    assert found.figures["roofline_share"] == pytest.approx(forward.moved_bytes / 1e9 * 1e3)
    assert 0 < found.figures["budget_share"] <= 1
    assert (found.timing.cache, found.timing.ceilings, found.timing.kernels) == ("warm", CEILINGS, ())


@pytest.mark.parametrize(("settings", "flushes"), [(SETTINGS, 1), (replace(SETTINGS, warm=True), 0)])
def test_ceilings_are_measured_as_cold_as_samples_are(question, monkeypatch, settings, flushes):
    flushed = []

    class Flush:
        num_bytes = 8

        def __call__(self):
            flushed.append(None)

    monkeypatch.setattr(timing, "CacheFlush", lambda device: Flush())
    check = TimingCheck(TimingConditions(CPU, settings, steady))
    check._ceilings_of("float32")
    assert len(flushed) == flushes


def test_what_the_clock_adds_is_in_the_record_and_not_in_the_times(question, monkeypatch):
    """More than the whole step takes, so that nothing of it is left."""
    overhead = ClockOverhead(empty_ns=10**12, replay_ns=1300)
    monkeypatch.setattr(timing, "measure_overhead", lambda _device, _flush: overhead)
    found = TimingCheck(TimingConditions(CPU, SETTINGS)).examine(load("reference"), *question)
    assert found.timing.overhead == overhead
    assert found.timing.latency("forward").samples_ns == (1, 1)


@pytest.mark.parametrize(
    ("state", "notes"),
    [
        ({"throttle_reasons": ("sw_power_cap",)}, ("the device was held back: sw_power_cap",)),
        (
            {"sm_clock_mhz": 1583, "max_sm_clock_mhz": 1980},
            ("the SM clock under load was 1583 MHz of at most 1980 MHz: another run may be faster",),
        ),
        ({"sm_clock_mhz": 1585, "max_sm_clock_mhz": 1980}, ()),
        ({"sm_clock_mhz": 300}, ()),
    ],
)
def test_a_device_that_was_held_back_is_noted(question, monkeypatch, state, notes):
    state = DeviceState(**state)
    called = []
    monkeypatch.setattr(timing, "state_under_load", lambda _device, work: called.append(work()) or state)
    found = TimingCheck(TimingConditions(CPU, SETTINGS, steady)).examine(load("reference"), *question)
    assert found.notes == found.timing.notes == notes
    assert found.timing.device == state
    assert len(called) == 1


def test_a_clock_that_was_replaced_is_named(question, monkeypatch):
    monkeypatch.setattr(timing, "replaced_clocks", lambda: ("time.perf_counter_ns",))
    found = TimingCheck(TimingConditions(CPU, SETTINGS, steady)).examine(load("reference"), *question)
    assert isinstance(found, Broken)
    assert "time.perf_counter_ns" in found.summary


def test_too_little_memory_is_no_fault(question, monkeypatch):
    class Hungry:
        def __init__(self, *_):
            raise MemoryError("2 GiB more")

    monkeypatch.setattr(timing, "TimingMeasurement", Hungry)
    found = TimingCheck(TimingConditions(CPU, SETTINGS, steady)).examine(load("reference"), *question)
    assert found == NotExamined(("out of memory for the contents of several problems: 2 GiB more",), "attncheck")


@pytest.mark.parametrize(("features", "is_timed"), [(frozenset({"cascade", "lse"}), True), (frozenset({"lse"}), False)])
def test_a_cascade_is_timed_where_it_is_one_call(features, is_timed, make_case):
    assert (CHECKS["timing"].not_applicable(make_case(path="cascade"), features) is None) is is_timed


def test_the_kernels_that_ran_and_those_that_a_library_chose_are_recorded(question):
    settings = replace(SETTINGS, kernels=True)
    found = TimingCheck(TimingConditions(CPU, settings)).examine(load("torch_sdpa:math"), *question)
    kernels = found.timing.kernels
    assert any("scaled_dot_product" in kernel.name for kernel in kernels)
    assert all(kernel.name.startswith("aten::") for kernel in kernels)
    durations = [kernel.duration_ns for kernel in kernels]
    assert durations == sorted(durations, reverse=True)
    assert found.chosen_kernels == ("math",)


def test_ceilings_are_measured_once_a_dtype_and_memory_is_taken_at_the_first_batch(
    question, make_case, measured, monkeypatch
):
    made = []
    monkeypatch.setattr(timing, "CacheFlush", lambda device: made.append(device) or CacheFlush(device))
    check = TimingCheck(TimingConditions(CPU, SETTINGS, steady))
    assert made == []
    problem = build_problem(make_case((1, 21), (1, 40), dtype="float16"), 0)
    for each in (question, question, (problem, truth_of(problem, CPU, refuse_blindness=False))):
        check.examine(load("reference"), *each)
    assert measured == ["float32", "float16"]
    assert made == [CPU]
