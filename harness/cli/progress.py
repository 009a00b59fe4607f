"""Progress of a run on stderr: a bar on a terminal, else a line every ten seconds."""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from attncheck.harness.cli.common import print_stderr
from attncheck.harness.host import kernel_count
from attncheck.harness.run.options import RunOptions
from attncheck.harness.run.run import See
from attncheck.reports.analysis.phrases import plural, what_happened
from attncheck.reports.run_file.records import EXAMINED, FALLEN_SHORT, Ended, Record, is_out_of_time
from attncheck.reports.run_file.timings import TIMING

LINE_EVERY_S = 10.0
PRINTED_AT_ONCE = 10
"""Number of failed records that are printed as they arrive; the report lists all of them."""


class Tally:
    """Counts how many cases of the run have begun, and how many records failed.

    A case counts once for each process of a backend that gets it: once per round for ``timing``, and once for all other
    checks together, or for each part of them with ``--within``. A case that is not examined in round 0 counts for all
    rounds, since later ones skip it. Records of one part must arrive together: only the latest one is remembered.
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
    def rest(self) -> str:
        """The half of a sentence about the cases that have not begun; empty if there are none."""
        return "; the remaining cases were not examined" if self.done < self.cases else ""

    @property
    def left(self) -> str:
        """The estimated time left, as ``about 2 min left``, if no further check fails and is explained.

        Empty in the first 10 seconds and the first 5 % of the cases.
        """
        elapsed = time.monotonic() - self._began
        if elapsed < LINE_EVERY_S or not self.cases / 20 <= self.done < self.cases:
            return ""
        seconds = elapsed / self.done * (self.cases - self.done)
        right = self._spent[False]
        both = self._spent[False] + self._spent[True]
        if sum(right):
            seconds *= min((sum(right) / len(right)) / (sum(both) / len(both)), 1.0)
        if seconds < 60:
            return f"about {max(round(seconds, -1), 10):.0f} s left"
        minutes = round(seconds / 60)
        return f"about {minutes} min left" if minutes < 100 else f"about {minutes / 60:.0f} h left"


_LOOK_EVERY_S = 2.0
"""Least seconds between two looks at the caches, which may hold thousands of files."""


class CompiledKernels:
    """Counts the kernels that are added to the caches on disk from now on, by all processes of this machine."""

    def __init__(self, count: Callable[[], int] = kernel_count) -> None:
        self._count = count
        self._first = self._latest = count()
        self._grew_s = -math.inf
        self._next_look_s = 0.0

    @property
    def words(self) -> str:
        """``compiling, 12 kernels so far``, if some were added since the last look, or within ten seconds; else empty.

        The total is unknown: which kernels a case needs shows only when it runs.
        """
        began = time.monotonic()
        if began >= self._next_look_s:
            found = self._count()
            if found > self._latest:
                self._grew_s = began
            self._latest = found
            self._next_look_s = began + max(_LOOK_EVERY_S, 20 * (time.monotonic() - began))
        if began - self._grew_s > LINE_EVERY_S:
            return ""
        return f"compiling, {plural(self._latest - self._first, 'kernel')} so far"


class ProgressLines:
    """Prints the first records that fail, and the progress every ten seconds.

    What one end of the process prevents shares a line. ``verbose``: print a line for each record, whatever its outcome.
    """

    def __init__(self, tally: Tally, kernels: CompiledKernels | None = None, *, verbose: bool = False) -> None:
        """``kernels``: None if compiling is not mentioned."""
        self._tally = tally
        self._kernels = kernels
        self._verbose = verbose
        self._printed = 0
        self._latest_end: tuple[str, str, str] | None = None
        self._last_line_s = time.monotonic()

    def see(self, record: Record) -> None:
        """Print a record that the tally has counted, if it is due."""
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
            compiling = self._kernels.words if self._kernels else ""
            print_stderr(", ".join(part for part in (done, compiling, self._tally.left) if part))


class _CompilingColumn(ProgressColumn):
    def __init__(self, kernels: CompiledKernels) -> None:
        super().__init__()
        self._kernels = kernels

    def render(self, _task: Task) -> Text:
        return Text(self._kernels.words)


@contextmanager
def progress_bar(tally: Tally, kernels: CompiledKernels | None = None, *, is_timed: bool, color: bool) -> Iterator[See]:
    """Yield what redraws a bar on stderr for each record, once the tally has counted it.

    ``kernels``: None if compiling is not mentioned. ``is_timed``: whether the run takes timings; then the bar is
    redrawn only between them.
    """
    described = TextColumn("{task.description}", markup=False)
    columns = [BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), described]
    columns += [_CompilingColumn(kernels)] if kernels else []
    screen = Console(stderr=True, no_color=None if color else True)
    with Progress(*columns, console=screen, transient=True, auto_refresh=not is_timed) as progress:
        task = progress.add_task("", total=tally.cases)

        def see(record: Record) -> None:
            short = f"{tally.short} did not pass" if tally.short else ""
            parts = (f"{record.backend}  {record.case}", short, tally.left)
            description = ", ".join(part for part in parts if part)
            progress.update(task, completed=max(tally.done - 1, 0), description=description, refresh=is_timed)

        yield see


def display(options: RunOptions, tally: Tally, device: str, *, is_timed: bool) -> AbstractContextManager[See]:
    """Return the progress that suits stderr: a bar on a terminal, else lines; nothing inside a debugger."""
    if options.verbose:
        return nullcontext(ProgressLines(tally, verbose=True).see)
    if options.in_process:
        return nullcontext(ignore)
    # Nothing walks through folders while times are taken.
    kernels = None if device == "cpu" or is_timed else CompiledKernels()
    if sys.stderr.isatty():
        return progress_bar(tally, kernels, is_timed=is_timed, color=options.color)
    return nullcontext(ProgressLines(tally, kernels).see)


def ignore(_found: object) -> None:
    """Do nothing with a header, a record or a result."""
