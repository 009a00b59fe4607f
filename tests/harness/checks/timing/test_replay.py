"""Graphs under the clock, with a fake recorder in place of CUDA's: it replays what it captures."""

from dataclasses import replace

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceBuilder, ReferenceImpl
from attncheck.backends.contract import AttentionCGSupport
from attncheck.harness.checks.cudagraph.recorder import CaptureError, Recording, Violation
from attncheck.harness.checks.findings import FindingError
from attncheck.harness.checks.timing.check import (
    LatestAnswer,
    TimedStep,
    allows_graph,
    level_of,
)
from attncheck.harness.checks.timing.clock import HostClock
from attncheck.harness.checks.timing.contents import FreshContents
from attncheck.harness.driver.session import Session
from attncheck.harness.problem.problem import build_problem
from attncheck.reference.spec import BatchSpec, RequestSpec
from attncheck.reports.run_file.timings import ClockOverhead

CPU = torch.device("cpu")
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
    """Builds for capture as always, in place, and counts."""

    captures = builds = 0
    in_place = True

    def build_for_cudagraph_capture(self, common_attn_metadata):
        self.captures += 1
        self.made = super().build(0, common_attn_metadata)
        table = common_attn_metadata.block_table_tensor
        self.made = replace(
            self.made,
            common=replace(common_attn_metadata, block_table_tensor=table if self.in_place else table.clone()),
        )
        return self.made

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        self.builds += 1
        return super().build(common_prefix_len, common_attn_metadata, fast_build)


class Graphed(ReferenceBackend):
    """The reference, as if its forward could be captured."""

    Builder = Builder

    @classmethod
    def get_builder_cls(cls):
        return cls.Builder

    @staticmethod
    def get_impl_cls():
        return ReferenceImpl


class StaleTable(Graphed):
    """Its graph keeps the block table of the capture."""

    class Builder(Builder):
        in_place = False


def timed(backend, recorder, make_case):
    problem = build_problem(make_case((1, 21), (1, 40), dtype="float32"), 0)
    session = Session(backend, problem, CPU, capture_sizes=(2,))
    contents = FreshContents(problem, None, CPU)
    return TimedStep(
        "forward", session, contents, HostClock(), lambda: None, LatestAnswer(), recorder=recorder
    ), session.builder


def test_replays_are_timed_and_builds_go_on(make_case):
    recorder = Recorder()
    step, builder = timed(Graphed, recorder, make_case)
    assert step.clock_name == "host"
    for _ in range(4):
        step.take()
    step.finish()
    assert step.clock_name == "graph"
    assert (recorder.launches, recorder.marked) == (4, 3)
    assert (builder.captures, builder.builds, len(step.build_ns)) == (2, 4, 4)
    assert step.notes == ()


def test_what_a_replay_adds_to_its_kernels_is_no_part_of_a_time(make_case, device):
    """Kernels of 50 us on a simulated device, 3 us to replay them, 2 us to record an event."""

    class Slow(Recorder):
        def launch(self):
            device.work(53_000)
            super().launch()

    step, _ = timed(Graphed, Slow(), make_case)
    device.event_ns = 2_000
    step._clock, step._overhead = device.clock, ClockOverhead(empty_ns=2_000, replay_ns=3_000)
    assert [step.take() for _ in range(10)][-1] == pytest.approx(50_000, abs=10)


def test_a_replay_is_judged_like_any_other_call(plain, make_case):
    step, _ = timed(StaleTable, Recorder(), make_case)
    step.take()
    with pytest.raises(FindingError) as refused:
        step.take()  # of another problem, in other pages
    assert plain(str(refused.value)) == snapshot(
        "forward: the output of call 2 is wrong: 2 of 2 rows are wrong, the first is row 0 (request 0, position 20), in all heads; the largest error is ..."
    )


def test_where_no_graph_comes_about_forward_is_timed_and_it_is_noted(make_case):
    recorder = Recorder(CaptureError((Violation("host read", ".item()"),)))
    step, _ = timed(Graphed, recorder, make_case)
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
        own = type("Declares", (ReferenceBuilder,), {"cudagraph_support": declared})
        backend = type("Declaring", (Graphed,), {"Builder": own})
        assert allows_graph(backend, problem) is (declared.value >= level.value)


def test_local_batches_are_not_captured(make_case):
    own = type("Declares", (ReferenceBuilder,), {"cudagraph_support": LEVELS.ALWAYS})
    backend = type("Declaring", (Graphed,), {"Builder": own})
    case = make_case((1, 40), attn_chunk_size=16, path="local")
    assert not allows_graph(backend, build_problem(case, 0))
