"""Values for templates that show the times of one run: bars of each case, charts, and the rows of a table.

Bars of one case share a scale from zero; bars of different cases do not. The fastest backend is marked only if
:func:`attncheck.reports.speeds.tables.fastest` returns it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from attncheck.reports.document.run_values import RunValues
from attncheck.reports.html.curves import length_panels
from attncheck.reports.html.drawing import SeriesStyle, series_styles
from attncheck.reports.html.speed_charts import build_chart, length_chart, roofline_charts
from attncheck.reports.html.units import measured_time
from attncheck.reports.speeds.notes import legend, speed_notes
from attncheck.reports.speeds.speed import Speed
from attncheck.reports.speeds.summary import summary_tables
from attncheck.reports.speeds.tables import SpeedTable, fastest_of_cases, speed_tables, suites_of
from attncheck.reports.speeds.traffic import Traffic, traffic

if TYPE_CHECKING:
    from markupsafe import Markup

MOST_BARS = 1200
OPEN_BARS = 160
"""Up to this number of bars, those of a suite are expanded initially."""


class SpeedBar(NamedTuple):
    """One backend's time for ``forward`` of a case; ``share``, ``low``, ``high``: in per cent of the scale."""

    backend: str
    series: int
    time: str
    share: float
    low: float
    high: float
    is_fastest: bool


class CaseBars(NamedTuple):
    """The bars of one case."""

    case: str
    bars: tuple[SpeedBar, ...]


class SuiteBars(NamedTuple):
    """The bars of one suite; ``left_out``: the number of cases beyond the limit of the page."""

    suite: str
    cases: tuple[CaseBars, ...]
    left_out: int
    is_open: bool


class TitledChart(NamedTuple):
    """A chart, its heading and its description."""

    title: str
    about: str
    chart: "Markup"


@dataclass(frozen=True)
class SpeedView:
    """The times of one run as shown on the page."""

    summaries: tuple[SpeedTable, ...]
    traffic: tuple[Traffic, ...]
    drawings: tuple[TitledChart, ...]
    looks: Mapping[str, SeriesStyle]
    bars: tuple[SuiteBars, ...]
    intervals: Literal["rounds", "process"]
    about: str
    notes: tuple[str, ...]


def speed_view(run: RunValues, name: str) -> SpeedView | None:
    """Return the view of a run's times, or None if it has none; ``name`` must be unique in the page."""
    if not (found := run.speeds):
        return None
    looks = series_styles(dict.fromkeys(speed.backend for speed in found))
    return SpeedView(
        summaries=summary_tables(found),
        traffic=traffic(run.header, found),
        drawings=tuple(_drawings(run, looks, name)),
        looks=looks,
        bars=_bars(found, list(looks)),
        intervals="rounds" if any(len(speed.rounds) > 1 for speed in found) else "process",
        about=legend(speed_tables(found)),
        notes=tuple(speed_notes(found)),
    )


def _drawings(run: RunValues, looks: Mapping[str, SeriesStyle], name: str) -> list[TitledChart]:
    forward = [speed for speed in run.speeds if speed.part == "forward"]
    needs = {record.case: record.needs for record in run.records}
    drawings = [
        TitledChart(
            f"Latency over length: {panel.title}", panel.about, length_chart(f"{name}-length-{index}", panel, looks)
        )
        for index, panel in enumerate(length_panels(forward, needs))
    ]
    drawings += [
        TitledChart(f"Roofline, {dtype}", "what forward achieves, under what the device copies and multiplies", drawn)
        for dtype, drawn in roofline_charts(f"{name}-roofline", forward, looks).items()
    ]
    if (drawn := build_chart(f"{name}-build", run.speeds, looks)) is not None:
        drawings.append(TitledChart("Build and forward", "above the line, making the metadata takes longer", drawn))
    return drawings


def _bars(found: Sequence[Speed], backends: Sequence[str]) -> tuple[SuiteBars, ...]:
    forward = [speed for speed in found if speed.part == "forward"]
    first = fastest_of_cases(forward)
    room, is_open = MOST_BARS, len(forward) <= OPEN_BARS
    suites = []
    for suite, members in suites_of(forward).items():
        cases: dict[str, list[Speed]] = {}
        for speed in members:
            cases.setdefault(speed.case, []).append(speed)
        shown = []
        for case, own in cases.items():
            if (room := room - len(own)) < 0:
                break
            shown.append(CaseBars(case, _case_bars(own, backends, first[case, "forward"])))
        suites.append(SuiteBars(suite, tuple(shown), len(cases) - len(shown), is_open))
    return tuple(suites)


def _case_bars(own: Sequence[Speed], backends: Sequence[str], first: str | None) -> tuple[SpeedBar, ...]:
    full = max(*(speed.interval_ns[1] for speed in own), *(speed.median_ns for speed in own)) / 100
    return tuple(
        SpeedBar(
            speed.backend,
            backends.index(speed.backend),
            measured_time(speed.median_ns),
            round(speed.median_ns / full, 1),
            round(speed.interval_ns[0] / full, 1),
            round(speed.interval_ns[1] / full, 1),
            speed.backend == first,
        )
        for speed in own
    )
