"""``attncheck report``: run files told to people, and to their tools. Reads, never re-computes; needs no torch."""

from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attncheck.errors import QuestionError
from attncheck.harness.cli.output import STEP_SUMMARY, refuse_input, use_color, write_output

if TYPE_CHECKING:
    from attncheck.reports.run_file.store import Run


class ReportFormat(StrEnum):
    """How a report is written."""

    TERMINAL = "terminal"
    MARKDOWN = "markdown"
    HTML = "html"
    JUNIT = "junit"
    GITHUB = "github"
    PYTEST_BENCHMARK = "pytest-benchmark"


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run files written by `attncheck run`.")],
    form: Annotated[
        ReportFormat,
        typer.Option(
            "--format",
            help="Text for a terminal; Markdown; one self-contained HTML page; JUnit XML; for GitHub Actions a step "
            f"summary (added to ${STEP_SUMMARY} where that is set and no --output given) and annotations (to "
            "stdout); the JSON of pytest-benchmark, of one run.",
        ),
    ] = ReportFormat.TERMINAL,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write to this file instead of stdout.")] = None,
) -> int:
    """Report on run files, one after the other; HTML compares the first with each of the others."""
    from attncheck.reports.run_file.store import read_run

    if form == ReportFormat.PYTEST_BENCHMARK and len(runs) > 1:
        raise QuestionError(
            f"--format {form} takes one run, and {len(runs)} are given; convert each by itself, and let "
            "`pytest-benchmark compare` read the files together"
        )
    read = [read_run(path) for path in runs]
    refuse_input(output, runs)
    text = _renderer(form, color=output is None and use_color())(read)
    write_output(text, output, is_summary=form == ReportFormat.GITHUB)
    if form == ReportFormat.GITHUB:
        from attncheck.reports.github import run as github

        typer.echo(github.annotations(read), nl=False)
    return 0


def _renderer(form: ReportFormat, *, color: bool) -> "Callable[[Sequence[Run]], str]":
    """What turns runs into a text of this format; loaded only now, since some formats need what others do without."""
    if form == ReportFormat.MARKDOWN:
        from attncheck.reports.markdown import run as markdown

        return lambda runs: "\n".join(markdown.render_run(run) for run in runs)
    if form == ReportFormat.HTML:
        from attncheck.reports import html

        return html.render_runs
    if form == ReportFormat.JUNIT:
        from attncheck.reports import junit

        return junit.render_runs
    if form == ReportFormat.GITHUB:
        from attncheck.reports.github import run as github

        return github.summary
    if form == ReportFormat.PYTEST_BENCHMARK:
        from attncheck.reports import pytest_benchmark

        return lambda runs: "".join(pytest_benchmark.render_run(run) for run in runs)
    from attncheck.reports.terminal import run as terminal

    return lambda runs: "\n\n".join(terminal.render_run(run, color=color) for run in runs) + "\n"
