"""Plain text of a given width: wrapped lines, aligned columns, and optional colours."""

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

WIDTH = 100

_COLOUR = re.compile(r"\033\[\d+m")
_PLAIN = "\033[0m"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Align columns, two spaces apart. The headings are the first row, since tabulate would pad separate ones."""
    from tabulate import tabulate

    return tabulate(rows, tablefmt="plain", disable_numparse=True)


def wrap(text: str, indent: str = "", *, width: int = WIDTH) -> str:
    """Wrap long lines; a word longer than a line, such as a path, is not broken."""
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


@dataclass(frozen=True)
class Style:
    """The layout of text: the columns of a line, and whether words are coloured by ANSI sequences.

    ``verbose``: a report leaves nothing out.
    """

    width: int = WIDTH
    color: bool = False
    verbose: bool = False

    def wrap(self, text: str, indent: str = "") -> str:
        """Wrap long lines to the width, not counting colour sequences."""
        return _coloured_as(text, wrap(_COLOUR.sub("", text), indent, width=self.width))

    def paint(self, text: str, code: str) -> str:
        """Return ``text`` in the colour of an ANSI code."""
        return f"\033[{code}m{text}{_PLAIN}" if self.color else text

    def printable(self, text: str) -> str:
        """Return a report without control characters of foreign text; colour sequences stay if colours are enabled."""
        from attncheck.reports.analysis import phrases

        parts = [phrases.printable(part) for part in _COLOUR.split(text)]
        colours = _COLOUR.findall(text) if self.color else []
        return "".join(part + colour for part, colour in zip_longest(parts, colours, fillvalue=""))

    def turned_table(self, rows: Sequence[Sequence[str]]) -> str:
        """Return the rows as aligned columns, or if these are too wide, transposed in as many tables as needed."""
        if max(map(visible_width, table(rows).splitlines())) <= self.width:
            return table(rows)
        names = [name.replace("\n", " ") for name in rows[0]]
        columns = [[row[0].replace("_", "_\n"), *row[1:]] for row in rows[1:]]
        tables, first = [], 0
        for last in range(1, len(columns) + 1):
            following = [names, *columns[first : last + 1]]
            is_full = max(map(visible_width, table(list(zip(*following, strict=True))).splitlines())) > self.width
            if is_full or last == len(columns):
                tables.append(table(list(zip(names, *columns[first:last], strict=True))))
                first = last
        return "\n\n".join(tables)

    def table_rows(self, rows: Sequence[Sequence[str]], *, is_named: bool = True) -> tuple[str, list[str]]:
        """Return the heading and the text of each row, as aligned columns.

        If these are too wide, the heading is "", and each row a wrapped list of its cells without empty ones.
        ``is_named``: each cell of a list follows the name of its column.
        """
        lines = table(rows).splitlines()
        if max(map(visible_width, lines)) <= self.width:
            height = max(name.count("\n") for name in rows[0]) + 1
            return "\n".join(lines[:height]), lines[height:]
        names = [name.replace("\n", " ") for name in rows[0]]
        lists = [
            ", ".join(
                f"{name} {cell}" if is_named else cell
                for name, cell in zip(names[1:], row[1:], strict=True)
                if cell not in ("-", "")
            )
            for row in rows[1:]
        ]
        return "", [self.wrap(f"{row[0]}: {cells}") for row, cells in zip(rows[1:], lists, strict=True)]


def _coloured_as(text: str, folded: str) -> str:
    """Return ``folded`` with the colours of ``text``; both have the same characters except for whitespace."""
    places = [index for index, character in enumerate(folded) if not character.isspace()]
    for match in reversed(list(_COLOUR.finditer(text))):
        before = len("".join(_COLOUR.sub("", text[: match.start()]).split()))
        at = places[before - 1] + 1 if match[0] == _PLAIN else places[before]
        folded = folded[:at] + match[0] + folded[at:]
    return folded


def visible_width(line: str) -> int:
    """Return the columns that a line takes, not counting colour sequences."""
    return len(_COLOUR.sub("", line))
