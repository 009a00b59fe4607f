"""Whether a batch is fast only because its shape is known: it is held against others of nearly its shape.

Cannot see: one that is served well within :data:`TOO_FAST`, nor one whose neighbours are known as well. Must not
know: backends, how a step is taken.
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from attncheck.harness.checks.timing.statistics import median_interval

TOO_FAST = 2.0
"""How many times as long all neighbours must take for a batch to be a special case."""

NOTABLE = 1.25
"""From how many times on it is said."""

GLANCE, LOOK = 3, 10
"""Samples of each side: to see that there is nothing, and to be sure that there is."""

Take = Callable[[], int]


@dataclass(frozen=True)
class Neighbour:
    """How much longer a neighbour took than the batch itself: a ratio of medians, and the least that it may be."""

    distance: int
    ratio: float
    least: float

    @property
    def is_notable(self) -> bool:
        """Whether a reader should know."""
        return self.least > NOTABLE

    @property
    def is_suspect(self) -> bool:
        """Whether the batch is faster than its shape explains."""
        return self.least > TOO_FAST


def compare(distance: int, own: Take, neighbour: Take) -> Neighbour:
    """Compare samples of both, taken in turns; more of them only where the first are conspicuous.

    Both have been warmed up.
    """
    owns, others = _in_turns(own, neighbour, GLANCE)
    if median(others) <= NOTABLE * median(owns):
        return Neighbour(distance, median(others) / max(1.0, median(owns)), 0.0)
    owns, others = _in_turns(own, neighbour, LOOK)
    least = median_interval(others)[0] / max(1.0, median_interval(owns)[1])
    return Neighbour(distance, median(others) / max(1.0, median(owns)), least)


def _in_turns(own: Take, neighbour: Take, count: int) -> tuple[list[int], list[int]]:
    pairs = [(own(), neighbour()) for _ in range(count)]
    return [mine for mine, _ in pairs], [theirs for _, theirs in pairs]
