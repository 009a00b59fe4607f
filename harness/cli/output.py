"""Where what a command prints goes (stdout, a file, the summary of a GitHub step), and its colours and width."""

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
"""The environment variable in which GitHub Actions names the file that a step adds its summary to."""


class ColorChoice(StrEnum):
    """Whether to print colours; ``auto``: to a terminal, or as NO_COLOR and FORCE_COLOR have it."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


Color = Annotated[
    ColorChoice, typer.Option("--color", help="Colours: auto prints them to a terminal, or where FORCE_COLOR is set.")
]
"""The option of every command that prints a report."""


def use_color(choice: ColorChoice = ColorChoice.AUTO) -> bool:
    """Return whether to print colours to stdout.

    Without a choice of the user, NO_COLOR (https://no-color.org) comes before FORCE_COLOR (https://force-color.org),
    and both before what stdout is; an empty variable counts as not set.
    """
    if choice is not ColorChoice.AUTO:
        return choice is ColorChoice.ALWAYS
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or sys.stdout.isatty()


def terminal_width() -> int:
    """Return how many columns a report may use: COLUMNS, else the terminal's width, else 100; from 40 to 200."""
    return min(max(shutil.get_terminal_size((100, 24)).columns, 40), 200)


def refuse_input(output: Path | None, runs: Iterable[Path]) -> None:
    """Raises QuestionError where ``output`` is one of the run files that were read."""
    if output is not None and output.exists() and any(output.samefile(path) for path in runs):
        raise QuestionError(f"--output {output} is one of the runs that are read; name another file")


def write_output(text: str, output: Path | None, *, is_summary: bool = False) -> None:
    """To the file ``--output`` asks for, written anew; else to stdout.

    ``is_summary``: for GitHub, which without ``--output`` gets it behind what the step's summary holds already.

    Raises:
        QuestionError: the file is named wrongly.
        WriteError: the disk is full or read-only.
    """
    named = os.environ.get(STEP_SUMMARY) if is_summary else None
    if output is not None:
        _write(output, text, mode="w", name=f"--output {output}")
    elif named:
        _write(Path(named), text, mode="a", name=f"${STEP_SUMMARY} {named}")
    else:
        typer.echo(text, nl=False, color=True)  # what it has of colours was chosen


def _write(path: Path, text: str, *, mode: str, name: str) -> None:
    try:
        with path.open(mode, encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError as error:
        raise unwritable(name, error) from error


def drop_stdout() -> None:
    """Print nothing more: the interpreter flushes stdout at its end, and would fail again."""
    sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (for the interpreter's last flush)


@contextlib.contextmanager
def printing_to_stdout(run_file: Path | None = None) -> Iterator[None]:
    """Raise WriteError, which names ``run_file``, where stdout takes no more."""
    try:
        yield
    except OSError as error:
        drop_stdout()
        safe = "" if run_file is None else f"the run file is {run_file}"
        raise WriteError("stdout", error, safe=safe) from error


def say(text: str) -> None:
    """Print a line on stderr; where nothing reads it, the command goes on."""
    with contextlib.suppress(OSError):
        typer.echo(text, err=True)


def show_printed(backend: str, lines: str) -> None:
    """Print what the process of a backend printed, on stderr: stdout holds the report alone."""
    with contextlib.suppress(ValueError):  # stderr is closed
        say("\n".join(f"{backend} | {line}" for line in lines.split("\n")))
