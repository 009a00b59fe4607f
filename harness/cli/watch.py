"""``attncheck run --watch``: examines again after each save, previously failed cases first.

A spare process, which has loaded torch and the checks but no backend, waits for the save. A save during a round ends
the round. Syntax errors and other reasons why nothing could be examined are shown, and watching continues.
"""

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType

import typer

from attncheck.errors import QuestionError, SelectionError
from attncheck.harness.cli.output import show_printed, terminal_width
from attncheck.harness.cli.run_execution import FinishedRun, execute_run
from attncheck.harness.cli.run_files import open_run
from attncheck.harness.cli.run_options import RunOptions
from attncheck.harness.cli.watch_terminal import CLEAR, Keys, RoundLines, terminal_keys
from attncheck.harness.cli.watched_files import WatchedFiles
from attncheck.harness.run.selection import Selection
from attncheck.harness.workers.first_messages import preparation_of
from attncheck.harness.workers.worker_process import WorkerProcess
from attncheck.reports.analysis.phrases import plural, title
from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.records import FALLEN_SHORT, Record
from attncheck.reports.terminal.watch import render_round

_POLL_S = 0.05
"""Seconds between two checks of the files."""

_SETTLED_S = 0.02
"""Seconds without further changes after which a save counts as complete."""


class FilesSavedInterrupt(KeyboardInterrupt):
    """Raised when a watched file is saved during a round; it ends the round like Ctrl-C."""


def watch_run(options: RunOptions, spare: WorkerProcess | None, *, color: bool, keys: Keys | None = None) -> int:
    """Examine after each save until ``q`` is pressed; return 1 if the last round failed, else 0.

    ``spare``: a process started in advance. ``keys``: None for those of the terminal.

    Raises:
        SelectionError: the options are not allowed with ``--watch``, or select no cases.
    """
    selection = _watchable(options)
    paths = [suite.path for suite in selection.suites]
    files = WatchedFiles(options.backends, [*paths, *([options.expect] if options.expect else [])])
    watch = _Watch(options, files, selection, spare, color=color)
    with contextlib.closing(watch), terminal_keys() if keys is None else contextlib.nullcontext(keys) as pressed:
        began, since = time.monotonic(), "start"
        while True:
            files.accept()
            if watch.run_round(began, since):
                watch.show_waiting()
                while not files.changed():
                    if pressed(_POLL_S) == "q":
                        return 1 if watch.is_short else 0
            began, since = _settled(files), "save"


def _watchable(options: RunOptions) -> Selection:
    """Return the cases of the first round; raise SelectionError for options that ``--watch`` does not allow."""
    refused = {
        "--in-process": options.in_process,
        "--executor ray": options.ray,
        "--provider": options.providers,
        "--output": options.output,
        "--rounds": options.rounds,
        "--shard": options.shard,
        "--resume": options.resume,
        "--last-failed": options.keys,
    }
    for name in (name for name, is_given in refused.items() if is_given):
        raise SelectionError(f"--watch cannot be combined with {name}; leave out one of them")
    if not options.backends:
        raise SelectionError("--watch needs a backend; give a file, such as ./mine.py")
    selection = options.select()
    if selection.is_timed:
        raise SelectionError("--watch cannot be combined with the check timing; leave out one of them")
    return selection


def _settled(files: WatchedFiles) -> float:
    """Wait until no file changes any more; return the time of the latest change, on the clock time.monotonic()."""
    before = None
    while (state := files.state()) != before:
        before = state
        time.sleep(_SETTLED_S)
    newest = max((state[path][0] for path in files.changed() if path in state), default=time.time_ns())
    age = (time.time_ns() - newest) / 1e9
    return time.monotonic() - (age if 0 <= age < 60 else 0.0)


