"""Long reasons made short: places of one violation joined, the rest cut where it does not hurt.

Text in, text out.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

_FIGURE = re.compile(r"\d+(?:\.\d+)?(?:e[+-]\d+)?")
_WHOLE_FIGURE = re.compile(rf"(?<!\w){_FIGURE.pattern}")
"""That ends no name, such as a dtype's."""

_VIOLATION = re.compile(r"(?P<what>.+) at (?P<file>.+?):(?P<line>\d+) in (?P<function>.+)")


@dataclass(frozen=True)
class _ReasonPart:
    """One part between semicolons; with ``lines``, a violation in one function of one file."""

    what: str
    file: str = ""
    function: str = ""
    lines: tuple[str, ...] = ()

    def holds(self, other: "_ReasonPart") -> bool:
        """Whether ``other`` differs in nothing but its line; the first of a list follows what introduces the list."""
        is_alike = self.what == other.what or self.what.endswith(f": {other.what}")
        return is_alike and bool(other.lines) and (self.file, self.function) == (other.file, other.function)

    def __str__(self) -> str:
        return f"{self.what} at {self.file}:{', '.join(self.lines)} in {self.function}" if self.lines else self.what


def joined(reason: str) -> str:
    """Violations that differ in their lines alone as one: ``.item() at mine.py:9, 10 in forward``."""
    parts: list[_ReasonPart] = []
    for text in reason.split("; "):
        match = _VIOLATION.fullmatch(text)
        part = (
            _ReasonPart(match["what"], match["file"], match["function"], (match["line"],))
            if match
            else _ReasonPart(text)
        )
        same = next((index for index, earlier in enumerate(parts) if earlier.holds(part)), None)
        if same is None:
            parts.append(part)
        else:
            lines = dict.fromkeys((*parts[same].lines, *part.lines))
            parts[same] = replace(parts[same], lines=tuple(lines))
    return "; ".join(map(str, parts))


def shortened(reason: str, width: int) -> str:
    """``reason``, or its beginning and ``...``, at most ``width`` characters.

    It ends after the last semicolon where that keeps half of the width, else after a whole word; within one only where
    there is a single one.
    """
    if len(reason) <= width:
        return reason
    room = width - len(" ...")
    clause, word = reason.rfind(";", 0, room) + 1, reason.rfind(" ", 0, room + 1)
    if clause * 2 >= width:
        return f"{reason[:clause]} ..."
    return f"{reason[:word]} ..." if word > 0 else f"{reason[: width - 3]}..."


def listed(reasons: Sequence[str]) -> str:
    """Reasons that differ in their first figure alone as one: ``block_size 1, 8, 16: supported are ...``."""
    figures = dict.fromkeys(match[0] for reason in reasons if (match := _WHOLE_FIGURE.search(reason)))
    return _WHOLE_FIGURE.sub(", ".join(sorted(figures, key=float)), reasons[0], count=1)


def without_first_figure(reason: str) -> str:
    """What reasons have in common that :func:`listed` makes one."""
    return _WHOLE_FIGURE.sub("#", reason, count=1)


def without_figures(reason: str) -> str:
    """What reasons that differ in figures alone have in common."""
    return _FIGURE.sub("#", reason)
