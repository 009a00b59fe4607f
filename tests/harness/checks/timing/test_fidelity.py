"""Times are true: a call that spins and measures itself is timed within 2 %.

Each sample is held against what the call measured itself, so that a machine that is busy makes both longer.
"""

import importlib.util
import sys
import time
from pathlib import Path
from statistics import median

import pytest
import torch

from attncheck.harness.checks.findings import TimingSettings
from attncheck.harness.checks.timing.clock import HostClock, sample
from attncheck.harness.run.backend_loading import load_backend

BENCHMARK = Path(__file__).parents[4] / "benchmarks" / "timing_fidelity.py"


@pytest.mark.parametrize("target_us", [100, 10_000])
def test_a_spin_takes_as_long_as_it_measures(target_us):
    clock, spent, taken = HostClock(), [], []

    def spin():
        began = time.perf_counter_ns()
        while (now := time.perf_counter_ns()) - began < target_us * 1000:
            pass
        spent.append(now - began)

    def take():
        taken.append(clock.time(spin))
        return taken[-1]

    found = sample(take, TimingSettings(limit_s=0.3))
    assert tuple(taken[-len(found.samples_ns) :]) == found.samples_ns
    errors = [ns / own - 1 for ns, own in zip(taken, spent, strict=True)]
    assert min(errors) >= 0
    assert median(errors) <= 0.02
    assert found.median_ns >= 1000 * target_us


@pytest.fixture
def fidelity(monkeypatch):
    spec = importlib.util.spec_from_file_location("timing_fidelity", BENCHMARK)
    found = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "timing_fidelity", found)
    spec.loader.exec_module(found)
    return found


def test_the_whole_check_measures_what_a_backend_spins(tmp_path, fidelity):
    """Of the shortest sample, which a machine that is busy has left alone."""
    suite = tmp_path / "spin.yaml"
    suite.write_text(fidelity.SPIN_SUITE)
    latency = fidelity.timing_of(fidelity.spinning(1_000), str(suite)).latency("forward")
    assert latency.clock == "host"
    assert 1_000_000 <= min(latency.samples_ns) <= 1_020_000


def test_steps_are_timed_by_the_clock_and_by_the_profiler(fidelity):
    """On a CPU the figures mean nothing; that there are any means that it will run on a GPU."""
    ((step, operators, profiled_us, clocked_us, error),) = fidelity.against_the_profiler(
        load_backend("reference"), torch.device("cpu")
    )
    assert step == "2q1s40"
    assert operators >= 2  # scores and values
    assert error == clocked_us / profiled_us - 1
