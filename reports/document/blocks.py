"""The blocks of a document: frozen values that a text format renders.

Texts are raw: the renderer escapes them, so that a backend's text cannot become markup or drive a terminal. Width,
folding and colours belong to the renderer as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

SectionName = Literal[
    "verdict",
    "table",
    "failures",
    "graph-levels",
    "bits",
    "support",
    "timings",
    "functions",
    "expected",
    "unexamined",
    "conventions",
    "circumstances",
]
"""The sections of a run, by the names that ``attncheck report --section`` takes."""

Colour = Literal["", "red", "green", "yellow"]


class Sign(NamedTuple):
    """A verdict as one character, its tone (a colour of the HTML report's style sheet), and its meaning."""

    sign: str
    tone: Literal["good", "bad", "warn", "calm", "none"]
    meaning: str


@dataclass(frozen=True)
class Span:
    """A part of a line. ``is_bold``: bold in Markdown. ``colour``, ``is_loud``: coloured, upper case in a terminal.

    ``is_code``: code in Markdown, plain in a terminal. ``sign``: HTML shows it before the text. ``count``: in a wide
    table, HTML shows it instead of the text. Markdown and a terminal show the text alone.
    """

    text: str
    is_bold: bool = False
    colour: Colour = ""
    is_loud: bool = False
    is_code: bool = False
    sign: Sign | None = None
    count: str = ""


BREAK = Span("\n")
"""A line break within a cell of a Markdown table; a terminal leaves out what follows it."""

Text = str | Span | tuple[str | Span, ...]
"""One line: plain text, or spans that follow each other without a space between them."""


@dataclass(frozen=True)
class Heading:
    """A heading of a level, 1 for the title."""

    level: int
    text: Text


@dataclass(frozen=True)
class Paragraph:
    """One paragraph."""

    text: Text


@dataclass(frozen=True)
class Item:
    """A line of a list, with lines below it. ``is_whole``: it is not wrapped, so that it can be copied."""

    text: Text
    children: "tuple[Item, ...]" = ()
    is_whole: bool = False


@dataclass(frozen=True)
class Items:
    """A list, with an optional title. ``is_cut``: a terminal cuts each line to its width."""

    items: tuple[Item, ...]
    title: Text = ""
    is_cut: bool = False


@dataclass(frozen=True)
class Table:
    """Rows below headings; a line break in a heading holds in a terminal alone.

    What a terminal does if the table is too wide: with ``is_turned``, it transposes the table; with ``is_cut``, it cuts
    the first and the last column; otherwise, each row becomes a list of its cells, which has the headings if
    ``is_named``.
    """

    headings: tuple[str, ...]
    rows: tuple[tuple[Text, ...], ...]
    is_turned: bool = False
    is_cut: bool = False
    is_named: bool = True


@dataclass(frozen=True)
class Code:
    """Lines that stay as they are. ``language``: ``sh`` or ``text``."""

    text: str
    language: str = "text"


@dataclass(frozen=True)
class Folded:
    """Blocks below a title, which GitHub folds and a terminal leaves out."""

    title: str
    blocks: "tuple[Block, ...]"


Block = Heading | Paragraph | Items | Table | Code | Folded


def spans(text: Text) -> tuple[Span, ...]:
    """Return the spans of a line."""
    parts = text if isinstance(text, tuple) else (text,)
    return tuple(part if isinstance(part, Span) else Span(part) for part in parts)


def plain(text: Text) -> str:
    """Return the characters of a line alone."""
    return "".join(span.text for span in spans(text))


def listed(lines: Sequence[Text], title: Text = "") -> list[Block]:
    """Return the lines as a list, or [] if there are none."""
    return [Items(tuple(map(Item, lines)), title)] if lines else []


def table(headings: Sequence[str], rows: Sequence[Sequence[Text]], *, is_turned: bool = False) -> Table:
    """Return a table of sequences."""
    return Table(tuple(headings), tuple(map(tuple, rows)), is_turned=is_turned)
