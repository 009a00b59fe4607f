"""A comparison as Markdown, for a step summary, a pull request or a file: every change, with nothing cut."""

from attncheck.reports.comparison.compare import RunComparison
from attncheck.reports.document.blocks import Heading
from attncheck.reports.document.comparison import closing, compared
from attncheck.reports.markdown import text


def render_comparison(comparison: RunComparison) -> str:
    """Return the whole comparison, its verdict first, ending in a newline."""
    title = Heading(1, "attncheck comparison")
    return text.render([title, closing(comparison), *compared(comparison, whole=True)]) + "\n"
