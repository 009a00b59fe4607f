"""Reports for GitHub Actions: a step summary in Markdown, and annotations as workflow commands on stdout.

The summary of runs has tables, speeds, and the findings in a fold; that of a comparison is the Markdown report. Both
stay below the size above which GitHub shows nothing. A backend's text cannot become a command: annotations are escaped
as in the runner's own library, and no line of a report looks like one
(:func:`attncheck.reports.analysis.phrases.printable`).

Errors are what fails the run or the comparison. Warnings are what weakens it: backends without an examination,
doubtful times, and differences that fail nothing.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

from attncheck.reports.analysis import phrases
from attncheck.reports.analysis.phrases import one_line, plural, printable
from attncheck.reports.analysis.places import place_to_show
from attncheck.reports.analysis.repro import repeat_line
from attncheck.reports.analysis.summary import RunSummary
from attncheck.reports.comparison.compare import RunComparison, SpeedChange
from attncheck.reports.comparison.summary import (
    change_text,
    grouped_outcomes,
    interval_text,
    missing,
    times_text,
    unclear,
    with_verdict,
)
from attncheck.reports.document import run as document
from attncheck.reports.document.blocks import Block, Folded, Heading, Paragraph
from attncheck.reports.document.failures import errors, failure_blocks
from attncheck.reports.document.run import checks
from attncheck.reports.document.run_values import RunValues
from attncheck.reports.markdown.run import bold, render_comparison
from attncheck.reports.markdown.text import render
from attncheck.reports.run_file.records import UTILITIES, Record
from attncheck.reports.run_file.store import Run
from attncheck.reports.speeds.notes import doubts

AnnotationKind = Literal["error", "warning"]

MAX_ANNOTATIONS = 10
"""Maximum errors, and maximum warnings, that GitHub shows for a step."""


def annotation(kind: AnnotationKind, title: str, message: str, *, file: str = "", line: int | None = None) -> str:
    """Return ``::kind file=...,line=...,title=...::message``, without its newline."""
    named = {"file": one_line(file), "line": str(line or ""), "title": one_line(title)}
    properties = ",".join(f"{key}={_property(value)}" for key, value in named.items() if value)
    return f"::{kind} {properties}::{_data(printable(message))}"


def as_shown(commands: Sequence[str], kind: AnnotationKind) -> Sequence[str]:
    """Return the commands that GitHub shows; if there are more, the last one states how many."""
    if len(commands) <= MAX_ANNOTATIONS:
        return commands
    more = len(commands) - MAX_ANNOTATIONS + 1
    return [*commands[: MAX_ANNOTATIONS - 1], annotation(kind, f"and {more} more", "the step's summary lists them")]


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


MAX_SUMMARY_BYTES = 1_000_000
"""Below the 1 MiB limit of a step's summary, since other commands of the step may write to it, too."""


