"""Whether two sets of process medians differ: an interval of their ratio, simultaneous over many pairs.

Logs of times are averaged, since times differ by factors. One process is one observation, since processes differ far
more than samples within one. The interval is Welch's, for two means with unknown and unequal variances (B. L. Welch,
Biometrika 34, 1947). Its level is that of the family divided by the number of pairs (Bonferroni). With probability
``1 - level`` every interval of a comparison contains the true ratio, whatever the pairs have in common.

If processes of both sides alternated, each has a neighbour that met the same machine. Then there is a second interval,
Student's for the mean of the logs of their ratios, which drift does not widen. It has half the degrees of freedom and
is wider without drift. Both are computed, each at half the level, and the narrower one is used. Both contain the truth
at once with the probability of a single interval.

A rank test needs no normal distribution, but cannot reach such a level with few rounds. Its p-value is at least 2 / 252
with 5 processes a side, or 2 / 184756 with 10, even if the sides do not overlap; 100 pairs need 1e-4, 1000 need 1e-5.
The assumption here is that the mean of a side is nearly normal. Where it is not, because some processes are far slower,
the interval grows and fewer differences are reported, not more. The exception is a small number of processes of two
kinds: all fast ones on one side and all slow ones on the other look like a difference. :data:`MIN_ROUNDS` limits that.

The power of a comparison is the smallest slowdown that it finds, with the rounds needed for a smaller one. It is
computed by theory, for log times that are normal with equal variance on both sides.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

FAMILY_LEVEL = 0.01
"""Probability that a comparison of equal speeds reports any pair, before :data:`EFFECT` is required."""

MIN_ROUNDS = 5
"""Processes a side below which there is no verdict. If every second process is slower by a third, two equal sides
differ by chance so that the interval excludes 1 in 3 % of pairs of 3, 0.8 % of 4, 0.2 % of 5 (simulated, level
1e-4)."""

EFFECT = 0.01
"""Smallest difference that is reported, as a share of the time."""

MARGIN = 0.05
"""Difference below which two times count as the same, unless a threshold is given; a share of the time."""


@dataclass(frozen=True)
class RatioEstimate:
    """The ratio of the geometric means of the times, NEW over BASE, and its interval."""

    ratio: float
    low: float
    high: float


def estimate_ratio(
    base: Sequence[float], new: Sequence[float], *, level: float, resolution: float = 0.0, in_turns: bool = False
) -> RatioEstimate:
    """Return the ratio of two sets of positive times, at least two each, with a two-sided interval at ``1 - level``.

    ``resolution``: the step of the clock as a share of the time; it widens the interval on either side. ``in_turns``:
    times at equal positions of ``base`` and ``new``, which have equal length, were measured next to each other.
    """
    one, other = [[math.log(time) for time in times] for times in (base, new)]
    if in_turns:
        half = min(_half_of_welch(one, other, level / 2), _half_of_pairs(one, other, level / 2))
    else:
        half = _half_of_welch(one, other, level)
    # All processes may round to the same step, and then show no spread.
    half += math.log1p(resolution)
    difference = statistics.fmean(other) - statistics.fmean(one)
    return RatioEstimate(math.exp(difference), math.exp(difference - half), math.exp(difference + half))


def pooled_spread(base: Sequence[float], new: Sequence[float]) -> float:
    """Return the pooled standard deviation of the logs of both sides, as a share of the time."""
    return math.sqrt(statistics.fmean(statistics.variance(map(math.log, times)) for times in (base, new)))


def spread_in_turns(base: Sequence[float], new: Sequence[float]) -> float:
    """Return the same for what a process does not share with its neighbour on the other side, without drift."""
    return statistics.stdev(math.log(other / one) for one, other in zip(base, new, strict=True)) / math.sqrt(2)


def _half_of_welch(one: Sequence[float], other: Sequence[float], level: float) -> float:
    """Return half the width of Welch's interval of the difference of two means."""
    variances = [statistics.variance(logs) / len(logs) for logs in (one, other)]
    total = sum(variances)
    if not total:
        return 0.0
    # Welch and Satterthwaite: the degrees of freedom of a sum of two variances.
    shares = [(part / total) ** 2 / (len(logs) - 1) for part, logs in zip(variances, (one, other), strict=True)]
    return quantile(1 - level / 2, 1 / sum(shares)) * math.sqrt(total)


