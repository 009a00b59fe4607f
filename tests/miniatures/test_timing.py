"""Patterns that make a kernel look fast are caught by ``timing``, and by no check of answers alone.

Clocks are stand-ins, so that nothing depends on how busy the machine is: one counts ATen's operators, one is the clock
of CUDA over a device that is simulated.
"""

import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attncheck.backends.registry import load
from attncheck.cases.loader import load_suite
from attncheck.harness.checks.findings import TimingSettings
from attncheck.harness.checks.timing import check
from attncheck.harness.checks.timing import check as timing
from attncheck.harness.checks.timing.clock import EventClock
from attncheck.harness.run.evaluate import Examiner, RunPlan
from attncheck.reports.run_file.timings import Ceilings

FILE = Path(__file__).resolve().with_name("timing.py")
SETTINGS = TimingSettings(limit_s=60, min_samples=5, max_samples=6)

MEANINGS = {
    "LeavesWorkToAThread": "written after the clock had stopped",
    "EvaluatesLazily": "computed when it is looked at",
    "ReplacesTheClock": "were patched",
    "LowersThePrecision": "a lower precision",
    "LeavesOutTheWrite": "cache write is left out",
    "ComputesWhileItBuilds": "",
    "KnowsTheShape": "a known shape is special-cased",
    "KeepsThePlan": "",
    "LeavesTheEarlierAnswer": "nothing was written",
    "HandsOutTheEarlierAnswer": "results are kept",
    "CachesByPointer": "results are kept",
    "CachesByShape": "results are kept",
    "CachesByFingerprint": "results are kept",
    "KeepsTheWeights": "",
    "HandsBackItsInput": "an input is handed back",
    "FindsItsAnswerInMemory": "",
}
"""What the finding must mean; empty: a wrong answer of no known sort."""


class Operators(TorchDispatchMode):
    """Counts operators."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


class OperatorClock:
    """A microsecond for each operator."""

    name = "host"

    def time(self, call, *, before=lambda: None, after=lambda: None):
        before()
        with Operators() as seen:
            call()
        after()
        return 1_000 * (1 + seen.count)

    def wait(self):
        pass


@pytest.fixture(autouse=True)
def no_ceilings(monkeypatch):
    """Ceilings of the machine are not measured."""
    known = Ceilings(copy_bytes_per_s=1e10, matmul_flops_per_s=1e11, dtype="float32")
    monkeypatch.setattr(timing, "measure_ceilings", lambda *_: known)


@pytest.fixture
def counted(monkeypatch):
    """Clocks that count operators."""
    monkeypatch.setattr(check, "clock_for", lambda _device: OperatorClock())


@cache
def case():
    return next(case for case in load_suite("decode").cases if case.id == "page-edges.float32-NHD")


def examined(backend, case, *checks):
    plan = RunPlan(cases=(case,), backends=(backend,), checks=checks, timing=SETTINGS)
    examiner = Examiner(plan)
    records = {record.check: record for record in examiner.run()}
    assert not examiner.blind
    return records


@pytest.mark.parametrize("name", MEANINGS)
@pytest.mark.usefixtures("counted")
def test_a_trick_is_caught_under_the_clock(name, monkeypatch):
    for owner, attribute in (
        (time, "perf_counter_ns"),
        (torch.cuda, "synchronize"),
        (torch.cuda.Event, "elapsed_time"),
    ):
        monkeypatch.setattr(owner, attribute, getattr(owner, attribute))  # to be put back
    records = examined(load(f"{FILE}:{name}"), case(), "numerics", "timing")
    assert records["numerics"].outcome == "passed"
    found = records["timing"]
    assert found.outcome == "failed", found
    assert MEANINGS[name] in (found.meaning or "")
    assert found.timing is None


@pytest.mark.usefixtures("counted")
def test_results_cached_by_content_are_never_found_again():
    backend = load(f"{FILE}:CachesByContent")
    found = examined(backend, case(), "timing")["timing"]
    assert found.outcome == "passed"
    assert backend.backend.Impl.hits == 0


def test_work_on_another_stream_is_caught(monkeypatch):
    backend = load(f"{FILE}:LeavesWorkToAStream")
    deferred = backend.backend.Impl.cheat.__globals__["deferred"]

    def synchronize():
        while deferred:
            deferred.pop()()

    api = SimpleNamespace(
        current=lambda: "main",
        make_current=lambda _stream: None,
        record=lambda _stream: None,
        is_done=lambda _event: False,
        elapsed_ms=lambda _start, _end: 1.0,
        synchronize=synchronize,
        hold=lambda _ns: None,
        now_ns=time.perf_counter_ns,
    )
    monkeypatch.setattr(check, "clock_for", lambda _device: EventClock(api))
    found = examined(backend, case(), "timing")["timing"]
    assert found.outcome == "failed"
    assert "another stream" in found.meaning


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_work_on_another_stream_is_caught_on_a_gpu():
    plan = RunPlan(
        cases=(case(),),
        backends=(load(f"{FILE}:LeavesWorkToAStream"),),
        checks=("timing",),
        device="cuda",
        timing=SETTINGS,
    )
    (found,) = Examiner(plan).run()
    assert found.outcome == "failed"
    assert "another stream" in found.meaning
