"""The order of a timed step, what its clock sees, and what each call must do; with a fake recorder, of replays too."""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceBuilder, ReferenceImpl
from attncheck.backends.contract import AttentionCGSupport
from attncheck.harness.checks.cudagraph.recorder import CaptureError, Recording, Violation
from attncheck.harness.checks.findings import FindingError
from attncheck.harness.checks.timing import clock as clock_module
from attncheck.harness.checks.timing.check import LatestAnswer, TimedStep, allows_graph, level_of
from attncheck.harness.checks.timing.clock import EventClock
from attncheck.harness.checks.timing.contents import FreshContents
from attncheck.harness.driver.session import Session
from attncheck.harness.problem.problem import build_problem
from attncheck.reference.step_spec import BatchSpec, RequestSpec
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


def step_of(backend, case, log=None, clock=None, recorder=None):
    log = [] if log is None else log
    problem = build_problem(case, 0)
    sizes = () if recorder is None else (len(problem.requests),)
    session, contents = Session(backend, problem, CPU, capture_sizes=sizes), FreshContents(problem, None, CPU)
    timer = clock or Clock(log)
    return TimedStep(
        "forward", session, contents, timer, lambda: log.append("flush"), LatestAnswer(), recorder=recorder
    )


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


# Replays.

LEVELS = AttentionCGSupport


class Recorder:
    """Keeps what is captured last, and refuses nothing."""

    name = "emulated"

    def __init__(self, refusal=None):
        self.refusal, self.launches = refusal, 0

    def mark_host(self, *tensors):
        self.marked = len(tensors)

    def record(self, prepare):
        prepare()()
        if self.refusal:
            raise self.refusal
        self.forward = prepare()
        self.forward()
        return Recording(replay=self.launch, launch=self.launch)

    def launch(self):
        self.launches += 1
        self.forward()


class Builder(ReferenceBuilder):
    """Builds for capture in place, and counts."""

    captures = builds = 0
    in_place = True

    def build_for_cudagraph_capture(self, common_attn_metadata):
        self.captures += 1
        table = common_attn_metadata.block_table_tensor
        common = replace(common_attn_metadata, block_table_tensor=table if self.in_place else table.clone())
        return replace(super().build(0, common_attn_metadata), common=common)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        self.builds += 1
        return super().build(common_prefix_len, common_attn_metadata, fast_build)


Graphed = backend_of(builder=Builder)
StaleTable = backend_of(builder=type("StaleTable", (Builder,), {"in_place": False}))
"""Its graph keeps the block table of the capture."""


def declaring(level):
    return backend_of(builder=type("Declares", (ReferenceBuilder,), {"cudagraph_support": level}))


@pytest.fixture
def decodes(make_case):
    return make_case((1, 21), (1, 40), dtype="float32")


def test_replays_are_timed_and_builds_go_on(decodes):
    recorder = Recorder()
    step = step_of(Graphed, decodes, recorder=recorder)
    builder = step._session.builder
    assert step.clock_name == "host"
    for _ in range(4):
        step.take()
    step.finish()
    assert step.clock_name == "graph"
    assert (recorder.launches, recorder.marked) == (4, 3)
    assert (builder.captures, builder.builds, len(step.build_ns)) == (2, 4, 4)
    assert step.notes == ()


def test_what_a_replay_adds_to_its_kernels_is_no_part_of_a_time(decodes, device):
    """Kernels of 50 us on a simulated device, 3 us to replay them, 2 us to record an event."""

    class Slow(Recorder):
        def launch(self):
            device.work(53_000)
            super().launch()

    step = step_of(Graphed, decodes, recorder=Slow())
    device.event_ns = 2_000
    step._clock, step._overhead = device.clock, ClockOverhead(empty_ns=2_000, replay_ns=3_000)
    assert [step.take() for _ in range(10)][-1] == pytest.approx(50_000, abs=10)


def test_a_replay_is_judged_like_any_other_call(plain, decodes):
    step = step_of(StaleTable, decodes, recorder=Recorder())
    step.take()
    with pytest.raises(FindingError) as refused:
        step.take()  # of another problem, in other pages
    assert plain(str(refused.value)) == snapshot(
        "forward: the output of call 2 is wrong: 2 of 2 rows are wrong, the first is row 0 (request 0, position 20), in all heads; the largest error is ..."
    )


def test_where_no_graph_comes_about_forward_is_timed_and_it_is_noted(decodes):
    recorder = Recorder(CaptureError((Violation("host read", ".item()"),)))
    step = step_of(Graphed, decodes, recorder=recorder)
    step.take()
    step.take()
    assert step.clock_name == "host"
    (note,) = step.notes
    assert note == snapshot("forward is not replayed from a graph, though one is declared: host read: .item()")


@pytest.mark.parametrize(
    ("query_lens", "level"),
    [
        ([1, 1], LEVELS.UNIFORM_SINGLE_TOKEN_DECODE),
        ([4, 4], LEVELS.UNIFORM_BATCH),
        ([1, 4], LEVELS.ALWAYS),
    ],
)
def test_a_batch_needs_the_level_that_holds_it(query_lens, level, make_case):
    requests = tuple(RequestSpec(query_len=length, seq_len=30) for length in query_lens)
    assert level_of(BatchSpec(requests=requests)) is level
    problem = build_problem(make_case(*requests), 0)
    for declared in LEVELS:
        assert allows_graph(declaring(declared), problem) is (declared.value >= level.value)


def test_local_batches_are_not_captured(make_case):
    case = make_case((1, 40), attn_chunk_size=16, path="local")
    assert not allows_graph(declaring(LEVELS.ALWAYS), build_problem(case, 0))
