"""Results for the functions of providers: a verdict, counts and notes for each.

This module computes rows and sentences; ``document.tables`` makes tables of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.records import (
    UTILITIES,
    Crashed,
    Errored,
    Failed,
    Passed,
    Record,
    TimedOut,
    Unsupported,
    XFailed,
)

FunctionVerdict = Literal[
    "equal", "drifted", "judged", "differs", "missing", "errored", "crashed", "timed_out", "stale", "expected"
]

HEADINGS = ("function", "verdict", "questions", "equal", "drifted", "judged", "differ")

_NOTE_HEADINGS = {
    "known departures": ("drift", "judgement", "stale"),
    "missing": ("missing",),
    "notes": (),
}
"""Headings of notes, and the kinds of notes under each; the last heading takes all other kinds."""

LEGEND = (
    "equal: every question is answered as the reference does; drifted: a known change of signature or meaning; judged: "
    "a known defect, or an input taken without a check, where the reference deliberately answers otherwise; differs: "
    "no known reason; missing: no failure"
)


@dataclass(frozen=True)
class FunctionRow:
    """One function of one provider. ``counts``: inputs compared, then by result in the order of the headings."""

    name: str
    word: FunctionVerdict
    counts: tuple[str, ...]
    notes: tuple[str, ...]


def function_rows(records: Sequence[Record], provider: str) -> tuple[FunctionRow, ...]:
    """Return the rows of one provider, in the order of its records."""
    return tuple(_row(record) for record in records if record.check == UTILITIES and record.backend == provider)


def notes_by_heading(rows: Sequence[FunctionRow]) -> tuple[tuple[str, tuple[tuple[str, str], ...]], ...]:
    """Return, by heading, pairs of function names and a note; functions with equal notes share one pair."""
    owners: dict[str, dict[str, list[str]]] = {heading: {} for heading in _NOTE_HEADINGS}
    for row in rows:
        for note in row.notes:
            kind = row.word if row.word == "missing" else note.partition(":")[0]
            heading = next(heading for heading, kinds in _NOTE_HEADINGS.items() if kind in kinds or not kinds)
            owners[heading].setdefault(note, []).append(row.name)
    return tuple(
        (heading, tuple((", ".join(names), note) for note, names in notes.items()))
        for heading, notes in owners.items()
        if notes
    )


def provider_title(header: RunHeader, provider: str) -> str:
    """Return a title with the provider's name and version."""
    version = next((info.version for info in header.backends if info.name == provider), "")
    return f"utilities of {provider}{f' {version}' if version else ''}"


def _row(record: Record) -> FunctionRow:
    figures = record.figures if isinstance(record, Passed | Failed) else {}
    counts = tuple(_count(figures, key) for key in ("questions", "equal", "drifted", "judged", "differs"))
    notes = record.notes if isinstance(record, Passed) else ()
    if isinstance(record, Unsupported):
        notes = record.reasons
    return FunctionRow(record.case_id, _word(record), counts, notes)


def _word(record: Record) -> FunctionVerdict:
    match record:
        case Passed():
            if record.figures.get("judgements"):
                return "judged"
            return "drifted" if record.figures.get("drifts") else "equal"
        case Failed():
            return "differs"
        case Errored():
            return "errored"
        case Crashed() | TimedOut():
            return record.outcome
        case XFailed():
            return "expected"
        case Unsupported():
            return "missing"
        case _:
            return "stale"


def _count(figures: dict[str, int | float], key: str) -> str:
    value = figures.get(key, 0)
    return str(int(value)) if value else "-"
