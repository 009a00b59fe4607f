"""Values for templates, unescaped: a finding with its example, and a failing function of a provider as one."""

from dataclasses import dataclass

from attncheck.reports.analysis import phrases
from attncheck.reports.analysis.findings import Finding, Short, stated_cause
from attncheck.reports.analysis.repro import repro_command
from attncheck.reports.document.run_values import RunValues
from attncheck.reports.run_file.causes import died_at, raised_at
from attncheck.reports.run_file.records import UTILITIES, Ended, Errored, Failed, Record

SHOWN = 40
"""Maximum findings in the section of findings; the records have all."""


@dataclass(frozen=True)
class FindingView:
    """A finding as shown on the page.

    ``others``: a record of each further case. ``rounds``: the number of rounds that failed, if there were several.
    ``cause``: the likely cause, unless it is the title. ``evidence``: what proves a cause that is the title.
    ``places``: lines of the author's code. ``trail``: a traceback, or the last output of a process that died.
    """

    finding: Finding
    others: tuple[Record, ...]
    rounds: str
    cause: str
    evidence: str
    details: tuple[str, ...]
    places: tuple[str, ...]
    trail: str
    repro: str


def finding_views(run: RunValues) -> tuple[FindingView, ...]:
    """Return a view of each finding that makes the run fail, then of each failing function of a provider."""
    found = [finding for finding in run.found.findings if not finding.is_expected]
    found += [
        Finding(record.backend, f"{record.case}, {record.check}", (record,), record)
        for record in run.summary.short
        if record.check == UTILITIES and isinstance(record, Short)
    ]
    return tuple(_view(finding, run) for finding in found)


def _view(finding: Finding, run: RunValues) -> FindingView:
    record = finding.example
    first = {other.case: other for other in reversed(finding.records)}
    places: tuple[str, ...] = ()
    trail = ""
    if isinstance(record, Errored):
        trail = record.traceback or record.message
        places = (place,) if (place := raised_at(record.traceback)) else ()
    elif isinstance(record, Ended):
        trail, places = record.output + record.native_stack, died_at(record.output)
    cause = stated_cause(record, finding) if isinstance(record, Failed) else ""
    text = cause.removeprefix("likely cause: ")
    is_title = text.startswith(finding.title)
    return FindingView(
        finding=finding,
        others=tuple(first[case] for case in finding.cases if case != record.case),
        rounds=phrases.rounds_short(run.summary, record),
        cause="" if is_title else cause,
        evidence=text.removeprefix(finding.title).lstrip(":; ") if is_title else "",
        details=record.details if isinstance(record, Failed) else (),
        places=places,
        trail=trail,
        repro=repro_command(record, run.header),
    )
