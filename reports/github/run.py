"""Runs for GitHub Actions: a step summary in Markdown, and annotations as workflow commands on stdout.

The summary has tables, speeds, and the findings in a fold. It stays below the size above which GitHub shows nothing. A
backend's text cannot become a command: annotations are escaped as in the runner's own library, and no line of a report
looks like one (:func:`attncheck.reports.analysis.phrases.printable`).
"""

from collections.abc import Iterator, Sequence

from attncheck.reports.analysis import phrases
from attncheck.reports.analysis.places import place_to_show
from attncheck.reports.analysis.repro import repro_command
from attncheck.reports.analysis.summary import RunSummary
from attncheck.reports.document import run as document
from attncheck.reports.document.blocks import Block, Folded, Heading, Paragraph
from attncheck.reports.document.failures import errors, failure_blocks
from attncheck.reports.document.run_values import RunValues
from attncheck.reports.document.tables import checks
from attncheck.reports.github.annotations import annotation, as_shown
from attncheck.reports.markdown import text
from attncheck.reports.markdown.run import bold
from attncheck.reports.run_file.records import UTILITIES, Record
from attncheck.reports.run_file.store import Run
from attncheck.reports.speeds.notes import doubts

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
    head = text.render(_head(values), folds=True)
    cut = "\n\nThe rest was cut, since a summary holds 1 MiB: the run file has it all.\n"
    if len(head.encode()) + len(cut.encode()) > room:
        return first_bytes(head, room - len(cut.encode())) + cut
    shown = failure_blocks(values)
    kept: list[Block] = []
    size, left_out = len(head.encode()) + len(cut.encode()) + 200, 0  # 200 for the fold itself
    for blocks in shown:
        length = len(text.render(blocks).encode()) + 2
        left_out += size + length > room
        if size + length <= room:
            kept += blocks
            size += length
    if kept:
        head += "\n\n" + text.render([Folded(f"Findings ({len(shown)})", tuple(kept))], folds=True)
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
            lines += [f"{record.case}: {_what(record, run.summary)}", f"repeat: {repro_command(record, run.header)}"]
            file, line = place_to_show(record, run.header, root)
            title = f"{finding.backend}: {finding.title}"
            yield annotation("error", title, "\n".join(lines), file=file, line=line)
    for function in run.summary.short:
        if function.check == UTILITIES:
            message = f"{_what(function, run.summary)}\nrepeat: {repro_command(function, run.header)}"
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
