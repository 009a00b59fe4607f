"""What Markdown makes of characters: text that stays text, code, pipe tables."""

import re
from collections.abc import Iterable, Sequence

from attncheck.reports.analysis import phrases


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A pipe table; cells must be escaped already. tabulate's own pipe format pads, and does not escape."""
    if not (body := list(rows)):
        return "Nothing was recorded."
    lines = [headers, ["---"] * len(headers), *body]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


_MARKUP = re.compile(r"[\\`*\[\]|]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")


def escaped(text: str) -> str:
    """``text`` on one line, with everything escaped that Markdown or HTML would read; ``a_b`` means nothing to it."""
    flat = " ".join(phrases.printable(text).split())
    return _MARKUP.sub(lambda match: "\\" + match[0], flat).replace("&", "&amp;").replace("<", "&lt;")


def code(text: str) -> str:
    """``text`` on one line, between backticks."""
    text = phrases.one_line(text)
    fence = "`" * (_longest_ticks(text) + 1)
    return f"{fence} {text} {fence}" if "`" in text else f"`{text}`"


def code_cell(text: str) -> str:
    """The same for a cell of a table, which a pipe would end."""
    return code(text.replace("|", "\\|"))


def fenced(text: str, language: str = "text") -> str:
    """``text`` as it stands, as a block of its own."""
    fence = "`" * max(3, _longest_ticks(text) + 1)
    return f"{fence}{language}\n{phrases.printable(text).rstrip()}\n{fence}"


def _longest_ticks(text: str) -> int:
    return max((len(run) for run in re.findall(r"`+", text)), default=0)
