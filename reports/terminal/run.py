"""A run as a person reads it in a terminal: the table, what fell short, what was not examined.

Text in, text out: no colours unless asked for, nothing printed here. Lines keep to 100 columns, except commands made
to be pasted.
"""

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence

from attncheck.reports.analysis import phrases
from attncheck.reports.analysis.crashes import died_at, last_words, raised_at
from attncheck.reports.analysis.graph_levels import (
    LevelRow,
    legend,
    level_notes,
    level_rows,
    unmeasured_cases,
    without_reasons,
)
from attncheck.reports.analysis.repro import repro_command
from attncheck.reports.analysis.summary import OutcomeCounts, RunSummary, summarise
from attncheck.reports.analysis.utilities import (
    HEADINGS,
    LEGEND,
    FunctionRow,
    function_rows,
    known_departures,
    provider_title,
)
from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.records import Crashed, Errored, Failed, Record, graph_of
from attncheck.reports.run_file.store import Run
from attncheck.reports.speeds.speed import speeds
from attncheck.reports.terminal.columns import WIDTH, table, wrap
from attncheck.reports.terminal.speeds import NAME_WIDTH, render_speeds

SHOWN_FAILURES = 3
"""Failures shown in full for one backend under one check; the Markdown report shows them all."""
SHOWN_GAPS = 6
"""Reasons shown for one backend, those with most cases first."""
REASON_WIDTH = 440
"""Characters shown of the reason why a probe broke; the Markdown report shows all."""
HINT_WIDTH = 140
"""Characters of it where a failure is told further down."""
PRINTED_WIDTH = 280
"""Characters shown of a line that a process printed before it died."""


def opening(header: RunHeader) -> str:
    """What a run begins with: versions, machine, what was asked, and what to know about it."""
    return "\n".join([wrap(phrases.title(header)), *(wrap(f"note: {note}") for note in header.notes)])


def render_run(run: Run, *, color: bool = False) -> str:
    """A run file as text: opening, warning if it was cut off, tables, failures."""
    parts = [opening(run.header)]
    if warning := phrases.incomplete(run):
        parts.append(wrap(f"warning: {warning}"))
    parts.append(render(run.header, run.records, errors=run.errors, complete=run.complete, color=color))
    return "\n\n".join(parts)


def render(
    header: RunHeader,
    records: Sequence[Record],
    *,
    errors: Sequence[str] = (),
    complete: bool = True,
    color: bool = False,
    quiet: bool = False,
) -> str:
    """The tables and failures of a run without its opening, ending with the counts of all outcomes.

    ``quiet``: the failures and the counts alone.
    """
    summary = summarise(records, checks=header.checks)
    failures = _failures(summary, header, color)
    ending = [
        "\n".join(wrap(f"error: {error}") for error in errors),
        phrases.closing(summary, errors, complete=complete),
    ]
    if quiet:
        return "\n\n".join(section for section in (*failures, *ending) if section)
    sections = [
        _check_table(summary, color),
        _chosen_kernels(summary),
        _graph_levels(level_rows(records), unmeasured_cases(records), color),
        _suite_table(summary, color) if len(summary.suites) > 1 else "",
        render_speeds(speeds(records)),
        *(_functions(header, records, provider, color) for provider in summary.providers),
        *failures,
        _gaps(summary),
        _expected(summary),
        _conventions(header, summary),
        *ending,
    ]
    return "\n\n".join(section for section in sections if section)


def _check_table(summary: RunSummary, color: bool) -> str:
    """Backends down, checks across: passed of examined."""
    if not summary.backends:
        return ""
    # Two lines of headings: with every check and the usual names the table just keeps to its width.
    worst = ["worst error\n(budgets)"] if summary.has_errors_measured else []
    rows = [
        [
            phrases.one_line(backend),
            *(_cell(summary.by_check.get((backend, check)), color) for check in summary.checks),
            *(phrases.budgets(summary.by_backend[backend].worst_share) for _ in worst),
            str(summary.by_backend[backend].not_examined or "-"),
        ]
        for backend in summary.backends
    ]
    return table([["backend", *summary.checks, *worst, "not\nexamined"], *rows])


def _chosen_kernels(summary: RunSummary) -> str:
    lines = [f"kernels of {name}: {phrases.chosen_kernels(cases)}" for name, cases in summary.chosen_kernels.items()]
    return "\n".join(wrap(phrases.one_line(line)) for line in lines)


