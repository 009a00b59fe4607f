"""What commands share: output, interruptions, and completion of names."""

import contextlib
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from attncheck.errors import QuestionError, WriteError, unwritable

# Output of commands: destination (stdout, a file, the summary of a GitHub step), colours and width.

STEP_SUMMARY = "GITHUB_STEP_SUMMARY"
"""Environment variable with which GitHub Actions gives the path of a step's summary file."""


class ColorChoice(StrEnum):
    """Whether to print colours; ``auto``: if stdout is a terminal, unless NO_COLOR or FORCE_COLOR is set."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


Color = Annotated[ColorChoice, typer.Option("--color", help="Colours; auto: on a terminal, or if FORCE_COLOR is set.")]
"""The option of all commands that print a report."""


def use_color(choice: ColorChoice = ColorChoice.AUTO) -> bool:
    """Return whether to print colours to stdout.

    An explicit choice comes first, then NO_COLOR (https://no-color.org), then FORCE_COLOR (https://force-color.org),
    then whether stdout is a terminal. Empty variables count as unset.
    """
    if choice is not ColorChoice.AUTO:
        return choice is ColorChoice.ALWAYS
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or sys.stdout.isatty()


def terminal_width() -> int:
    """Return the width of a report in columns, from 40 to 200: COLUMNS, else the terminal's width, else 100."""
    return min(max(shutil.get_terminal_size((100, 24)).columns, 40), 200)


def refuse_input(output: Path | None, runs: Iterable[Path]) -> None:
    """Raise QuestionError if ``output`` is one of the run files that were read."""
    if output is not None and output.exists() and any(output.samefile(path) for path in runs):
        raise QuestionError(f"--output {output} is one of the runs that are read; name another file")


def step_summary() -> Path | None:
    """Return the summary file of the GitHub step that runs this process, or None without one."""
    named = os.environ.get(STEP_SUMMARY)
    return Path(named) if named else None


def write_output(text: str, output: Path | None, summary: Path | None = None) -> None:
    """Write ``text`` to the file ``output`` (overwriting it); else append it to ``summary``; else write it to stdout.

    Raises:
        QuestionError: the path is invalid.
        WriteError: the disk is full or read-only.
    """
    if output is not None:
        _write(output, text, mode="w", name=f"--output {output}")
    elif summary is not None:
        _write(summary, text, mode="a", name=f"${STEP_SUMMARY} {summary}")
    else:
        typer.echo(text, nl=False, color=True)  # keep the colours in the text


def _write(path: Path, text: str, *, mode: str, name: str) -> None:
    try:
        with path.open(mode, encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError as error:
        raise unwritable(name, error) from error


def make_folder(folder: Path, name: str) -> None:
    """Create a folder and its parents, unless it is there.

    Raises:
        QuestionError, WriteError: it cannot be created; the message names ``name``.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(name, error) from error


def drop_stdout() -> None:
    """Discard all further output to stdout; otherwise the interpreter's final flush would fail again."""
    sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (for the interpreter's last flush)


@contextlib.contextmanager
def printing_to_stdout(run_file: Path | None = None) -> Iterator[None]:
    """Raise WriteError if writing to stdout fails; its message names ``run_file``."""
    try:
        yield
    except OSError as error:
        drop_stdout()
        safe = "" if run_file is None else f"the run file is {run_file}"
        raise WriteError("stdout", error, safe=safe) from error


def print_foreign(text: str) -> None:
    """Print lines to stdout that may hold text of backends or files, without its control characters."""
    typer.echo(_printable(text))


def print_stderr(text: str) -> None:
    """Print lines to stderr, without control characters; errors of stderr are ignored."""
    with contextlib.suppress(OSError):
        typer.echo(_printable(text), err=True)


def _printable(text: str) -> str:
    if text.isascii() and text.isprintable():
        return text
    from attncheck.reports.analysis.phrases import printable

    return printable(text)


def show_printed(backend: str, lines: str) -> None:
    """Print the output of a backend's process to stderr, since stdout is for the report."""
    with contextlib.suppress(ValueError):  # stderr is closed
        print_stderr("\n".join(f"{backend} | {line}" for line in lines.split("\n")))


# Turns signals that end a run into KeyboardInterrupt, so that its findings are still reported. Loads no torch.

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def signal_of(interrupt: KeyboardInterrupt) -> signal.Signals:
    """Return the signal that ended the run; SIGINT if Python raised the exception itself."""
    return next((each for each in interrupt.args if isinstance(each, signal.Signals)), signal.SIGINT)


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt at the first signal that ends a run; a second signal kills the process.

    A signal that is ignored, as SIGHUP under nohup, stays ignored. Has no effect outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    taken = [number for number in _SIGNALS if before[number] not in (signal.SIG_IGN, None)]

    def interrupt(number: int, _frame: FrameType | None) -> None:
        for each in taken:
            signal.signal(each, signal.SIG_DFL)
        raise KeyboardInterrupt(signal.Signals(number))

    try:
        for number in taken:
            signal.signal(number, interrupt)
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])


# Shell completion for names of backends, suites, cases and checks. Loads no torch.
#
# In a list separated by commas, the last word is completed. A word that looks like a path gets no completions, so that
# the shell completes file names.


def backends(incomplete: str) -> list[str]:
    """Return the registered backends that begin with ``incomplete``."""
    from attncheck.backends.registry import known_names

    return _beginning(incomplete, known_names())


def suites(incomplete: str) -> list[str]:
    """Return the built-in suites that begin with ``incomplete``."""
    from attncheck.cases.loader import suite_names

    return _in_list(incomplete, suite_names())


def checks(incomplete: str) -> list[str]:
    """Return the checks that begin with ``incomplete``."""
    from attncheck.reference.spec import CHECKS

    return _in_list(incomplete, CHECKS)


def cases(context: typer.Context, incomplete: str) -> list[str]:
    """Return the cases that begin with ``incomplete``, of the suites given so far, or of ``smoke``.

    Suites that cannot be read are skipped.
    """
    from attncheck.cases.loader import load_suite
    from attncheck.errors import QuestionError
    from attncheck.harness.run.options import split_commas

    names: list[str] = []
    for suite in split_commas(context.params.get("suites") or ["smoke"]):
        try:
            names += [name for case in load_suite(suite) for name in (case.id, case.key)]
        except QuestionError:
            continue
    return _in_list(incomplete, names)


def _in_list(incomplete: str, names: Iterable[str]) -> list[str]:
    """Complete the last name of a list separated by commas."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in _beginning(last, names)]


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
