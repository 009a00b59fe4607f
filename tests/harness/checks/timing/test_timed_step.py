"""The order of a timed step, what its clock sees, and what each call must do."""

import time
from types import SimpleNamespace

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceBuilder, ReferenceImpl
from attncheck.harness.checks.findings import FindingError
from attncheck.harness.checks.timing import clock as clock_module
from attncheck.harness.checks.timing.check import LatestAnswer, TimedStep
from attncheck.harness.checks.timing.clock import EventClock
from attncheck.harness.checks.timing.contents import FreshContents
from attncheck.harness.driver.session import Session
from attncheck.harness.problem.problem import build_problem

CPU = torch.device("cpu")


class Clock:
    """Tells the ``log`` when it runs; every call takes its number of nanoseconds."""

    name = "host"

    def __init__(self, log):
        self.log, self.taken = log, 0

    def time(self, call, *, before=lambda: None, after=lambda: None):
        before()
        self.log.append("start")
        call()
        self.log.append("stop")
        after()
        self.taken += 1
        return self.taken

    def wait(self):
        self.log.append("wait")


def backend_of(impl=ReferenceImpl, builder=ReferenceBuilder, **own):
    made = {"get_impl_cls": staticmethod(lambda: impl), "get_builder_cls": staticmethod(lambda: builder)}
    return type("Backend", (ReferenceBackend,), made | own)


def step_of(backend, case, log=None, clock=None):
    log = [] if log is None else log
    problem = build_problem(case, 0)
    session, contents = Session(backend, problem, CPU), FreshContents(problem, None, CPU)
    return TimedStep("forward", session, contents, clock or Clock(log), lambda: log.append("flush"), LatestAnswer())


@pytest.fixture
def case(make_case):
    return make_case((1, 21), (4, 19), dtype="float32", padding=(1, 2))


def test_the_clock_sees_the_write_and_forward_and_nothing_else(case):
    log = []

    class Impl(ReferenceImpl):
        def do_kv_cache_update(self, *arguments):
            log.append("write")

        def forward(self, *arguments, **keywords):
            log.append("forward")
            return super().forward(*arguments, **keywords)

    class Builder(ReferenceBuilder):
        def build(self, *arguments, **keywords):
            log.append("build")
            return super().build(*arguments, **keywords)

    step = step_of(backend_of(Impl, Builder, forward_includes_kv_cache_update=False), case, log)
    log.clear()  # of the session's own set-up
    assert [step.take(), step.take()] == [1, 2]
    assert log == ["wait", "build", "wait", "flush", "start", "write", "forward", "stop"] * 2
    assert len(step.build_ns) == 2


def test_what_a_call_of_nothing_takes_is_no_part_of_a_host_time(case, monkeypatch):
    """A clock that moves on by 400 ns whenever it is read, and by 5000 in each ``forward``."""
    at = [0]

    def now():
        at[0] += 400
        return at[0]

    class Impl(ReferenceImpl):
        def forward(self, *arguments, **keywords):
            at[0] += 5000
            return super().forward(*arguments, **keywords)

    monkeypatch.setattr(clock_module, "host_ns", now)
    step = step_of(backend_of(Impl), case, clock=clock_module.HostClock())
    assert [step.take() for _ in range(3)] == [5000] * 3


@pytest.mark.parametrize("next_call", ["take", "finish"])
def test_what_comes_behind_a_right_answer_is_seen_at_the_next_call(case, next_call):
    class Impl(ReferenceImpl):
        def forward(self, *arguments, output, **keywords):
            self.output = output
            return super().forward(*arguments, output=output, **keywords)

    step = step_of(backend_of(Impl), case)
    step.take()
    step._session.impl.output[0] += 1
    with pytest.raises(FindingError) as refused:
        getattr(step, next_call)()
    assert str(refused.value) == snapshot("forward: the output changed after the clock had stopped")


def test_inputs_and_metadata_are_only_lent(case):
    class Impl(ReferenceImpl):
        def forward(self, layer, query, key, value, kv_cache, metadata, output, **keywords):
            returned = super().forward(layer, query, key, value, kv_cache, metadata, output=output, **keywords)
            query.zero_()
            metadata.common.seq_lens += 1
            return returned

    with pytest.raises(FindingError) as refused:
        step_of(backend_of(Impl), case).take()
    assert str(refused.value) == snapshot(
        "forward: the call changed what it was lent to read: query, metadata.seq_lens"
    )


def test_one_call_can_be_looked_at_by_other_means(case):
    calls = []

    class Impl(ReferenceImpl):
        def forward(self, *arguments, **keywords):
            calls.append(torch.is_grad_enabled())
            return super().forward(*arguments, **keywords)

    step = step_of(backend_of(Impl), case)
    step.take()
    calls.clear()
    bare = step.unjudged_call()
    assert calls == []
    bare()
    assert calls == [False]
    step.finish()  # what it left in the buffer is not judged


def test_a_reader_learns_what_the_clock_of_a_device_met(case):
    api = SimpleNamespace(
        current=lambda: "main",
        make_current=lambda _stream: None,
        record=lambda _stream: None,
        is_done=lambda _event: False,
        elapsed_ms=lambda _start, _end: 0.5,
        synchronize=lambda: None,
        hold=lambda _ns: None,
        now_ns=time.perf_counter_ns,
    )
    clock = EventClock(api)
    step = step_of(backend_of(), case, clock=clock)
    assert step.take() == 500_000
    assert (step.clock_name, step.notes) == ("events", ())
    clock.num_taken, clock.num_behind = 20, 2
    assert step.notes == ()  # a host that is slow now and then
    clock.num_taken, clock.num_behind, clock.num_late = 20, 4, 3
    clock.is_overlapped = True
    unheld, behind, late = step.notes
    assert unheld == snapshot(
        "forward: the device was not held back, because work seemed to go on elsewhere on it after the warm-up's calls; gaps between launches count"
    )
    assert behind == snapshot(
        "forward: in 4 of 20 calls the host fell behind the device, and gaps between launches count"
    )
    assert late == snapshot(
        "forward: in 3 of 20 calls work went on elsewhere on the device when the stream was done; it counts"
    )
