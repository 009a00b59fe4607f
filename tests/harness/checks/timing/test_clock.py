"""Clocks and samples on a device that is simulated in virtual time: what counts, and when sampling ends."""

import gc
import math
from itertools import chain, count, repeat

import numpy as np
import pytest
import torch

from attncheck.errors import QuestionError
from attncheck.harness.checks.findings import TimingSettings
from attncheck.harness.checks.timing import clock
from attncheck.harness.checks.timing.clock import GUARDS, LONGEST_HOLD_NS, HostClock, median_interval, sample

US = 1_000


def settled(timer, call, **around):
    """The tenth sample: holds have been learnt by then."""
    return [timer.time(call, **around) for _ in range(10)][-1]


def close(ns, share=1e-4):
    return pytest.approx(ns, rel=share)


def test_what_goes_before_and_after_does_not_count(device):
    order = []

    def issue(name, ns):
        return lambda: (order.append(name), device.work(ns))

    timer = device.clock
    flush, copy = issue("before", 700 * US), issue("after", 900 * US)
    assert settled(timer, issue("call", 50 * US), before=flush, after=copy) == close(50 * US)
    assert order == ["before", "call", "after"] * 10
    assert timer.num_late == 0


def kernels_of(kernel_ns):
    def step(device):
        for _ in range(5):
            device.spend(300 * US)  # Python, far slower than the device
            device.work(kernel_ns)

    return step


def with_another_stream_in_between(device):
    device.work(20 * US)
    device.work(80 * US, on="side", behind=["main"])
    device.work(10 * US, behind=["side"])


def left_on_another_stream(device):
    device.work(20 * US)
    device.work(400 * US, on="side", behind=["main"])


def not_waiting_for_the_held_stream(device):
    device.spend(30 * US)
    device.work(400 * US, on="side")


def leaving_its_own_stream_current(device):
    device.stream = "side"
    device.work(400 * US)


def leaving_an_idle_stream_current(device):
    device.work(400 * US, on="main")
    device.stream = "side"


def waiting_for_the_device(device):
    device.work(100 * US)
    device.wait_for("main")
    device.spend(40 * US)
    device.work(100 * US)


def idle(device):
    pass


@pytest.mark.parametrize(
    ("step", "low_us", "high_us", "num_behind", "num_late", "num_held"),
    [
        *((kernels_of(us * US), 5 * us, 5 * us, 0, 0, 15) for us in (10, 100, 1_000, 10_000)),
        (with_another_stream_in_between, 110, 110, 0, 0, 15),
        # 4 us until the work on the side is issued; not the time until the host sees the end
        (left_on_another_stream, 424, 424, 0, 15, 0),
        (not_waiting_for_the_held_stream, 400, 460, 0, 15, 0),
        (leaving_its_own_stream_current, 400, 440, 0, 15, 0),
        (leaving_an_idle_stream_current, 400, 440, 0, 0, 15),
        (waiting_for_the_device, 240, 270, 15, 0, 5),
        (idle, 0, 0, 0, 0, 15),
    ],
)
def test_what_counts_of_a_step(device, step, low_us, high_us, num_behind, num_late, num_held):
    timer, copied = device.clock, []
    around = {"before": lambda: device.work(1_000 * US), "after": lambda: copied.append(device.stream)}
    times = [timer.time(lambda: step(device), **around) for _ in range(20)]
    assert all(0.9999 * low_us * US <= ns <= 1.0001 * high_us * US for ns in times[10:]), times
    assert (timer.num_behind, timer.num_late) == (num_behind, num_late)
    assert len(device.held) == num_held
    if num_behind:
        assert device.held[-1] == LONGEST_HOLD_NS  # and none in vain after that
    assert set(copied) == {"main"}


def test_a_host_that_is_late_twice_in_the_warm_up_spoils_no_time(device):
    timer = device.clock
    times = []
    for number in range(20):
        device.wake_ns = 500 * US if number in (1, 2) else 6 * US
        times.append(timer.time(lambda: device.work(50 * US)))
    assert times[GUARDS:] == [close(50 * US)] * (20 - GUARDS)
    assert (timer.num_late, timer.is_overlapped) == (0, False)
    assert len(device.held) == 20 - GUARDS


def test_a_host_that_is_slow_to_wake_up_after_a_long_call_is_not_late(device):
    timer = device.clock
    timer.time(lambda: device.work(50 * US))  # the time of an idle device is measured here
    device.wake_ns = 70 * US
    assert settled(timer, lambda: device.work(6_000 * US)) == close(6_000 * US)
    assert timer.num_late == 0

    def leave_work():
        device.work(6_000 * US)
        device.work(200 * US, on="side", behind=["main"])

    assert settled(timer, leave_work) == close(6_204 * US, share=0.02)
    assert timer.num_late > 0


def test_the_host_clock_takes_what_lies_between(monkeypatch):
    now, order = [0], []

    def step(name, ns):
        def act():
            order.append(name)
            now[0] += ns

        return act

    monkeypatch.setattr(clock, "host_ns", lambda: now[0])
    timer = HostClock(wait=step("wait", 5))
    assert timer.time(step("call", 70), before=step("before", 1_000), after=step("after", 1_000)) == 75
    assert order == ["before", "wait", "call", "wait", "after"]


def test_no_garbage_is_collected_under_a_clock(device):
    seen = []
    for timer in (HostClock(), device.clock):
        timer.time(lambda: seen.append(gc.isenabled()))
        with pytest.raises(LookupError):
            timer.time(lambda: {}["gone"])
        assert gc.isenabled()
    assert seen == [False, False]


def test_the_host_clock_does_not_look_clocks_up(monkeypatch):
    for name in ("perf_counter_ns", "perf_counter", "monotonic_ns"):
        monkeypatch.setattr(f"time.{name}", lambda: 0)
    product = torch.ones(200, 200)
    assert HostClock().time(lambda: product @ product) > 0