def _half_of_pairs(one: Sequence[float], other: Sequence[float], level: float) -> float:
    """Return half the width of Student's interval of the mean of the paired differences."""
    deviation = statistics.stdev(after - before for before, after in zip(one, other, strict=True))
    return quantile(1 - level / 2, len(one) - 1) * deviation / math.sqrt(len(one))


def quantile(probability: float, freedom: float) -> float:
    """Return the quantile of Student's t with ``freedom`` degrees of freedom, which may be fractional."""
    from scipy.special import stdtrit  # takes 0.25 s, so only comparisons import it

    return float(stdtrit(freedom, probability))


POWER = 0.8
"""Probability with which a slowdown counts as found."""

MOST_ROUNDS = 1000

_GRID = 64
_MOST_LOG = math.log(1e6)
"""Largest log of a slowdown: beyond it a figure is meaningless, and its exponential may overflow."""


@dataclass(frozen=True)
class ProcessNoise:
    """The spread between process medians, as a share of the time (standard deviation of the logs).

    ``in_turns``: the spread of what a process does not share with its neighbour; None if the sides did not alternate.
    """

    spread: float
    in_turns: float | None = None


def smallest_slowdown(noise: ProcessNoise, rounds: int, *, level: float, effect: float = EFFECT) -> float:
    """Return the smallest slowdown, as a share of the time, that ``rounds`` processes a side find four times in five.

    ``level``: two-sided, of one interval, as in :func:`attncheck.reports.comparison.significance.estimate_ratio`.
    """
    scale = math.sqrt(2 / rounds)
    if noise.in_turns is None:
        errors = noise.spread * scale * _errors_needed(rounds, level)
    else:
        apart = noise.spread * scale * _errors_needed(rounds, level / 2)
        errors = min(apart, noise.in_turns * scale * _errors_needed(rounds, level / 2, in_turns=True))
    return math.expm1(min(math.log1p(effect) + errors, _MOST_LOG))


def rounds_needed(noise: ProcessNoise, slowdown: float, *, level: float, effect: float = EFFECT) -> int | None:
    """Return the processes a side that find ``slowdown`` four times in five, or None if above :data:`MOST_ROUNDS`.

    A slowdown not above ``effect`` is found by chance only, so no number of rounds suffices for it.
    """
    if smallest_slowdown(noise, MOST_ROUNDS, level=level, effect=effect) > slowdown:
        return None
    few, enough = MIN_ROUNDS - 1, MOST_ROUNDS
    while enough - few > 1:
        middle = (few + enough) // 2
        if smallest_slowdown(noise, middle, level=level, effect=effect) > slowdown:
            few = middle
        else:
            enough = middle
    return enough


@cache
def _errors_needed(rounds: int, level: float, *, in_turns: bool = False) -> float:
    """Return the standard errors by which the truth must exceed a bound that the interval exceeds four times in five.

    The mean of differences between processes that alternated, over its own estimated error, follows the noncentral t.
    So does, in Welch's interval, the difference over the root of the summed variances, with ``2 (rounds - 1)`` degrees
    of freedom. This does not depend on the share ``r`` of one variance in the sum, which is Beta-distributed. That
    share does set the degrees of freedom of the quantile: ``(rounds - 1) / (r^2 + (1 - r)^2)``. The result averages
    over ``r`` and is found by bisection.
    """
    from scipy.special import betaincinv, nctdtr

    if in_turns:
        freedom, bounds = rounds - 1, [quantile(1 - level / 2, rounds - 1)]
    else:
        half = (rounds - 1) / 2
        shares = [float(betaincinv(half, half, (index + 0.5) / _GRID)) for index in range(_GRID)]
        freedom = 2 * (rounds - 1)
        bounds = [quantile(1 - level / 2, (rounds - 1) / (share**2 + (1 - share) ** 2)) for share in shares]

    def misses(errors: float) -> bool:
        return float(nctdtr(freedom, errors, bounds).mean()) > 1 - POWER

    low, high = 0.0, 1.0
    while misses(high):
        low, high = high, 2 * high
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if misses(middle) else (low, middle)
    return high
