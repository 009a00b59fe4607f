"""A run as text for a terminal: verdicts, tables, findings, and what was not examined.

Functions return text and print nothing. Colours are optional. Lines keep to the width, except commands to be copied.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from attncheck.reports.analysis import phrases
from attncheck.reports.analysis.graph_levels import (
    LevelRow,
    legend,
    level_notes,
    level_rows,
    unmeasured_cases,
)
from attncheck.reports.analysis.summary import OutcomeCounts, RunSummary, summarise
from attncheck.reports.analysis.utilities import (
    HEADINGS,
    LEGEND,
    FunctionRow,
    function_rows,
    notes_by_heading,
    provider_title,
)
from attncheck.reports.analysis.verdicts import run_findings
from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.records import Record
from attncheck.reports.run_file.store import Run
from attncheck.reports.speeds.speed import speeds
from attncheck.reports.terminal.columns import WIDTH, Style, wrap
from attncheck.reports.terminal.findings import render_findings, render_verdicts, short_functions
from attncheck.reports.terminal.speeds import NAME_WIDTH, render_speeds

SHOWN_GAPS = 6
"""Maximum reasons for one backend; those with most cases are shown."""
REASON_WIDTH = 440
"""Maximum characters of the reason why a probe broke; the Markdown report shows all."""
HINT_WIDTH = 140
"""Maximum characters of that reason if the failure is shown as a finding below."""


def opening(header: RunHeader, *, width: int = WIDTH) -> str:
    """Return the first lines of a run: versions, machine, suites, and notes of the header."""
    lines = (phrases.title(header), *(f"note: {note}" for note in header.notes))
    return phrases.printable("\n".join(wrap(text, width=width) for text in lines))


def render_run(run: Run, *, color: bool = False, width: int = WIDTH) -> str:
    """Return a run file as text: first lines, warning if it was cut off, verdicts, tables, findings."""
    parts = [opening(run.header, width=width)]
    if warning := phrases.incomplete(run):
        parts.append(wrap(f"warning: {phrases.one_line(warning)}", width=width))
    parts.append(
        render(
            run.header,
            run.records,
            errors=run.errors,
            complete=run.complete,
            color=color,
            width=width,
            run_file=Path(run.path),
        )
    )
    return "\n\n".join(parts)


def render(
    header: RunHeader,
    records: Sequence[Record],
    *,
    errors: Sequence[str] = (),
    complete: bool = True,
    color: bool = False,
    width: int = WIDTH,
    quiet: bool = False,
    run_file: Path | None = None,
) -> str:
    """Return verdicts, tables and findings of a run without its first lines, ending with the counts of all outcomes.

    ``quiet``: only verdicts, findings and counts. ``run_file``: the path of the records, for a command that reads them.
    Backends that cannot run on this machine share one line, unless no backend was examined.
    """
    style = Style(width, color)
    summary = summarise(records, checks=header.checks)
    found = run_findings(records, header)
    absent = summary.absent if summary.total.examined else ()
    shown = replace(summary, backends=tuple(name for name in summary.backends if name not in absent))
    tables = [
        _check_table(shown, style),
        _chosen_kernels(shown, style),
        _graph_levels(level_rows(records), unmeasured_cases(records), style),
        _suite_table(shown, style) if len(summary.suites) > 1 else "",
        render_speeds(header, speeds(records), style),
        *(_functions(header, records, provider, style) for provider in summary.providers),
    ]
    circumstances = [_gaps(shown, style), _conventions(header, shown, style)]
    sections = [
        render_verdicts(found.verdicts, style, absent),
        *(() if quiet else tables),
        *render_findings(found.findings, summary, header, style, run_file),
        *short_functions(summary, header, style),
        *(() if quiet else circumstances),
        "\n".join(style.wrap(f"error: {error}") for error in errors),
        style.wrap(phrases.closing(summary, errors, complete=complete, verdicts=found.verdicts)),
    ]
    return style.printable("\n\n".join(section for section in sections if section))


def _check_table(summary: RunSummary, style: Style) -> str:
    """Return a table of backends by checks, transposed if there are many checks; cells are passed of examined."""
    if not summary.backends:
        return ""
    worst = ["worst\nerror\n(budgets)"] if summary.has_errors_measured else []
    rows = [
        [
            phrases.one_line(backend),
            *(_cell(summary.by_check.get((backend, check)), style) for check in summary.checks),
            *(phrases.budgets(summary.by_backend[backend].worst_share) for _ in worst),
            str(summary.by_backend[backend].not_examined or "-"),
        ]
        for backend in summary.backends
    ]
    return style.turned_table([["backend", *summary.checks, *worst, "not\nexamined"], *rows])


def _chosen_kernels(summary: RunSummary, style: Style) -> str:
    lines = [f"kernels of {name}: {phrases.chosen_kernels(cases)}" for name, cases in summary.chosen_kernels.items()]
    return "\n".join(style.wrap(phrases.one_line(line)) for line in lines)


def _graph_levels(rows: Sequence[LevelRow], unmeasured: Mapping[str, Mapping[str, int]], style: Style) -> str:
    """Return declared and measured CUDA-graph levels; below each row the probe that broke, and head-room.

    ``unmeasured``: by backend and outcome, the number of cases without a level, shown below the backend's rows.
    """
    if not rows:
        return ""
    cells = [
        [
            phrases.cut(phrases.one_line(row.backend), NAME_WIDTH),
            row.graph.declared,
            _measured(row, style),
            str(row.cases),
            row.probes,
        ]
        for row in rows
    ]
    heading, lines = style.table_rows([["backend", "declared", "measured", "cases", "probes"], *cells])
    told = [f"{line}\n{_level_notes(row, rows, style)}".rstrip() for line, row in zip(lines, rows, strict=True)]
    for backend, counts in unmeasured.items():
        own = [index for index, row in enumerate(rows) if row.backend == backend]
        text = ", ".join(f"{phrases.plural(count, 'case')} {outcome}" for outcome, count in counts.items())
        if own:
            told[own[-1]] += f"\n  and {text}"
        else:
            told.append(style.wrap(f"{phrases.one_line(backend)}: {text}"))
    recorders = ", ".join(dict.fromkeys(row.graph.recorder for row in rows))
    body = "\n".join([heading, *told] if heading else told)
    return "\n\n".join([f"CUDA-graph levels (recorder: {recorders})", body, style.wrap(legend(rows))])


def _level_notes(row: LevelRow, rows: Sequence[LevelRow], style: Style) -> str:
    example = phrases.one_line(row.results[0].cases[0])
    notes = [f"cases such as {example}" if row.cases > 1 else f"case {example}"]
    if [other.backend for other in rows].count(row.backend) == 1:
        notes.clear()
    notes += [phrases.why_no_higher(row, width=HINT_WIDTH if row.falls_short else REASON_WIDTH)]
    notes += [phrases.other_reasons(row)] if row.other_cases else []
    notes += [f"head-room: could declare {row.head_room}"] if row.head_room else []
    if row is next(other for other in rows if other.backend == row.backend):
        notes += [phrases.one_line(note) for note in level_notes(rows).get(row.backend, ())]
    return "\n".join(style.wrap(note, "  ") for note in notes if note)


def _measured(row: LevelRow, style: Style) -> str:
    text = phrases.measured_level(row.graph.measured)
    return text if row.graph.measured is None else style.paint(text, "31" if row.falls_short else "32")


def _suite_table(summary: RunSummary, style: Style) -> str:
    """Return a table of suites by backends, transposed if backends are many; cells are passed of examined."""
    cells = [
        [_cell(summary.by_suite.get((backend, suite)), style) for backend in summary.backends]
        for suite in summary.suites
    ]
    names = [phrases.one_line(backend) for backend in summary.backends]
    if len(names) <= max(5, len(summary.suites)):
        rows = [[suite, *row] for suite, row in zip(summary.suites, cells, strict=True)]
        return style.table([["suite", *names], *rows])
    columns = [[name, *column] for name, column in zip(names, zip(*cells, strict=True), strict=True)]
    return style.table([["backend", *summary.suites], *columns])


def _functions(header: RunHeader, records: Sequence[Record], provider: str, style: Style) -> str:
    rows = function_rows(records, provider)
    cells = [HEADINGS, *([row.name, _paint_word(row, style), *row.counts] for row in rows)]
    notes = [
        "\n".join([heading, *(style.wrap(f"{names}: {phrases.printable(note)}", "  ") for names, note in said)])
        for heading, said in notes_by_heading(rows)
    ]
    return "\n\n".join([provider_title(header, provider), style.table(cells), style.wrap(LEGEND), *notes])


def _paint_word(row: FunctionRow, style: Style) -> str:
    code = {"equal": "32", "drifted": "32", "judged": "32", "missing": "0"}.get(row.word, "31")
    return style.paint(row.word, code)


def _cell(tally: OutcomeCounts | None, style: Style) -> str:
    if tally is None or not tally.examined:
        return "-"
    return style.paint(f"{tally['passed']}/{tally.examined}", "31" if tally.short else "32")


def _gaps(summary: RunSummary, style: Style) -> str:
    """Return what was not examined and why; backends with the same gap share a paragraph."""
    owners: dict[str, list[str]] = {}
    left_out: dict[str, int] = {}
    for backend in summary.backends:
        gaps = [gap for gap in summary.gaps if gap.backend == backend]
        for gap in gaps[:SHOWN_GAPS]:
            text = f"{phrases.gap(gap, len(summary.checks))}, {phrases.gap_outcome(gap)}: {phrases.gap_reasons(gap)}"
            owners.setdefault(text, []).append(phrases.one_line(backend))
        if len(gaps) > SHOWN_GAPS:
            left_out[phrases.one_line(backend)] = len(gaps) - SHOWN_GAPS
    lines = [style.wrap(f"{', '.join(backends)}: {text}", "  ") for text, backends in owners.items()]
    lines += [
        style.wrap(f"{name}: and for {phrases.plural(n, 'further reason')}", "  ") for name, n in left_out.items()
    ]
    return "\n".join(["not examined", *lines]) if lines else ""


def _conventions(header: RunHeader, summary: RunSummary, style: Style) -> str:
    """Return each backend's conventions, merged if equal; a backend of another project has its version."""
    groups: dict[str, list[str]] = {}
    for backend in header.backends:
        if backend.name in summary.backends and backend.conventions:
            is_ours = backend.version in ("", header.environment.attncheck)
            name = backend.name if is_ours else f"{backend.name} ({backend.version})"
            groups.setdefault(phrases.conventions(backend), []).append(phrases.one_line(name))
    return "\n".join(style.wrap(f"conventions of {', '.join(names)}: {text}") for text, names in groups.items())
