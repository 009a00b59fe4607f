"""Between which times a speed lies, as far as was measured. Must not know: how a time is shown."""

from typing import Literal, NamedTuple

from attncheck.reports.speeds.speed import Speed


class Interval(NamedTuple):
    """From ``low_ns`` to ``high_ns``; ``of`` rounds: the range of the medians of processes; ``of`` process: of one.

    The interval of the median within the only process says nothing of where the next process would lie.
    """

    low_ns: float
    high_ns: float
    of: Literal["rounds", "process"]


def interval(speed: Speed) -> Interval:
    """The interval of a speed."""
    if len(speed.rounds) > 1:
        return Interval(min(speed.medians_ns), max(speed.medians_ns), "rounds")
    (only,) = speed.rounds
    return Interval(only.low_ns, only.high_ns, "process")
