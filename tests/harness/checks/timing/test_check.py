"""The check timing: records' values and notes, the parts of a batch, and its neighbours."""

from dataclasses import replace
from itertools import cycle
from types import SimpleNamespace

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl
from attncheck.backends.registry import load
from attncheck.harness.checks.cudagraph.recorder import CaptureError, Violation
from attncheck.harness.checks.findings import FindingError, Holds, NotExamined, TimingSettings
from attncheck.harness.checks.timing import check as timing
from attncheck.harness.checks.timing.check import (
    CHECKS,
    FEW_SAMPLES,
    MORE_SAMPLES,
    Neighbour,
    TimingCheck,
    TimingConditions,
    TimingMeasurement,
    compare,
    neighbour_of,
    parts_of,
)
from attncheck.harness.checks.timing.clock import CacheFlush, Samples, sample
from attncheck.harness.driver.foreign_code import StageError
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.truth.truth import truth_of
from attncheck.reference.spec import AttentionType
from attncheck.reference.step_spec import RequestSpec
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
    """Return the reference as a backend that declares batches unsupported for which ``condition`` is true."""

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
        monkeypatch.setattr(timing, "accelerator_of", lambda named: device.api if "cuda" in str(named) else None)
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
        monkeypatch.setattr(timing, "recorder_for", lambda _device: made)
        return made

    def test_events_are_measured_and_apart_from_them_replays_where_there_are_any(self, gpu, recorder):
        gpu.hold = lambda ns: gpu.work(ns + 1_500)  # the least that any kernel takes
        found = timing.measure_overhead(torch.device("cuda", 0), lambda: gpu.work(700_000))
        assert (found.empty_ns, found.replay_ns) == (pytest.approx(2_000, abs=10), pytest.approx(3_000, abs=10))
        recorder.refusal = CaptureError((Violation("error", "no graphs here"),))
        found = timing.measure_overhead(torch.device("cuda", 0))
        assert (found.empty_ns, found.replay_ns) == (pytest.approx(2_000, abs=10), None)
        assert timing.measure_overhead(CPU) is None

    def test_no_sample_is_a_guard_however_little_time_there_is(self, gpu, monkeypatch, make_case):
        """Guards wait for the device, and gaps between launches count in them."""

        class Impl(ReferenceImpl):
            def forward(self, *arguments, **keywords):
                gpu.work(10_000)
                gpu.spend(100_000)
                gpu.work(10_000)
                return super().forward(*arguments, **keywords)

        backend = type("Slow", (ReferenceBackend,), {"get_impl_cls": staticmethod(lambda: Impl)})
        monkeypatch.setattr(timing, "clock_for", lambda _device: gpu.clock)
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

        monkeypatch.setattr(timing, "compare", compare)
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


def compared(own, neighbour):
    """The comparison, and how many samples each side gave."""
    sides = [cycle(own), cycle(neighbour)]
    taken = [0, 0]

    def taker(side):
        def take():
            taken[side] += 1
            return next(sides[side])

        return take

    found = compare(1, taker(0), taker(1))
    assert taken[0] == taken[1]
    return found, taken[0]


@pytest.mark.parametrize(
    ("own", "neighbour", "is_confirmed", "is_notable", "is_suspect"),
    [
        *(([1000], neighbour, False, False, False) for neighbour in ([500], [1000], [1200], [900, 1100])),
        ([1000, 1050, 980], [4000, 4100, 3900], True, True, True),
        ([1000, 1010], [1500, 1510], True, True, False),
        ([1000, 1000, 4000, 4000, 1000], [4500, 900, 4500, 4500, 1000], True, False, False),  # noise may have made it
    ],
)
def test_a_batch_that_is_much_faster_than_its_neighbour_is_suspect(
    own, neighbour, is_confirmed, is_notable, is_suspect
):
    found, taken = compared(own, neighbour)
    assert taken == FEW_SAMPLES + is_confirmed * MORE_SAMPLES
    assert (found.is_notable, found.is_suspect) == (is_notable, is_suspect)
    if is_suspect:
        assert found.ratio == pytest.approx(4, rel=0.1)


def lengths(problem):
    return [(request.query_len, request.num_keys) for request in problem.requests]


ENCODER = {"attn_type": AttentionType.ENCODER_ONLY, "causal": False}
PARTS = {"decode": [(1, 37), (1, 130)], "prefill": [(5, 40), (33, 33)]}


@pytest.mark.parametrize(
    ("requests", "layer", "expected"),
    [
        (((1, 37), (5, 40), (33, 33), (1, 130)), {"padding": (2, 3)}, PARTS),
        (((1, 37), (1, 130)), {}, {}),
        (((5, 40), (33, 33)), {}, {}),
        (((1, 1), (5, 5)), ENCODER, {}),  # no cache, so no decodes
    ],
)
def test_a_mixed_batch_is_taken_apart(requests, layer, expected, make_case):
    problem = build_problem(make_case(*requests, **layer), 0)
    parts = parts_of(problem)
    assert {name: lengths(part) for name, part in parts.items()} == expected
    for part in parts.values():
        assert (part.num_blocks, part.case.batch.padding.tokens) == (problem.num_blocks, 0)


SHARED = tuple(RequestSpec(query_len=1, seq_len=length, shared_prefix=32) for length in (33, 40))


@pytest.mark.parametrize(
    ("requests", "distance", "expected"),
    [
        (((1, 37), (5, 40)), 1, [(1, 36), (5, 39)]),
        (((1, 37), (5, 40)), 8, [(1, 29), (5, 32)]),
        (((1, 37), (5, 6)), 1, [(1, 36), (5, 6)]),  # a context there is does not vanish
        (((1, 37), (33, 33)), 1, [(1, 36), (33, 33)]),
        (((20, 20), (33, 33)), 1, [(19, 19), (32, 32)]),
        (((1, 1), (33, 33)), 1, None),
        (((1, 2),), 1, None),
        (((4, 4),), 8, None),
        (SHARED, 1, [(1, 33), (1, 39)]),  # a prefix that is shared stays whole
    ],
)
def test_a_neighbour_is_shorter(requests, distance, expected, make_case):
    neighbour = neighbour_of(build_problem(make_case(*requests), 0), distance)
    assert (None if neighbour is None else lengths(neighbour)) == expected


def test_encoder_rows_are_shortened_with_the_context(make_case):
    request = RequestSpec(query_len=2, seq_len=10, encoder_len=30)
    case = make_case(request, attn_type=AttentionType.ENCODER_DECODER, causal=False, path="cross")
    neighbour = neighbour_of(build_problem(case, 0), 1)
    assert [(one.total_len, one.encoder_len) for one in neighbour.case.batch] == [(9, 29)]
