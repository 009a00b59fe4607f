"""Which line of a backend did something, found by walking up the stack or a traceback."""

import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_tb
from types import CodeType, FrameType

_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
"""Folders of code that a backend uses, but did not write; a backend may be installed there all the same."""

_OURS = ("attncheck.harness.", "attncheck.backends.candidates.vllm.")
"""Code that only drives a backend: the harness, and the bridge to vLLM's."""


@dataclass(frozen=True)
class SourceLine:
    """A line of Python code; the words are made only when somebody asks for them."""

    code: CodeType
    number: int

    def __str__(self) -> str:
        path = Path(self.code.co_filename)
        roots = (*map(Path, reversed(_LIBRARIES)), Path.cwd())
        shown = next((path.relative_to(root) for root in roots if path.is_relative_to(root)), path)
        return f"{shown}:{self.number} in {self.code.co_name}"


@dataclass(frozen=True)
class CallSite:
    """Where something was done: the backend's line (None: no frame of a backend was found).

    ``interpreted``: Triton's interpreter did it, which stands for a kernel's work.
    """

    line: SourceLine | None
    interpreted: bool

    def __str__(self) -> str:
        return "" if self.line is None else str(self.line)


def find_call_site(boundary: CodeType | None = None) -> CallSite:
    """Where the caller of this is, on the way from here up to the frame that runs ``boundary``."""
    return _innermost_own(_stack(sys._getframe(1), boundary))


def call_site_of(error: BaseException) -> CallSite:
    """Where ``error`` was raised, on the way to where it was caught."""
    return _innermost_own(reversed(list(walk_tb(error.__traceback__))))


def _stack(frame: FrameType | None, boundary: CodeType | None) -> Iterator[tuple[FrameType, int]]:
    while frame is not None and frame.f_code is not boundary:
        yield frame, frame.f_lineno
        frame = frame.f_back


def _innermost_own(frames: Iterable[tuple[FrameType, int]]) -> CallSite:
    """The first of ``frames``, innermost first and each with its line, that is the backend's own.

    torch and what only drives a backend never are. Code of other installed libraries is only where no frame further
    out is: a backend that calls a library is to blame for what the library does, and a backend may be an installed
    library.
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
