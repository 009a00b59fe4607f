"""Renders the blocks of a document for a terminal: wrapped lines, aligned columns, optional colours."""

import textwrap
from collections.abc import Iterable, Sequence
from itertools import takewhile

from attncheck.reports.analysis.phrases import cut, printable
from attncheck.reports.document.blocks import (
    BREAK,
    Block,
    Code,
    Folded,
    Heading,
    Item,
    Items,
    Paragraph,
    Span,
    Table,
    Text,
    spans,
)
from attncheck.reports.terminal.columns import Style

NAME_WIDTH = 27
"""Columns for the first cell of a row that may be cut."""
LAST_WIDTH = 24
"""Minimum columns for the last cell of such a row."""

_COLOURS = {"red": "31", "green": "32", "yellow": "33"}


def render(blocks: Iterable[Block], style: Style) -> str:
    """Return the blocks as text without a final newline."""
    return style.printable("\n\n".join(text for block in blocks if (text := _block(block, style))))


def line(text: Text, style: Style) -> str:
    """Return a line up to a break, unwrapped and coloured if colours are enabled."""
    return "".join(_span(span, style) for span in takewhile(lambda span: span is not BREAK, spans(text)))


def items(members: Sequence[Item], style: Style, indent: str = "", *, is_cut: bool = False) -> str:
    """Return a list, one item a line, those below an item two columns further right."""
    lines = []
    for member in members:
        text = line(member.text, style)
        if is_cut:
            lines.append(indent + cut(text, style.width - len(indent)))
        else:
            lines.append(indent + text if member.is_whole else style.wrap(text, indent))
        lines += [items(member.children, style, f"{indent}  ")] if member.children else []
    return "\n".join(lines)


def _block(block: Block, style: Style) -> str:
    match block:
        case Heading(text=text) | Paragraph(text=text):
            return style.wrap(line(text, style))
        case Items(members, title, is_cut) if title:
            return "\n".join([style.wrap(line(title, style)), items(members, style, "  ", is_cut=is_cut)])
        case Items(members, _, is_cut):
            return items(members, style, is_cut=is_cut)
        case Table():
            return _table(block, style)
        case Code(text):
            return textwrap.indent(printable(text).rstrip(), "  ")
        case Folded():
            return ""


def _span(span: Span, style: Style) -> str:
    text = printable(span.text).replace("\n", " ").replace("\t", " ")
    text = text.upper() if span.is_loud else text
    return style.paint(text, _COLOURS[span.colour]) if span.colour else text


def _table(block: Table, style: Style) -> str:
    if not block.rows:
        return "nothing was recorded"
    rows = [list(block.headings), *([line(cell, style) for cell in row] for row in block.rows)]
    rows = _cut(rows, style.width) if block.is_cut else rows
    if block.is_turned:
        return style.turned_table(rows)
    heading, lines = style.table_rows(rows, is_named=block.is_named)
    return "\n".join([heading, *lines] if heading else lines)


def _cut(rows: Sequence[Sequence[str]], width: int) -> list[list[str]]:
    """Return the rows with the first and the last cell cut, the last only if enough columns remain for it."""
    short = [[cut(row[0], NAME_WIDTH), *row[1:]] for row in rows]
    taken = sum(max(len(row[column]) for row in short) + 2 for column in range(len(short[0]) - 1))
    room = width - taken
    return short if room < LAST_WIDTH else [[*row[:-1], cut(row[-1], room)] for row in short]
