"""A round of ``attncheck run --watch`` as text: verdict, changes since the previous round, first finding."""

from collections.abc import Mapping, Sequence

from attncheck.reports.analysis import phrases
from attncheck.reports.analysis.summary import summarise
from attncheck.reports.analysis.verdicts import run_findings
from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.records import FALLEN_SHORT, Record
from attncheck.reports.terminal.columns import WIDTH, Style
from attncheck.reports.terminal.findings import render_findings, render_verdicts

_SHOWN = 6
"""Maximum checks named in one line."""

_COLORS = {"fixed": "32", "broken": "31", "still failing": "31"}


def render_round(
    header: RunHeader,
    records: Sequence[Record],
    before: Sequence[Record],
    *,
    errors: Sequence[str] = (),
    color: bool = False,
    width: int = WIDTH,
) -> str:
    """Return the text of a round. ``before``: the records of the previous round, empty in the first one."""
    style = Style(width, color)
    found = run_findings(records, header)
    shown = render_findings(found.findings, summarise(records, checks=header.checks), header, style)
    sections = [
        render_verdicts(found.verdicts, style),
        _changes(records, before, style) if before else "",
        *shown[:1],
        "\n".join(style.wrap(f"error: {error}") for error in errors),
    ]
    return "\n\n".join(section for section in sections if section)


def render_record(record: Record) -> str:
    """Return a line for one record: its case, check and outcome, and what happened if it did not pass."""
    what = phrases.what_happened(record)
    outcome = record.outcome if what == record.outcome else f"{record.outcome}: {what}"
    return phrases.one_line(f"{record.case} {record.check}: {outcome}")


def _changes(records: Sequence[Record], before: Sequence[Record], style: Style) -> str:
    was = _short(before)
    groups: dict[str, list[str]] = {"fixed": [], "broken": [], "still failing": []}
    for key, is_short in _short(records).items():
        if is_short:
            groups["still failing" if was.get(key) else "broken"].append(" ".join(key[1:]))
        elif was.get(key):
            groups["fixed"].append(" ".join(key[1:]))
    lines = []
    for kind, names in groups.items():
        if names:
            rest = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            text = phrases.one_line(", ".join(names[:_SHOWN]) + rest)
            lines.append(style.wrap(f"{style.paint(kind, _COLORS[kind])}: {text}"))
    return "\n".join(lines)


def _short(records: Sequence[Record]) -> Mapping[tuple[str, str, str], bool]:
    return {(each.backend, each.case, each.check): each.outcome in FALLEN_SHORT for each in records}
