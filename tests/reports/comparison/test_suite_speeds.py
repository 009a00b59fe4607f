"""One sentence states how fast a suite is, and only what the intervals of whole processes allow."""

import math
from collections.abc import Callable
from random import Random

import pytest

from attncheck.reports.comparison.speed_changes import SpeedPair, SuiteSpeedChange, compare_suites
from attncheck.reports.speeds.speed import Speed

Speeds = Callable[..., Speed]
EFFECT = 0.01


def change(low: float, high: float, *, new: str = "Mine", part: str = "forward") -> SuiteSpeedChange:
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


def pairs(
    speed: Speeds, factor: float, *, cases: int, shared: float, own: float, turns: bool = False
) -> list[SpeedPair]:
    """Cases whose processes differ by ``shared``, which all cases of a process have, and by ``own`` noise."""
    drawn = Random(cases)
    sides = []
    for side in (1.0, factor):
        luck = [drawn.gauss(0, shared) for _ in range(10)]
        sides.append(
            [
                speed([1e6 * side * math.exp(each + drawn.gauss(0, own)) for each in luck], case=f"decode/{index}")
                for index in range(cases)
            ]
        )
    return [SpeedPair("a", *both, turns) for both in zip(*sides, strict=True)]


def test_noise_of_single_cases_averages_out_and_noise_of_processes_does_not(speed):
    widths = {}
    for shared, own in ((0.0, 0.05), (0.05, 0.0)):
        for cases in (1, 25):
            (found,) = compare_suites(pairs(speed, 1.2, cases=cases, shared=shared, own=own), EFFECT)
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


def test_a_coarse_clock_widens_the_interval(speed):
    coarse = SpeedPair("a", *(speed([1e6] * 10, samples=(1_000_000, 1_100_000)) for _ in "12"))
    (found,) = compare_suites([coarse], EFFECT)
    assert (found.low, found.high) == (pytest.approx(1 / 1.1), pytest.approx(1.1))