class _Watch:
    """State between rounds: the spare process, the records of the previous round, its run file.

    ``is_short``: whether the last round failed or examined nothing.
    """

    def __init__(
        self,
        options: RunOptions,
        files: WatchedFiles,
        selection: Selection,
        spare: WorkerProcess | None,
        *,
        color: bool,
    ) -> None:
        self.is_short = False
        self._options, self._files, self._color = options, files, color
        self._prepare = preparation_of(selection)
        self._environment: dict[str, str] = {}
        self._spare = spare
        self._before: tuple[Record, ...] = ()
        self._short: dict[tuple[str, str, str], bool] = {}
        self._run_file: Path | None = None
        self._is_terminal = sys.stdout.isatty()

    def close(self) -> None:
        """End the spare process."""
        if self._spare is not None:
            self._spare.close(at_once=True)

    def run_round(self, began: float, since: str) -> bool:
        """Examine all cases and show the result; return False if a file was saved meanwhile.

        ``began``: when the files were saved, by time.monotonic(). ``since``: the event to print, ``start`` or ``save``.
        """
        failing = tuple(dict.fromkeys(case for (_, case, _), is_short in self._short.items() if is_short))
        shown = RoundLines(began, since, failing, self._prepare_spare, is_terminal=self._is_terminal)
        if self._is_terminal:
            typer.echo(CLEAR, nl=False)
        self._prepare_spare()
        spare, self._spare = self._spare, None
        options = replace(self._options, folder=None, first=failing)
        try:
            with _interrupted_by(self._files) as stop:
                finished = execute_run(options, shown.begin, lambda _: stop(), spare, shown.see)
        except FilesSavedInterrupt:
            self._keep(shown.records)
            return False
        except QuestionError as error:
            self.is_short = True
            self._show(f"error: {error}")
            self._prepare_spare()
            return True
        self._keep(shown.records)
        if isinstance(finished.ended_by, FilesSavedInterrupt):
            return False
        if finished.ended_by is not None:
            raise finished.ended_by
        self._show_result(finished, shown)
        self._before = finished.records
        self._prepare_spare()
        return True

    def show_waiting(self) -> None:
        """Print which files are watched."""
        names = [str(path) for path in self._files.named] or ["the case files"]
        others = len(self._files.state()) - len(self._files.named)
        more = f" or {plural(others, 'other file')}" if others > 0 else ""
        typer.echo(f"waiting for a change in {', '.join(names)}{more}; q or Ctrl-C ends")

    def _keep(self, records: list[Record]) -> None:
        self._short |= {(each.backend, each.case, each.check): each.outcome in FALLEN_SHORT for each in records}

    def _prepare_spare(self) -> None:
        if self._spare is None or self._spare.has_ended:
            show = show_printed if self._options.show_output else None
            self._spare = WorkerProcess(self._environment, show, self._options.pass_env)
        self._spare.prepare(self._prepare)

    def _show_result(self, finished: FinishedRun, shown: RoundLines) -> None:
        header, records = finished.header, finished.records
        errors = (*finished.blind, *finished.unmet)
        self.is_short = bool(errors) or any(record.outcome in FALLEN_SHORT for record in records)
        self._environment = dict(header.backends[0].required_environment)
        self._prepare = self._prepare.model_copy(update={"libraries": self._files.libraries()})
        self._write(header, records, errors)
        text = render_round(header, records, self._before, errors=errors, color=self._color, width=terminal_width())
        cases = plural(len({record.case for record in records}), "case")
        took = f"{shown.elapsed:.1f} s after the {shown.since}: {cases}; first verdict after {shown.first_s:.1f} s"
        where = "no run file (--no-output)" if self._run_file is None else f"run file: {self._run_file}"
        self._show("\n".join([title(header), "", text, "", took, where]))

    def _write(self, header: RunHeader, records: tuple[Record, ...], errors: tuple[str, ...]) -> None:
        """Write the run file of the round, and delete that of the previous round."""
        with open_run(None, self._options.folder, header, self._options.keep) as writer:
            for record in records:
                writer.add(record)
            for error in errors:
                writer.fail(error)
        if self._run_file is not None:
            self._run_file.unlink(missing_ok=True)
        self._run_file = writer.path

    def _show(self, text: str) -> None:
        typer.echo(f"{CLEAR if self._is_terminal else ''}{text}", color=self._color)


@contextlib.contextmanager
def _interrupted_by(files: WatchedFiles) -> Iterator[Callable[[], None]]:
    """Raise FilesSavedInterrupt in the main thread when a file is saved, until the yielded function is called."""

    def stop() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)

    def look(_number: int, _frame: FrameType | None) -> None:
        if files.changed():
            stop()
            raise FilesSavedInterrupt

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _POLL_S, _POLL_S)
    try:
        yield stop
    finally:
        stop()
        signal.signal(signal.SIGALRM, before)
