"""Runs for GitHub Actions: a step summary in Markdown, and annotations as workflow commands on stdout.

The summary has tables, speeds, and the findings in a fold. It stays below the size above which GitHub shows nothing. A
backend's text cannot become a command: annotations are escaped as in the runner's own library, and no line of a report
looks like one (:func:`attncheck.reports.analysis.phrases.printable`).
"""

import html
from collections.abc import Iterator, Sequence

from attncheck.reports.analysis import phrases
from attncheck.reports.analysis.places import place_to_show
from attncheck.reports.analysis.repro import repro_command
from attncheck.reports.analysis.summary import RunSummary, summarise
from attncheck.reports.analysis.verdicts import run_findings
from attncheck.reports.github.annotations import annotation, as_shown
from attncheck.reports.markdown import markup
from attncheck.reports.markdown.findings import failing, verdicts
from attncheck.reports.markdown.run import check_table
from attncheck.reports.markdown.speeds import listed, means
from attncheck.reports.run_file.records import EXAMINED, UTILITIES, Record
from attncheck.reports.run_file.store import Run
from attncheck.reports.speeds.notes import doubts, fastest_note, speed_notes
from attncheck.reports.speeds.speed import speeds
from attncheck.reports.speeds.summary import summary_tables

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
    counted = summarise(run.records, checks=run.header.checks)
    answer, found = run_findings(run.records, run.header), speeds(run.records)
    tables = summary_tables(found)
    head = [
        f"## attncheck: {markup.escaped(phrases.closing(counted, run.errors, complete=run.complete))}",
        markup.escaped(phrases.title(run.header)),
        f"**{markup.escaped(warning)}**" if (warning := phrases.incomplete(run)) else "",
        "\n".join(f"- error: {markup.escaped(error)}" for error in run.errors),
        verdicts(answer.verdicts),
        check_table(counted) if counted.backends else "",
        *(part for table in tables for part in (f"### Speeds in {markup.escaped(table.suite)}", *means(table))),
        _folded("About these figures", [listed([*fastest_note(tables), *speed_notes(found)])]) if found else "",
    ]
    text = "\n\n".join(part for part in head if part)
    cut = "\n\nThe rest was cut, since a summary holds 1 MiB: the run file has it all.\n"
    if len(text.encode()) + len(cut.encode()) > room:
        return first_bytes(text, room - len(cut.encode())) + cut
    _, *told = failing(answer.findings, counted, run.header) or [""]
    kept, size = [], len(text.encode()) + len(cut.encode()) + 200  # 200 for the fold itself
    for story in told:
        if size + len(story.encode()) + 2 <= room:
            kept.append(story)
            size += len(story.encode()) + 2
    if kept:
        text += "\n\n" + _folded(f"Findings ({len(told)})", kept)
    return text + (cut if len(kept) < len(told) else "\n")


def _folded(title: str, parts: Sequence[str]) -> str:
    # The empty line makes GitHub render the parts as Markdown.
    return "\n\n".join([f"<details><summary>{html.escape(title)}</summary>", *parts, "</details>"])


def first_bytes(text: str, size: int) -> str:
    """Return at most ``size`` bytes of ``text``, up to the end of a line."""
    kept = text.encode()[: max(size, 0)].decode(errors="ignore")
    return kept.rpartition("\n")[0]


def annotations(runs: Sequence[Run], root: str = "") -> str:
    """Return workflow commands, one a line, errors first; "" if there are none.

    ``root``: the folder of the checkout; paths of files below it are relative to it.
    """
    errors = [command for run in runs for command in _errors(run, root)]
    warnings = [command for run in runs for command in _warnings(run)]
    return "".join(f"{command}\n" for command in (*as_shown(errors, "error"), *as_shown(warnings, "warning")))


def _errors(run: Run, root: str) -> Iterator[str]:
    for error in run.errors:
        yield annotation("error", "attncheck", error)
    if (warning := phrases.incomplete(run)) is not None:
        yield annotation("error", "attncheck", warning)
    counted = summarise(run.records, checks=run.header.checks)
    for finding in run_findings(run.records, run.header).findings:
        if not finding.is_expected:
            record = finding.example
            lines = [phrases.extent(finding), *([f"in common: {finding.contrast}"] if finding.contrast else [])]
            lines += [f"{record.case}: {_what(record, counted)}", f"repeat: {repro_command(record, run.header)}"]
            file, line = place_to_show(record, run.header, root)
            title = f"{finding.backend}: {finding.title}"
            yield annotation("error", title, "\n".join(lines), file=file, line=line)
    for function in counted.short:
        if function.check == UTILITIES:
            message = f"{_what(function, counted)}\nrepeat: {repro_command(function, run.header)}"
            yield annotation("error", f"{function.backend}: {function.case_id}: {function.outcome}", message)


def _what(record: Record, counted: RunSummary) -> str:
    rounds = phrases.rounds_short(counted, record)
    return phrases.what_happened(record) + (f" ({rounds})" if rounds else "")


def _warnings(run: Run) -> Iterator[str]:
    """Yield warnings on backends without any examination, and on times with throttling or unsettled medians."""
    for backend in run.header.backends:
        outcomes = {record.outcome for record in run.records if record.backend == backend.name}
        if outcomes and not outcomes & EXAMINED:
            yield annotation("warning", f"{backend.name}: nothing was examined", _why(backend.name, run.records))
    for doubt in doubts(speeds(run.records)):
        yield annotation("warning", "attncheck: times", doubt)


def _why(backend: str, records: Sequence[Record]) -> str:
    reasons = [
        reason
        for record in records
        if record.backend == backend and record.outcome in ("unsupported", "unavailable")
        for reason in getattr(record, "reasons", ())
    ]
    return "; ".join(list(dict.fromkeys(reasons))[:3])
