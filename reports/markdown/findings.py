"""Verdicts, findings and functions of providers, as Markdown."""

from collections.abc import Sequence

from attncheck.reports.analysis import phrases
from attncheck.reports.analysis.findings import Finding
from attncheck.reports.analysis.repro import repro_command, sanitizer_command
from attncheck.reports.analysis.summary import RunSummary
from attncheck.reports.analysis.verdicts import BackendVerdict
from attncheck.reports.markdown import markup
from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.records import UTILITIES, Ended, Errored, Failed, Record, XFailed

SHOWN_CASES = 12
"""Maximum cases of a finding that are named; the run file has all of them."""


def verdicts(found: Sequence[BackendVerdict]) -> str:
    """Return a bullet for each backend: its verdict, its false claims, and what it could declare."""
    lines = []
    for each in found:
        if each.verdict == "not examined":
            continue
        lines.append(f"- **{markup.escaped(each.backend)}: {each.verdict}**: {phrases.verdict_counts(each)}")
        if each.false_claims:
            lines.append(f"  - **false claims: {markup.escaped(phrases.claims(each))}**")
        if each.could_declare:
            lines.append(f"  - could be declared: {markup.escaped(', '.join(each.could_declare))}")
    silent = [each.backend for each in found if each.verdict == "not examined"]
    return "\n".join([*lines, *([f"- not examined: {markup.escaped(', '.join(silent))}"] if silent else [])])


def failing(findings: Sequence[Finding], summary: RunSummary, header: RunHeader) -> list[str]:
    """Return a heading and a section for each finding that fails the run, or [] if there is none."""
    told = [_section(finding, summary, header) for finding in findings if not finding.is_expected]
    told += [_function(record, header) for record in summary.short if record.check == UTILITIES]
    return ["## Findings", *told] if told else []


def expected(findings: Sequence[Finding]) -> list[str]:
    """Return a heading and a section for each expected finding: one record a check, and the number of others."""
    told = []
    for finding in findings:
        if not finding.is_expected:
            continue
        told.append(f"### {markup.escaped(finding.backend)}: {markup.escaped(finding.title)}")
        rows = []
        for check in finding.checks:
            first, *further = [r for r in finding.records if r.check == check and isinstance(r, XFailed)]
            more = f" and {phrases.plural(len(further), 'more case')}" if further else ""
            rows.append(
                [
                    markup.escaped(check),
                    markup.escaped(first.case) + more,
                    first.underlying,
                    markup.escaped(first.summary),
                ]
            )
        told.append(markup.table(["check", "case", "outcome", "what happened"], rows))
    return ["## Expected findings", *told] if told else []


def _section(finding: Finding, summary: RunSummary, header: RunHeader) -> str:
    record = finding.example
    rounds = f" ({told})" if (told := phrases.rounds_short(summary, record)) else ""
    facts = [f"- {markup.escaped(phrases.extent(finding))}; exit status {finding.exit_status}"]
    facts += [f"- in common: {markup.escaped(str(finding.contrast))}"] if finding.contrast else []
    if len(finding.cases) > 1:
        more = f" and {len(finding.cases) - SHOWN_CASES} more" if len(finding.cases) > SHOWN_CASES else ""
        facts.append(f"- cases: {markup.escaped(', '.join(finding.cases[:SHOWN_CASES]))}{more}")
    facts.append(f"- example: {markup.escaped(phrases.example(finding))}{rounds}")
    facts += [f"  - {markup.escaped(finding.case.shape)}"] if finding.case else []
    facts.append(f"  - **{record.outcome}**: {markup.escaped(phrases.what_happened(record))}")
    heading = f"### {markup.escaped(finding.backend)}: {markup.escaped(phrases.cut(finding.title, 200))}"
    return "\n\n".join([heading, "\n".join(facts), *_details(record, header)])


def _function(record: Record, header: RunHeader) -> str:
    heading = f"### {markup.escaped(record.backend)}: {markup.escaped(record.case_id)}"
    what = f"- **{record.outcome}**: {markup.escaped(phrases.what_happened(record))}"
    return "\n\n".join([heading, what, *_details(record, header)])


def _details(record: Record, header: RunHeader) -> list[str]:
    lines = []
    if isinstance(record, Failed):
        lines += [_detail(detail) for detail in record.details]
        lines += [f"Likely cause: {markup.escaped(record.meaning)}"] if record.meaning else []
        figures = [[markup.escaped(name), f"{value:.6g}"] for name, value in record.figures.items()]
        lines += [markup.table(["figure", "value"], figures)] if figures else []
    if isinstance(record, Errored):
        lines.append(markup.fenced(record.traceback or record.message))
    if isinstance(record, Ended | Failed | Errored) and record.output:
        lines.append(f"The end of what it printed:\n\n{markup.fenced(record.output)}")
    if isinstance(record, Ended) and record.native_stack:
        lines.append(f"Its stacks, by py-spy:\n\n{markup.fenced(record.native_stack)}")
    commands = "\n".join(filter(None, [repro_command(record, header), sanitizer_command(record, header)]))
    lines.append(f"Repeat:\n\n{markup.fenced(commands, 'sh')}")
    return lines


def _detail(text: str) -> str:
    return markup.fenced(text) if "\n" in text.strip() else f"- {markup.escaped(text)}"
