"""What a comparison could have found: how large a slowdown has to be, and how many rounds a smaller one takes.

By theory, of processes whose logs of times are normal and spread alike on both sides.
"""

import math
from dataclasses import dataclass
from functools import cache

from attncheck.reports.comparison.significance import EFFECT, MIN_ROUNDS, quantile

POWER = 0.8
"""How often what is said to be found is found."""

MOST_ROUNDS = 1000

_GRID = 64
_MOST_LOG = math.log(1e6)
"""Beyond, no figure means anything, and the exponential of a wide one overflows."""


@dataclass(frozen=True)
class ProcessNoise:
    """How far process medians lie apart, as a share of the time (deviation of the logs).

    ``in_turns``: the same of what a process does not share with the one beside it; None where they took no turns.
    """

    spread: float
    in_turns: float | None = None


def smallest_slowdown(noise: ProcessNoise, rounds: int, *, level: float, effect: float = EFFECT) -> float:
    """The least slowdown, as a share of the time, that ``rounds`` processes a side find four times in five.

    ``level``: two-sided, of one interval, as of :func:`attncheck.reports.comparison.significance.estimate_ratio`.
    """
    scale = math.sqrt(2 / rounds)
    if noise.in_turns is None:
        errors = noise.spread * scale * _errors_needed(rounds, level)
    else:
        apart = noise.spread * scale * _errors_needed(rounds, level / 2)
        errors = min(apart, noise.in_turns * scale * _errors_needed(rounds, level / 2, in_turns=True))
    return math.expm1(min(math.log1p(effect) + errors, _MOST_LOG))


def rounds_needed(noise: ProcessNoise, slowdown: float, *, level: float, effect: float = EFFECT) -> int | None:
    """How many processes a side find ``slowdown`` four times in five; None: more than :data:`MOST_ROUNDS`.

    The least effect is never found more often than by luck, so that nothing is enough for a slowdown not above it.
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
    """By how many standard errors the truth must pass a bound for the interval to pass it four times in five.

    The mean of differences between processes that took turns, over its own estimated error, follows the noncentral t.
    So does, in Welch's interval, the difference over the root of the summed variances, with ``2 (rounds - 1)`` degrees
    of freedom, whatever the share ``r`` of one variance in the sum, which is Beta-distributed. But that share sets the
    degrees of freedom of the quantile to pass: ``(rounds - 1) / (r^2 + (1 - r)^2)``. The mean over ``r`` is taken, and
    solved by halving.
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
