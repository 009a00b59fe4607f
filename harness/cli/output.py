"""Output of commands: destination (stdout, a file, the summary of a GitHub step), colours and width."""

import contextlib
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from attncheck.errors import QuestionError, WriteError, unwritable

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


def write_output(text: str, output: Path | None, *, is_summary: bool = False) -> None:
    """Write ``text`` to the file ``output`` (overwriting it), or to stdout if it is None.

    ``is_summary``: whether the text is a GitHub step summary; without ``output`` it is appended to the summary file.

    Raises:
        QuestionError: the path is invalid.
        WriteError: the disk is full or read-only.
    """
    named = os.environ.get(STEP_SUMMARY) if is_summary else None
    if output is not None:
        _write(output, text, mode="w", name=f"--output {output}")
    elif named:
        _write(Path(named), text, mode="a", name=f"${STEP_SUMMARY} {named}")
    else:
        typer.echo(text, nl=False, color=True)  # keep the colours in the text


def _write(path: Path, text: str, *, mode: str, name: str) -> None:
    try:
        with path.open(mode, encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
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


def print_stderr(text: str) -> None:
    """Print a line to stderr; errors of stderr are ignored."""
    with contextlib.suppress(OSError):
        typer.echo(text, err=True)


def show_printed(backend: str, lines: str) -> None:
    """Print the output of a backend's process to stderr, since stdout is for the report."""
    with contextlib.suppress(ValueError):  # stderr is closed
        print_stderr("\n".join(f"{backend} | {line}" for line in lines.split("\n")))
