"""Speeds as rows of text, with the unit of a column in its heading: each case, means by backend, recorded traffic.

The fastest of several backends is marked only if all its rounds are below all rounds of the others. A time for recorded
traffic is the sum of the medians of cases, weighted by how often each occurred; a case counts only if every backend of
its suite timed it. Cells are plain text, which the report format escapes.
"""

import math
import operator
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from attncheck.reports.analysis.phrases import plural
from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.timings import StepPart
from attncheck.reports.speeds.speed import Speed, by_backend, by_round

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
    each backend's mean is over its own cases.
    """

    suite: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    has_fastest: bool = False
    averaged: int | None = None


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


def summary_tables(speeds: Sequence[Speed]) -> tuple[SpeedTable, ...]:
    """Return a table for each suite with a row for each backend: mean times, roofline share, slowest case."""
    return tuple(_summary_table(suite, members) for suite, members in suites_of(speeds).items())


def _summary_table(suite: str, speeds: Sequence[Speed]) -> SpeedTable:
    forward = by_backend(speeds, "forward")
    build = by_backend(speeds, "build")
    shared = set.intersection(*(set(cases) for cases in forward.values())) if forward else set()
    averaged = {name: sorted(shared or cases) for name, cases in forward.items()}
    means = {
        name: by_round([cases[case] for case in averaged[name]], statistics.geometric_mean)
        for name, cases in forward.items()
    }
    builds = {
        name: by_round([cases[case] for case in averaged[name] if case in cases], statistics.geometric_mean)
        for name, cases in build.items()
        if name in averaged
    }
    unit = time_unit([statistics.geometric_mean(rounds) for rounds in (*means.values(), *builds.values()) if rounds])
    first = fastest(means) if shared else None
    rows = []
    for name, cases in forward.items():
        slowest = max(cases.values(), key=lambda speed: speed.median_ns)
        shares = [share for case in averaged[name] if (share := cases[case].roofline_share) is not None]
        rows.append(
            (
                name,
                str(len(cases)),
                unit.text(statistics.geometric_mean(means[name])) + (f" {FASTEST}" if name == first else ""),
                unit.text(statistics.geometric_mean(builds[name])) if builds.get(name) else NOTHING,
                share_text(statistics.geometric_mean(shares) if shares else None),
                f"{case_id(slowest)} ({unit.text(slowest.median_ns)})",
            )
        )
    headings = ("backend", "cases", f"forward ({unit.name})", f"build ({unit.name})", "roofline", "slowest case")
    return without_empty_columns(SpeedTable(suite, headings, tuple(rows), first is not None, len(shared)))


class TrafficTime(NamedTuple):
    """The time of one backend. ``calls_timed``: the share of all calls that are of its timed cases.

    ``forward_ns``: the sum over all calls of the compared cases, a mean of the rounds; None without such cases.
    """

    backend: str
    calls_timed: float
    forward_ns: float | None
    is_fastest: bool


@dataclass(frozen=True)
class Traffic:
    """The times for the traffic of one suite.

    ``cases``: the number of cases that every backend timed. ``calls_compared``: the share of all calls that are theirs.
    """

    suite: str
    cases: int
    calls_compared: float
    times: tuple[TrafficTime, ...]

    @property
    def title(self) -> str:
        """A sentence on what the sums of the table contain."""
        if not self.cases:
            return "On this traffic: no case was timed for every backend, so none is compared"
        return (
            f"On this traffic: forward of {plural(self.cases, 'case')} timed for every backend, each weighted by how "
            "often it came, without builds"
        )

    @property
    def table(self) -> SpeedTable:
        """The table, with a row for each backend."""
        sums = [each.forward_ns for each in self.times if each.forward_ns is not None]
        unit, least = time_unit(sums), min(sums, default=1.0)
        rows = tuple(
            (
                each.backend,
                f"{each.calls_timed:.1%}",
                f"{unit.text(each.forward_ns)}{f' {FASTEST}' * each.is_fastest}",
                "-" if each.forward_ns is None else f"{each.forward_ns / least:.3g}",
            )
            for each in self.times
        )
        headings = ("backend", "calls timed", f"{self.calls_compared:.1%} of calls ({unit.name})", "times the least")
        return SpeedTable(self.suite, headings, rows, any(each.is_fastest for each in self.times), self.cases)


def traffic(header: RunHeader, speeds: Sequence[Speed]) -> tuple[Traffic, ...]:
    """Return the times for each suite whose cases have weights, with those of each backend that was timed in it."""
    weights: dict[str, dict[str, float]] = {}
    for case in header.cases:
        if case.weight is not None:
            weights.setdefault(case.suite, {})[f"{case.suite}/{case.id}"] = case.weight
    forward = suites_of([speed for speed in speeds if speed.part == "forward"])
    return tuple(_traffic(suite, forward[suite], own) for suite, own in weights.items() if suite in forward)


def _traffic(suite: str, speeds: Sequence[Speed], weights: Mapping[str, float]) -> Traffic:
    timed = by_backend((speed for speed in speeds if speed.case in weights), "forward")
    shared = sorted(set.intersection(*map(set, timed.values()))) if timed else []
    calls, own = sum(weights.values()), [weights[case] for case in shared]
    sums = {
        name: by_round([cases[case] for case in shared], lambda times: sum(map(operator.mul, own, times)))
        for name, cases in timed.items()
    }
    first = fastest({name: rounds for name, rounds in sums.items() if rounds})
    times = tuple(
        TrafficTime(
            name,
            sum(weights[case] for case in cases) / calls,
            sum(sums[name]) / len(sums[name]) if sums[name] else None,
            name == first,
        )
        for name, cases in timed.items()
    )
    return Traffic(suite, len(shared), sum(own) / calls, times)
