"""The time that each backend takes for recorded traffic: medians of cases, weighted by how often each occurred.

A case counts only if every backend of its suite timed it, in the same run and thus on one device. The share of calls
that were timed is shown for each backend.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from attncheck.reports.analysis.phrases import plural
from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.speeds.speed import Speed, by_backend, by_round
from attncheck.reports.speeds.tables import FASTEST, SpeedTable, fastest, suites_of, time_unit


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
