"""Progress of a run on stderr: a bar on a terminal, else a line every ten seconds."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from attncheck.harness.cli.output import print_stderr
from attncheck.reports.analysis.phrases import what_happened
from attncheck.reports.run_file.records import EXAMINED, FALLEN_SHORT, Ended, Record, is_out_of_time
from attncheck.reports.run_file.timings import TIMING

LINE_EVERY_S = 10.0
PRINTED_AT_ONCE = 10
"""Number of failed records that are printed as they arrive; the report lists all of them."""


class RunProgress(Protocol):
    """Receives every record as it arrives."""

    def see(self, record: Record) -> None:
        """Take one record."""


class NoProgress:
    """Shows nothing, for a run inside a debugger."""

    def see(self, record: Record) -> None:
        """Ignore the record."""


class Tally:
    """Counts how many cases of the run have begun, and how many records failed.

    A case counts once for each process of a backend that gets it: once per round for ``timing``, and once for all other
    checks together. A case that is not examined in round 0 counts for all rounds, since later ones skip it.
    Records of one case must arrive together: only the latest case is remembered.
    """

    def __init__(self, cases: int, rounds: int) -> None:
        self.cases = cases
        self.done = self.short = 0
        self._began = time.monotonic()
        self._rounds = rounds
        self._latest: tuple[str, str, str, int, bool] | None = None
        self._spent = {True: [0.0], False: [0.0]}  # seconds of the records of checks, by whether they failed

    def see(self, record: Record) -> None:
        """Count one record."""
        is_timed = record.check == TIMING
        question = (record.backend, record.suite, record.case_id, record.round, is_timed)
        if question != self._latest:
            self._latest = question
            is_spared = is_timed and record.round == 0 and record.outcome not in EXAMINED
            self.done += self._rounds if is_spared else 1
        self.short += record.outcome in FALLEN_SHORT
        if record.outcome in EXAMINED:
            self._spent[record.outcome in FALLEN_SHORT].append(record.duration_s)

    @property
    def left(self) -> str:
        """The estimated time left, as ``about 2 min left``, if no further check fails and is explained.

        Empty in the first 10 seconds and the first 5 % of the cases.
        """
        elapsed = time.monotonic() - self._began
        if elapsed < LINE_EVERY_S or not self.cases / 20 <= self.done < self.cases:
            return ""
        seconds = elapsed / self.done * (self.cases - self.done)
        right, both = self._spent[False], self._spent[False] + self._spent[True]
        if sum(right):
            seconds *= min((sum(right) / len(right)) / (sum(both) / len(both)), 1.0)
        if seconds < 60:
            return f"about {max(round(seconds, -1), 10):.0f} s left"
        minutes = round(seconds / 60)
        return f"about {minutes} min left" if minutes < 100 else f"about {minutes / 60:.0f} h left"


class ProgressLines:
    """Prints the first records that fail, and the progress every ten seconds.

    What one end of the process prevents shares a line. ``verbose``: print a line for each record, whatever its outcome.
    """

    def __init__(self, cases: int, rounds: int, *, verbose: bool = False) -> None:
        self._tally = Tally(cases, rounds)
        self._verbose = verbose
        self._printed = 0
        self._latest_end: tuple[str, str, str] | None = None
        self._last_line_s = time.monotonic()

    def see(self, record: Record) -> None:
        """Count one record, and print it if it is due."""
        self._tally.see(record)
        is_short = record.outcome in FALLEN_SHORT
        where = "" if is_out_of_time(record) else record.case
        end = (record.backend, where, record.cause) if isinstance(record, Ended) else None
        is_same_end = end is not None and end == self._latest_end
        self._latest_end = end
        if self._verbose and not is_short:
            line = f"{record.outcome}  {record.backend}  {record.case}  {record.check}  {record.duration_s:.2f} s"
            print_stderr(line)
        elif is_short and (self._verbose or (self._printed < PRINTED_AT_ONCE and not is_same_end)):
            self._printed += 1
            print_stderr(f"{record.outcome}  {record.backend}  {record.case}  {record.check}: {what_happened(record)}")
        if time.monotonic() - self._last_line_s >= LINE_EVERY_S:
            self._last_line_s = time.monotonic()
            done = f"case {self._tally.done} of {self._tally.cases}, {self._tally.short} did not pass"
            print_stderr(", ".join(part for part in (done, self._tally.left) if part))


class ProgressBar:
    """A progress bar over the cases of all backends, updated with each record."""

    def __init__(self, progress: Progress, cases: int, rounds: int) -> None:
        self._progress = progress
        self._tally = Tally(cases, rounds)
        self._task = progress.add_task("", total=cases)

    def see(self, record: Record) -> None:
        """Count one record, and update the bar."""
        self._tally.see(record)
        short = f"{self._tally.short} did not pass" if self._tally.short else ""
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
    """Yield the progress display that suits stderr; ``cases``: the number of cases, summed over all backends.

    ``rounds``: the rounds of the check ``timing``; its cases count in each of them.
    ``verbose``: print one line per record.
    ``is_timed``: whether the run takes timings; then the bar is redrawn only between them.
    ``color``: whether the bar may have colours.
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
