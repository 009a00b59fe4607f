"""Verdicts of single pairs: what keeps two times from being compared, and what counts as slower."""

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attncheck.reports.comparison.speed_changes import (
    ComparisonTerms,
    SpeedChange,
    SpeedPair,
    compare_speeds,
)
from attncheck.reports.comparison.thresholds import parse_thresholds
from attncheck.reports.speeds.speed import Speed


def one(base: Speed, new: Speed, terms: ComparisonTerms | None = None) -> SpeedChange:
    (change,) = compare_speeds([SpeedPair(base.backend, base, new)], terms or ComparisonTerms())
    return change


@pytest.mark.parametrize(("factor", "verdict"), [(1.1, "slower"), (1 / 1.1, "faster"), (1.0, "same"), (1.004, "same")])
def test_a_clear_difference_is_reported_and_a_small_one_is_not(speed, around, factor, verdict):
    change = one(speed(around(1e6)), speed(around(1e6 * factor, seed=1)))
    assert change.verdict == verdict
    assert change.reason == ""
    assert change.low is not None
    assert change.high is not None
    assert change.low < factor < change.high
    assert change.is_regression == (verdict == "slower")


@pytest.mark.parametrize(("factor", "verdict"), [(1.009, "slower"), (1 / 1.009, "faster")])
def test_what_is_certain_and_below_the_least_effect_is_not_reported(speed, around, factor, verdict):
    base, new = around(1e6, spread=1e-4), around(1e6 * factor, spread=1e-4, seed=1)
    assert one(speed(base), speed(new)).verdict == "same"
    assert one(speed(base), speed(new), ComparisonTerms(effect=0.005)).verdict == verdict


def test_a_wide_interval_is_no_verdict_and_states_how_many_rounds_would_be(speed, around):
    change = one(speed(around(1e6, spread=0.1)), speed(around(1e6, spread=0.1, seed=1)))
    assert change.verdict == "cannot tell"
    assert "over 10 rounds" in change.reason
    needed = int(change.reason.split("; ")[1].split(" a side")[0])
    assert needed > 10
    hopeless = one(speed(around(1e6, spread=0.9)), speed(around(1e6, spread=0.9, seed=1)))
    assert "1000 would not find 5.0%" in hopeless.reason


def test_between_the_least_effect_and_the_margin_nothing_is_reported(speed):
    base = [0.981e6, 1.019e6] * 5  # for one pair an interval of 2.6 % either way
    pair = SpeedPair("fast", speed(base), speed([1.03 * time for time in base]))
    (change,) = compare_speeds([pair], ComparisonTerms())
    assert change.verdict == "cannot tell"
    assert "neither clearly above 1.0% nor clearly within 5.0%" in change.reason
    # Pairs that are not tested leave the others their level, and those that are do not.
    too_few = SpeedPair("fast", speed([1e6]), speed([1e6]))
    assert compare_speeds([pair, too_few, too_few], ComparisonTerms())[0] == change
    assert compare_speeds([pair] * 100, ComparisonTerms())[0].low < change.low


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"rounds": 4}, "too few rounds: 10 in BASE, 4 in NEW"),
        ({"clock": "graph"}, "clock: host in BASE, graph in NEW"),
        ({"cache": "cold"}, "cache: warm in BASE, cold in NEW"),
    ],
)
def test_what_was_measured_otherwise_is_not_compared(speed, around, fields, reason):
    rounds = fields.pop("rounds", 10)
    change = one(speed(around(1e6)), speed(around(2e6, rounds=rounds), **fields))
    assert (change.verdict, change.low, change.high) == ("cannot tell", None, None)
    assert change.reason.startswith(reason)
    assert not change.is_regression


def test_times_of_a_coarse_clock_do_not_differ_by_one_step(speed):
    base, new = speed([10_240.0] * 10, samples=[10_240, 10_752]), speed([10_752.0] * 10, samples=[10_240, 10_752])
    assert SpeedPair("fast", base, new).clock_step == pytest.approx(0.05)
    change = one(base, new)
    assert change.verdict == "cannot tell"
    assert "the clock counts in steps of 5.0%" in change.reason


def test_a_threshold_decides_what_fails_and_is_the_margin(speed, around):
    base, new = speed(around(1e6)), speed(around(1.1e6, seed=1))
    for text, fails in (("5%", True), ("20%", False), ("smoke: 5%", True), ("other: 5%", False), ("@build: 5%", False)):
        change = one(base, new, ComparisonTerms(thresholds=parse_thresholds([text], least=0.01)))
        assert (change.verdict, change.is_regression) == ("slower", fails), text
    wide = speed(around(1e6, spread=0.04)), speed(around(1e6, spread=0.04, seed=1))
    assert one(*wide).verdict == "cannot tell"
    assert one(*wide, ComparisonTerms(thresholds=parse_thresholds(["20%"], least=0.01))).verdict == "same"


medians = st.lists(st.floats(0.5e6, 2e6), min_size=5, max_size=8)

MIRRORED = {"slower": "faster", "faster": "slower", "same": "same", "cannot tell": "cannot tell"}


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])  # which only makes values
@given(base=medians, new=medians, factor=st.floats(0.01, 100))
def test_swapped_sides_mirror_the_verdict_and_the_unit_means_nothing(speed, base, new, factor):
    def compared(before, after):
        return one(speed(before, samples=[1]), speed(after, samples=[1]))

    forth, back = compared(base, new), compared(new, base)
    assert back.verdict == MIRRORED[forth.verdict]
    assert math.log(back.ratio) == pytest.approx(-math.log(forth.ratio), abs=1e-9)
    assert forth.low is not None
    assert back.high is not None
    assert math.log(back.high) == pytest.approx(-math.log(forth.low), abs=1e-9)
    scaled = compared([factor * time for time in base], [factor * time for time in new])
    assert scaled.ratio == pytest.approx(forth.ratio)
    assert scaled.verdict == forth.verdict