def _graph_levels(rows: Sequence[LevelRow], unmeasured: Mapping[str, Mapping[str, int]], color: bool) -> str:
    """Declared and measured CUDA-graph levels; below each row what ended the climb, and head-room.

    ``unmeasured``: how many cases of a backend have no level, by outcome; told below its rows.
    """
    if not rows:
        return ""
    cells = [
        [
            phrases.cut(phrases.one_line(row.backend), NAME_WIDTH),
            row.graph.declared,
            _measured(row, color),
            str(row.cases),
            row.probes,
        ]
        for row in rows
    ]
    headings, *lines = table([["backend", "declared", "measured", "cases", "probes"], *cells]).splitlines()
    told = [f"{line}\n{_level_notes(row, rows)}".rstrip() for line, row in zip(lines, rows, strict=True)]
    for backend, counts in unmeasured.items():
        own = [index for index, row in enumerate(rows) if row.backend == backend]
        text = ", ".join(f"{phrases.plural(count, 'case')} {outcome}" for outcome, count in counts.items())
        if own:
            told[own[-1]] += f"\n  and {text}"
        else:
            told.append(wrap(f"{phrases.one_line(backend)}: {text}"))
    recorders = ", ".join(dict.fromkeys(row.graph.recorder for row in rows))
    return "\n".join([f"CUDA-graph levels (recorder: {recorders})", "", headings, *told, "", wrap(legend(rows))])


def _level_notes(row: LevelRow, rows: Sequence[LevelRow]) -> str:
    example = phrases.one_line(row.results[0].cases[0])
    notes = [f"cases such as {example}" if row.cases > 1 else f"case {example}"]
    if [other.backend for other in rows].count(row.backend) == 1:
        notes.clear()
    notes += [phrases.why_no_higher(row, width=HINT_WIDTH if row.falls_short else REASON_WIDTH)]
    notes += [phrases.other_reasons(row)] if row.other_cases else []
    notes += [f"head-room: could declare {row.head_room}"] if row.head_room else []
    if row is next(other for other in rows if other.backend == row.backend):
        notes += [phrases.one_line(note) for note in level_notes(rows).get(row.backend, ())]
    return "\n".join(wrap(note, "  ") for note in notes if note)


def _measured(row: LevelRow, color: bool) -> str:
    text = phrases.measured_level(row.graph.measured)
    return text if row.graph.measured is None else _paint(text, "31" if row.falls_short else "32", color)


def _suite_table(summary: RunSummary, color: bool) -> str:
    """Suites down, backends across, or the other way where few suites meet many backends: passed of examined."""
    cells = [
        [_cell(summary.by_suite.get((backend, suite)), color) for backend in summary.backends]
        for suite in summary.suites
    ]
    names = [phrases.one_line(backend) for backend in summary.backends]
    if len(names) <= max(5, len(summary.suites)):
        rows = [[suite, *row] for suite, row in zip(summary.suites, cells, strict=True)]
        return table([["suite", *names], *rows])
    columns = [[name, *column] for name, column in zip(names, zip(*cells, strict=True), strict=True)]
    return table([["backend", *summary.suites], *columns])


def _functions(header: RunHeader, records: Sequence[Record], provider: str, color: bool) -> str:
    """The functions of one provider with their verdicts, then what is known of those that depart."""
    rows = function_rows(records, provider)
    cells = [HEADINGS, *([row.name, _paint_word(row, color), *row.counts] for row in rows)]
    notes = [wrap(f"{names}: {phrases.printable(note)}", "  ") for names, note in known_departures(rows)]
    known = "\n".join(["known departures", *notes]) if notes else ""
    return "\n\n".join(part for part in (provider_title(header, provider), table(cells), wrap(LEGEND), known) if part)


def _paint_word(row: FunctionRow, color: bool) -> str:
    code = {"equal": "32", "drifted": "32", "judged": "32", "missing": "0"}.get(row.word, "31")
    return _paint(row.word, code, color)


def _cell(tally: OutcomeCounts | None, color: bool) -> str:
    if tally is None or not tally.examined:
        return "-"
    return _paint(f"{tally['passed']}/{tally.examined}", "31" if tally.short else "32", color)


def _paint(text: str, code: str, color: bool) -> str:
    return f"\033[{code}m{text}\033[0m" if color else text


