"""The interval against scipy's own test, how often equal speeds are named, and how often a slower one is found."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

import pytest
from scipy import stats

from attncheck.reports.comparison.significance import (
    FAMILY_LEVEL,
    ProcessNoise,
    estimate_ratio,
    pooled_spread,
    rounds_needed,
    smallest_slowdown,
    spread_in_turns,
)
from attncheck.reports.comparison.speed_changes import ComparisonTerms, SpeedChange, SpeedPair, compare_speeds
from attncheck.reports.speeds.speed import Speed

BASE = (100.0, 104.0, 97.0, 101.0, 99.0, 110.0)
NEW = (120.0, 118.0, 131.0, 122.0)


def test_the_interval_is_welchs_of_the_logs():
    found = estimate_ratio(BASE, NEW, level=0.001)
    one, other = ([math.log(time) for time in times] for times in (BASE, NEW))
    expected = stats.ttest_ind(other, one, equal_var=False).confidence_interval(0.999)
    assert math.log(found.low) == pytest.approx(expected.low)
    assert math.log(found.high) == pytest.approx(expected.high)
    assert found.ratio == pytest.approx(stats.gmean(NEW) / stats.gmean(BASE))
    # A step of the clock widens the interval of times without spread.
    found = estimate_ratio([10.0] * 10, [10.5] * 10, level=0.001, resolution=0.05)
    assert (found.low, found.high) == (pytest.approx(1.05 / 1.05), pytest.approx(1.05 * 1.05))
    assert estimate_ratio([10.0] * 10, [10.5] * 10, level=0.001).low == pytest.approx(1.05)
    # Of processes in turns that share nothing, the wider base of both sides counts.
    found = estimate_ratio(BASE[:4], NEW, level=0.002, in_turns=True)
    apart = estimate_ratio(BASE[:4], NEW, level=0.001)
    assert (found.low, found.high) == (pytest.approx(apart.low), pytest.approx(apart.high))


def test_the_spread_is_of_each_side_around_its_own_middle():
    sides = [[math.exp(-0.02), math.exp(0.02)], [5 * math.exp(-0.04), 5 * math.exp(0.04)]]
    variances = [2 * 0.02**2, 2 * 0.04**2]  # two values, one degree of freedom
    assert pooled_spread(*sides) == pytest.approx(math.sqrt(sum(variances) / 2))


def test_more_rounds_find_less_and_as_many_as_are_needed_are_named():
    level, noise = 1e-4, ProcessNoise(0.03)
    needed = rounds_needed(noise, 0.05, level=level)
    assert needed is not None
    assert smallest_slowdown(noise, needed, level=level) <= 0.05 < smallest_slowdown(noise, needed - 1, level=level)
    assert smallest_slowdown(noise, 5, level=level) > smallest_slowdown(noise, 50, level=level) > 0.01
    assert rounds_needed(noise, 0.01, level=level) is None  # the least reported effect is never found
    assert rounds_needed(ProcessNoise(0.9), 0.02, level=level) is None
    quiet_beside = rounds_needed(ProcessNoise(0.03, in_turns=0.01), 0.05, level=level)
    assert quiet_beside is not None
    assert quiet_beside < needed


@pytest.mark.parametrize("wander", [0.0, 0.2], ids=["apart", "in turns on a machine that wanders"])
@pytest.mark.parametrize("rounds", [5, 30])
def test_the_stated_slowdown_is_found_four_times_in_five(rounds, wander):
    in_turns = wander > 0
    noise = ProcessNoise(wander, in_turns=0.02) if in_turns else ProcessNoise(0.02)
    slowdown = smallest_slowdown(noise, rounds, level=1e-4)
    drawn = Random(3)
    found = 0
    for _ in range(500):
        machine = [drawn.gauss(0, wander) for _ in range(rounds)]
        base = [math.exp(each + drawn.gauss(0, 0.02)) for each in machine]
        new = [(1 + slowdown) * math.exp(each + drawn.gauss(0, 0.02)) for each in machine]
        found += estimate_ratio(base, new, level=1e-4, in_turns=in_turns).low > 1.01
    assert 0.75 < found / 500 < 0.85  # three standard errors of a share of 0.8


def test_of_processes_in_turns_what_they_share_with_the_one_beside_them_is_left_out():
    machine = [100.0, 130.0, 90.0, 105.0, 140.0, 95.0]
    ratios = [1.10, 1.11, 1.09, 1.10, 1.12, 1.10]
    new = [time * ratio for time, ratio in zip(machine, ratios, strict=True)]
    found = estimate_ratio(machine, new, level=0.002, in_turns=True)
    expected = stats.ttest_1samp([math.log(ratio) for ratio in ratios], 0).confidence_interval(0.999)
    assert (math.log(found.low), math.log(found.high)) == (pytest.approx(expected.low), pytest.approx(expected.high))
    assert estimate_ratio(machine, new, level=0.002).low < 1 < found.low
    assert spread_in_turns(machine, new) == pytest.approx(
        stats.tstd([math.log(each) for each in ratios]) / math.sqrt(2)
    )


Draw = Callable[[], float]


def _verdicts(speed: Callable[..., Speed], draws: Sequence[tuple[Draw, Draw]], rounds: int) -> Sequence[SpeedChange]:
    pairs = [
        SpeedPair("fast", speed([base() for _ in range(rounds)]), speed([new() for _ in range(rounds)]))
        for base, new in draws
    ]
    return compare_speeds(pairs, ComparisonTerms())


def test_slow_ones_among_many_are_found_and_others_are_not_named(speed):
    drawn = Random(11)

    def at(factor):
        return lambda: 1e6 * factor * math.exp(drawn.gauss(0, 0.01))

    draws = [(at(1), at(1.05 if index < 5 else 1)) for index in range(100)]
    found, named, repeats = 0, 0, 2
    for _ in range(repeats):
        verdicts = [change.verdict for change in _verdicts(speed, draws, 10)]
        found += verdicts[:5].count("slower")
        named += len(verdicts[5:]) - verdicts[5:].count("same")
    assert found >= 0.95 * 5 * repeats
    assert named <= 0.01 * 95 * repeats


@pytest.mark.parametrize(("rounds", "kinds"), [(10, (0.9, 1.3)), (5, (0.5, 3.0))])
def test_processes_of_two_kinds_raise_no_false_alarm(speed, rounds, kinds):
    drawn = Random(7)
    share, factor = kinds

    def one():
        return 1e6 * (1 if drawn.random() < share else factor) * math.exp(drawn.gauss(0, 0.003))

    counts = Counter(change.verdict for change in _verdicts(speed, [(one, one)] * 150, rounds))
    assert counts["slower"] + counts["faster"] <= 1  # of 150; a comparison of a single pair may err in FAMILY_LEVEL
    assert FAMILY_LEVEL <= 0.01
