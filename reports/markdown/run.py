"""A run or a comparison as Markdown, for a pull request, a wiki or a file, with everything useful from the run file.

Verdicts come first, then findings with an example each. Nothing is cut.
"""

from collections.abc import Sequence

from attncheck.reports.comparison.compare import RunComparison
from attncheck.reports.document import run as document
from attncheck.reports.document.blocks import Block, Heading, Paragraph, SectionName, Span
from attncheck.reports.document.comparison import closing, compared
from attncheck.reports.document.failures import errors
from attncheck.reports.document.run_values import RunValues
from attncheck.reports.markdown import text
from attncheck.reports.run_file.store import Run

ORDER: tuple[SectionName, ...] = (
    "failures",
    "table",
    "support",
    "graph-levels",
    "bits",
    "timings",
    "functions",
    "expected",
    "unexamined",
    "circumstances",
)
"""The sections behind the verdicts; the first table has the conventions."""


def render_run(run: Run) -> str:
    """Return the whole report of one run file, ending in a newline."""
    values = RunValues.of(run)
    blocks: list[Block] = [
        Heading(1, "attncheck report"),
        *bold(values.closing()),
        *bold(values.warning),
        *document.blocks(values, ("verdict",), whole=True),
        *errors(values, whole=True),
        *document.blocks(values, ORDER, whole=True),
    ]
    return text.render(blocks) + "\n"


def render_sections(run: Run, names: Sequence[SectionName]) -> str:
    """Return the named sections of a run file, ending in a newline."""
    return text.render(document.chosen(RunValues.of(run), names)) + "\n"


def bold(line: str) -> list[Block]:
    """Return a line as a bold paragraph, or [] if it is empty."""
    return [Paragraph(Span(line, is_bold=True))] if line else []


def render_comparison(comparison: RunComparison) -> str:
    """Return the whole comparison, its verdict first, ending in a newline."""
    title = Heading(1, "attncheck comparison")
    return text.render([title, closing(comparison), *compared(comparison, whole=True)]) + "\n"
