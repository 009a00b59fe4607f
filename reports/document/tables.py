"""Tables of outcomes: backends by checks, backends by suites, and functions of providers."""

from collections.abc import Sequence

from attncheck.reports.analysis import phrases
from attncheck.reports.analysis.phrases import one_line
from attncheck.reports.analysis.summary import OutcomeCounts
from attncheck.reports.analysis.utilities import (
    HEADINGS,
    LEGEND,
    function_rows,
    notes_by_heading,
    provider_title,
)
from attncheck.reports.document.blocks import (
    BREAK,
    Block,
    Colour,
    Heading,
    Paragraph,
    Span,
    Table,
    Text,
    listed,
    table,
)
from attncheck.reports.document.run_values import RunValues

_VERDICTS: dict[str, Colour] = {"equal": "green", "drifted": "green", "judged": "green", "missing": ""}
"""Colours of verdicts on functions; all others are red."""


def outcomes(run: RunValues, *, whole: bool) -> list[Block]:
    """Return the tables of suites and of checks, and which kernels ran; in brief the table of checks with totals."""
    if not whole:
        return [checks(run, run.present, totals=True)] if run.present else []
    if run.summary.providers and not run.summary.backends:
        return []
    return [
        Heading(2, "Backends and suites"),
        Paragraph(
            (
                "Good records of examined ones, over all checks; ",
                Span("-", is_code=True),
                " where nothing was examined.",
            )
        ),
        suites(run),
        Heading(2, "Backends and checks"),
        checks(run, run.summary.backends),
        *kernels(run),
    ]


def kernels(run: RunValues) -> list[Block]:
    """Return the kernels that libraries chose, a line for each backend."""
    chosen = run.summary.chosen_kernels
    return listed([f"Kernels of {name}: {phrases.chosen_kernels(cases)}" for name, cases in chosen.items()])


def checks(run: RunValues, backends: Sequence[str], *, totals: bool = False) -> Table:
    """Return backends by checks; cells are passed of examined. ``totals``: with the worst error and what is left."""
    rows = [
        [one_line(backend), *(_cell(run.summary.by_check.get((backend, check))) for check in run.summary.checks)]
        + (_totals(run, backend) if totals else [])
        for backend in backends
    ]
    headings = ["backend", *map(one_line, run.summary.checks), *(_total_headings(run) if totals else [])]
    return table(headings, rows, is_turned=True)


def suites(run: RunValues) -> Table:
    """Return backends by suites, with what their figures depend on beside their names, and totals."""
    infos = {info.name: info for info in run.header.backends}
    rows = []
    for backend in run.summary.backends:
        info = infos.get(backend)
        name = f"{backend} {info.version}" if info and info.version else backend
        stated = (BREAK, phrases.conventions(info)) if info and info.conventions else ()
        counts = [_cell(run.summary.by_suite.get((backend, suite))) for suite in run.summary.suites]
        rows.append([(name, *stated), *counts, *_totals(run, backend)])
    return table(["backend", *map(one_line, run.summary.suites), *_total_headings(run)], rows)


def _total_headings(run: RunValues) -> list[str]:
    return [*(["worst\nerror /\nallowed"] if run.summary.has_errors_measured else []), "not\nexamined"]


def _totals(run: RunValues, backend: str) -> list[Text]:
    counts = run.summary.by_backend[backend]
    worst: list[Text] = [phrases.budgets(counts.worst_share)] if run.summary.has_errors_measured else []
    return [*worst, str(counts.not_examined or "-")]


def _cell(tally: OutcomeCounts | None) -> Text:
    if tally is None or not tally.examined:
        return "-"
    text = f"{tally['passed']}/{tally.examined}"
    if tally.short:
        return Span(text, is_bold=True, colour="red")
    return Span(text, colour="yellow" if tally["xfailed"] else "green")


def functions(run: RunValues, *, whole: bool) -> list[Block]:
    """Return a table of functions for each provider and its legend; whole, also the notes on functions."""
    return [block for provider in run.summary.providers for block in _provider(run, provider, whole=whole)]


def _provider(run: RunValues, provider: str, *, whole: bool) -> list[Block]:
    rows = function_rows(run.records, provider)
    cells: list[list[Text]] = [
        [Span(row.name, is_code=True), Span(row.word, colour=_VERDICTS.get(row.word, "red")), *row.counts]
        for row in rows
    ]
    notes = [
        block
        for heading, pairs in (notes_by_heading(rows) if whole else ())
        for block in listed([f"{names}: {note}" for names, note in pairs], heading)
    ]
    return [Heading(2, provider_title(run.header, provider)), Paragraph(f"{LEGEND}."), table(HEADINGS, cells), *notes]
