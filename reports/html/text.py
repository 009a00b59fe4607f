"""Renders the blocks of a document as HTML, with every text escaped."""

import html
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

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
    Sign,
    Span,
    Table,
    Text,
    plain,
    spans,
)

_TONES = {"red": "bad", "green": "good", "yellow": "warn"}
_NUMBER = re.compile(r"[\d.,/]+( ?%| \*)?|[-+]?\d[\d.,]*|inf|")
"""A cell of a column that is aligned to the right; ``-`` is left out before."""

WIDE = 5
"""Columns above which a table shows counts of signs instead of their texts."""
LONG = 30
"""Rows above which a table scrolls by itself."""


@dataclass(frozen=True)
class Card:
    """The blocks of one finding, in a frame."""

    blocks: Sequence[Block]


@dataclass(frozen=True)
class Drawing:
    """A chart as ``<svg>`` markup, with its caption."""

    caption: str
    svg: str


PageBlock = Block | Card | Drawing
"""A block of a document, or one that only the HTML report has."""


def render(blocks: Iterable[PageBlock]) -> str:
    """Return the blocks as markup."""
    return "\n".join(map(_block, blocks))


def escaped(text: str) -> str:
    """Return ``text`` for an element or a quoted attribute, without control characters."""
    return html.escape(printable(text))


def inline(text: Text) -> str:
    """Return a line as markup; what follows a break is small."""
    parts = spans(text)
    first = list(takewhile(lambda span: span is not BREAK, parts))
    line = "".join(_following(first))
    below = "".join(map(_span, parts[len(first) + 1 :]))
    return f"{line}<small>{below}</small>" if below else line


def _block(block: PageBlock) -> str:
    match block:
        case Heading(level, text):
            return f"<h{level}>{inline(text)}</h{level}>"
        case Paragraph(text):
            return f"<p>{inline(text)}</p>"
        case Items(items, title) if title:
            return f"<p><b>{inline(title)}</b></p>\n{_items(items)}"
        case Items(items):
            return _items(items)
        case Table():
            return _table(block)
        case Code(text, "sh"):
            return "\n".join(map(_command, text.splitlines()))
        case Code(text):
            return f'<pre tabindex="0">{escaped(text.rstrip())}</pre>'
        case Folded(title, blocks):
            return f"<details><summary>{escaped(title)}</summary>\n{render(blocks)}\n</details>"
        case Card(blocks):
            return f'<article class="card">\n{render(blocks)}\n</article>'
        case Drawing(caption, svg):
            return f"<figure><figcaption>{escaped(caption)}</figcaption>\n{svg}\n</figure>"


def _items(items: Sequence[Item]) -> str:
    lines = [f"<li>{_item(item)}</li>" for item in items]
    return "<ul>\n" + "\n".join(lines) + "\n</ul>"


def _item(item: Item) -> str:
    line = f"<code>{escaped(plain(item.text))}</code>" if item.is_whole else inline(item.text)
    return line + (f"\n{_items(item.children)}" if item.children else "")


def _command(line: str) -> str:
    return f'<div class="command"><code>{escaped(line)}</code><button type="button" data-copy>Copy</button></div>'


def _following(parts: Sequence[Span]) -> Iterator[str]:
    """Yield each span; a colon behind a chip is left out, since the chip's frame ends it."""
    is_chip = False
    for span in parts:
        yield _span(Span(span.text.removeprefix(":")) if is_chip else span)
        is_chip = _is_chip(span)


def _is_chip(span: Span) -> bool:
    return span.is_bold and span.colour != ""


def _span(span: Span) -> str:
    text = escaped(span.text)
    if span.sign:
        return _signed(span, span.sign)
    if span.is_code:
        return f"<code>{text}</code>"
    if _is_chip(span):
        return f'<b class="chip t-{_TONES[span.colour]}">{text}</b>'
    if span.colour:
        return f'<span class="ink-{_TONES[span.colour]}">{text}</span>'
    return f"<b>{text}</b>" if span.is_bold and text else text


def _signed(span: Span, sign: Sign) -> str:
    text, meaning = escaped(span.text), escaped(sign.meaning)
    mark = f'<b class="sign t-{sign.tone}" title="{text or meaning}">{escaped(sign.sign)}</b>'
    count = f'<span class="count" aria-hidden="true">{escaped(span.count)}</span>' if span.count else ""
    return f'{mark} {count}<span class="words">{text}</span>'


def _table(table: Table) -> str:
    if not table.rows:
        return "<p>Nothing was recorded.</p>"
    columns = ["number" if all(map(_is_number, column)) else "" for column in zip(*table.rows, strict=True)]
    signs = _signs(table)
    heads = [
        _element("th" if name else "td", escaped(name), kind)
        for name, kind in zip(table.headings, columns, strict=True)
    ]
    rows = ["".join(map(_cell, row, columns, range(len(row)))) for row in table.rows]
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    grid = f"\n<thead><tr>{''.join(heads)}</tr></thead>\n<tbody>\n{body}\n</tbody>\n"
    frame = "scroll tall" if len(rows) > LONG else "scroll"
    return (
        f'{_legend(signs)}<div class="{frame}" tabindex="0">{_element("table", grid, "matrix" if signs else "")}</div>'
    )


def _cell(cell: Text, kind: str, place: int) -> str:
    """Return a cell in the colour of its only span. ``kind``: the class of its column; the first column has names."""
    if place == 0:
        return f'<th scope="row">{inline(cell)}</th>'
    parts = spans(cell)
    if len(parts) == 1 and parts[0].colour:
        return _element("td", escaped(parts[0].text), f"{kind} t-{_TONES[parts[0].colour]}".strip())
    return _element("td", inline(cell), kind)


def _element(tag: str, content: str, style: str) -> str:
    """Return an element of a class, if ``style`` is one."""
    return f'<{tag} class="{style}">{content}</{tag}>' if style else f"<{tag}>{content}</{tag}>"


def _is_number(cell: Text) -> bool:
    return _NUMBER.fullmatch(plain(cell).removeprefix("-")) is not None


def _signs(table: Table) -> list[Sign]:
    """Return the distinct signs of a wide table of counts, in its order; [] for other tables."""
    cells = [span for row in table.rows for cell in row for span in spans(cell)]
    is_wide = len(table.headings) > WIDE and any(span.count for span in cells)
    return list(dict.fromkeys(span.sign for span in cells if span.sign)) if is_wide else []


def _legend(signs: Sequence[Sign]) -> str:
    """Return a line that explains the signs, or "" without any."""
    if not signs:
        return ""
    marks = [f'<b class="sign t-{each.tone}">{escaped(each.sign)}</b> {escaped(each.meaning)}' for each in signs]
    return '<p class="legend">' + "".join(f"<span>{each}</span>" for each in [*marks, "-: no case"]) + "</p>\n"
