"""The terminal of ``attncheck run --watch``: lines while a round is going on, and keys while it waits."""

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
"""Clears a terminal, with what has left its top."""

_CLEAR_LINE = "\r\033[K"

_FIRST_LINES = 6
"""Records of what fell short before that have a line of their own."""

Keys = Callable[[float], str]
"""Waits up to so many seconds, and returns the key pressed; empty if none was."""


class RoundLines:
    """Prints the first verdicts of a round as they come, and on a terminal how many cases were examined.

    ``first``: the cases that fell short before. ``at_verdict`` is called after the first record; ``first_s``: the
    seconds until then.
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
        """Take note of how many cases there are."""
        self._total = len(header.cases) * len(header.backends)

    def see(self, record: Record) -> None:
        """Print the record if it is the first one, or one of a case that fell short before."""
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
    """Yield what waits for a key, which the terminal then gives without a newline; elsewhere it only waits."""
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
