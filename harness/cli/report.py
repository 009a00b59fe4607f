"""``attncheck report``: renders run files in a format for people or tools. Recomputes nothing, and loads no torch."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from attncheck.errors import QuestionError
from attncheck.harness.cli.output import Color, ColorChoice, refuse_input, terminal_width, use_color, write_output
from attncheck.reports.document.blocks import SectionName
from attncheck.reports.formats import FORMATS
from attncheck.reports.terminal.columns import Style

if TYPE_CHECKING:  # type checkers do not support enums with computed members
    RunFormat = str
    SectionChoice = SectionName
else:
    RunFormat = StrEnum("RunFormat", {name: name for name in FORMATS})
    SectionChoice = StrEnum("SectionChoice", {name: name for name in get_args(SectionName)})


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run files written by `attncheck run`.")],
    form: Annotated[
        RunFormat,
        typer.Option("--format", help=f"{'; '.join(form.about_runs for form in FORMATS.values())}."),
    ] = "terminal",
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write to this file instead of stdout.")] = None,
    section: Annotated[
        list[SectionChoice] | None,
        typer.Option(
            metavar="NAME",
            help="Print only this section, in full, as terminal, markdown or github. May be repeated. "
            f"Sections: {', '.join(get_args(SectionName))}.",
        ),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print the report for a terminal in full.")] = False,
    color: Color = ColorChoice.AUTO,
) -> int:
    """Print a report of each run file.

    HTML compares the first run with each of the others.
    """
    from attncheck.reports.run_file.store import read_run

    chosen = FORMATS[form]
    if chosen.advice and len(runs) > 1:
        raise QuestionError(f"--format {form} takes one run, and {len(runs)} are given; {chosen.advice}")
    if section and chosen.render_sections is None:
        able = ", ".join(name for name, each in FORMATS.items() if each.render_sections)
        raise QuestionError(f"--section cannot be combined with --format {form}; formats with sections are {able}")
    read = [read_run(path) for path in runs]
    refuse_input(output, runs)
    style = Style(terminal_width(), output is None and use_color(color), verbose)
    if section and chosen.render_sections is not None:
        rendered = chosen.render_sections(read, [*dict.fromkeys(section)], style)
    else:
        rendered = chosen.render_runs(read, style)
    write_output(rendered.text, output, is_summary=chosen.is_step_summary)
    typer.echo(rendered.log, nl=False)
    return 0
