"""The time that each backend takes for recorded traffic: medians of cases, weighted by how often each occurred.

A case counts only if every backend of its suite timed it, in the same run and thus on one device. The share of calls
that were timed is shown for each backend.
"""

import operator
from collections.abc import Mapping, Sequence

from attncheck.reports.analysis.phrases import plural
from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.speeds.speed import Speed, by_backend, by_round
from attncheck.reports.speeds.tables import FASTEST, SpeedTable, fastest, suites_of, time_unit


def traffic_tables(header: RunHeader, speeds: Sequence[Speed]) -> tuple[SpeedTable, ...]:
    """Return a table for each suite whose cases have weights, with a row for each backend that was timed in it."""
    weights: dict[str, dict[str, float]] = {}
    for case in header.cases:
        if case.weight is not None:
            weights.setdefault(case.suite, {})[f"{case.suite}/{case.id}"] = case.weight
    forward = suites_of([speed for speed in speeds if speed.part == "forward"])
    return tuple(_table(suite, forward[suite], own) for suite, own in weights.items() if suite in forward)


def _table(suite: str, speeds: Sequence[Speed], weights: Mapping[str, float]) -> SpeedTable:
    timed = by_backend((speed for speed in speeds if speed.case in weights), "forward")
    shared = set.intersection(*map(set, timed.values())) if timed else set()
    all_calls = sum(weights.values())
    calls = sum(weights[case] for case in shared)
    own = [weights[case] for case in sorted(shared)]
    sums = {
        name: by_round([cases[case] for case in sorted(shared)], lambda times: sum(map(operator.mul, own, times)))
        for name, cases in timed.items()
    }
    means = {name: sum(rounds) / len(rounds) for name, rounds in sums.items() if rounds}
    unit = time_unit(means.values())
    least = min(means.values(), default=1.0)
    first = fastest({name: sums[name] for name in means})
    rows = tuple(
        (
            name,
            f"{sum(weights[case] for case in cases) / all_calls:.1%}",
            f"{unit.text(means[name])}{f' {FASTEST}' if name == first else ''}" if name in means else "-",
            f"{means[name] / least:.3g}" if name in means else "-",
        )
        for name, cases in timed.items()
    )
    headings = ("backend", "calls timed", f"{calls / all_calls:.1%} of calls ({unit.name})", "times the least")
    return SpeedTable(suite, headings, rows, first is not None, len(shared))


def traffic_title(table: SpeedTable) -> str:
    """Return a sentence on what the sums of a table contain."""
    if not table.averaged:
        return "on this traffic: no case was timed for every backend, so none is compared"
    cases = plural(table.averaged, "case")
    return (
        f"on this traffic: forward of {cases} timed for every backend, each weighted by how often it came, "
        "without builds"
    )
