"""What a comparison could have found: how large a slowdown has to be, and how many rounds a smaller one takes.

By theory, of processes whose logs of times are normal and spread alike on both sides. Must not know: records, cases,
verdicts.
"""

import math
from functools import cache

from attncheck.reports.significance import EFFECT, MIN_ROUNDS, quantile

POWER = 0.8
"""How often what is said to be found is found."""

MOST_ROUNDS = 1000

_GRID = 64


def smallest_slowdown(spread: float, rounds: int, *, level: float, effect: float = EFFECT) -> float:
    """The least slowdown, as a share of the time, that ``rounds`` processes a side find four times in five.

    ``spread``: of process medians, as a share of the time; ``level``: two-sided, of one interval.
    """
    standard_error = spread * math.sqrt(2 / rounds)
    return math.expm1(math.log1p(effect) + _errors_needed(rounds, level) * standard_error)


def rounds_needed(spread: float, slowdown: float, *, level: float, effect: float = EFFECT) -> int | None:
    """How many processes a side find ``slowdown`` four times in five; None: more than :data:`MOST_ROUNDS`.

    The least effect is never found more often than by luck, so that nothing is enough for a slowdown not above it.
    """
    if smallest_slowdown(spread, MOST_ROUNDS, level=level, effect=effect) > slowdown:
        return None
    few, enough = MIN_ROUNDS - 1, MOST_ROUNDS
    while enough - few > 1:
        middle = (few + enough) // 2
        if smallest_slowdown(spread, middle, level=level, effect=effect) > slowdown:
            few = middle
        else:
            enough = middle
    return enough


@cache
def _errors_needed(rounds: int, level: float) -> float:
    """By how many standard errors the truth must pass a bound for Welch's interval to pass it four times in five.

    The difference over the root of the summed variances follows the noncentral t with ``2 (rounds - 1)`` degrees of
    freedom, whatever the share ``r`` of one variance in the sum, which is Beta-distributed. But that share sets the
    degrees of freedom, and with them the quantile to pass: ``(rounds - 1) / (r^2 + (1 - r)^2)``. The mean over ``r`` is
    taken, and solved by halving.
    """
    from scipy.special import betaincinv, nctdtr

    half = (rounds - 1) / 2
    shares = [float(betaincinv(half, half, (index + 0.5) / _GRID)) for index in range(_GRID)]
    bounds = [quantile(1 - level / 2, (rounds - 1) / (share**2 + (1 - share) ** 2)) for share in shares]

    def misses(errors: float) -> bool:
        return float(nctdtr(2 * (rounds - 1), errors, bounds).mean()) > 1 - POWER

    low, high = 0.0, 1.0
    while misses(high):
        low, high = high, 2 * high
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if misses(middle) else (low, middle)
    return high
