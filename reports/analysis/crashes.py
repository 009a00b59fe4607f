"""What a process that died left in what it printed: where it was, and its last words.

The stack is the one :mod:`faulthandler` writes, innermost call first; from the text alone. Must not know: records, how
a process is watched, where anything is installed here.
"""

import re
from collections.abc import Iterator

from attncheck.reports.analysis.tracebacks import is_foreign

SHOWN_FRAMES = 3
SHOWN_LINES = 4

_THREAD = re.compile(r"(?P<current>Current )?[Tt]hread 0x[0-9a-f]+.* \(most recent call first\):")
_FRAME = re.compile(r'File "(?P<path>[^"]+)", line (?:\d+|\?\?\?) in ')
_STACK_LINE = re.compile(
    r"<no Python frame>$|Extension modules: |Current thread's C stack trace|Binary file \"|\.\.\.$"
)


def died_at(output: str) -> tuple[str, ...]:
    """The innermost frames of the thread that died, at most three, of neither an installed library nor the harness.

    Without such a frame, the innermost ones of any file; empty without a stack. Where no thread is marked as the one
    that died (it ran no Python), the stacks of all are taken.
    """
    frames = list(_frames(output))
    own = [place for path, place in frames if not is_foreign(path)]
    return tuple((own or [place for _, place in frames])[:SHOWN_FRAMES])


def last_words(output: str) -> tuple[str, ...]:
    """The last lines printed that are no part of a stack, at most four, as they were printed."""
    lines = [line.strip() for line in output.splitlines()]
    words = [line for line in lines if line and not any(p.match(line) for p in (_THREAD, _FRAME, _STACK_LINE))]
    return tuple(words[-SHOWN_LINES:])


def _frames(output: str) -> Iterator[tuple[str, str]]:
    """Path and text of each frame of the last thread marked as current; without one, of all threads."""
    lines = [line.strip() for line in output.splitlines()]
    headings = {index: match for index, line in enumerate(lines) if (match := _THREAD.fullmatch(line))}
    current = [index for index, match in headings.items() if match["current"]]
    first = current[-1] if current else 0
    end = next((index for index in headings if current and index > first), len(lines))
    for line in lines[first:end]:
        if match := _FRAME.match(line):
            yield match["path"], line
