"""The formats of reports and comparisons in one table; to add a format, add an entry.

Each function imports its format when it is called, since some formats need packages that others do not.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from attncheck.reports.terminal.columns import Style

if TYPE_CHECKING:
    from attncheck.reports.comparison.compare import RunComparison
    from attncheck.reports.document.blocks import SectionName
    from attncheck.reports.run_file.store import Run


class RenderedReport(NamedTuple):
    """``text``: the report, for stdout or a file. ``log``: text that is always printed to stdout."""

    text: str
    log: str = ""


@dataclass(frozen=True)
class ReportFormat:
    """One format: functions that render runs and, if supported, a comparison; only the terminal format uses the style.

    ``about_runs``, ``about_comparison``: its text in the help of the commands. ``advice``: what to do with several
    runs, for a format of a single run. ``is_step_summary``: the text belongs in the summary of a GitHub step.
    ``render_sections``: for a text format, renders the named sections of runs, whole. ``is_page``: whether the text is
    unreadable on a terminal.
    """

    about_runs: str
    render_runs: "Callable[[Sequence[Run], Style], RenderedReport]"
    about_comparison: str = ""
    render_comparison: "Callable[[RunComparison, Style], RenderedReport] | None" = None
    advice: str = ""
    is_step_summary: bool = False
    render_sections: "Callable[[Sequence[Run], Sequence[SectionName], Style], RenderedReport] | None" = None
    is_page: bool = False


def _terminal_runs(runs: "Sequence[Run]", style: Style) -> RenderedReport:
    from attncheck.reports.terminal import run as terminal

    texts = [terminal.render_run(run, color=style.color, width=style.width, verbose=style.verbose) for run in runs]
    return RenderedReport("\n\n".join(texts) + "\n")


def _terminal_sections(runs: "Sequence[Run]", names: "Sequence[SectionName]", style: Style) -> RenderedReport:
    from attncheck.reports.terminal import run as terminal

    texts = [terminal.render_sections(run, names, color=style.color, width=style.width) for run in runs]
    return RenderedReport("\n\n".join(texts) + "\n")


def _terminal_comparison(comparison: "RunComparison", style: Style) -> RenderedReport:
    from attncheck.reports.terminal import run as terminal

    return RenderedReport(terminal.render_comparison(comparison, color=style.color, width=style.width) + "\n")


def _markdown_runs(runs: "Sequence[Run]", _style: Style) -> RenderedReport:
    from attncheck.reports.markdown import run as markdown

    return RenderedReport("\n".join(markdown.render_run(run) for run in runs))


def _markdown_sections(runs: "Sequence[Run]", names: "Sequence[SectionName]", _style: Style) -> RenderedReport:
    from attncheck.reports.markdown import run as markdown

    return RenderedReport("\n".join(markdown.render_sections(run, names) for run in runs))


def _markdown_comparison(comparison: "RunComparison", _style: Style) -> RenderedReport:
    from attncheck.reports.markdown import run as markdown

    return RenderedReport(markdown.render_comparison(comparison))


def _html_runs(runs: "Sequence[Run]", _style: Style) -> RenderedReport:
    from attncheck.reports import html

    return RenderedReport(html.render_runs(runs))


def _junit_runs(runs: "Sequence[Run]", _style: Style) -> RenderedReport:
    from attncheck.reports import junit

    return RenderedReport(junit.render_runs(runs, str(Path.cwd())))


def _sarif_runs(runs: "Sequence[Run]", _style: Style) -> RenderedReport:
    from attncheck.reports import sarif

    return RenderedReport("".join(sarif.render_run(run, str(Path.cwd())) for run in runs))


def _github_runs(runs: "Sequence[Run]", _style: Style) -> RenderedReport:
    from attncheck.reports import github

    return RenderedReport(github.summary(runs), github.annotations(runs, str(Path.cwd())))


def _github_comparison(comparison: "RunComparison", _style: Style) -> RenderedReport:
    from attncheck.reports import github

    log = "".join(f"{line}\n" for line in github.comparison_annotations(comparison))
    return RenderedReport(github.comparison_summary(comparison), log)


def _pytest_benchmark_runs(runs: "Sequence[Run]", _style: Style) -> RenderedReport:
    from attncheck.reports import pytest_benchmark

    return RenderedReport("".join(pytest_benchmark.render_run(run) for run in runs))


def _json_runs(runs: "Sequence[Run]", _style: Style) -> RenderedReport:
    from attncheck.reports.data import runs_document

    return RenderedReport(runs_document(runs))


def _json_comparison(comparison: "RunComparison", _style: Style) -> RenderedReport:
    from attncheck.reports.data import comparison_document

    return RenderedReport(comparison_document(comparison))


def _audit_page(runs: "Sequence[Run]", _style: Style) -> RenderedReport:
    from attncheck.reports.audit import page

    return RenderedReport(page.render(*runs))


def _audit_document(runs: "Sequence[Run]", _style: Style) -> RenderedReport:
    from attncheck.reports.audit import page

    return RenderedReport(page.document(*runs))


def _csv_runs(runs: "Sequence[Run]", _style: Style) -> RenderedReport:
    from attncheck.reports.data import csv_table

    return RenderedReport(csv_table(runs))


FORMATS: Mapping[str, ReportFormat] = {
    "terminal": ReportFormat(
        "text",
        _terminal_runs,
        "Text for a terminal",
        _terminal_comparison,
        render_sections=_terminal_sections,
    ),
    "markdown": ReportFormat(
        "the same as Markdown", _markdown_runs, "Markdown", _markdown_comparison, render_sections=_markdown_sections
    ),
    "html": ReportFormat("one self-contained HTML page", _html_runs, is_page=True),
    "junit": ReportFormat("JUnit XML", _junit_runs),
    "sarif": ReportFormat(
        "SARIF 2.1.0 for code scanning, of one run",
        _sarif_runs,
        advice="convert each by itself, and upload each with a category of its own",
    ),
    "github": ReportFormat(
        "a step summary (added to $GITHUB_STEP_SUMMARY where that is set and no --output given) and annotations (to "
        "stdout)",
        _github_runs,
        "a GitHub step summary with annotations of what failed",
        _github_comparison,
        is_step_summary=True,
        render_sections=_markdown_sections,
    ),
    "pytest-benchmark": ReportFormat(
        "the JSON of pytest-benchmark, of one run",
        _pytest_benchmark_runs,
        advice="convert each by itself, and let `pytest-benchmark compare` read the files together",
    ),
    "json": ReportFormat("every table as one JSON document", _json_runs, "one JSON document", _json_comparison),
    "csv": ReportFormat("CSV with a row for each record", _csv_runs),
    "audit": ReportFormat(
        "declared and measured features and graph levels of the first run, as Markdown, with the levels of others",
        _audit_page,
    ),
    "audit-json": ReportFormat("the same as JSON", _audit_document),
}
"""Formats by the value of ``--format``, in the order of the help."""
