"""What is seen while a run is going: a bar on a terminal, a line now and then elsewhere.

Goes to stderr, so that stdout holds the report alone.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from attncheck.harness.cli.output import say
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

    Keeps nothing of a question: its records come one after another.

    A question is a case put to a process of a backend: for its times in every round, for all other checks once. What is
    not examined in the first round is not asked in the others.
    """

    def __init__(self, cases: int, rounds: int) -> None:
        self.cases = cases
        self.done = self.short = 0
        self._began = time.monotonic()
        self._rounds = rounds
        self._latest: tuple[str, str, str, int, bool] | None = None

    def see(self, record: Record) -> None:
        """One more record."""
        is_timed = record.check == TIMING
        question = (record.backend, record.suite, record.case_id, record.round, is_timed)
        if question != self._latest:
            self._latest = question
            is_spared = is_timed and record.round == 0 and record.outcome not in EXAMINED
            self.done += self._rounds if is_spared else 1
        self.short += record.outcome in FALLEN_SHORT

    @property
    def left(self) -> str:
        """``about 2 min left``, at the pace so far; empty in the first 10 seconds and the first 5 % of the cases."""
        elapsed = time.monotonic() - self._began
        if elapsed < LINE_EVERY_S or not self.cases / 20 <= self.done < self.cases:
            return ""
        seconds = elapsed / self.done * (self.cases - self.done)
        if seconds < 60:
            return f"about {max(round(seconds, -1), 10):.0f} s left"
        minutes = round(seconds / 60)
        return f"about {minutes} min left" if minutes < 100 else f"about {minutes / 60:.0f} h left"


class ProgressLines:
    """Plain lines: the first records that fall short, and every ten seconds how far the run is.

    ``verbose``: a line for each record, whatever its outcome.
    """

    def __init__(self, cases: int, rounds: int, *, verbose: bool = False) -> None:
        self._tally = Tally(cases, rounds)
        self._verbose = verbose
        self._said = time.monotonic()

    def see(self, record: Record) -> None:
        """One more record."""
        self._tally.see(record)
        is_short = record.outcome in FALLEN_SHORT
        if self._verbose and not is_short:
            line = f"{record.outcome}  {record.backend}  {record.case}  {record.check}  {record.duration_s:.2f} s"
            say(line)
        elif is_short and (self._verbose or self._tally.short <= TOLD_AT_ONCE):
            say(f"{record.outcome}  {record.backend}  {record.case}  {record.check}: {what_happened(record)}")
        if time.monotonic() - self._said >= LINE_EVERY_S:
            self._said = time.monotonic()
            done = f"case {self._tally.done} of {self._tally.cases}, {self._tally.short} fell short"
            say(", ".join(part for part in (done, self._tally.left) if part))


class ProgressBar:
    """A progress bar over the cases of every backend, drawn anew with each record at least."""

    def __init__(self, progress: Progress, cases: int, rounds: int) -> None:
        self._progress = progress
        self._tally = Tally(cases, rounds)
        self._task = progress.add_task("", total=cases)

    def see(self, record: Record) -> None:
        """One more record."""
        self._tally.see(record)
        short = f"{self._tally.short} fell short" if self._tally.short else ""
        parts = (f"{record.backend}  {record.case}", short, self._tally.left)
        description = ", ".join(part for part in parts if part)
        self._progress.update(self._task, completed=max(self._tally.done - 1, 0), description=description)
        if not self._progress.live.auto_refresh:
            self._progress.refresh()


@contextmanager
def progress_for(
    cases: int,
    *,
    rounds: int = 1,
    silent: bool = False,
    verbose: bool = False,
    is_timed: bool = False,
    color: bool = True,
) -> Iterator[RunProgress]:
    """Yield the progress that suits where stderr goes; ``cases``: how many the run has, counted anew for each backend.

    ``rounds``: of the check ``timing``, whose cases are counted in every one. ``verbose``: lines, one a record.
    ``is_timed``: it is made, and nothing is drawn while a time is taken. ``color``: the bar may have colours.
    """
    if silent:
        yield NoProgress()
    elif verbose or not sys.stderr.isatty():
        yield ProgressLines(cases, rounds, verbose=verbose)
    else:
        columns = (
            BarColumn(20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
        )
        screen = Console(stderr=True, no_color=None if color else True)
        with Progress(*columns, console=screen, transient=True, auto_refresh=not is_timed) as progress:
            yield ProgressBar(progress, cases, rounds)
