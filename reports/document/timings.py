"""Times: means of each suite and notes on the figures; whole also every case and the kernels that ran."""

from attncheck.reports.analysis.phrases import one_line, plural, sentence
from attncheck.reports.document.blocks import (
    Block,
    Folded,
    Heading,
    Paragraph,
    Span,
    Table,
    Text,
    listed,
    table,
)
from attncheck.reports.document.run_values import RunValues
from attncheck.reports.run_file.timings import Kernel
from attncheck.reports.speeds.notes import doubts, fastest_note, legend, rounds_note, speed_notes
from attncheck.reports.speeds.summary import summary_tables
from attncheck.reports.speeds.tables import SpeedTable, speed_tables, time_unit
from attncheck.reports.speeds.traffic import traffic

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
