"""Where what a command says goes: stdout, a file, the summary of a GitHub step."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path

import typer

from attncheck.errors import QuestionError

STEP_SUMMARY = "GITHUB_STEP_SUMMARY"
"""The environment variable in which GitHub Actions names the file that a step adds its summary to."""


def use_color() -> bool:
    """Whether stdout is a terminal whose user has not asked for plain text (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def refuse_input(output: Path | None, runs: Iterable[Path]) -> None:
    """Raises QuestionError where ``output`` is one of the run files that were read."""
    if output is not None and output.exists() and any(output.samefile(path) for path in runs):
        raise QuestionError(f"--output {output} is one of the runs that are read; name another file")


def write_output(text: str, output: Path | None, *, is_summary: bool = False) -> None:
    """To the file ``--output`` asks for, written anew; else to stdout.

    ``is_summary``: for GitHub, which without ``--output`` gets it behind what the step's summary holds already.

    Raises:
        QuestionError: the file cannot be written.
    """
    named = os.environ.get(STEP_SUMMARY) if is_summary else None
    if output is not None:
        _write(output, text, mode="w", name=f"--output {output}")
    elif named:
        _write(Path(named), text, mode="a", name=f"${STEP_SUMMARY} {named}")
    else:
        typer.echo(text, nl=False)


def _write(path: Path, text: str, *, mode: str, name: str) -> None:
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise QuestionError(f"{name} cannot be written: {error.strerror}") from error
