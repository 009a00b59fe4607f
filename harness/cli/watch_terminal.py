"""Terminal output and keys of ``attncheck run --watch``."""

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterator

import typer

from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.records import Record
from attncheck.reports.terminal.watch import render_record

CLEAR = "\033[H\033[2J\033[3J"
"""Escape sequence that clears a terminal and its scrollback."""

_CLEAR_LINE = "\r\033[K"

_FIRST_LINES = 6
"""Of this many first records of a round, those of previously failed cases are printed."""

Keys = Callable[[float], str]
"""Function that waits up to the given seconds, and returns the key pressed or an empty string."""


class RoundLines:
    """Prints the first verdicts of a round as they arrive, and on a terminal the number of examined cases.

    ``first``: the cases that failed before. ``at_verdict`` is called after the first record, ``first_s`` seconds after
    the save.
    """

    def __init__(
        self,
        began: float,
        since: str,
        first: tuple[str, ...],
        at_verdict: Callable[[], None],
        *,
        is_terminal: bool,
    ) -> None:
        self.since, self.first_s = since, 0.0
        self._is_terminal, self._total = is_terminal, 0
        self._cases: set[tuple[str, str]] = set()
        self.records: list[Record] = []
        self._began, self._first, self._at_verdict = began, first, at_verdict

    @property
    def elapsed(self) -> float:
        """Seconds since the save."""
        return time.monotonic() - self._began

    @property
    def _line_start(self) -> str:
        return _CLEAR_LINE if self._is_terminal else ""

    def begin(self, header: RunHeader) -> None:
        """Set the number of cases from the header."""
        self._total = len(header.cases) * len(header.backends)

    def see(self, record: Record) -> None:
        """Print the record if it is the first one, or among the first ones and of a case that failed before."""
        is_first = not self.records
        self.records.append(record)
        if is_first or (record.case in self._first and len(self.records) <= _FIRST_LINES):
            typer.echo(f"{self._line_start}{self.elapsed:.1f} s after the {self.since}: {render_record(record)}")
        if self._is_terminal:
            self._cases.add((record.backend, record.case))
            typer.echo(f"{self._line_start}{len(self._cases)} of {self._total} cases", nl=False)
        if is_first:
            self.first_s = self.elapsed
            self._at_verdict()


@contextlib.contextmanager
def terminal_keys() -> Iterator[Keys]:
    """Yield a function that waits for a key, without Enter; if stdin is no terminal, the function only waits."""
    if not sys.stdin.isatty():
        yield _no_key
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def read(seconds: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        return os.read(descriptor, 1).decode(errors="replace") if ready else ""

    try:
        tty.setcbreak(descriptor)
        yield read
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _no_key(seconds: float) -> str:
    time.sleep(seconds)
    return ""
