"""Values for templates, unescaped: findings by cause with one example each, and expected failures by reason."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attncheck.reports.analysis import phrases
from attncheck.reports.analysis.findings import Finding
from attncheck.reports.analysis.repro import repro_command
from attncheck.reports.analysis.summary import RunSummary
from attncheck.reports.run_file.causes import died_at, raised_at
from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.records import UTILITIES, Ended, Errored, Failed, Record, XFailed

SHOWN = 40
"""Maximum findings in the section of findings; the records have all."""


@dataclass(frozen=True)
class FindingView:
    """A finding as shown on the page; ``record``: its example.

    ``others``: a record of each further case. ``common``: what the cases have in common. ``shape``, ``description``: of
    the example's case, or "" if the run file does not describe it. ``rounds``: the number of rounds that failed, if
    there were several. ``meaning``: the likely cause, unless it is the title. ``evidence``: what proves a cause that is
    the title. ``places``: lines of the author's code. ``trail``: a traceback, or the last output of a process that
    died.
    """

    record: Record
    title: str
    extent: str
    common: str
    others: tuple[Record, ...]
    shape: str
    description: str
    what: str
    rounds: str
    meaning: str
    evidence: str
    details: tuple[str, ...]
    places: tuple[str, ...]
    figures: Mapping[str, str]
    trail: str
    repro: str


@dataclass(frozen=True)
class ExpectedFailures:
    """Expected failures of one backend and check for one reason; ``first`` is shown, ``further`` counts the others."""

    first: XFailed
    further: int


def finding_views(found: Sequence[Finding], summary: RunSummary, header: RunHeader) -> tuple[FindingView, ...]:
    """Return a view of each finding that makes the run fail, then of each failing function of a provider."""
    shown = [_finding(each, summary, header) for each in found if not each.is_expected]
    shown += [_shown(record, "", summary, header) for record in summary.short if record.check == UTILITIES]
    return tuple(shown)


def expected(records: Sequence[XFailed]) -> tuple[ExpectedFailures, ...]:
    """Return a group for each backend, reason and check."""
    alike: dict[tuple[str, str, str], list[XFailed]] = {}
    for record in records:
        alike.setdefault((record.backend, record.reason, record.check), []).append(record)
    return tuple(ExpectedFailures(first, len(further)) for first, *further in alike.values())


def figures_of(record: Record) -> dict[str, str]:
    """Return the figures of a record, with six significant digits."""
    figures = record.figures if hasattr(record, "figures") else {}
    return {name: f"{value:.6g}" for name, value in figures.items()}


def _finding(finding: Finding, summary: RunSummary, header: RunHeader) -> FindingView:
    first = {record.case: record for record in reversed(finding.records)}
    return _shown(
        finding.example,
        finding.title,
        summary,
        header,
        extent=phrases.extent(finding),
        common=str(finding.contrast or ""),
        others=tuple(first[case] for case in finding.cases if case != finding.example.case),
        shape=finding.case.shape if finding.case else "",
        description=finding.case.description if finding.case else "",
    )


def _shown(
    record: Record,
    title: str,
    summary: RunSummary,
    header: RunHeader,
    *,
    extent: str = "",
    common: str = "",
    others: tuple[Record, ...] = (),
    shape: str = "",
    description: str = "",
) -> FindingView:
    places: tuple[str, ...] = ()
    trail = ""
    if isinstance(record, Errored):
        trail = record.traceback or record.message
        places = (place,) if (place := raised_at(record.traceback)) else ()
    elif isinstance(record, Ended):
        trail, places = record.output + record.native_stack, tuple(died_at(record.output))
    meaning = (record.meaning or "") if isinstance(record, Failed) else ""
    return FindingView(
        record=record,
        title=title or f"{record.case}, {record.check}",
        extent=extent,
        common=common,
        others=others,
        shape=shape,
        description=description,
        what=phrases.what_happened(record),
        rounds=phrases.rounds_short(summary, record),
        meaning="" if meaning.startswith(title) and title else meaning,
        evidence=meaning.removeprefix(f"{title}: ") if meaning.startswith(title) and title else "",
        details=record.details if isinstance(record, Failed) else (),
        places=places,
        figures=figures_of(record),
        trail=trail,
        repro=repro_command(record, header),
    )
