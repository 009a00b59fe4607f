"""Markdown markup: escaped text, code, and pipe tables."""

import re
from collections.abc import Iterable, Sequence

from attncheck.reports.analysis import phrases


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a pipe table of cells that are escaped already. tabulate's own pipe format pads, and does not escape."""
    if not (body := list(rows)):
        return "Nothing was recorded."
    lines = [headers, ["---"] * len(headers), *body]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


_MARKUP = re.compile(r"[\\`*\[\]|]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_SPACE = re.compile(r"\s+")


def escaped(text: str) -> str:
    """Return ``text`` on one line, with Markdown and HTML markup escaped; the underscore in ``a_b`` needs none."""
    return escaped_part(text).strip()


def escaped_part(text: str) -> str:
    """Return a part of a line, escaped in the same way; a space at either end stays."""
    flat = _SPACE.sub(" ", phrases.printable(text))
    return _MARKUP.sub(lambda match: "\\" + match[0], flat).replace("&", "&amp;").replace("<", "&lt;")


def code(text: str) -> str:
    """Return ``text`` on one line as a code span."""
    text = phrases.one_line(text)
    fence = "`" * (_longest_ticks(text) + 1)
    return f"{fence} {text} {fence}" if "`" in text else f"`{text}`"


def code_cell(text: str) -> str:
    """Return a code span for a table cell, with its pipes escaped."""
    return code(text.replace("|", "\\|"))


def fenced(text: str, language: str = "text") -> str:
    """Return ``text`` as a fenced code block."""
    fence = "`" * max(3, _longest_ticks(text) + 1)
    return f"{fence}{language}\n{phrases.printable(text).rstrip()}\n{fence}"


def _longest_ticks(text: str) -> int:
    return max((len(run) for run in re.findall(r"`+", text)), default=0)
