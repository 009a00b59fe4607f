"""Verdicts and findings of a run for a terminal: a line for each backend, then its findings with one example each."""

import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from attncheck.reports.analysis import phrases
from attncheck.reports.analysis.findings import Finding
from attncheck.reports.analysis.repro import repro_command, sanitizer_command
from attncheck.reports.analysis.summary import RunSummary
from attncheck.reports.analysis.verdicts import BackendVerdict
from attncheck.reports.run_file.causes import died_at, last_words, native_frames, raised_at
from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.records import UTILITIES, Ended, Errored, Failed, Record
from attncheck.reports.terminal.columns import WIDTH, Style, wrap

SHOWN_FINDINGS = 6
"""Maximum findings of one backend shown in full; each of the others takes one line."""
SHOWN_FUNCTIONS = 3
"""Maximum failing functions of a provider shown in full; its table has all of them."""
PRINTED_WIDTH = 280
"""Maximum characters of a line that a process printed."""

_COLORS = {"failed": "31", "passed": "32", "not examined": "33"}


def render_verdicts(verdicts: Sequence[BackendVerdict], style: Style, absent: Sequence[str] = ()) -> str:
    """Return a line for each backend, with its false claims below; backends without a verdict share a line.

    ``absent``: backends that cannot run on the machine and have no other part in the report.
    """
    lines = []
    for each in verdicts:
        if each.verdict == "not examined":
            continue
        name, word = phrases.one_line(each.backend), style.paint(each.verdict.upper(), _COLORS[each.verdict])
        lines.append(style.wrap(f"{name}: {word}: {phrases.verdict_counts(each)}"))
        if each.false_claims:
            lines.append(style.wrap(f"false claims: {phrases.claims(each)}", "  "))
        if each.could_declare:
            lines.append(style.wrap(f"could be declared: {', '.join(each.could_declare)}", "  "))
    silent = [each.backend for each in verdicts if each.verdict == "not examined" and each.backend not in absent]
    for names, why in ((silent, ""), (absent, " (unavailable; see `attncheck doctor`)")):
        if names:
            lines.append(style.wrap(f"not examined: {', '.join(map(phrases.one_line, names))}{why}"))
    return "\n".join(lines)


def render_findings(
    findings: Sequence[Finding], summary: RunSummary, header: RunHeader, style: Style, run_file: Path | None = None
) -> list[str]:
    """Return a paragraph for each finding.

    Expected findings, and those beyond :data:`SHOWN_FINDINGS` of a backend, take one line.
    """
    total = Counter(finding.backend for finding in findings if not finding.is_expected)
    place: Counter[str] = Counter()
    full, short, expected = [], [], []
    for finding in findings:
        place[finding.backend] += 1
        if finding.is_expected:
            expected.append(_expected_line(finding, style))
        elif place[finding.backend] > SHOWN_FINDINGS:
            number = f"{place[finding.backend]} of {total[finding.backend]}"
            short.append(style.wrap(f"finding {number}, {_heading(finding)}: {phrases.extent(finding)}", "  "))
        else:
            number = f"{place[finding.backend]} of {total[finding.backend]}"
            full.append(_paragraph(finding, number, summary, header, style))
    if short:
        reader = f"attncheck report --format markdown {run_file or 'RUN'}"
        full.append("\n".join(["further findings", *short, f"  in full: {reader}"]))
    return [*full, "\n".join(expected)] if expected else full


def _heading(finding: Finding) -> str:
    return f"{phrases.one_line(finding.backend)}: {phrases.one_line(finding.title)}"


def _paragraph(finding: Finding, number: str, summary: RunSummary, header: RunHeader, style: Style) -> str:
    first = finding.example
    lines = [
        style.wrap(f"{style.paint(f'finding {number}', '31')}, {_heading(finding)}"),
        style.wrap(f"{phrases.extent(finding)}; exit status {finding.exit_status}", "  "),
    ]
    if finding.contrast is not None:
        lines.append(style.wrap(f"in common: {finding.contrast}", "  "))
    rounds = phrases.rounds_short(summary, first)
    lines.append(style.wrap(f"example: {phrases.example(finding)}{f', {rounds}' if rounds else ''}", "  "))
    if finding.case is not None:
        lines.append(style.wrap(finding.case.shape, "    "))
    return "\n".join([*lines, textwrap.indent(story(first, header, width=style.width - 4), "    ")])


def _expected_line(finding: Finding, style: Style) -> str:
    text = f"expected: {phrases.one_line(finding.backend)}: {phrases.extent(finding)}: "
    return phrases.cut(text + phrases.one_line(finding.title), style.width)


def short_functions(summary: RunSummary, header: RunHeader, style: Style) -> list[str]:
    """Return a paragraph for each failing function of a provider, up to :data:`SHOWN_FUNCTIONS` a provider."""
    shown: Counter[str] = Counter()
    paragraphs = []
    for record in summary.short:
        if record.check != UTILITIES:
            continue
        shown[record.backend] += 1
        if shown[record.backend] <= SHOWN_FUNCTIONS:
            who = f"{phrases.one_line(record.backend)}  {phrases.one_line(record.case_id)}"
            text = textwrap.indent(story(record, header, width=style.width - 2), "  ")
            paragraphs.append(f"{style.paint(record.outcome, '31')}  {who}\n{text}")
    more = [f"{name}: {count - SHOWN_FUNCTIONS}" for name, count in shown.items() if count > SHOWN_FUNCTIONS]
    if more:
        paragraphs.append(style.wrap(f"not shown here: {'; '.join(more)} (the table has them all)"))
    return paragraphs


def story(record: Record, header: RunHeader | None = None, *, width: int = WIDTH - 2) -> str:
    """Return what happened to a record that did not pass, its likely cause, and the command that repeats it."""
    lines = [phrases.what_happened(record)]
    if isinstance(record, Failed):
        lines += [phrases.printable(detail) for detail in record.details]
        lines += [f"likely cause: {phrases.printable(record.meaning)}"] if record.meaning else []
    if isinstance(record, Errored) and (place := raised_at(record.traceback)):
        lines.append(phrases.printable(place))
    if isinstance(record, Ended):
        lines += [phrases.printable(place) for place in died_at(record.output)]
        lines += [f"in {phrases.one_line(frame)}" for frame in native_frames(record.native_stack)]
    if isinstance(record, Ended | Failed | Errored):
        words = [phrases.cut(phrases.one_line(line), PRINTED_WIDTH) for line in last_words(record.output)]
        lines += ["printed last:", *(f"  {word}" for word in words)] if words else []
    command = phrases.printable(repro_command(record, header))
    sanitizer = phrases.printable(sanitizer_command(record, header))
    # Paths stay unbroken, so that they can be copied.
    folded = (line if line.startswith("File ") else wrap(line, width=width) for line in lines)
    return "\n".join([*folded, f"repeat: {command}", *([f"or: {sanitizer}"] if sanitizer else [])])
