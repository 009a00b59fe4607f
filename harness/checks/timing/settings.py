"""How a case is timed, as set on the command line."""

import math
from dataclasses import dataclass

from attncheck.errors import SelectionError


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
