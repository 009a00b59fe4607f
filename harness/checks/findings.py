"""What a check returns, and the settings of the check ``timing``."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from attncheck.errors import InternalError, SelectionError
from attncheck.reports.run_file.bits import Bits
from attncheck.reports.run_file.graph_levels import GraphLevels
from attncheck.reports.run_file.timings import Timing

Figures = Mapping[str, float | int]


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """Additional measurements of a check, copied unchanged into the record field of the same name.

    ``graph``: levels and probes of the check ``cudagraph``. ``chosen_kernels``: names of the kernels that a library
    chose, or None if not examined. ``bits``: of the check ``bitwise``. ``timing``: times of the check ``timing``.
    """

    graph: GraphLevels | None = None
    chosen_kernels: tuple[str, ...] | None = None
    bits: Bits | None = None
    timing: Timing | None = None


@dataclass(frozen=True)
class Holds(Measurements):
    """The property holds. ``figures``: measured margins. ``notes``: facts a reader should see although it holds."""

    figures: Figures = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Broken(Measurements):
    """The property does not hold. ``summary``: one line, where and by how much. ``meaning``: the likely cause.

    ``finding``: a text shared by failures with one cause; if empty, the record derives it from meaning or summary.
    ``concerns``: the features that the likely cause involves.
    """

    summary: str
    figures: Figures = field(default_factory=dict)
    meaning: str | None = None
    details: tuple[str, ...] = ()
    finding: str = ""
    concerns: tuple[str, ...] = ()


@dataclass(frozen=True)
class NotExamined(Measurements):
    """Nothing was examined, for ``reasons``. ``by``: whose limitation this is."""

    reasons: tuple[str, ...]
    by: Literal["backend", "attncheck"] = "backend"


Finding = Holds | Broken | NotExamined


class FindingError(InternalError):
    """Ends a check with ``finding``."""

    def __init__(self, finding: Broken) -> None:
        self.finding = finding
        super().__init__(finding.summary)


@dataclass(frozen=True)
class TimingSettings:
    """Settings for the timing of each part of a step in one process.

    ``limit_s``: wall-clock seconds after which sampling ends, except for the few samples that an interval needs. It is
    short because processes differ more than samples within one, so many rounds are better than many samples.
    ``relative_width``: sampling ends earlier if the interval of the median is at most this share of the median.
    ``min_samples``, ``max_samples``: bounds on their number. ``warm``: do not flush the device's last-level cache
    before a sample. ``kernels``: record by the profiler which kernels run.

    Raises:
        SelectionError: if a value allows no measurement.
    """

    limit_s: float = 0.25
    relative_width: float = 0.02
    min_samples: int = 10
    max_samples: int = 200
    warm: bool = False
    kernels: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.limit_s) and self.limit_s > 0):
            raise SelectionError(f"a time limit of {self.limit_s} s: give seconds, more than 0")
        if not (math.isfinite(self.relative_width) and self.relative_width >= 0):
            raise SelectionError(f"a relative width of {self.relative_width}: give a share, such as 0.02")
        if not 1 <= self.min_samples <= self.max_samples:
            raise SelectionError(
                f"{self.min_samples} to {self.max_samples} samples: give 1 or more, and no fewer as the most"
            )
