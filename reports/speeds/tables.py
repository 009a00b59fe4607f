"""Speeds as rows of text: one table for each suite, with the unit of a column in its heading.

The fastest of several backends is marked only if all its rounds are below all rounds of the others. Cells are plain
text, which the report format escapes.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from attncheck.reports.run_file.timings import StepPart
from attncheck.reports.speeds.speed import Speed

FASTEST_ROUNDS = 5
"""Rounds of each backend from which the fastest is marked. For equal speeds, five times of one are all below five of
the other with a probability of 1 in 252; medians of single processes differ by tens of per cent by chance."""

FASTEST = "*"
NOTHING = "-"


@dataclass(frozen=True)
class ColumnUnit:
    """The unit of a column: its ``size`` in the measured unit; ``decimals`` None: three significant digits."""

    name: str
    size: float
    decimals: int | None = None

    def text(self, value: float | None) -> str:
        """Return a figure without its unit, or ``-`` for None."""
        if value is None:
            return NOTHING
        return f"{value / self.size:.3g}" if self.decimals is None else f"{value / self.size:,.{self.decimals}f}"


@dataclass(frozen=True)
class SpeedTable:
    """Headings and rows of one suite, without empty columns.

    ``has_fastest``: whether any row is marked. ``averaged``: the number of cases that means are averaged over; 0 if
    each backend's mean is over its own cases. ``means``: by backend, the mean of ``forward`` over these cases.
    """

    suite: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    has_fastest: bool = False
    averaged: int | None = None
    means: Mapping[str, float] = field(default_factory=dict)


def time_unit(nanoseconds: Iterable[float]) -> ColumnUnit:
    """Return the unit for times of one table: the largest of ns, us, ms and s that the smallest time reaches."""
    names = {1.0: "ns", 1e3: "us", 1e6: "ms", 1e9: "s"}
    smallest = min(nanoseconds, default=1.0)
    size = _largest_within(names, smallest)
    digits = smallest / size
    return ColumnUnit(names[size], size, 2 if digits < 10 else 1 if digits < 100 else 0)


def rate_unit(rates: Iterable[float | None], what: str) -> ColumnUnit:
    """Return the unit for rates of one table, such as ``GB/s``: the largest that the largest rate reaches."""
    names = {1e6: f"M{what}/s", 1e9: f"G{what}/s", 1e12: f"T{what}/s"}
    largest = max((rate for rate in rates if rate is not None), default=1e9)
    size = _largest_within(names, largest)
    return ColumnUnit(names[size], size)


def _largest_within(sizes: Iterable[float], value: float) -> float:
    """Return the largest size not above ``value``, or else the smallest; 1e-9 absorbs the rounding of means."""
    known = sorted(sizes)
    return max((size for size in known if size <= value * (1 + 1e-9)), default=known[0])


def suite_of(speed: Speed) -> str:
    """Return the suite of the case that was timed."""
    return speed.case.partition("/")[0]


def case_id(speed: Speed) -> str:
    """Return the id of the case within its suite."""
    return speed.case.partition("/")[2]


def suites_of(speeds: Sequence[Speed]) -> dict[str, list[Speed]]:
    """Return the speeds of each suite, in the order of the suites' first speeds."""
    found: dict[str, list[Speed]] = {}
    for speed in speeds:
        found.setdefault(suite_of(speed), []).append(speed)
    return found


def fastest(medians: Mapping[str, Sequence[float]]) -> str | None:
    """Return the backend whose ``medians`` of all rounds are below all those of every other backend, or None.

    None also with fewer than two backends, or fewer than :data:`FASTEST_ROUNDS` rounds of one.
    """
    if len(medians) < 2 or any(len(rounds) < FASTEST_ROUNDS for rounds in medians.values()):
        return None
    best = min(medians, key=lambda name: statistics.geometric_mean(medians[name]))
    others = [time for name, rounds in medians.items() if name != best for time in rounds]
    return best if max(medians[best]) < min(others) else None


def fastest_of_cases(speeds: Sequence[Speed]) -> dict[tuple[str, StepPart], str | None]:
    """Return, by case and part, the backend that :func:`fastest` returns."""
    medians: dict[tuple[str, StepPart], dict[str, Sequence[float]]] = {}
    for speed in speeds:
        medians.setdefault((speed.case, speed.part), {})[speed.backend] = speed.medians_ns
    return {key: fastest(times) for key, times in medians.items()}


def speed_tables(speeds: Sequence[Speed]) -> tuple[SpeedTable, ...]:
    """Return a table for each suite with a row for each case, part and backend; ``forward`` rows include the build."""
    return tuple(_table(suite, members) for suite, members in suites_of(speeds).items())


def _table(suite: str, speeds: Sequence[Speed]) -> SpeedTable:
    builds = {(speed.backend, speed.case): speed for speed in speeds if speed.part == "build"}
    timed = [speed for speed in speeds if speed.part != "build"]
    first = fastest_of_cases(timed)
    place = {key: index for index, key in enumerate(first)}
    time = time_unit(speed.median_ns for speed in speeds)
    bandwidth = rate_unit((speed.bytes_per_s for speed in speeds), "B")
    flops = rate_unit((speed.flops_per_s for speed in speeds), "FLOP")
    repeated = any(speed.spread is not None for speed in speeds)
    rows = []
    for speed in sorted(timed, key=lambda speed: place[speed.case, speed.part]):
        build = builds.get((speed.backend, speed.case)) if speed.part == "forward" else None
        mark = f" {FASTEST}" if speed.backend == first[speed.case, speed.part] else ""
        rows.append(
            (
                case_id(speed),
                speed.part,
                speed.backend,
                time.text(speed.median_ns) + mark,
                spread_text(speed) if repeated else interval_text(speed, time),
                time.text(None if build is None else build.median_ns),
                str(len(speed.rounds)),
                bandwidth.text(speed.bytes_per_s),
                flops.text(speed.flops_per_s),
                share_text(speed.roofline_share),
            )
        )
    headings = (
        "case",
        "part",
        "backend",
        f"median ({time.name})",
        "spread" if repeated else "95% interval",
        f"build ({time.name})",
        "rounds",
        bandwidth.name,
        flops.name,
        "roofline",
    )
    return without_empty_columns(SpeedTable(suite, headings, tuple(rows), any(first.values())))


def without_empty_columns(table: SpeedTable) -> SpeedTable:
    """Return the table without the columns that are empty in every row."""
    kept = [index for index, _ in enumerate(table.headings) if any(row[index] != NOTHING for row in table.rows)]
    headings = tuple(table.headings[index] for index in kept)
    return replace(table, headings=headings, rows=tuple(tuple(row[index] for index in kept) for row in table.rows))


def spread_text(speed: Speed) -> str:
    """Return the spread between processes as a share of the time, or ``-`` for one process."""
    return NOTHING if speed.spread is None else f"{speed.spread:.1%}"


def interval_text(speed: Speed, unit: ColumnUnit) -> str:
    """Return the interval of the median within the first process, in the unit of the table."""
    return f"{unit.text(speed.rounds[0].low_ns)} to {unit.text(speed.rounds[0].high_ns)}"


def share_text(share: float | None) -> str:
    """Return a share of the roofline in whole per cent, or with two significant digits below 10 %."""
    if share is None:
        return NOTHING
    if share <= 0 or share >= 0.095:
        return f"{share:.0%}"
    decimals = 1 - math.floor(math.log10(share * 100))
    return f"{share:.{decimals}%}"
