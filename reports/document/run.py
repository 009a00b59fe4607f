"""The sections of a run by name: tables of outcomes, times, and what the results depend on.

Findings are in ``failures.py``, measured support and CUDA-graph levels in ``support.py``.
"""

import shlex
from collections.abc import Mapping, Sequence
from typing import Protocol

from attncheck.reports.analysis import phrases
from attncheck.reports.analysis.phrases import one_line, plural, sentence
from attncheck.reports.analysis.summary import OutcomeCounts
from attncheck.reports.analysis.utilities import HEADINGS, LEGEND, function_rows, notes_by_heading, provider_title
from attncheck.reports.document.bits import bits
from attncheck.reports.document.blocks import (
    BREAK,
    Block,
    Colour,
    Folded,
    Heading,
    Item,
    Items,
    Paragraph,
    SectionName,
    Span,
    Table,
    Text,
    listed,
    table,
)
from attncheck.reports.document.failures import expected, failures, verdict
from attncheck.reports.document.run_values import RunValues
from attncheck.reports.document.support import graph_levels, support
from attncheck.reports.run_file.records import EXAMINED, UTILITIES, bits_of
from attncheck.reports.run_file.timings import Kernel
from attncheck.reports.speeds.notes import doubts, fastest_note, legend, rounds_note, speed_notes
from attncheck.reports.speeds.tables import SpeedTable, speed_tables, summary_tables, time_unit, traffic

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
    share = counts.worst_share
    worst = Span(phrases.budgets(share), colour="red" if share is not None and share > 1 else "")
    return [*([worst] if run.summary.has_errors_measured else []), str(counts.not_examined or "-")]


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


ABOUT = "About these figures"


def timings(run: RunValues, *, whole: bool) -> list[Block]:
    """Return the means of each suite and notes, or [] if nothing was timed; whole, also every case and kernels."""
    if not run.speeds:
        return []
    short = summary_tables(run.speeds)
    weighted = {each.suite: each for each in traffic(run.header, run.speeds)}
    blocks: list[Block] = [Heading(2, "Speeds")] if whole else []
    tables = speed_tables(run.speeds)
    for means, cases in zip(short, tables, strict=True):
        blocks.append(Heading(3, means.suite if whole else f"Speeds in {means.suite}"))
        blocks += [Paragraph(f"{sentence(averaged(means))}:"), _table(means)]
        if (calls := weighted.get(means.suite)) is not None:
            blocks += [Paragraph(f"{calls.title}:"), _table(calls.table)]
        blocks += [Paragraph("Each case:"), _table(cases, is_cut=False)] if whole else []
    notes = speed_notes(run.speeds)
    if whole:
        return [*blocks, Heading(3, ABOUT), Paragraph(f"{legend(tables)}."), *listed(notes), *_kernels(run)]
    first = [*fastest_note(short), *rounds_note(run.speeds), *doubts(run.speeds)]
    others = listed([note for note in notes if note not in first])
    return [*blocks, *listed(first), *([Folded(ABOUT, tuple(others))] if others else [])]


def averaged(summary: SpeedTable) -> str:
    """Return what the means of a table are averaged over, and whether its rows can be compared."""
    if not summary.averaged:
        return "no case was timed for every backend: each mean is over the backend's own cases, so do not compare them"
    return f"geometric means of {plural(summary.averaged, 'case')} timed for every backend"


def _table(speeds: SpeedTable, *, is_cut: bool = True) -> Table:
    rows = tuple(tuple(map(one_line, row)) for row in speeds.rows)
    return Table(tuple(map(one_line, speeds.headings)), rows, is_cut=is_cut)


def _kernels(run: RunValues) -> list[Block]:
    """Return the kernels of one step of each case, from the first round that recorded them with the profiler."""
    found: list[tuple[str, str, Kernel]] = []
    for speed in run.speeds:
        if speed.part == "forward":
            kernels = next((timing.kernels for timing in speed.timings if timing.kernels), ())
            found += [(speed.case, speed.backend, kernel) for kernel in kernels]
    if not found:
        return []
    unit = time_unit(kernel.duration_ns / max(kernel.count, 1) for _, _, kernel in found)
    headings = ("case", "backend", "kernel", "launches", f"all together ({unit.name})")
    rows: list[list[Text]] = [
        [case, backend, Span(kernel.name, is_code=True), str(kernel.count), unit.text(kernel.duration_ns)]
        for case, backend, kernel in found
    ]
    return [Heading(3, "Kernels"), table(headings, rows)]


def unexamined(run: RunValues, *, whole: bool) -> list[Block]:
    """Return what was not examined and why, backends with equal gaps together.

    In brief, one line counts it, and one prints sections whole. A run that examined nothing has all reasons in brief.
    """
    summary = run.summary
    if not whole and summary.total.examined:
        return _in_brief(run)
    if summary.providers and not summary.backends:
        return []
    backends = summary.backends if whole else run.present
    owners: dict[tuple[str, str, str], list[str]] = {}
    for gap in summary.gaps:
        if gap.backend in backends:
            row = (phrases.gap_outcome(gap), phrases.gap(gap, len(summary.checks)), phrases.gap_reasons(gap))
            owners.setdefault(row, []).append(phrases.one_line(gap.backend))
    if not owners and not whole:
        return []
    if not owners:
        return [Heading(2, "Not examined"), Paragraph("Every selected check was examined.")]
    rows = tuple((", ".join(names), *row) for row, names in owners.items())
    return [
        Heading(2, "Not examined"),
        Paragraph("The run has no verdict on these."),
        Table(("backend", "outcome", "what", "why"), rows, is_named=False),
    ]


