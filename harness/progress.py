"""What is seen while a run is going: a bar on a terminal, a line now and then elsewhere.

Goes to stderr, so that stdout holds the report alone. Must not know: how records come about.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from attncheck.reports.phrases import what_happened
from attncheck.reports.records import FALLEN_SHORT, Record

LINE_EVERY_S = 10.0
TOLD_AT_ONCE = 10
"""So many records that fell short are told as they come; the report tells the rest."""


class Watcher(Protocol):
    """Is shown every record as it arrives."""

    def see(self, record: Record) -> None:
        """One more record."""


class Silent:
    """Shows nothing: for a run inside a debugger."""

    def see(self, record: Record) -> None:
        """One more record."""


class _Tally:
    """How many of the run's pairs of a case and a backend have begun, and how many records fell short."""

    def __init__(self, cases: int) -> None:
        self.cases = cases
        self.short = 0
        self._begun: set[tuple[str, str, str]] = set()

    def see(self, record: Record) -> None:
        self._begun.add((record.backend, record.suite, record.case_id))
        self.short += record.outcome in FALLEN_SHORT

    @property
    def done(self) -> int:
        return len(self._begun)


class Lines:
    """Plain lines: the first records that fall short, and every ten seconds how far the run is."""

    def __init__(self, cases: int) -> None:
        self._tally = _Tally(cases)
        self._said = time.monotonic()

    def see(self, record: Record) -> None:
        """One more record."""
        self._tally.see(record)
        if record.outcome in FALLEN_SHORT and self._tally.short <= TOLD_AT_ONCE:
            typer.echo(
                f"{record.outcome}  {record.backend}  {record.case}  {record.check}: {what_happened(record)}", err=True
            )
        if time.monotonic() - self._said >= LINE_EVERY_S:
            self._said = time.monotonic()
            typer.echo(f"case {self._tally.done} of {self._tally.cases}, {self._tally.short} fell short", err=True)


class Bar:
    """A progress bar over the cases of every backend."""

    def __init__(self, progress: Progress, cases: int) -> None:
        self._progress = progress
        self._tally = _Tally(cases)
        self._task = progress.add_task("", total=cases)

    def see(self, record: Record) -> None:
        """One more record."""
        self._tally.see(record)
        short = f", {self._tally.short} fell short" if self._tally.short else ""
        name = f"{record.backend}  {record.case}{short}"
        self._progress.update(self._task, completed=max(self._tally.done - 1, 0), description=name)


@contextmanager
def watching(cases: int, *, silent: bool = False) -> Iterator[Watcher]:
    """The watcher that suits where stderr goes; ``cases`` is how many the run has, counted anew for each backend."""
    if silent:
        yield Silent()
    elif not sys.stderr.isatty():
        yield Lines(cases)
    else:
        columns = (
            BarColumn(20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            yield Bar(progress, cases)