def summary(runs: Sequence[Run]) -> str:
    """Return the step summary of ``runs``, at most :data:`MAX_SUMMARY_BYTES` of UTF-8, ending in a newline."""
    left = MAX_SUMMARY_BYTES
    texts = []
    for index, run in enumerate(runs):
        texts.append(_summary_of(run, left // (len(runs) - index)))
        left -= len(texts[-1].encode())
    return phrases.printable("".join(texts))


def _summary_of(run: Run, room: int) -> str:
    values = RunValues.of(run)
    head = render(_head(values), folds=True)
    cut = "\n\nThe rest was cut, since a summary holds 1 MiB: the run file has it all.\n"
    if len(head.encode()) + len(cut.encode()) > room:
        return first_bytes(head, room - len(cut.encode())) + cut
    shown = failure_blocks(values)
    kept: list[Block] = []
    size, left_out = len(head.encode()) + len(cut.encode()) + 200, 0  # 200 for the fold itself
    for blocks in shown:
        length = len(render(blocks).encode()) + 2
        left_out += size + length > room
        if size + length <= room:
            kept += blocks
            size += length
    if kept:
        head += "\n\n" + render([Folded(f"Findings ({len(shown)})", tuple(kept))], folds=True)
    return head + (cut if left_out else "\n")


def _head(run: RunValues) -> list[Block]:
    return [
        Heading(2, f"attncheck: {run.closing()}"),
        Paragraph(phrases.title(run.header)),
        *bold(run.warning),
        *errors(run, whole=False),
        *document.blocks(run, ("verdict",), whole=True),
        *([checks(run, run.summary.backends)] if run.summary.backends else []),
        *document.blocks(run, ("timings",), whole=False),
    ]


def first_bytes(text: str, size: int) -> str:
    """Return at most ``size`` bytes of ``text``, up to the end of a line."""
    kept = text.encode()[: max(size, 0)].decode(errors="ignore")
    return kept.rpartition("\n")[0]


def annotations(runs: Sequence[Run], root: str = "") -> str:
    """Return workflow commands, one a line, errors first; "" if there are none.

    ``root``: the folder of the checkout; paths of files below it are relative to it.
    """
    values = [RunValues.of(run) for run in runs]
    errors = [command for run in values for command in _errors(run, root)]
    warnings = [command for run in values for command in _warnings(run)]
    return "".join(f"{command}\n" for command in (*as_shown(errors, "error"), *as_shown(warnings, "warning")))


def _errors(run: RunValues, root: str) -> Iterator[str]:
    for error in (*run.errors, *([run.warning] if run.warning else [])):
        yield annotation("error", "attncheck", error)
    for finding in run.found.findings:
        if not finding.is_expected:
            record = finding.example
            lines = [phrases.extent(finding), *filter(None, [phrases.contrast(finding)])]
            lines += [f"{record.case}: {_what(record, run.summary)}", *filter(None, [repeat_line(record, run.header)])]
            file, line = place_to_show(record, run.header, root)
            title = f"{finding.backend}: {finding.title}"
            yield annotation("error", title, "\n".join(lines), file=file, line=line)
    for function in run.summary.short:
        if function.check == UTILITIES:
            message = f"{_what(function, run.summary)}\n{repeat_line(function, run.header)}"
            yield annotation("error", f"{function.backend}: {function.case_id}: {function.outcome}", message)


def _what(record: Record, counted: RunSummary) -> str:
    rounds = phrases.rounds_short(counted, record)
    return phrases.what_happened(record) + (f" ({rounds})" if rounds else "")


def _warnings(run: RunValues) -> Iterator[str]:
    """Yield warnings on backends without any examination, and on times with throttling or unsettled medians."""
    for backend, reasons in run.silent.items():
        yield annotation("warning", f"{backend}: nothing was examined", reasons)
    for doubt in doubts(run.speeds):
        yield annotation("warning", "attncheck: times", doubt)


_CUT = "\n\nThe rest was cut: a summary holds 1 MiB.\n"


def comparison_summary(comparison: RunComparison) -> str:
    """Return the Markdown report, cut at the end of a line if it is too long; ends in a newline."""
    text = render_comparison(comparison)
    if len(text.encode()) <= MAX_SUMMARY_BYTES:
        return text
    return first_bytes(text, MAX_SUMMARY_BYTES - len(_CUT.encode())) + _CUT


def comparison_annotations(comparison: RunComparison) -> list[str]:
    """Return workflow commands, one a line, errors first; empty if nothing changed and every pair is decided."""
    return [*as_shown([*_worse(comparison)], "error"), *as_shown([*_weaknesses(comparison)], "warning")]


def _worse(comparison: RunComparison) -> Iterator[str]:
    for group in grouped_outcomes(comparison.outcomes):
        first, further = group.first, len(group.cases) - 1
        if first.kind == "worse":
            more = f" and {plural(further, 'more case')}" if further else ""
            title = f"{first.backend}: {first.case}{more}, {', '.join(group.checks)}: {group.step}"
            yield annotation("error", title, group.what or group.step)
    for change in with_verdict(comparison.speeds, "slower"):
        if change.is_regression:
            was, now = times_text(change)
            title = f"{change.backend}: {change.case}, {change.part}: {change_text(change.ratio)} time"
            yield annotation("error", title, f"{was} -> {now} (interval {interval_text(change)})")
    if not comparison.terms.allow_missing:
        yield from (annotation("error", "missing", text) for text in missing(comparison))


def _weaknesses(comparison: RunComparison) -> Iterator[str]:
    speeds = comparison.speeds
    for text in comparison.warnings:
        yield annotation("warning", "attncheck compare", text)
    if comparison.terms.allow_missing:
        yield from (annotation("warning", "missing, accepted by --allow-missing", text) for text in missing(comparison))
    slower = [change for change in with_verdict(speeds, "slower") if not change.is_regression]
    if slower:
        yield annotation("warning", f"{plural(len(slower), 'time')} slower that --fail-on lets pass", _worst(slower[0]))
    for members in unclear(speeds):
        title = f"{len(members)} of {plural(len(speeds), 'time')} too noisy to compare"
        yield annotation("warning", title, f"such as {_name(members[0])}: {members[0].reason}")


def _worst(change: SpeedChange) -> str:
    return f"{_name(change)}: {change_text(change.ratio)} (interval {interval_text(change)})"


def _name(change: SpeedChange) -> str:
    return f"{change.backend}, {change.case}, {change.part}"
