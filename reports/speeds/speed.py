"""The speed of one backend for one part of one case, combined over the rounds of a run.

The unit of observation is the process: samples of one process are correlated, so only their median counts.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from attncheck.reports.analysis.measured import Time
from attncheck.reports.run_file.records import Passed, Record, XPassed
from attncheck.reports.run_file.store import Run
from attncheck.reports.run_file.timings import PARTS, TIMING, Ceilings, Latency, StepPart, Timing


@dataclass(frozen=True)
class Speed:
    """The measurements of one part of one case of one backend: ``rounds``, each the latency in one process.

    ``timings``: everything those processes measured, in the same order.
    """

    backend: str
    case: str
    part: StepPart
    rounds: tuple[Latency, ...]
    timings: tuple[Timing, ...]

    @cached_property
    def medians_ns(self) -> tuple[float, ...]:
        """The median of each process."""
        return tuple(latency.median_ns for latency in self.rounds)

    @cached_property
    def median_ns(self) -> float:
        """The geometric mean of the processes' medians, since logs of times are averaged and compared."""
        return statistics.geometric_mean(self.medians_ns)

    @property
    def interval_ns(self) -> tuple[float, float]:
        """The range of the processes' medians; with a single process, the interval of its median.

        The latter does not predict the median of another process.
        """
        if len(self.rounds) > 1:
            return min(self.medians_ns), max(self.medians_ns)
        (only,) = self.rounds
        return only.low_ns, only.high_ns

    @cached_property
    def spread(self) -> float | None:
        """The standard deviation of the logs of the process medians, a share of the time; None with one process."""
        if len(self.rounds) < 2:
            return None
        return statistics.stdev(map(math.log, self.medians_ns))

    @property
    def bytes_per_s(self) -> float | None:
        """Achieved bandwidth for the least bytes to move; None if these are undefined."""
        moved = self.rounds[0].moved_bytes
        return None if moved is None else moved / self.median_ns * 1e9

    @property
    def flops_per_s(self) -> float | None:
        """Achieved rate for the least operations; None if these are undefined."""
        flops = self.rounds[0].flops
        return None if flops is None else flops / self.median_ns * 1e9

    @cached_property
    def roofline_share(self) -> float | None:
        """The least time the device could take for the bytes and flops, as a share of the time taken.

        Both ceilings are measured in the same processes; None without them.
        """
        shares = [timing.roofline_share(each) for each, timing in zip(self.rounds, self.timings, strict=True)]
        known = [share for share in shares if share is not None]
        return statistics.geometric_mean(known) if len(known) == len(shares) else None


def speeds(records: Iterable[Record]) -> tuple[Speed, ...]:
    """Return all speeds of right outputs, in the order of ``records``, with parts in the order of ``PARTS``.

    A case that did not pass in every round has no speed.
    """
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.check == TIMING:
            groups.setdefault((record.backend, record.case), []).append(record)
    found = []
    for (backend, case), members in groups.items():
        timings = [each.timing for each in members if isinstance(each, Passed | XPassed) and each.timing is not None]
        if len(timings) != len(members):
            continue
        for part in PARTS:
            rounds = [latency for timing in timings if (latency := timing.latency(part)) is not None]
            if rounds and len(rounds) == len(timings):
                found.append(Speed(backend, case, part, tuple(rounds), tuple(timings)))
    return tuple(found)


def forward_times(run: Run) -> dict[tuple[str, str], Time]:
    """Return the times of ``forward`` by backend and ``suite/id``."""
    machine = run.header.environment.digest
    return {
        (speed.backend, speed.case): Time(speed.median_ns, *speed.interval_ns, len(speed.rounds), machine)
        for speed in speeds(run.records)
        if speed.part == "forward"
    }


def by_backend(speeds: Iterable[Speed], part: StepPart) -> dict[str, dict[str, Speed]]:
    """Return the speeds of one part, by backend and case."""
    found: dict[str, dict[str, Speed]] = {}
    for speed in speeds:
        if speed.part == part:
            found.setdefault(speed.backend, {})[speed.case] = speed
    return found


def by_round(speeds: Sequence[Speed], combine: Callable[[Sequence[float]], float]) -> list[float]:
    """Return ``combine`` of the cases' times in each round, or of their medians if cases differ in their rounds."""
    if not speeds:
        return []
    if len({len(speed.rounds) for speed in speeds}) > 1:
        return [combine([speed.median_ns for speed in speeds])]
    return [combine(times) for times in zip(*(speed.medians_ns for speed in speeds), strict=True)]


def timings_of(speeds: Iterable[Speed]) -> tuple[Timing, ...]:
    """Return each timing once, although it appears in the speeds of several parts."""
    return tuple({id(timing): timing for speed in speeds for timing in speed.timings}.values())


def mean_ceilings(speeds: Iterable[Speed]) -> dict[str, Ceilings]:
    """Return, by dtype, the geometric means of the ceilings measured with the times."""
    found: dict[str, list[Ceilings]] = {}
    for timing in timings_of(speeds):
        if timing.ceilings is not None:
            found.setdefault(timing.ceilings.dtype, []).append(timing.ceilings)
    return {
        dtype: Ceilings(
            copy_bytes_per_s=statistics.geometric_mean(each.copy_bytes_per_s for each in members),
            matmul_flops_per_s=statistics.geometric_mean(each.matmul_flops_per_s for each in members),
            dtype=dtype,
        )
        for dtype, members in found.items()
    }
