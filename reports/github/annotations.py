"""Workflow commands, printed to the log of a GitHub runner, which shows them as annotations.

They are escaped as in the runner's own library, so that no text can end its command or begin another.
"""

from collections.abc import Sequence
from typing import Literal

from attncheck.reports.analysis.phrases import one_line, printable

AnnotationKind = Literal["error", "warning"]

MAX_ANNOTATIONS = 10
"""Maximum errors, and maximum warnings, that GitHub shows for a step."""


def annotation(kind: AnnotationKind, title: str, message: str, *, file: str = "", line: int | None = None) -> str:
    """Return ``::kind file=...,line=...,title=...::message``, without its newline."""
    named = {"file": one_line(file), "line": str(line or ""), "title": one_line(title)}
    properties = ",".join(f"{key}={_property(value)}" for key, value in named.items() if value)
    return f"::{kind} {properties}::{_data(printable(message))}"


def as_shown(commands: Sequence[str], kind: AnnotationKind) -> Sequence[str]:
    """Return the commands that GitHub shows; if there are more, the last one states how many."""
    if len(commands) <= MAX_ANNOTATIONS:
        return commands
    more = len(commands) - MAX_ANNOTATIONS + 1
    return [*commands[: MAX_ANNOTATIONS - 1], annotation(kind, f"and {more} more", "the step's summary lists them")]


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
