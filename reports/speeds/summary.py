"""Speeds in short: the mean time of each backend for a suite, and its slowest case.

Means are geometric, over the cases that all backends of the suite timed, so that they can be compared. If there is no
such case, each backend's mean is over its own cases.
"""

from collections.abc import Sequence
from statistics import geometric_mean

from attncheck.reports.speeds.speed import Speed, by_backend, by_round
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
    forward = by_backend(speeds, "forward")
    build = by_backend(speeds, "build")
    shared = set.intersection(*(set(cases) for cases in forward.values())) if forward else set()
    averaged = {name: sorted(shared or cases) for name, cases in forward.items()}
    means = {
        name: by_round([cases[case] for case in averaged[name]], geometric_mean) for name, cases in forward.items()
    }
    builds = {
        name: by_round([cases[case] for case in averaged[name] if case in cases], geometric_mean)
        for name, cases in build.items()
        if name in averaged
    }
    unit = time_unit([geometric_mean(rounds) for rounds in (*means.values(), *builds.values()) if rounds])
    first = fastest(means) if shared else None
    rows = []
    for name, cases in forward.items():
        slowest = max(cases.values(), key=lambda speed: speed.median_ns)
        shares = [share for case in averaged[name] if (share := cases[case].roofline_share) is not None]
        rows.append(
            (
                name,
                str(len(cases)),
                unit.text(geometric_mean(means[name])) + (f" {FASTEST}" if name == first else ""),
                unit.text(geometric_mean(builds[name])) if builds.get(name) else NOTHING,
                share_text(geometric_mean(shares) if shares else None),
                f"{case_id(slowest)} ({unit.text(slowest.median_ns)})",
            )
        )
    headings = ("backend", "cases", f"forward ({unit.name})", f"build ({unit.name})", "roofline", "slowest case")
    shared_means = {name: geometric_mean(rounds) for name, rounds in means.items()} if shared else {}
    return without_empty_columns(SpeedTable(suite, headings, tuple(rows), first is not None, len(shared), shared_means))
