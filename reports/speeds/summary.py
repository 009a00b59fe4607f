"""Speeds in short: the mean time of each backend for a suite, and its slowest case.

Means are geometric, over the cases that all backends of the suite timed, so that they can be compared. If there is no
such case, each backend's mean is over its own cases.
"""

import statistics
from collections.abc import Sequence

from attncheck.reports.run_file.timings import StepPart
from attncheck.reports.speeds.speed import Speed
from attncheck.reports.speeds.tables import (
    FASTEST,
    NOTHING,
    SpeedTable,
    case_id,
    fastest,
    share_text,
    suites_of,
    time_unit,
    without_empty_columns,
)


def summary_tables(speeds: Sequence[Speed]) -> tuple[SpeedTable, ...]:
    """Return a table for each suite with a row for each backend: mean times, roofline share, slowest case."""
    return tuple(_table(suite, members) for suite, members in suites_of(speeds).items())


def _table(suite: str, speeds: Sequence[Speed]) -> SpeedTable:
    forward = _by_backend(speeds, "forward")
    build = _by_backend(speeds, "build")
    shared = set.intersection(*(set(cases) for cases in forward.values())) if forward else set()
    averaged = {name: sorted(shared or cases) for name, cases in forward.items()}
    means = {name: _means([cases[case] for case in averaged[name]]) for name, cases in forward.items()}
    builds = {
        name: _means([cases[case] for case in averaged[name] if case in cases])
        for name, cases in build.items()
        if name in averaged
    }
    unit = time_unit([_mean(rounds) for rounds in (*means.values(), *builds.values()) if rounds])
    first = fastest(means) if shared else None
    rows = []
    for name, cases in forward.items():
        slowest = max(cases.values(), key=lambda speed: speed.median_ns)
        shares = [share for case in averaged[name] if (share := cases[case].roofline_share) is not None]
        rows.append(
            (
                name,
                str(len(cases)),
                unit.text(_mean(means[name])) + (f" {FASTEST}" if name == first else ""),
                unit.text(_mean(builds[name])) if builds.get(name) else NOTHING,
                share_text(statistics.geometric_mean(shares) if shares else None),
                f"{case_id(slowest)} ({unit.text(slowest.median_ns)})",
            )
        )
    headings = ("backend", "cases", f"forward ({unit.name})", f"build ({unit.name})", "roofline", "slowest case")
    return without_empty_columns(SpeedTable(suite, headings, tuple(rows), first is not None, len(shared)))


def _by_backend(speeds: Sequence[Speed], part: StepPart) -> dict[str, dict[str, Speed]]:
    found: dict[str, dict[str, Speed]] = {}
    for speed in speeds:
        if speed.part == part:
            found.setdefault(speed.backend, {})[speed.case] = speed
    return found


def _means(speeds: Sequence[Speed]) -> list[float]:
    """Return the mean over cases of each round, or one mean of all rounds if cases have different numbers of rounds."""
    rounds = {len(speed.rounds) for speed in speeds}
    if len(rounds) == 1:
        return [statistics.geometric_mean(times) for times in zip(*(speed.medians_ns for speed in speeds), strict=True)]
    return [statistics.geometric_mean(speed.median_ns for speed in speeds)] if speeds else []


def _mean(rounds: Sequence[float]) -> float:
    return statistics.geometric_mean(rounds)
