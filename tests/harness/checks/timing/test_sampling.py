"""When sampling ends, and what comes of it; in virtual time."""

from itertools import chain, count, cycle, repeat

import numpy as np
import pytest

from attncheck.harness.checks.timing.sampling import sample
from attncheck.harness.checks.timing.settings import TimingSettings

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


def test_steady_samples_end_it_early():
    bench = Bench(noisy(MS, 0.001))
    found = bench.sample()
    assert len(found.samples_ns) == 10
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


def test_noisier_samples_take_more():
    steady, noise = (len(Bench(noisy(MS, spread)).sample().samples_ns) for spread in (0.002, 0.04))
    assert steady < noise <= 200


def test_the_interval_was_as_narrow_as_asked_for():
    found = Bench(noisy(10_000, 0.05)).sample(max_samples=1000, relative_width=0.02)
    assert found.is_settled
    assert found.high_ns - found.low_ns <= 0.02 * found.median_ns
    assert 10 < len(found.samples_ns) < 1000


def test_no_more_than_the_most():
    found = Bench(noisy(MS, 0.5)).sample(limit_s=100, max_samples=40)
    assert len(found.samples_ns) == 40
    assert not found.is_settled


def test_time_runs_out():
    bench = Bench(noisy(MS, 0.5), between=9 * MS)
    found = bench.sample(limit_s=0.5)
    assert 0.5e9 <= bench.host <= 0.53e9
    assert not found.is_settled


def test_a_warm_up_that_never_ends_takes_a_fifth_of_the_time():
    bench = Bench(100 * MS * 0.9**n for n in count())
    found = bench.sample(limit_s=1)
    taken = sum(bench.given) - sum(found.samples_ns)
    assert 0.2e9 <= taken <= 0.3e9


def test_a_warm_up_is_over_once_nothing_is_faster_than_the_fastest():
    bench = Bench(cycle([1.2 * MS, MS]))
    found = bench.sample(limit_s=10)
    assert len(bench.given) - len(found.samples_ns) == 5


def test_what_takes_longer_than_the_limit_is_sampled_three_times_and_has_an_interval_of_some_width():
    bench = Bench([3_000 * MS, 3_300 * MS, 3_000 * MS, 3_100 * MS])
    found = bench.sample(limit_s=0.01)
    assert found.samples_ns == (3_300 * MS, 3_000 * MS, 3_100 * MS)
    assert (found.low_ns, found.median_ns, found.high_ns) == (3_000 * MS, 3_100 * MS, 3_300 * MS)
    assert not found.is_settled


def test_no_more_than_the_most_where_that_is_less_than_an_interval_needs():
    assert Bench(repeat(MS)).sample(limit_s=0.01, min_samples=1, max_samples=2).samples_ns == (MS, MS)


def test_samples_that_keep_rising_are_not_settled():
    """The median of the first 60 looks well known, and is another a moment later."""
    rising = chain(repeat(MS, 4), (MS * (1 + n / 600) for n in count()))
    found = Bench(rising).sample(relative_width=0.045, min_samples=60, max_samples=60)
    assert found.high_ns - found.low_ns <= 0.045 * found.median_ns
    assert not found.is_settled


def test_what_raises_is_the_callers():
    def fall():
        raise LookupError("gone")

    with pytest.raises(LookupError, match="gone"):
        sample(fall, TimingSettings())
