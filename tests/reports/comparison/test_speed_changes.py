"""Comparison of times: verdicts on pairs, sentences on suites, thresholds, and the intervals behind them."""

import math
from collections import Counter
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats

from attncheck.errors import QuestionError, UnknownNameError
from attncheck.reports.comparison.significance import (
    FAMILY_LEVEL,
    ProcessNoise,
    estimate_ratio,
    rounds_needed,
    smallest_slowdown,
    spread_in_turns,
)
from attncheck.reports.comparison.speed_changes import (
    ComparisonTerms,
    SpeedPair,
    SuiteSpeedChange,
    compare_speeds,
    compare_suites,
)
from attncheck.reports.comparison.thresholds import SlowdownThresholds, parse_thresholds


def one(base, new, terms=None):
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


def test_what_is_certain_and_below_the_least_effect_is_not_reported(speed, around):
    base, new = speed(around(1e6, spread=1e-4)), speed(around(1.009e6, spread=1e-4, seed=1))
    assert one(base, new).verdict == "same"
    assert one(base, new, ComparisonTerms(effect=0.005)).verdict == "slower"


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


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])  # which only makes values
@given(base=medians, new=medians, factor=st.floats(0.01, 100))
def test_swapped_sides_mirror_the_verdict_and_the_unit_means_nothing(speed, base, new, factor):
    def compared(before, after):
        return one(speed(before, samples=[1]), speed(after, samples=[1]))

    forth, back = compared(base, new), compared(new, base)
    assert back.verdict == {"slower": "faster", "faster": "slower"}.get(forth.verdict, forth.verdict)
    assert math.log(back.ratio) == pytest.approx(-math.log(forth.ratio), abs=1e-9)
    assert forth.low is not None
    assert back.high is not None
    assert math.log(back.high) == pytest.approx(-math.log(forth.low), abs=1e-9)
    scaled = compared([factor * time for time in base], [factor * time for time in new])
    assert scaled.ratio == pytest.approx(forth.ratio)
    assert scaled.verdict == forth.verdict


EFFECT = LEAST = 0.01


def change(low, high, *, new="Mine", part="forward"):
    is_different = low > 1 + EFFECT or high < 1 / (1 + EFFECT)
    return SuiteSpeedChange("sdpa", new, "decode", part, 3, math.sqrt(low * high), low, high, is_different)


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (change(1 / 1.36, 1 / 1.28), "Mine is 1.32 ± 0.05 times as fast as sdpa in decode"),
        (change(1.28, 1.36), "sdpa is 1.32 ± 0.05 times as fast as Mine in decode"),
        (change(1.28, 1.36, new="sdpa"), "sdpa of BASE is 1.32 ± 0.05 times as fast as sdpa of NEW in decode"),
        (change(1.5, 1.5, part="build"), "sdpa is 1.5000 ± 0.0000 times as fast as Mine in decode, build"),
        (change(0.98, 1.031), "sdpa and Mine: no difference above 3.1 % was found in decode"),
        (change(0.9, 1.001), "sdpa and Mine: no difference above 11.2 % was found in decode"),
        (change(1.0, 1.0), "sdpa and Mine: no difference above 0.1 % was found in decode"),
    ],
)
def test_the_faster_one_comes_first_and_the_figure_covers_the_interval(found, sentence):
    assert found.in_words == sentence


def pairs(speed, *, cases, shared, own):
    """Cases whose processes differ by ``shared``, which all cases of a process have, and by ``own`` noise."""
    drawn = Random(cases)
    sides = []
    for side in (1.0, 1.2):
        luck = [drawn.gauss(0, shared) for _ in range(10)]
        times = ([1e6 * side * math.exp(each + drawn.gauss(0, own)) for each in luck] for _ in range(cases))
        sides.append([speed(medians, case=f"decode/{index}") for index, medians in enumerate(times)])
    return [SpeedPair("a", *both) for both in zip(*sides, strict=True)]


def test_noise_of_single_cases_averages_out_and_noise_of_processes_does_not(speed):
    widths = {}
    for shared, own in ((0.0, 0.05), (0.05, 0.0)):
        for cases in (1, 25):
            (found,) = compare_suites(pairs(speed, cases=cases, shared=shared, own=own), EFFECT)
            assert found.low < 1.2 < found.high
            widths[shared, cases] = math.log(found.high / found.low)
    assert widths[0.0, 25] < widths[0.0, 1] / 3
    assert widths[0.05, 25] > widths[0.05, 1] / 2


