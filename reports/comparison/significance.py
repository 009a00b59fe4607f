"""Whether two sets of process medians differ: an interval of their ratio that holds over many pairs at once.

Times differ by factors, so that what is averaged is their logs. Processes differ by far more than samples of one: a
process is one observation. The interval is Welch's, of two means of unknown and unequal variances (B. L. Welch,
Biometrika 34, 1947), at the family's level divided by the number of pairs (Bonferroni): with probability ``1 - level``
every interval of a comparison holds the true ratio, whatever the pairs have in common.

Where processes of both sides took turns, each has one beside it that met the same machine. Then a second interval is
made, of the mean of the logs of their ratios (Student), which what drifts or wanders does not widen. It has half the
degrees of freedom, and is wider where nothing wanders; so both are made, each at half the level, and the narrower one
counts: both hold the truth at once as often as one would.

A rank test needs no normal distribution, and cannot reach such a level with few rounds: its p-value is never below
2 / 252 with 5 processes a side or 2 / 184756 with 10, and that only where the sides do not overlap at all; 100 pairs
ask for 1e-4, 1000 for 1e-5. What is assumed instead is that the mean of a side is near to normal. Where it is not,
because a process now and then is far slower, the interval grows with it and less is told, not more. The exception is
very few processes, of two kinds: all fast ones on one side and all slow ones on the other look like a difference, which
is why :data:`MIN_ROUNDS` is what it is.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

FAMILY_LEVEL = 0.01
"""How often a comparison of equal speeds may name any pair at all, by chance, before the least effect is asked for."""

MIN_ROUNDS = 5
"""Processes a side below which nothing is told. Where every second process is slower by a third, two equal sides fall
apart so that the interval excludes 1 in 3 % of pairs of 3, 0.8 % of 4, 0.2 % of 5 (simulated at a level of 1e-4)."""

EFFECT = 0.01
"""The least difference that is told, as a share of the time."""

MARGIN = 0.05
"""The difference below which two times count as the same, where none is asked about."""


@dataclass(frozen=True)
class RatioEstimate:
    """Times of NEW over times of BASE: the ratio of their geometric means, and its interval."""

    ratio: float
    low: float
    high: float


def estimate_ratio(
    base: Sequence[float], new: Sequence[float], *, level: float, resolution: float = 0.0, in_turns: bool = False
) -> RatioEstimate:
    """The ratio of two sets of positive times, at least two each, with a two-sided interval at ``1 - level``.

    ``resolution``: the step of the clock as a share of the time. All processes may round to the same step, and then
    they show no spread: the interval is widened by one step on either side. ``in_turns``: times at one place of
    ``base`` and ``new``, which are of one length, were taken beside each other.
    """
    one, other = [[math.log(time) for time in times] for times in (base, new)]
    if in_turns:
        half = min(_half_of_welch(one, other, level / 2), _half_of_pairs(one, other, level / 2))
    else:
        half = _half_of_welch(one, other, level)
    half += math.log1p(resolution)
    difference = statistics.fmean(other) - statistics.fmean(one)
    return RatioEstimate(math.exp(difference), math.exp(difference - half), math.exp(difference + half))


def pooled_spread(base: Sequence[float], new: Sequence[float]) -> float:
    """How far processes of either side lie from their own middle, as a share of the time (deviation of the logs)."""
    return math.sqrt(statistics.fmean(statistics.variance(map(math.log, times)) for times in (base, new)))


def spread_in_turns(base: Sequence[float], new: Sequence[float]) -> float:
    """The same of what a process does not share with the one beside it: of what does not wander."""
    return statistics.stdev(math.log(other / one) for one, other in zip(base, new, strict=True)) / math.sqrt(2)


def _half_of_welch(one: Sequence[float], other: Sequence[float], level: float) -> float:
    """Half the width of the interval of the difference of two means."""
    variances = [statistics.variance(logs) / len(logs) for logs in (one, other)]
    total = sum(variances)
    if not total:
        return 0.0
    # Welch and Satterthwaite: the degrees of freedom of a sum of two variances.
    shares = [(part / total) ** 2 / (len(logs) - 1) for part, logs in zip(variances, (one, other), strict=True)]
    return quantile(1 - level / 2, 1 / sum(shares)) * math.sqrt(total)


def _half_of_pairs(one: Sequence[float], other: Sequence[float], level: float) -> float:
    """The same of the mean of differences."""
    deviation = statistics.stdev(after - before for before, after in zip(one, other, strict=True))
    return quantile(1 - level / 2, len(one) - 1) * deviation / math.sqrt(len(one))


def quantile(probability: float, freedom: float) -> float:
    """The quantile of Student's t with ``freedom`` degrees, which need not be whole."""
    from scipy.special import stdtrit  # a quarter of a second, which commands that compare nothing do not pay

    return float(stdtrit(freedom, probability))
