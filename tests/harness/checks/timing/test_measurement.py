"""What is timed beside a batch, and what becomes of it where a backend will not have it."""

from types import SimpleNamespace

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl
from attncheck.harness.checks.cudagraph.recorder import CaptureError, Violation
from attncheck.harness.checks.findings import FindingError, TimingSettings
from attncheck.harness.checks.timing import check
from attncheck.harness.checks.timing.check import Neighbour, TimingConditions, TimingMeasurement
from attncheck.harness.checks.timing.clock import sample
from attncheck.harness.driver.foreign_code import StageError
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.truth.truth import truth_of

CPU = torch.device("cpu")
BENCH = TimingConditions(
    CPU, TimingSettings(limit_s=60, min_samples=1, max_samples=1), lambda _part, *take: sample(*take)
)


@pytest.fixture
def measure(make_case):
    def make(backend=ReferenceBackend, requests=((1, 21), (4, 40), (1, 17))):
        problem = build_problem(make_case(*requests, dtype="float32"), 0)
        return TimingMeasurement(BENCH, backend, problem, truth_of(problem, CPU, refuse_blindness=False))

    return make


def refusing(condition):
    """The reference, declaring that it does not serve batches of which ``condition`` holds."""

    def unsupported_reasons(cls, layer, cache, batch):
        return ["not this batch"] if condition(batch) else []

    return type("Refusing", (ReferenceBackend,), {"unsupported_reasons": classmethod(unsupported_reasons)})


def raising(condition):
    """The reference, raising in ``forward`` where ``condition`` holds of the metadata."""

    class Impl(ReferenceImpl):
        def forward(self, layer, query, key, value, kv_cache, metadata, output, **keywords):
            if condition(metadata.common):
                raise RuntimeError("not this batch")
            return super().forward(layer, query, key, value, kv_cache, metadata, output=output, **keywords)

    return type("Raising", (ReferenceBackend,), {"get_impl_cls": staticmethod(lambda: Impl)})


def test_a_part_that_is_not_served_is_left_out_and_noted(measure):
    made = measure(refusing(lambda batch: batch.max_query_len == 1))
    assert [latency.part for latency in made.latencies()] == ["forward", "build", "prefill"]
    assert made.notes == snapshot(
        ("decode: not timed alone: the backend does not serve it, or it has no right answer",)
    )


class TestOverhead:
    """What a clock adds, on a simulated device whose events take 2 us, and the replay of a graph 3 us."""

    @pytest.fixture
    def gpu(self, monkeypatch, device):
        device.event_ns = 2_000
        monkeypatch.setattr(check, "accelerator_of", lambda named: device.api if "cuda" in str(named) else None)
        return device

    @pytest.fixture
    def recorder(self, monkeypatch, gpu):
        """Replays take 3 us on the device before the kernel that was captured."""

        class Recorder:
            refusal = None

            def record(self, prepare):
                if self.refusal is not None:
                    raise self.refusal
                forward = prepare()
                return SimpleNamespace(launch=lambda: (gpu.work(3_000), forward()))

        made = Recorder()
        monkeypatch.setattr(check, "recorder_for", lambda _device: made)
        return made

    def test_events_are_measured_and_apart_from_them_replays_where_there_are_any(self, gpu, recorder):
        gpu.hold = lambda ns: gpu.work(ns + 1_500)  # the least that any kernel takes
        found = check.measure_overhead(torch.device("cuda", 0), lambda: gpu.work(700_000))
        assert (found.empty_ns, found.replay_ns) == (pytest.approx(2_000, abs=10), pytest.approx(3_000, abs=10))
        recorder.refusal = CaptureError((Violation("error", "no graphs here"),))
        found = check.measure_overhead(torch.device("cuda", 0))
        assert (found.empty_ns, found.replay_ns) == (pytest.approx(2_000, abs=10), None)
        assert check.measure_overhead(CPU) is None

    def test_no_sample_is_a_guard_however_little_time_there_is(self, gpu, monkeypatch, make_case):
        """Guards wait for the device, and gaps between launches count in them."""

        class Impl(ReferenceImpl):
            def forward(self, *arguments, **keywords):
                gpu.work(10_000)
                gpu.spend(100_000)
                gpu.work(10_000)
                return super().forward(*arguments, **keywords)

        backend = type("Slow", (ReferenceBackend,), {"get_impl_cls": staticmethod(lambda: Impl)})
        monkeypatch.setattr(check, "clock_for", lambda _device: gpu.clock)
        settings = TimingSettings(limit_s=1e-9)
        bench = TimingConditions(CPU, settings, lambda _part, *take: sample(*take))
        problem = build_problem(make_case((1, 21), dtype="float32"), 0)
        made = TimingMeasurement(bench, backend, problem, truth_of(problem, CPU, refuse_blindness=False))
        forward, _ = made.latencies()
        assert forward.samples_ns == tuple([pytest.approx(22_000, abs=10)] * 3)


def test_an_exception_names_the_part_or_the_neighbour_at_which_it_came(measure):
    made = measure(raising(lambda common: common.num_reqs == 2))
    with pytest.raises(StageError) as caught:
        made.latencies()
    assert caught.value.raised.stage == "forward of the decode part alone"
    made = measure(raising(lambda common: int(common.seq_lens.max()) == 39))
    with pytest.raises(StageError) as caught:
        made.compare_neighbours()
    assert caught.value.raised.stage == "forward of the same batch, a token shorter"


FAR = "forward takes 9 times as long where requests are a token shorter"
BEHIND = "forward takes {} times as long where requests are 8 tokens shorter"


@pytest.fixture
def compared_as(monkeypatch):
    """``compared_as(*ratios)``: neighbours take so many times as long; returns the list of distances compared."""

    def replaced(*ratios):
        distances, left = [], list(ratios)

        def compare(distance, _own, _neighbour):
            distances.append(distance)
            return Neighbour(distance, left[0], left.pop(0))

        monkeypatch.setattr(check, "compare", compare)
        return distances

    return replaced


@pytest.mark.parametrize(
    ("requests", "ratios", "notes"),
    [
        pytest.param(((1, 1),), (), (), id="no neighbours"),
        pytest.param(((1, 21), (4, 40)), (1.1,), (), id="the first that is as fast is enough"),
        pytest.param(((1, 21), (4, 40)), (9.0, 1.2), (FAR,), id="one that is as fast clears the batch"),
        pytest.param(((1, 21), (4, 40)), (9.0, 1.5), (FAR, BEHIND.format(1.5)), id="less than twice is a note"),
    ],
)
def test_a_neighbour_that_is_slower_is_noted(measure, compared_as, requests, ratios, notes):
    distances = compared_as(*ratios)
    made = measure(requests=requests)
    made.compare_neighbours()
    assert distances == [1, 8][: len(ratios)]
    assert made.notes == notes


def test_a_batch_all_of_whose_neighbours_are_far_slower_is_a_special_case(measure, compared_as):
    compared_as(9.0, 3.0)
    with pytest.raises(FindingError, match=BEHIND.format(3)) as caught:
        measure().compare_neighbours()
    assert "special-cased" in caught.value.finding.meaning
