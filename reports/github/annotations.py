"""Commands printed to the log of a GitHub runner, which it shows as annotations.

Escaped as the runner's own library does, so that no text can end its command or begin another.
"""

from collections.abc import Sequence
from typing import Literal

from attncheck.reports.analysis.phrases import one_line, printable

AnnotationKind = Literal["error", "warning"]

MAX_ANNOTATIONS = 10
"""Errors, and warnings, of which GitHub shows no more for a step."""


def annotation(kind: AnnotationKind, title: str, message: str, *, file: str = "", line: int | None = None) -> str:
    """Return ``::kind file=...,line=...,title=...::message``, without its newline."""
    named = {"file": one_line(file), "line": str(line or ""), "title": one_line(title)}
    told = ",".join(f"{key}={_property(value)}" for key, value in named.items() if value)
    return f"::{kind} {told}::{_data(printable(message))}"


def as_shown(commands: Sequence[str], kind: AnnotationKind) -> Sequence[str]:
    """As many as GitHub shows; the last says how many more there are."""
    if len(commands) <= MAX_ANNOTATIONS:
        return commands
    more = len(commands) - MAX_ANNOTATIONS + 1
    return [*commands[: MAX_ANNOTATIONS - 1], annotation(kind, f"and {more} more", "the step's summary tells them")]


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
