"""What became of the speed of one part of one case between two runs: faster, slower, the same, or cannot tell.

Must not know: how runs are matched, how a change is shown.
"""

from dataclasses import dataclass
from typing import Literal

from attncheck.reports.speed import Speed
from attncheck.reports.timings import Part

Verdict = Literal["slower", "faster", "same", "cannot tell"]

VERDICTS: tuple[Verdict, ...] = ("slower", "faster", "same", "cannot tell")
"""In the order they are reported."""


@dataclass(frozen=True)
class SpeedChange:
    """One pair of speeds. ``ratio``: time of NEW over time of BASE, so that 1.1 is 10 % slower.

    ``backend``: its name, ``OLD -> NEW`` where backends of two names were matched (``base.backend``, ``new.backend``
    are those names). ``low``, ``high``: the interval of the ratio, simultaneous over all pairs tested; None where none
    was made. ``reason``: why nothing can be told; empty for the other verdicts. ``is_regression``: slower, and by as
    much as the run is to fail for.
    """

    backend: str
    case: str
    part: Part
    base: Speed
    new: Speed
    ratio: float
    low: float | None
    high: float | None
    verdict: Verdict
    reason: str = ""
    is_regression: bool = False
