"""How many samples are taken: a warm-up until it settles, then as many as the median needs, or as time allows.

Must not know: clocks, what is sampled.
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from attncheck.harness.checks.timing.clock import host_ns
from attncheck.harness.checks.timing.settings import TimingSettings
from attncheck.harness.checks.timing.statistics import median_interval

WARM_UP_SHARE = 0.2
"""Of the time limit, for the warm-up at most."""

CALM = 3
"""Calls in a row that are hardly faster than the fastest before them: the warm-up is over."""

LEAST = 3
"""Samples that are taken however little time there is: of one alone, the interval would have no width."""

GROWTH = 1.25
"""How many more samples there are when the interval is looked at again: whoever looks all the time stops too early."""


@dataclass(frozen=True)
class Samples:
    """``samples_ns`` in the order taken, their median and its 95 % interval, in nanoseconds.

    ``is_settled``: the interval came to be as narrow as asked for, and the median of the later half of the samples is
    as near to that of the earlier.
    """

    samples_ns: tuple[int, ...]
    median_ns: float
    low_ns: float
    high_ns: float
    is_settled: bool


def sample(take: Callable[[], int], settings: TimingSettings, now: Callable[[], int] = host_ns) -> Samples:
    """Calls ``take`` for nanoseconds until the median is known well enough; ``now`` is a clock in nanoseconds.

    The time limit covers the warm-up and the samples; whatever it is, there is one call to warm up, and :data:`LEAST`
    samples or as few as are asked for at most. What ``take`` raises is the caller's.
    """
    end = now() + settings.limit_s * 1e9
    _warm_up(take, settings, now, now() + WARM_UP_SHARE * settings.limit_s * 1e9)
    taken = [take() for _ in range(min(LEAST, settings.max_samples))]
    look_at = settings.min_samples
    while now() < end and len(taken) < settings.max_samples:
        if len(taken) >= look_at:
            if _is_settled(taken, settings):
                break
            look_at = max(look_at + 1, int(look_at * GROWTH))
        taken.append(take())
    return samples_of(taken, settings)


def samples_of(taken: list[int], settings: TimingSettings) -> Samples:
    """What the nanoseconds ``taken`` come to; at least one."""
    low, high = median_interval(taken)
    return Samples(tuple(taken), float(median(taken)), low, high, _is_settled(taken, settings))


def _warm_up(take: Callable[[], int], settings: TimingSettings, now: Callable[[], int], end: float) -> None:
    best, calm = take(), 0
    while calm < CALM and now() < end:
        found = take()
        calm = 0 if found < best * (1 - settings.relative_width) else calm + 1
        best = min(best, found)


def _is_settled(taken: list[int], settings: TimingSettings) -> bool:
    if len(taken) < max(2, settings.min_samples):
        return False
    low, high = median_interval(taken)
    allowed = settings.relative_width * median(taken)
    half = len(taken) // 2
    drift = abs(median(taken[half:]) - median(taken[:half]))
    return high - low <= allowed and drift <= allowed
