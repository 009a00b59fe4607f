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
from attncheck.harness.driver.foreign_code import StageError
from attncheck.harness.driver.session import Session
from attncheck.harness.problem.problem import build_problem
from attncheck.reports.run_file.timings import ClockOverhead

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


def test_rows_are_not_there_while_metadata_are_built(case):
    kept, seen = {}, []

    class Impl(ReferenceImpl):
        def forward(self, layer, query, *arguments, **keywords):
            kept["query"] = query
            seen.append(("forward", query.clone()))
            return super().forward(layer, query, *arguments, **keywords)

    class Builder(ReferenceBuilder):
        def build(self, *arguments, **keywords):
            if kept:
                seen.append(("build", kept["query"].clone()))
            return super().build(*arguments, **keywords)

    step = step_of(backend_of(Impl, Builder), case)
    seen.clear()
    for _ in range(2):
        step.take()
    (_, first), (_, ahead), (_, second) = seen[-3:]
    assert [name for name, _ in seen[-3:]] == ["forward", "build", "forward"]
    assert torch.equal(ahead[:5], first[:5])
    assert not torch.equal(ahead[:5], second[:5])


def test_addresses_stay_and_contents_do_not(case):
    lent = []

    class Impl(ReferenceImpl):
        def forward(self, layer, query, key, value, kv_cache, metadata, output, **keywords):
            common = metadata.common
            tensors = (query, key, value, kv_cache, output, common.seq_lens, common.block_table_tensor)
            lent.append(([each.data_ptr() for each in tensors], query.clone(), kv_cache.clone(), output.clone()))
            return super().forward(layer, query, key, value, kv_cache, metadata, output=output, **keywords)

    step = step_of(backend_of(Impl), case)
    lent.clear()
    for _ in range(4):
        step.take()
    assert all(where == lent[0][0] for where, *_ in lent)
    for position in (1, 2):
        assert not torch.equal(lent[0][position], lent[1][position])
        assert not torch.equal(lent[1][position], lent[2][position])
    assert all(torch.isnan(output[:5]).all() for *_, output in lent)  # poison


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


def test_what_is_raised_has_its_stage(case):
    class Impl(ReferenceImpl):
        def forward(self, *arguments, **keywords):
            raise RuntimeError("no such kernel")

    with pytest.raises(StageError) as caught:
        step_of(backend_of(Impl), case).take()
    assert caught.value.raised.in_words == snapshot("forward raised RuntimeError: no such kernel")


def test_steps_of_one_memory_look_after_each_other_s_answers(case):
    own = step_of(backend_of(), case)
    other = TimedStep("other", own._session, own._contents, Clock([]), lambda: None, own._latest, own.memory)
    for step in (own, other, own, other):
        step.take()
    own.finish()
    other.finish()
    assert other.memory is own.memory


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


def test_what_an_empty_pair_of_events_takes_is_no_part_of_a_time(case, device):
    device.event_ns = 2_000

    class Impl(ReferenceImpl):
        def forward(self, *arguments, **keywords):
            device.work(50_000)
            return super().forward(*arguments, **keywords)

    step = step_of(backend_of(Impl), case)
    step._clock, step._overhead = device.clock, ClockOverhead(empty_ns=2_000, replay_ns=3_000)
    assert [step.take() for _ in range(10)][-1] == pytest.approx(50_000, abs=10)


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