def _in_brief(run: RunValues) -> list[Block]:
    gaps = [gap for gap in run.summary.gaps if gap.backend in run.present]
    hidden: dict[SectionName, bool] = {
        "unexamined": bool(gaps),
        "graph-levels": bool(run.found.levels),
        "bits": any(bits_of(record) is not None for record in run.records),
        "timings": bool(run.speeds),
        "functions": any(row.notes for name in run.summary.providers for row in function_rows(run.records, name)),
        "expected": any(finding.is_expected for finding in run.found.findings),
    }
    names = [name for name, is_hidden in hidden.items() if is_hidden]
    lines = [*run.in_full(*names)] if names else []
    if gaps:
        checks = sum(run.summary.by_backend[backend].not_examined for backend in run.present)
        cases = {
            (record.suite, record.case_id)
            for record in run.records
            if record.outcome not in EXAMINED and record.backend in run.present and record.check != UTILITIES
        }
        counted = f"{phrases.plural(checks, 'check')} of {phrases.plural(len(cases), 'case')}"
        reasons = len({(gap.outcome, gap.by, gap.checks, gap.cases, gap.reasons) for gap in gaps})
        lines.insert(0, Item(f"not examined: {counted} ({phrases.plural(reasons, 'reason')})"))
    return [Items(tuple(lines))] if lines else []


def conventions(run: RunValues, *, whole: bool) -> list[Block]:
    """Return each backend's conventions, merged if equal; [] in brief. A backend of another project has its version."""
    groups: dict[str, list[str]] = {}
    for backend in run.header.backends:
        if whole and backend.name in run.present and backend.conventions:
            is_ours = backend.version in ("", run.header.environment.attncheck)
            name = backend.name if is_ours else f"{backend.name} ({backend.version})"
            groups.setdefault(phrases.conventions(backend), []).append(phrases.one_line(name))
    return listed([f"conventions of {', '.join(names)}: {text}" for text, names in groups.items()])


def circumstances(run: RunValues, *, whole: bool) -> list[Block]:
    """Return the suites, the machine, versions, policy and time of the run; [] in brief."""
    if not whole:
        return []
    lines = [Item(f"{name}: {value}") for name, value in facts(run).items()]
    if run.header.command:
        lines.append(Item(("Command: ", Span(shlex.join(run.header.command), is_code=True))))
    lines += [Item(f"Notes: {'; '.join(run.header.notes)}")] if run.header.notes else []
    return [Heading(2, "Circumstances"), Items(tuple(lines))]


def facts(run: RunValues) -> dict[str, str]:
    """Return the suites, the machine, versions, policy and time, without what the run does not have."""
    header, env = run.header, run.header.environment
    found = {
        "Suites": ", ".join(f"{suite.name} ({phrases.suite_size(suite)})" for suite in header.suites),
        "Shard": header.shard,
        "Checks": ", ".join(header.checks),
        "Rounds": f"{header.rounds}, each in a process of its own" if header.rounds > 1 else "",
        "Seed": str(header.seed),
        "Device": f"{header.device}: {env.device_name}"
        + (f", compute capability {env.capability}" if env.capability else "")
        + (f", driver {env.driver}" if env.driver else ""),
        "Machine": f"{env.cpu}, {phrases.plural(env.cores, 'core')}, {env.platform}",
        "Versions": f"attncheck {env.attncheck}, torch {env.torch}, numpy {env.numpy}, Python {env.python}"
        + (f", commit {env.git_commit}" if env.git_commit else ""),
        "Policy": f"TF32 {'on' if env.tf32 else 'off'}, "
        f"deterministic algorithms {'on' if env.deterministic else 'off'}",
        "Started": header.started + (f", finished {run.finished}" if run.finished else ""),
    }
    return {name: value for name, value in found.items() if value}


class Section(Protocol):
    """Returns the blocks of a run; not ``whole``: what the first screen has of them."""

    def __call__(self, run: RunValues, *, whole: bool) -> list[Block]: ...  # noqa: D102


SECTIONS: Mapping[SectionName, Section] = {
    "verdict": verdict,
    "table": outcomes,
    "failures": failures,
    "graph-levels": graph_levels,
    "bits": bits,
    "support": support,
    "timings": timings,
    "functions": functions,
    "expected": expected,
    "unexamined": unexamined,
    "conventions": conventions,
    "circumstances": circumstances,
}


def blocks(run: RunValues, names: Sequence[SectionName], *, whole: bool) -> list[Block]:
    """Return the blocks of the named sections, in the order of the names."""
    return [block for name in names for block in SECTIONS[name](run, whole=whole)]


def chosen(run: RunValues, names: Sequence[SectionName]) -> list[Block]:
    """Return the blocks of the named sections, whole, or a sentence if the run has none of them."""
    return blocks(run, names, whole=True) or [Paragraph(f"The run has no {' and no '.join(names)}.")]
