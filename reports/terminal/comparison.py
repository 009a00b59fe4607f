"""A comparison for a terminal: its sections in brief, ending with the verdict.

Colours are optional, and never used for a difference that could be chance.
"""

from attncheck.reports.comparison.compare import RunComparison
from attncheck.reports.document.comparison import closing, compared
from attncheck.reports.terminal import text
from attncheck.reports.terminal.columns import WIDTH, Style


def render_comparison(comparison: RunComparison, *, color: bool = False, width: int = WIDTH) -> str:
    """Return the whole comparison, ending with its verdict, without a final newline."""
    return text.render([*compared(comparison, whole=False), closing(comparison)], Style(width, color))
