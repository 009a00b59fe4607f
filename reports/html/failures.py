"""What fell short, told once for all that is alike; and what did so as expected, by its reason.

Values for templates, unescaped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attncheck.reports.analysis import phrases
from attncheck.reports.analysis.reasons import without_figures
from attncheck.reports.analysis.repro import repro_command
from attncheck.reports.analysis.summary import RunSummary
from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.records import Crashed, Errored, Failed, Record, XFailed, graph_of

SHOWN = 40
"""Kinds of failures told beside the records, which tell all of them."""


@dataclass(frozen=True)
class AlikeFailures:
    """The story of ``record``, which speaks for ``others`` too: the same finding, but for figures.

    ``rounds``: in how many of its rounds, where there were several. ``trail``: a traceback, or what a process that died
    printed last.
    """

    record: Record
    others: tuple[Record, ...]
    what: str
    rounds: str
    meaning: str
    details: tuple[str, ...]
    figures: Mapping[str, str]
    trail: str
    repro: str


@dataclass(frozen=True)
class ExpectedFailures:
    """Records of one backend and check that fell short for one reason; ``first`` is told, ``further`` are more."""

    first: XFailed
    further: int


def failures(summary: RunSummary, header: RunHeader) -> tuple[AlikeFailures, ...]:
    """One for each backend, check and finding, in the order of the records."""
    alike: dict[tuple[str, ...], list[Record]] = {}
    for record in summary.short:
        alike.setdefault((record.backend, record.check, record.outcome, *_story(record)), []).append(record)
    return tuple(_failure(summary, header, *records) for records in alike.values())


def expected(records: Sequence[XFailed]) -> tuple[ExpectedFailures, ...]:
    """One for each backend, reason and check."""
    alike: dict[tuple[str, str, str], list[XFailed]] = {}
    for record in records:
        alike.setdefault((record.backend, record.reason, record.check), []).append(record)
    return tuple(ExpectedFailures(first, len(further)) for first, *further in alike.values())


def figures_of(record: Record) -> dict[str, str]:
    """The figures of a record as people read them."""
    figures = record.figures if hasattr(record, "figures") else {}
    return {name: f"{value:.6g}" for name, value in figures.items()}


def _story(record: Record) -> tuple[str, ...]:
    """Equal for records of which one speaks for all."""
    what = without_figures(phrases.what_happened(record))
    match record:
        case Failed(meaning=meaning):
            levels = graph_of(record)
            return (meaning or "", what) if levels is None else (levels.declared, levels.measured or "", what)
        case Errored(traceback=traceback):
            return traceback, what
        case _:
            return (what,)


def _failure(summary: RunSummary, header: RunHeader, record: Record, *others: Record) -> AlikeFailures:
    trail = ""
    if isinstance(record, Errored):
        trail = record.traceback or record.message
    elif isinstance(record, Crashed):
        trail = record.output
    return AlikeFailures(
        record=record,
        others=others,
        what=phrases.what_happened(record),
        rounds=phrases.rounds_short(summary, record),
        meaning=(record.meaning or "") if isinstance(record, Failed) else "",
        details=record.details if isinstance(record, Failed) else (),
        figures=figures_of(record),
        trail=trail,
        repro=repro_command(record, header),
    )
