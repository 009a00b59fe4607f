"""A run or a comparison as text for a terminal: verdicts, table, failures, and a line on what was not examined.

Functions return text and print nothing. Colours are optional, and never used for a difference that could be chance.
Lines keep to the width, except commands to be copied.
"""

from collections.abc import Sequence

from attncheck.reports.analysis import phrases
from attncheck.reports.analysis.findings import Finding
from attncheck.reports.comparison.compare import RunComparison
from attncheck.reports.document import run as document
from attncheck.reports.document.blocks import Block, Paragraph, SectionName
from attncheck.reports.document.comparison import closing, compared
from attncheck.reports.document.failures import errors as errors_of
from attncheck.reports.document.failures import story_items
from attncheck.reports.document.run_values import RunValues
from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.records import Record
from attncheck.reports.run_file.store import Run
from attncheck.reports.terminal import text
from attncheck.reports.terminal.columns import WIDTH, Style

ORDER: tuple[SectionName, ...] = (
    "verdict",
    "table",
    "failures",
    "expected",
    "graph-levels",
    "bits",
    "support",
    "timings",
    "functions",
    "unexamined",
    "conventions",
    "circumstances",
)
QUIET: tuple[SectionName, ...] = ("verdict", "failures", "expected")


def opening(header: RunHeader, *, width: int = WIDTH) -> str:
    """Return the first lines of a run: versions, machine, suites, and notes of the header."""
    style = Style(width)
    lines = (phrases.title(header), *(f"note: {note}" for note in header.notes))
    return style.printable("\n".join(map(style.wrap, lines)))


def render_run(run: Run, *, color: bool = False, width: int = WIDTH, verbose: bool = False) -> str:
    """Return a run file as text: first lines, warning if it was cut off, and the sections of the run."""
    values, style = RunValues.of(run), Style(width, color)
    warning = [Paragraph(f"warning: {values.warning}")] if values.warning else []
    parts = [opening(run.header, width=width), text.render([*warning, *_blocks(values, verbose=verbose)], style)]
    return "\n\n".join(parts)


def render_sections(run: Run, names: Sequence[SectionName], *, color: bool = False, width: int = WIDTH) -> str:
    """Return the named sections of a run file, whole."""
    return text.render(document.chosen(RunValues.of(run), names), Style(width, color))


def render(
    header: RunHeader,
    records: Sequence[Record],
    *,
    errors: Sequence[str] = (),
    complete: bool = True,
    color: bool = False,
    width: int = WIDTH,
    quiet: bool = False,
    verbose: bool = False,
    reader: str = "",
    listing: str = "--verbose",
) -> str:
    """Return the sections of a run without its first lines, ending with the counts of all outcomes.

    ``quiet``: only verdicts, findings and counts. ``verbose``: every section whole. ``reader``, ``listing``: as in
    :class:`RunValues`.
    """
    values = RunValues(header, records, errors, complete, reader=reader, listing=listing)
    return text.render(_blocks(values, quiet=quiet, verbose=verbose), Style(width, color))


def story(record: Record, header: RunHeader | None = None, finding: Finding | None = None) -> str:
    """Return what happened to a record that did not pass, its likely cause, and the command that repeats it."""
    return phrases.printable(text.items(story_items(record, header, finding), Style(WIDTH - 2)))


def _blocks(run: RunValues, *, quiet: bool = False, verbose: bool = False) -> list[Block]:
    sections = document.blocks(run, QUIET if quiet else ORDER, whole=verbose)
    return [*sections, *errors_of(run, whole=False), Paragraph(run.closing())]


def render_comparison(comparison: RunComparison, *, color: bool = False, width: int = WIDTH) -> str:
    """Return the whole comparison, ending with its verdict, without a final newline."""
    return text.render([*compared(comparison, whole=False), closing(comparison)], Style(width, color))
