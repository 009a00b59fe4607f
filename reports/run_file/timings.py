"""Values of the check ``timing`` in a record: samples of each part of a step, their statistics, and device rates.

Times are in nanoseconds.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

TIMING = "timing"
"""The check whose records have times."""

StepPart = Literal["forward", "build", "decode", "prefill"]

PARTS: tuple[StepPart, ...] = ("forward", "build", "decode", "prefill")
"""``forward``: the whole batch, including the write of its new rows to the KV cache; ``build``: its metadata, on the
host. ``decode``, ``prefill``: ``forward`` of only that part of a mixed batch."""

ClockName = Literal["host", "events", "graph"]
"""``host``: a monotonic clock around the call; ``events``: CUDA events; ``graph``: events around a graph replay."""


Positive = Annotated[float, Field(ge=1e-30, le=1e30, allow_inf_nan=False)]
"""A time or a rate, bounded because its logarithm and its inverse are computed."""

Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""An integer in the range of int64, which a float can approximate."""

Count = Annotated[int, Field(ge=0, lt=2**63)]
"""A number of bytes, operations or nanoseconds."""


class RunFileValue(BaseModel):
    """Base of all values in a run file: immutable, without unknown keys; NaN and infinities are strings in JSON."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class Latency(RunFileValue):
    """How long one part of a step took in one process.

    ``low_ns``, ``high_ns``: a 95 % bootstrap interval of the median. ``samples_ns``: every sample, in the order taken.
    ``is_settled``: the interval was as narrow as required before the time was up. ``moved_bytes``, ``flops``: the
    least that the part has to move and compute; None where that means nothing, as of ``build``.
    """

    part: StepPart
    clock: ClockName
    median_ns: Positive
    low_ns: Positive
    high_ns: Positive
    samples_ns: tuple[Count, ...]
    is_settled: bool
    moved_bytes: Count | None = None
    flops: Count | None = None


class Ceilings(RunFileValue):
    """What the device could do in the same process: a large copy, and a large matrix product in the layer's dtype."""

    copy_bytes_per_s: Positive
    matmul_flops_per_s: Positive
    dtype: str

    def least_ns(self, moved_bytes: int, flops: int) -> float:
        """Return the roofline: the longer of the times to move ``moved_bytes`` and to compute ``flops``."""
        return 1e9 * max(moved_bytes / self.copy_bytes_per_s, flops / self.matmul_flops_per_s)


class ClockOverhead(RunFileValue):
    """What CUDA events measure where nothing is timed; every sample is without it.

    ``empty_ns``: of a call that issues nothing. ``replay_ns``: what the replay of a graph of one kernel takes longer
    than a launch of that kernel; None where no graph could be captured.
    """

    empty_ns: Count
    replay_ns: Count | None = None


class Kernel(RunFileValue):
    """A kernel that ran in one step, as the profiler names it, and how long its ``count`` launches took together."""

    name: str
    count: int
    duration_ns: float


class DeviceState(RunFileValue):
    """The device while it was timed, as the driver reports it; ``throttle_reasons``: empty if nothing held it back."""

    sm_clock_mhz: int | None = None
    max_sm_clock_mhz: int | None = None
    temperature_c: int | None = None
    throttle_reasons: tuple[str, ...] = ()


class Timing(RunFileValue):
    """What one process measured of one case.

    ``cache``: whether the device's last-level cache was flushed before each sample. ``ceilings``: None where they were
    not measured. ``kernels``: only where they were requested. ``overhead``: None where the host's clock was used.
    ``notes``: what a reader of the figures should know.
    """

    latencies: tuple[Latency, ...]
    cache: Literal["cold", "warm"] = "warm"
    ceilings: Ceilings | None = None
    kernels: tuple[Kernel, ...] = ()
    device: DeviceState | None = None
    overhead: ClockOverhead | None = None
    notes: tuple[str, ...] = ()

    def latency(self, part: StepPart) -> Latency | None:
        """Return the latency of one part, or None if it was not measured."""
        return next((each for each in self.latencies if each.part == part), None)

    def roofline_share(self, latency: Latency) -> float | None:
        """Return the least time the device could take for a latency, as a share of the time taken.

        None if ceilings were not measured, or bytes and flops are undefined or 0.
        """
        if self.ceilings is None or latency.moved_bytes is None or latency.flops is None:
            return None
        return self.ceilings.least_ns(latency.moved_bytes, latency.flops) / latency.median_ns or None