def test_every_suite_and_part_has_a_sentence_of_its_own(speed):
    times = [1e6 * (1 + 0.001 * index) for index in range(6)]
    measured = [("decode/a", "forward"), ("decode/b", "forward"), ("decode/a", "build"), ("smoke/a", "forward")]
    made = [SpeedPair("a", *(speed(times, case=case, part=part) for _ in "12")) for case, part in measured]
    found = compare_suites(made, EFFECT)
    assert [(each.suite, each.part, each.cases) for each in found] == [
        ("decode", "forward", 2),
        ("decode", "build", 1),
        ("smoke", "forward", 1),
    ]


def test_a_suite_with_few_or_unequal_rounds_has_no_sentence(speed):
    few = SpeedPair("a", speed([1e6] * 4), speed([2e6] * 4))
    assert compare_suites([few], EFFECT) == ()
    unequal = [SpeedPair("a", *(speed([1e6] * rounds, case=f"smoke/{rounds}") for _ in "12")) for rounds in (6, 7)]
    assert compare_suites(unequal, EFFECT) == ()


def test_a_coarse_clock_widens_the_interval_of_a_suite(speed):
    coarse = SpeedPair("a", *(speed([1e6] * 10, samples=(1_000_000, 1_100_000)) for _ in "12"))
    (found,) = compare_suites([coarse], EFFECT)
    assert (found.low, found.high) == (pytest.approx(1 / 1.1), pytest.approx(1.1))


@pytest.mark.parametrize(
    ("texts", "case", "part", "share"),
    [
        (["decode:5 %"], "decode/a", "build", 0.05),
        (["decode: 5%"], "decode_long/a", "forward", None),
        (["dec*: 2.5%"], "decode/a", "forward", 0.025),
        (["decode/long-*: 7%"], "decode/long-8k.bfloat16", "forward", 0.07),
        (["decode/long-*: 7%"], "decode/short", "forward", None),
        (["12%"], "anything/at-all", "prefill", 0.12),
        (["@build: 20%"], "decode/a", "build", 0.2),
        (["@build: 20%"], "decode/a", "forward", None),
        (["decode/[ab]*@forward: 3%"], "decode/a", "forward", 0.03),
        (["5%", "@build: 20%", "decode: 3%"], "mixed/a", "build", 0.2),
        (["5%", "@build: 20%", "decode: 3%"], "decode/a", "build", 0.03),
    ],
)
def test_of_several_thresholds_the_last_that_concerns_a_case_counts(texts, case, part, share):
    found = parse_thresholds(texts, least=LEAST).share(case, part)
    assert found == (None if share is None else pytest.approx(share))
    assert SlowdownThresholds().share(case, part) == 0.0  # every slowdown is too much


def test_another_form_is_refused_with_examples():
    for text in ("", "decode", "decode: 5", "decode 5%", "decode: -5%", ": x%", "a:b: 5%", "decode: 5%%"):
        with pytest.raises(QuestionError, match="decode: 5%"):
            parse_thresholds([text], least=LEAST)
    with pytest.raises(UnknownNameError, match="did you mean 'build'"):
        parse_thresholds(["decode@biuld: 5%"], least=LEAST)
    with pytest.raises(QuestionError, match="below 1%"):
        parse_thresholds(["decode: 0.5%"], least=LEAST)


def test_a_pattern_that_matches_nothing_is_refused_with_the_suites():
    thresholds = parse_thresholds(["5%", "decod: 5%"], least=LEAST)
    with pytest.raises(QuestionError, match=r"'decod: 5%' matches no case .*decode, mixed"):
        thresholds.refuse_unmatched(["mixed/a", "decode/a", "decode/b"])
    parse_thresholds(["decode: 5%"], least=LEAST).refuse_unmatched(["decode/a"])


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


@pytest.mark.parametrize(("rounds", "share", "factor"), [(10, 0.9, 1.3), (5, 0.5, 3.0)])
def test_processes_of_two_kinds_raise_no_false_alarm(speed, rounds, share, factor):
    drawn = Random(7)

    def times():
        kinds = [1 if drawn.random() < share else factor for _ in range(rounds)]
        return speed([1e6 * kind * math.exp(drawn.gauss(0, 0.003)) for kind in kinds])

    pairs = [SpeedPair("fast", times(), times()) for _ in range(150)]
    counts = Counter(change.verdict for change in compare_speeds(pairs, ComparisonTerms()))
    assert counts["slower"] + counts["faster"] <= 1  # of 150; a comparison of a single pair may err in FAMILY_LEVEL
    assert FAMILY_LEVEL <= 0.01
