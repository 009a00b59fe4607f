"""Find the line of a backend that did something, by walking the stack or a traceback."""

import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_tb
from types import CodeType, FrameType

_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
"""Folders of libraries that a backend uses. A backend itself may be installed there, too."""

_OURS = ("attncheck.harness.", "attncheck.backends.candidates.vllm.")
"""Modules that only drive a backend: the harness, and the bridge to vLLM's backends."""


@dataclass(frozen=True)
class SourceLine:
    """A line of Python code. The text is created only when it is needed."""

    code: CodeType
    number: int

    def __str__(self) -> str:
        path = Path(self.code.co_filename)
        roots = (*map(Path, reversed(_LIBRARIES)), Path.cwd())
        shown = next((path.relative_to(root) for root in roots if path.is_relative_to(root)), path)
        return f"{shown}:{self.number} in {self.code.co_name}"


@dataclass(frozen=True)
class CallSite:
    """Where something happened. ``line``: the backend's line, or None if no frame belongs to a backend.

    ``interpreted``: Triton's interpreter did it, which emulates a kernel.
    """

    line: SourceLine | None
    interpreted: bool

    def __str__(self) -> str:
        return "" if self.line is None else str(self.line)


def find_call_site(boundary: CodeType | None = None) -> CallSite:
    """Return the call site of the caller, searching up to the frame that runs ``boundary``."""
    return _innermost_own(_stack(sys._getframe(1), boundary))


def call_site_of(error: BaseException) -> CallSite:
    """Return the call site that raised ``error``."""
    return _innermost_own(reversed(list(walk_tb(error.__traceback__))))


def _stack(frame: FrameType | None, boundary: CodeType | None) -> Iterator[tuple[FrameType, int]]:
    while frame is not None and frame.f_code is not boundary:
        yield frame, frame.f_lineno
        frame = frame.f_back


def _innermost_own(frames: Iterable[tuple[FrameType, int]]) -> CallSite:
    """Return the innermost of ``frames`` that belongs to the backend. ``frames``: (frame, line), innermost first.

    Frames of torch and of code that drives a backend are skipped. A frame of another installed library counts only if
    no outer frame belongs to the backend: the backend is responsible for its library calls, but may itself be
    installed.
    """
    library: CallSite | None = None
    interpreted = False
    for frame, line in frames:
        module = str(frame.f_globals.get("__name__", ""))
        root = module.partition(".")[0]
        if root == "triton":
            interpreted = True
        elif root not in {"torch", "numpy"} and not f"{module}.".startswith(_OURS):
            place = CallSite(SourceLine(frame.f_code, line), interpreted)
            if not _is_library(frame.f_code.co_filename):
                return place
            library = library or place
    return library or CallSite(None, interpreted)


def _is_library(filename: str) -> bool:
    return filename.startswith("<frozen ") or any(filename.startswith(folder + os.sep) for folder in _LIBRARIES)
