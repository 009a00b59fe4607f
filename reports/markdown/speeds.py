"""Speeds as Markdown: every case, part and backend, notes on the figures, and the kernels that ran."""

from collections.abc import Sequence

from attncheck.reports.markdown import markup
from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.timings import Kernel
from attncheck.reports.speeds.notes import legend, speed_notes
from attncheck.reports.speeds.speed import Speed
from attncheck.reports.speeds.summary import summary_tables
from attncheck.reports.speeds.tables import SpeedTable, speed_tables, time_unit
from attncheck.reports.speeds.traffic import traffic_tables, traffic_title
from attncheck.reports.terminal.speeds import averaged


def speeds_section(header: RunHeader, speeds: Sequence[Speed]) -> list[str]:
    """Return the summary and the whole table of each suite, then notes; [] if nothing was timed."""
    if not speeds:
        return []
    tables = speed_tables(speeds)
    sections = ["## Speeds"]
    traffic = {table.suite: table for table in traffic_tables(header, speeds)}
    for short, whole in zip(summary_tables(speeds), tables, strict=True):
        sections += [f"### {markup.escaped(short.suite)}", *means(short)]
        if short.suite in traffic:
            sections += [f"{traffic_title(traffic[short.suite]).capitalize()}:", rows_of(traffic[short.suite])]
        sections += ["Each case:", rows_of(whole)]
    sections += [
        "### About these figures",
        f"{markup.escaped(legend(tables))}.",
        listed(speed_notes(speeds)),
        *_kernels(speeds),
    ]
    return sections


def means(short: SpeedTable) -> list[str]:
    """Return a suite's table of means, preceded by what they are averaged over."""
    over = averaged(short)
    return [f"{over[:1].upper()}{over[1:]}:", rows_of(short)]


def listed(notes: Sequence[str]) -> str:
    """Return notes as a Markdown list."""
    return "\n".join(f"- {markup.escaped(note)}" for note in notes)


def rows_of(table: SpeedTable) -> str:
    """Return a table of speeds as Markdown."""
    return markup.table(
        [*map(markup.escaped, table.headings)], [[markup.escaped(cell) for cell in row] for row in table.rows]
    )


def _kernels(speeds: Sequence[Speed]) -> list[str]:
    """Return the kernels of one step of each case, from the first round that recorded them with the profiler."""
    rows: list[tuple[str, str, Kernel]] = []
    for speed in speeds:
        if speed.part == "forward":
            kernels = next((timing.kernels for timing in speed.timings if timing.kernels), ())
            rows += [(speed.case, speed.backend, kernel) for kernel in kernels]
    if not rows:
        return []
    unit = time_unit(kernel.duration_ns / max(kernel.count, 1) for _, _, kernel in rows)
    headings = ("case", "backend", "kernel", "launches", f"all together ({unit.name})")
    cells = [
        [
            markup.escaped(case),
            markup.escaped(backend),
            markup.code_cell(kernel.name),
            str(kernel.count),
            unit.text(kernel.duration_ns),
        ]
        for case, backend, kernel in rows
    ]
    return ["### Kernels", markup.table(headings, cells)]
