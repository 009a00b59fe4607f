"""Renders the blocks of a document as Markdown, with everything escaped that is not markup of the document."""

import html
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from attncheck.reports.analysis.phrases import printable
from attncheck.reports.document.blocks import (
    BREAK,
    Block,
    Code,
    Folded,
    Heading,
    Item,
    Items,
    Paragraph,
    Table,
    Text,
    plain,
    spans,
)
from attncheck.reports.markdown import markup


def render(blocks: Iterable[Block], *, folds: bool = False) -> str:
    """Return the blocks as Markdown without a final newline. ``folds``: fold by HTML, as GitHub does."""
    return printable("\n\n".join(text for block in blocks if (text := _block(block, folds=folds))))


def _block(block: Block, *, folds: bool) -> str:
    match block:
        case Heading(level, text):
            return f"{'#' * level} {_inline(text)}"
        case Paragraph(text):
            return _inline(text)
        case Items(items, title, _):
            return "\n\n".join([f"**{_inline(title)}**", _items(items)]) if title else _items(items)
        case Table():
            rows = [[_inline(cell, markup.code_cell) for cell in row] for row in block.rows]
            return markup.table([*map(markup.escaped, block.headings)], rows)
        case Code(text, language):
            return markup.fenced(text, language)
        case Folded(title, blocks) if folds:
            # The empty lines make GitHub render the blocks as Markdown.
            return f"<details><summary>{html.escape(title)}</summary>\n\n{render(blocks, folds=folds)}\n\n</details>"
        case Folded(title, blocks):
            return render((Heading(3, title), *blocks))


def _items(items: Sequence[Item], indent: str = "") -> str:
    lines = []
    for item in items:
        lines.append(f"{indent}- {markup.code(plain(item.text)) if item.is_whole else _inline(item.text)}")
        lines += [_items(item.children, f"{indent}  ")] if item.children else []
    return "\n".join(lines)


def _inline(text: Text, code: Callable[[str], str] = markup.code) -> str:
    """Return a line; bold spans that follow each other are one."""
    parts = []
    for is_bold, members in groupby(spans(text), lambda span: span.is_bold):
        part = "".join(
            "<br>" if span is BREAK else code(span.text) if span.is_code else markup.escaped_part(span.text)
            for span in members
        )
        parts.append(f"**{part}**" if is_bold and part else part)
    return "".join(parts).strip()
