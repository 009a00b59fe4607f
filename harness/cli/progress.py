"""What is seen while a run is going: a bar on a terminal, a line now and then elsewhere.

Goes to stderr, so that stdout holds the report alone.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from attncheck.reports.analysis.phrases import what_happened
from attncheck.reports.run_file.records import EXAMINED, FALLEN_SHORT, Record
from attncheck.reports.run_file.timings import TIMING

LINE_EVERY_S = 10.0
TOLD_AT_ONCE = 10
"""So many records that fell short are told as they come; the report tells the rest."""


class RunProgress(Protocol):
    """Is shown every record as it arrives."""

    def see(self, record: Record) -> None:
        """One more record."""


class NoProgress:
    """Shows nothing: for a run inside a debugger."""

    def see(self, record: Record) -> None:
        """One more record."""


class Tally:
    """How many of the run's questions have begun, and how many records fell short.

    A question is a case put to a process of a backend: for its times in every round, for all other checks once. What is
    not examined in the first round is not asked in the others.
    """

    def __init__(self, cases: int, rounds: int) -> None:
        self.cases = cases
        self.done = self.short = 0
        self._rounds = rounds
        self._begun: set[tuple[str, str, str, int, bool]] = set()

    def see(self, record: Record) -> None:
        """One more record."""
        is_timed = record.check == TIMING
        question = (record.backend, record.suite, record.case_id, record.round, is_timed)
        if question not in self._begun:
            self._begun.add(question)
            is_spared = is_timed and record.round == 0 and record.outcome not in EXAMINED
            self.done += self._rounds if is_spared else 1
        self.short += record.outcome in FALLEN_SHORT


class ProgressLines:
    """Plain lines: the first records that fall short, and every ten seconds how far the run is."""

    def __init__(self, cases: int, rounds: int) -> None:
        self._tally = Tally(cases, rounds)
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


class ProgressBar:
    """A progress bar over the cases of every backend, drawn anew with each record at least."""

    def __init__(self, progress: Progress, cases: int, rounds: int) -> None:
        self._progress = progress
        self._tally = Tally(cases, rounds)
        self._task = progress.add_task("", total=cases)

    def see(self, record: Record) -> None:
        """One more record."""
        self._tally.see(record)
        short = f", {self._tally.short} fell short" if self._tally.short else ""
        name = f"{record.backend}  {record.case}{short}"
        self._progress.update(self._task, completed=max(self._tally.done - 1, 0), description=name)
        if not self._progress.live.auto_refresh:
            self._progress.refresh()


@contextmanager
def progress_for(cases: int, *, rounds: int = 1, silent: bool = False, is_timed: bool = False) -> Iterator[RunProgress]:
    """Yield the progress that suits where stderr goes; ``cases``: how many the run has, counted anew for each backend.

    ``rounds``: of the check ``timing``, whose cases are counted in every one. ``is_timed``: it is made, and nothing is
    drawn while a time is taken.
    """
    if silent:
        yield NoProgress()
    elif not sys.stderr.isatty():
        yield ProgressLines(cases, rounds)
    else:
        columns = (
            BarColumn(20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
        )
        screen = Console(stderr=True)
        with Progress(*columns, console=screen, transient=True, auto_refresh=not is_timed) as progress:
            yield ProgressBar(progress, cases, rounds)
