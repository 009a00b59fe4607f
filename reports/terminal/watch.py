"""A round of ``attncheck run --watch`` as text: verdict, changes since the previous round, first finding."""

from collections.abc import Mapping, Sequence

from attncheck.reports.analysis import phrases
from attncheck.reports.analysis.reasons import named
from attncheck.reports.document.failures import errors as errors_of
from attncheck.reports.document.failures import expected, failures, verdict
from attncheck.reports.document.run_values import RunValues
from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.records import FALLEN_SHORT, Record
from attncheck.reports.terminal.columns import WIDTH, Style
from attncheck.reports.terminal.text import render

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
    style, run = Style(width, color), RunValues(header, records, errors)
    sections = [
        render(verdict(run, whole=False), style),
        _changes(records, before, style) if before else "",
        render([*failures(run, whole=False), *expected(run, whole=False)][:1], style),
        render(errors_of(run, whole=False), style),
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
            text = phrases.one_line(named(names, _SHOWN))
            lines.append(style.wrap(f"{style.paint(kind, _COLORS[kind])}: {text}"))
    return "\n".join(lines)


def _short(records: Sequence[Record]) -> Mapping[tuple[str, str, str], bool]:
    return {(each.backend, each.case, each.check): each.outcome in FALLEN_SHORT for each in records}
