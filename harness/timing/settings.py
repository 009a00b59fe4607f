"""How a case is timed, as the command line has it. Must not know: clocks, tensors."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TimingSettings:
    """For each part of a step in one process.

    ``limit_s``: wall-clock seconds after which no further sample is taken. ``relative_width``: sampling ends before,
    once the interval of the median is no wider than this share of it. ``warm``: the device's last-level cache is left
    as it is before a sample, and not flushed. ``kernels``: the profiler tells which kernels run.
    """

    limit_s: float = 0.5
    relative_width: float = 0.02
    min_samples: int = 10
    max_samples: int = 200
    warm: bool = False
    kernels: bool = False