def _failures(summary: RunSummary, header: RunHeader, color: bool) -> list[str]:
    """Each failure in full, up to :data:`SHOWN_FAILURES` a backend and check, then how many more there are.

    What fell short in the same words under several checks, as an exception does, is told once; so are CUDA-graph
    levels that are alike but for their reasons, whatever the case.
    """
    alike: dict[tuple[object, ...], list[Record]] = {}
    for record in summary.short:
        graph = graph_of(record)
        about = (record.case, phrases.what_happened(record)) if graph is None else (without_reasons(graph),)
        alike.setdefault((record.backend, record.outcome, *about), []).append(record)
    told: Counter[tuple[str, str]] = Counter()
    more: Counter[str] = Counter()
    shown = []
    for records in alike.values():
        kind = (records[0].backend, records[0].check)
        told[kind] += 1
        if told[kind] <= SHOWN_FAILURES:
            shown.append(_paragraph(records, summary, header, color))
        else:
            more.update(phrases.one_line(f"{record.backend}, {record.check}") for record in records)
    if more:
        counts = "; ".join(f"{kind}: {count}" for kind, count in more.items())
        shown.append(wrap(f"not shown here: {counts} (`attncheck report --format markdown` tells them all)"))
    return shown


def _paragraph(records: Sequence[Record], summary: RunSummary, header: RunHeader, color: bool) -> str:
    """Who, which case, which checks; then the story of the first record, which speaks for all."""
    first, checks = records[0], ", ".join(dict.fromkeys(record.check for record in records))
    rounds = phrases.rounds_short(summary, first)
    who = f"{phrases.one_line(first.backend)}  {phrases.one_line(first.case)}  {checks}  {rounds}".rstrip()
    heading = f"{_paint(first.outcome, '31', color)}  {who}"
    further = len({record.case for record in records}) - 1
    shared = [f"  and {phrases.plural(further, 'more case')} with the same levels and probes"] if further else []
    return "\n".join([heading, *shared, textwrap.indent(story(first, header), "  ")])


def story(record: Record, header: RunHeader | None = None) -> str:
    """What happened to one record that fell short, what it looks like, and how to repeat it; folded."""
    lines = [phrases.what_happened(record)]
    if isinstance(record, Failed):
        lines += [phrases.printable(detail) for detail in record.details]
        lines += [f"looks like: {phrases.printable(record.meaning)}"] if record.meaning else []
    if isinstance(record, Errored) and (place := raised_at(record.traceback)):
        lines.append(phrases.printable(place))
    if isinstance(record, Crashed):
        lines += [phrases.printable(place) for place in died_at(record.output)]
        words = [phrases.cut(phrases.one_line(line), PRINTED_WIDTH) for line in last_words(record.output)]
        lines += ["printed last:", *(f"  {word}" for word in words)] if words else []
    command = phrases.printable(repro_command(record, header))
    # A path is pasted, too.
    folded = (line if line.startswith("File ") else wrap(line, width=WIDTH - 2) for line in lines)
    return "\n".join([*folded, f"repeat: {command}"])


def _gaps(summary: RunSummary) -> str:
    """What was not examined and why; backends with the same gap share a paragraph."""
    owners: dict[str, list[str]] = {}
    left_out: dict[str, int] = {}
    for backend in summary.backends:
        gaps = [gap for gap in summary.gaps if gap.backend == backend]
        for gap in gaps[:SHOWN_GAPS]:
            text = f"{phrases.gap(gap, len(summary.checks))}, {phrases.gap_outcome(gap)}: {phrases.gap_reasons(gap)}"
            owners.setdefault(text, []).append(phrases.one_line(backend))
        if len(gaps) > SHOWN_GAPS:
            left_out[phrases.one_line(backend)] = len(gaps) - SHOWN_GAPS
    lines = [wrap(f"{', '.join(backends)}: {text}", "  ") for text, backends in owners.items()]
    lines += [wrap(f"{name}: and for {phrases.plural(n, 'further reason')}", "  ") for name, n in left_out.items()]
    return "\n".join(["not examined", *lines]) if lines else ""


def _expected(summary: RunSummary) -> str:
    reasons = Counter((record.backend, record.reason) for record in summary.expected)
    return "\n".join(
        wrap(f"fell short as expected: {phrases.one_line(backend)}, {times}: {phrases.printable(reason)}")
        for (backend, reason), count in reasons.items()
        for times in (phrases.plural(count, "time"),)
    )


def _conventions(header: RunHeader, summary: RunSummary) -> str:
    """Each backend's conventions, those that are alike together; beside a foreign backend's name its version."""
    groups: dict[str, list[str]] = {}
    for backend in header.backends:
        if backend.name in summary.backends and backend.conventions:
            is_ours = backend.version in ("", header.environment.attncheck)
            name = backend.name if is_ours else f"{backend.name} ({backend.version})"
            groups.setdefault(phrases.conventions(backend), []).append(phrases.one_line(name))
    return "\n".join(wrap(f"conventions of {', '.join(names)}: {text}") for text, names in groups.items())
