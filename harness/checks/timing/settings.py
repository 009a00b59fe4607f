"""How a case is timed, as the command line has it."""

import math
from dataclasses import dataclass

from attncheck.errors import SelectionError


@dataclass(frozen=True)
class TimingSettings:
    """For each part of a step in one process.

    ``limit_s``: wall-clock seconds after which no further sample is taken, but for the few that an interval needs; it
    is short, since processes differ by more than samples of one, and many rounds tell more than many samples.
    ``relative_width``: sampling ends before, once the interval of the median is no wider than this share of it.
    ``warm``: the device's last-level cache is left as it is before a sample, and not flushed. ``kernels``: the profiler
    tells which kernels run.

    Raises:
        SelectionError: a value with which nothing could be measured.
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
