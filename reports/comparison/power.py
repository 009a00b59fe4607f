"""Statistical power of a comparison: the smallest slowdown it finds, and the rounds needed for a smaller one.

Computed by theory, for log times that are normal with equal variance on both sides.
"""

import math
from dataclasses import dataclass
from functools import cache

from attncheck.reports.comparison.significance import EFFECT, MIN_ROUNDS, quantile

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
