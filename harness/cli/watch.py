"""The command ``run --watch``: run again after each save."""

import contextlib
import importlib.util
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

import typer

from attncheck.backends.registry import BUILTIN, entry_points
from attncheck.errors import QuestionError, SelectionError
from attncheck.harness.cli.common import show_printed, terminal_width
from attncheck.harness.cli.run import FinishedRun, execute_run
from attncheck.harness.cli.run_files import open_run
from attncheck.harness.run.options import RunOptions
from attncheck.harness.run.selection import Selection
from attncheck.harness.workers.pool import imports_of
from attncheck.harness.workers.process import WorkerProcess
from attncheck.harness.workers.worker import CaseServer
from attncheck.reports.analysis.phrases import plural, printable, title
from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.records import FALLEN_SHORT, Record
from attncheck.reports.terminal.watch import render_record, render_round

# Finds the files that `attncheck run --watch` watches, and detects changes. Loads no torch and no backend.

_LIBRARIES = ("triton", "xformers", "flash_attn", "flashinfer")
_IMPORT = re.compile(rf"^\s*(?:import|from)\s+({'|'.join(_LIBRARIES)})\b", re.MULTILINE)
_INTERPRETED = "TRITON_INTERPRET"
"""A file that contains this variable may set it, which has no effect once triton is imported."""

_MOST_FOLDERS = 200
"""Maximum watched folders of one package; those nearest its top come first."""

State = dict[Path, tuple[int, int]]
"""For each file, its modification time in nanoseconds and its size in bytes."""


class WatchedFiles:
    """The Python files in the folder or package of each backend, and other files by name.

    ``refs``: references of backends. ``others``: case files, and the expectation file.
    """

    def __init__(self, refs: Iterable[str], others: Iterable[Path] = ()) -> None:
        self.named = tuple(dict.fromkeys(file for ref in refs if (file := file_of(ref)) is not None))
        self._others = tuple(others)
        self._folders = tuple(dict.fromkeys(folder for file in self.named for folder in _folders_of(file)))
        self._accepted = self.state()

    def state(self) -> State:
        """Return the state of all existing files."""
        found: State = {}
        for path in (*self._sources(), *self.named, *self._others):
            try:
                status = path.stat()
            except OSError:  # an editor may be replacing the file
                continue
            found[path] = (status.st_mtime_ns, status.st_size)
        return found

    def changed(self) -> tuple[Path, ...]:
        """Return the files that were added, removed or changed since :meth:`accept`."""
        now = self.state()
        return tuple(path for path in {**self._accepted, **now} if self._accepted.get(path) != now.get(path))

    def accept(self) -> None:
        """Take the current state as unchanged."""
        self._accepted = self.state()

    def libraries(self) -> tuple[str, ...]:
        """Return the kernel libraries that the watched sources import.

        Triton is left out if a source contains TRITON_INTERPRET, which must be set before triton is imported.
        """
        texts = []
        for path in self.state():
            if path.suffix == ".py":
                with contextlib.suppress(OSError):  # an editor may be replacing the file
                    texts.append(path.read_text(encoding="utf-8", errors="replace"))
        found = {name for text in texts for name in _IMPORT.findall(text)}
        if any(_INTERPRETED in text for text in texts):
            found.discard("triton")
        return tuple(name for name in _LIBRARIES if name in found)

    def _sources(self) -> Iterator[Path]:
        for folder in self._folders:
            try:
                with os.scandir(folder) as entries:
                    names = [entry.name for entry in entries if entry.name.endswith(".py")]
            except OSError:
                continue
            yield from (folder / name for name in names)


def file_of(ref: str) -> Path | None:
    """Return the file of a backend without importing it, or None if that needs an import."""
    name, _, argument = ref.partition(":")
    if name == "vllm" and argument:
        return file_of(argument)
    place = ref if ref.endswith(".py") else ref.rpartition(":")[0] or ref
    if place.endswith(".py"):
        return Path(place)
    if name in BUILTIN:
        place = BUILTIN[name].partition(":")[0]
    elif (point := entry_points().get(name)) is not None:
        place = point.module
    return _module_file(place.split("."))


def _module_file(parts: Sequence[str]) -> Path | None:
    try:
        spec = importlib.util.find_spec(parts[0])
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin)
    if len(parts) > 1:
        path = path.parent.joinpath(*parts[1:])
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return path if path.is_file() else None


def _folders_of(file: Path) -> list[Path]:
    """Return the folder of ``file``, and if it belongs to a package also the folders below."""
    found = [file.parent]
    if not (file.parent / "__init__.py").is_file():
        return found
    for each in found:  # the loop appends to found
        if len(found) >= _MOST_FOLDERS:
            break
        try:
            inner = sorted(path for path in each.iterdir() if path.is_dir() and not path.name.startswith((".", "__")))
        except OSError:
            continue
        found += inner
    return found[:_MOST_FOLDERS]


# Terminal output and keys of `attncheck run --watch`.

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


# `attncheck run --watch`: examines again after each save, previously failed cases first.
#
# A spare process, which has loaded torch and the checks but no backend, waits for the save. A save during a round ends
# the round. Syntax errors and other reasons why nothing could be examined are shown, and watching continues.

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
        self._imports = imports_of(selection)
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
            self._show(f"error: {printable(str(error))}")
            self._prepare_spare()
            return True
        finally:
            if spare is not None:  # the error may have come before the run took it
                spare.close(at_once=True)
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
        self._spare.send(CaseServer.prepare, self._imports)

    def _show_result(self, finished: FinishedRun, shown: RoundLines) -> None:
        header, records = finished.header, finished.records
        errors = (*finished.blind, *finished.unmet)
        self.is_short = bool(errors) or any(record.outcome in FALLEN_SHORT for record in records)
        self._environment = dict(header.backends[0].required_environment)
        self._imports = self._imports.model_copy(update={"libraries": self._files.libraries()})
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
