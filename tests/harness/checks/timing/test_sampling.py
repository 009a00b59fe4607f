"""When sampling ends, in virtual time; and by simulation, how often the interval holds the true median."""

import math
from itertools import chain, count, repeat

import numpy as np
import pytest

from attncheck.errors import QuestionError
from attncheck.harness.checks.findings import TimingSettings
from attncheck.harness.checks.timing.clock import median_interval, sample

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


def test_steady_samples_end_it_early_and_noisier_ones_take_more():
    found, noise = (Bench(noisy(MS, spread)).sample() for spread in (0.001, 0.04))
    assert len(found.samples_ns) == 10 < len(noise.samples_ns) <= 200
    assert found.is_settled
    assert found.low_ns <= found.median_ns <= found.high_ns
    assert found.median_ns == pytest.approx(MS, rel=0.005)


def test_samples_are_kept_as_they_came_and_the_warm_up_is_not():
    bench = Bench(chain([90 * MS, 9 * MS, 5 * MS], noisy(MS, 0.001)))
    found = bench.sample(limit_s=10)
    warm_up = len(bench.given) - len(found.samples_ns)
    assert list(found.samples_ns) == bench.given[warm_up:]
    assert max(found.samples_ns) < 2 * MS
    assert warm_up >= 5


def test_the_interval_was_as_narrow_as_requested():
    found = Bench(noisy(10_000, 0.05)).sample(max_samples=1000, relative_width=0.02)
    assert found.is_settled
    assert found.high_ns - found.low_ns <= 0.02 * found.median_ns
    assert 10 < len(found.samples_ns) < 1000


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
