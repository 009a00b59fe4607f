"""``attncheck report``: run files told to people. Reads, never re-computes; needs no torch."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from attncheck.errors import QuestionError
from attncheck.harness.commands.run import use_color


class Format(StrEnum):
    """How a report is written."""

    TERMINAL = "terminal"
    MARKDOWN = "markdown"


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run files written by `attncheck run`.")],
    form: Annotated[Format, typer.Option("--format", help="Text for a terminal, or Markdown.")] = Format.TERMINAL,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write to this file instead of stdout.")] = None,
) -> int:
    """Report on run files, one after the other."""
    from attncheck.reports import markdown, terminal
    from attncheck.reports.store import read_run

    read = [read_run(path) for path in runs]
    if form == Format.MARKDOWN:
        text = "\n".join(markdown.render_run(run) for run in read)
    else:
        color = output is None and use_color()
        text = "\n\n".join(terminal.render_run(run, color=color) for run in read) + "\n"
    if output is None:
        typer.echo(text, nl=False)
        return 0
    if output.exists() and any(output.samefile(path) for path in runs):
        raise QuestionError(f"--output {output} is one of the runs to report on; name another file")
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise QuestionError(f"--output {output} cannot be written: {error.strerror}") from error
    return 0