MS = 1_000_000


class Bench:
    """Samples in turn from ``series``; each takes its own time, and ``between`` besides."""

    def __init__(self, series, between=0):
        self.series, self.between, self.host, self.given = iter(series), between, 0, []

    def take(self):
        ns = int(next(self.series))
        self.host += ns + self.between
        self.given.append(ns)
        return ns

    def sample(self, **settings):
        return sample(self.take, TimingSettings(**settings), now=lambda: self.host)


def noisy(median, spread, seed=0):
    generator = np.random.default_rng(seed)
    return (median * generator.lognormal(0, spread) for _ in count())


def test_steady_samples_end_it_early_and_noisier_ones_take_more_until_the_interval_is_as_narrow_as_requested():
    found, noise = (Bench(noisy(MS, spread)).sample() for spread in (0.001, 0.04))
    assert len(found.samples_ns) == 10 < len(noise.samples_ns) <= 200
    assert found.is_settled
    assert found.low_ns <= found.median_ns <= found.high_ns
    assert found.median_ns == pytest.approx(MS, rel=0.005)
    found = Bench(noisy(10_000, 0.05)).sample(max_samples=1000, relative_width=0.02)
    assert found.is_settled
    assert found.high_ns - found.low_ns <= 0.02 * found.median_ns
    assert 10 < len(found.samples_ns) < 1000


def test_samples_are_kept_as_they_came_and_the_warm_up_is_not():
    bench = Bench(chain([90 * MS, 9 * MS, 5 * MS], noisy(MS, 0.001)))
    found = bench.sample(limit_s=10)
    warm_up = len(bench.given) - len(found.samples_ns)
    assert list(found.samples_ns) == bench.given[warm_up:]
    assert max(found.samples_ns) < 2 * MS
    assert warm_up >= 5


def test_no_more_samples_and_time_than_the_most():
    found = Bench(noisy(MS, 0.5)).sample(limit_s=100, max_samples=40)
    assert (len(found.samples_ns), found.is_settled) == (40, False)
    assert Bench(repeat(MS)).sample(limit_s=0.01, min_samples=1, max_samples=2).samples_ns == (MS, MS)
    bench = Bench(noisy(MS, 0.5), between=9 * MS)
    assert not bench.sample(limit_s=0.5).is_settled
    assert 0.5e9 <= bench.host <= 0.53e9


def test_a_warm_up_that_never_ends_takes_a_fifth_of_the_time():
    bench = Bench(100 * MS * 0.9**n for n in count())
    found = bench.sample(limit_s=1)
    taken = sum(bench.given) - sum(found.samples_ns)
    assert 0.2e9 <= taken <= 0.3e9


def test_what_takes_longer_than_the_limit_is_sampled_three_times_and_has_an_interval_of_some_width():
    bench = Bench([3_000 * MS, 3_300 * MS, 3_000 * MS, 3_100 * MS])
    found = bench.sample(limit_s=0.01)
    assert found.samples_ns == (3_300 * MS, 3_000 * MS, 3_100 * MS)
    assert (found.low_ns, found.median_ns, found.high_ns) == (3_000 * MS, 3_100 * MS, 3_300 * MS)
    assert not found.is_settled


def test_samples_that_keep_rising_are_not_settled():
    """The median of the first 60 looks well known, and is another a moment later."""
    rising = chain(repeat(MS, 4), (MS * (1 + n / 600) for n in count()))
    found = Bench(rising).sample(relative_width=0.045, min_samples=60, max_samples=60)
    assert found.high_ns - found.low_ns <= 0.045 * found.median_ns
    assert not found.is_settled


def coverage(draw, truth, runs=300):
    """The share of intervals that hold the true median."""
    generator = np.random.default_rng(1)
    intervals = [median_interval(draw(generator)) for _ in range(runs)]
    return sum(low <= truth <= high for low, high in intervals) / runs


def test_samples_that_resemble_their_neighbours():
    """Drawn one by one, they would be held to be independent, and the interval would hold in three of four runs."""

    def draw(generator):
        steps = generator.normal(size=120)
        for i in range(1, 120):
            steps[i] = 0.5 * steps[i - 1] + math.sqrt(0.75) * steps[i]
        return 1000 + steps

    assert coverage(draw, 1000) >= 0.86


def test_more_samples_make_it_narrower():
    draws = np.random.default_rng(3).normal(1000, 50, 200)
    few, many = (np.mean([np.ptp(median_interval(part)) for part in np.split(draws, parts)]) for parts in (10, 1))
    assert many < few / 2


def test_an_interval_is_reproducible_and_needs_a_sample():
    samples = [int(x) for x in np.random.default_rng(2).normal(1e6, 1e4, 50)]
    assert median_interval(samples) == median_interval(samples)
    assert median_interval([7]) == median_interval([7, 7, 7]) == (7, 7)
    with pytest.raises(ValueError, match="no sample"):
        median_interval([])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"limit_s": -1.0}, "a time limit of -1.0 s"),
        ({"limit_s": math.inf}, "a time limit of inf s"),
        ({"relative_width": -0.1}, "a relative width of -0.1"),
        ({"relative_width": math.nan}, "a relative width of nan"),
        ({"min_samples": 0}, "0 to 200 samples"),
        ({"min_samples": 5, "max_samples": 4}, "5 to 4 samples"),
    ],
)
def test_settings_that_measure_nothing_are_refused(wrong, message):
    with pytest.raises(QuestionError, match=message):
        TimingSettings(**wrong)
    TimingSettings(limit_s=1e-6, relative_width=0.0, min_samples=1, max_samples=1)  # the least that measures
