"""How well the median is known: by simulation, how often its interval holds the true one."""

import math

import numpy as np
import pytest

from attncheck.harness.checks.timing.statistics import median_interval


def coverage(draw, truth, runs=300):
    """The share of intervals that hold the true median."""
    generator = np.random.default_rng(1)
    intervals = [median_interval(draw(generator)) for _ in range(runs)]
    return sum(low <= truth <= high for low, high in intervals) / runs


@pytest.mark.parametrize("count", [15, 60])
def test_skewed_samples_that_are_independent(count):
    held = coverage(lambda generator: 1e6 * generator.lognormal(0, 0.3, count), 1e6)
    assert 0.90 <= held <= 0.99


def test_samples_that_resemble_their_neighbours():
    """Drawn one by one, they would be held to be independent, and the interval would hold in three of four runs."""

    def draw(generator):
        steps = generator.normal(size=120)
        for i in range(1, 120):
            steps[i] = 0.5 * steps[i - 1] + math.sqrt(0.75) * steps[i]
        return 1000 + steps

    assert coverage(draw, 1000) >= 0.86


def test_the_same_samples_give_the_same_interval():
    samples = [int(x) for x in np.random.default_rng(2).normal(1e6, 1e4, 50)]
    assert median_interval(samples) == median_interval(samples)


def test_a_few_far_samples_move_nothing():
    samples = [100, 101, 102, 103, 104] * 8
    low, high = median_interval(samples[:-4] + [10**9] * 4)
    assert 100 <= low <= 102 <= high <= 104


def test_more_samples_make_it_narrower():
    draws = np.random.default_rng(3).normal(1000, 50, 200)
    few, many = (np.mean([np.ptp(median_interval(part)) for part in np.split(draws, parts)]) for parts in (10, 1))
    assert many < few / 2


def test_one_sample_says_what_it_is():
    assert median_interval([7]) == (7, 7)
    assert median_interval([7, 7, 7]) == (7, 7)


def test_no_sample_has_no_median():
    with pytest.raises(ValueError, match="no sample"):
        median_interval([])
