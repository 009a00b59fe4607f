"""Shorten lists of names, and reasons: merge those that differ only in lines of code or in a figure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

_FIGURE = re.compile(r"\d+(?:\.\d+)?(?:e[+-]\d+)?")
_WHOLE_FIGURE = re.compile(rf"(?<!\w){_FIGURE.pattern}")
"""A figure that is not the end of a name, such as of a dtype."""

_VIOLATION = re.compile(r"(?P<what>.+) at (?P<file>.+?):(?P<line>\d+) in (?P<function>.+)")


@dataclass(frozen=True)
class _ReasonPart:
    """One part of a reason between semicolons; with ``lines``, a violation in one function of one file."""

    what: str
    file: str = ""
    function: str = ""
    lines: tuple[str, ...] = ()

    def holds(self, other: "_ReasonPart") -> bool:
        """Return whether ``other`` differs only in its line; ``what`` may begin with the introduction of a list."""
        is_alike = self.what == other.what or self.what.endswith(f": {other.what}")
        return is_alike and bool(other.lines) and (self.file, self.function) == (other.file, other.function)

    def __str__(self) -> str:
        return f"{self.what} at {self.file}:{', '.join(self.lines)} in {self.function}" if self.lines else self.what


def named(names: Sequence[str], shown: int | None, separator: str = ", ") -> str:
    """Return the first ``shown`` names (None: all), and how many more there are: ``a, b and 3 more``."""
    rest = 0 if shown is None else len(names) - shown
    text = separator.join(names[:shown])
    return text if rest <= 0 else f"{text}{separator.rstrip(', ')} and {rest} more"


def joined(reason: str) -> str:
    """Merge violations that differ only in their lines: ``.item() at mine.py:9, 10 in forward``."""
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


def listed(reasons: Sequence[str]) -> str:
    """Merge reasons that differ only in their first figure: ``block_size 1, 8, 16: supported are ...``."""
    figures = dict.fromkeys(match[0] for reason in reasons if (match := _WHOLE_FIGURE.search(reason)))
    return _WHOLE_FIGURE.sub(", ".join(sorted(figures, key=float)), reasons[0], count=1)


def without_first_figure(reason: str) -> str:
    """Replace the first figure by ``#``; reasons with equal results are merged by :func:`listed`."""
    return _WHOLE_FIGURE.sub("#", reason, count=1)


def without_figures(reason: str) -> str:
    """Replace every figure by ``#``."""
    return _FIGURE.sub("#", reason)
