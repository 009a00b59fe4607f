"""Plain text that keeps to its width: folded lines, columns lined up."""

import textwrap
from collections.abc import Sequence

from tabulate import tabulate

WIDTH = 100


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns lined up, two spaces apart. The headings are the first row: tabulate would pad a row of its own."""
    return tabulate(rows, tablefmt="plain", disable_numparse=True)


def wrap(text: str, indent: str = "", *, width: int = WIDTH) -> str:
    """Fold long lines; a word that is longer than a line, such as a path, stays whole."""
    return "\n".join(
        textwrap.fill(
            line,
            width,
            initial_indent=indent,
            subsequent_indent=indent + "  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in text.splitlines()
    )
