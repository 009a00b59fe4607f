"""Speeds for a terminal: a row for each backend of a suite, and notes on the figures.

The Markdown report has a row for each case.
"""

from collections.abc import Sequence

from attncheck.reports.analysis import phrases
from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.speeds.notes import fastest_note, speed_notes
from attncheck.reports.speeds.speed import Speed
from attncheck.reports.speeds.summary import summary_tables
from attncheck.reports.speeds.tables import SpeedTable
from attncheck.reports.speeds.traffic import traffic_tables, traffic_title
from attncheck.reports.terminal.columns import Style

NAME_WIDTH = 27
"""Columns for a backend's name; the tables of checks have the whole name."""

CASE_WIDTH = 24
"""Minimum columns for the slowest case with its time."""


def render_speeds(header: RunHeader, speeds: Sequence[Speed], style: Style) -> str:
    """Return a table for each suite, another for each suite with recorded traffic, and the notes; "" without times."""
    if not speeds:
        return ""
    tables = summary_tables(speeds)
    titled = [(_title(each), each) for each in tables]
    titled += [
        (f"{phrases.one_line(each.suite)}, {traffic_title(each)}", each) for each in traffic_tables(header, speeds)
    ]
    told = [part for title, each in titled for part in (style.wrap(title), style.table(_fitted(each, style.width)))]
    notes = [*fastest_note(tables), *speed_notes(speeds), "each case: `attncheck report --format markdown`"]
    return "\n\n".join([*told, "\n".join(style.wrap(note, "  ") for note in notes)])


def _title(summary: SpeedTable) -> str:
    return f"speeds in {phrases.one_line(summary.suite)}: {averaged(summary)}"


def averaged(summary: SpeedTable) -> str:
    """Return what the means of a table are averaged over, and whether its rows can be compared."""
    if not summary.averaged:
        return "no case was timed of all; geometric means of each one's own cases, not to be compared"
    return f"geometric means of {phrases.plural(summary.averaged, 'case')} that all were timed in"


def _fitted(summary: SpeedTable, width: int) -> list[list[str]]:
    """Return the rows cut to the width: the names, and the last column, which has a case.

    If fewer than :data:`CASE_WIDTH` columns remain for the last one, it is not cut, and the table becomes a list.
    """
    rows = [[phrases.one_line(cell) for cell in row] for row in (summary.headings, *summary.rows)]
    rows = [[phrases.cut(row[0], NAME_WIDTH), *row[1:]] for row in rows]
    taken = sum(max(len(row[column]) for row in rows) + 2 for column in range(len(summary.headings) - 1))
    room = width - taken
    return rows if room < CASE_WIDTH else [[*row[:-1], phrases.cut(row[-1], room)] for row in rows]
