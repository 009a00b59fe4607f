"""CUDA-graph levels as Markdown: a table of rows, then the probes of each group of equal rows."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from attncheck.reports.analysis import phrases
from attncheck.reports.analysis.graph_levels import LevelRow, legend, level_notes
from attncheck.reports.analysis.reasons import joined, without_figures
from attncheck.reports.markdown import markup
from attncheck.reports.run_file.graph_levels import GraphProbe

SHOWN_REASONS = 5
"""Maximum reasons shown, those with most cases first; reasons that differ in more than figures are always shown."""

HEADINGS = ("backend", "declared", "measured", "cases", "recorder", "probes", "why no higher", "head-room")

Probes = tuple[GraphProbe, ...]


def graph_levels(rows: Sequence[LevelRow], unmeasured: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return the table of declared and measured levels, then every probe; [] if the run measured none.

    ``unmeasured``: by backend and outcome, the number of cases without a level; each makes a row.
    """
    if not rows:
        return []
    backends = dict.fromkeys([*(row.backend for row in rows), *unmeasured])
    table = [cells for backend in backends for cells in _rows(backend, rows, unmeasured.get(backend, {}))]
    alike: dict[tuple[object, ...], list[LevelRow]] = {}
    for row in rows:
        alike.setdefault((row.backend, row.graph.measured, row.graph.probes), []).append(row)
    return [
        "## CUDA-graph levels",
        f"{markup.escaped(legend(rows))}.",
        markup.table(HEADINGS, table),
        "\n".join(
            f"- {markup.escaped(backend)}: {markup.escaped('; '.join(notes))}."
            for backend, notes in level_notes(rows).items()
        ),
        *(section for members in alike.values() for section in _probes(members)),
    ]


def _rows(backend: str, rows: Sequence[LevelRow], unmeasured: Mapping[str, int]) -> Iterator[list[str]]:
    for row in rows:
        if row.backend == backend:
            yield [
                markup.escaped(backend),
                row.graph.declared,
                _measured(row),
                str(row.cases),
                row.graph.recorder,
                row.probes,
                _why_no_higher(row),
                f"could declare {row.head_room}" if row.head_room else "-",
            ]
    for outcome, count in unmeasured.items():
        yield [markup.escaped(backend), "-", f"**{outcome}**", str(count), "-", "-", "-", "-"]


def _measured(row: LevelRow) -> str:
    text = phrases.measured_level(row.graph.measured)
    return f"**{text}**" if row.falls_short else text


def _why_no_higher(row: LevelRow) -> str:
    others = f" ({phrases.other_reasons(row)})" if row.other_cases else ""
    return f"{markup.escaped(phrases.why_no_higher(row))}{others}" or "-"


def _probes(rows: Sequence[LevelRow]) -> list[str]:
    """Return the section of rows with equal probe outcomes: the probes, then the cases by what differs."""
    cases: dict[Probes, list[str]] = {}
    for row in rows:
        for result in row.results:
            cases.setdefault(result.graph.probes, []).extend(result.cases)
    found = sorted(cases, key=lambda probes: -len(cases[probes]))
    differing = [index for index, column in enumerate(zip(*found, strict=True)) if len(set(column)) > 1]
    measured = phrases.measured_level(rows[0].graph.measured)
    declared = " or ".join(dict.fromkeys(row.graph.declared for row in rows))
    count = phrases.plural(sum(row.cases for row in rows), "case")
    return [
        f"### {markup.escaped(rows[0].backend)}: declared {declared}, measured {measured}, {count}",
        markup.table(["probe", "level", "outcome", "reason"], _told(found, differing)),
        markup.table(["reason", "cases"], _by_reason(cases, found, differing)) if differing else "",
        _by_declared(rows) if len(rows) > 1 or not differing else "",
    ]


def _told(found: Sequence[Probes], differing: Sequence[int]) -> Iterator[list[str]]:
    """Yield a row for each probe; probes that were not run because of one broken probe share a row."""
    columns = list(zip(*found, strict=True))

    def key(index: int) -> object:
        column = columns[index]
        return tuple(probe.reason for probe in column) if column[0].outcome == "not run" else index

    for _, indices in groupby(range(len(columns)), key):
        first, *others = group = list(indices)
        probe, last = columns[first][0], columns[group[-1]][0]
        yield [
            f"{phrases.plural(len(group), 'probe')} behind it" if others else markup.escaped(probe.name),
            probe.level if probe.level == last.level else f"{probe.level} to {last.level}",
            phrases.probe_outcome(probe),
            "see below" if first in differing else markup.escaped(joined(probe.reason)) or "-",
        ]


def _by_reason(
    cases: Mapping[Probes, Sequence[str]], found: Sequence[Probes], differing: Sequence[int]
) -> Iterator[list[str]]:
    """Yield reasons with their cases; those that differ only in figures are merged beyond :data:`SHOWN_REASONS`."""
    kinds: dict[tuple[str, ...], Probes] = {}
    for probes in found:
        kinds.setdefault(tuple(without_figures(probe.reason) for probe in probes), probes)
    different = list(kinds.values())
    alike = [probes for probes in found if probes not in different]
    room = max(SHOWN_REASONS - len(different), 0)
    for probes in [*different, *alike[:room]]:
        reasons = dict.fromkeys(joined(probes[index].reason) for index in differing)
        yield [markup.escaped("; ".join(reasons)), _names(cases[probes])]
    if further := alike[room:]:
        names = [case for probes in further for case in cases[probes]]
        yield [f"{len(further)} more that differ in figures alone", _names(names)]


def _by_declared(rows: Sequence[LevelRow]) -> str:
    return "\n".join(
        f"{'- ' if len(rows) > 1 else ''}Cases{f' that declare {row.graph.declared}' if len(rows) > 1 else ''}: "
        + _names([case for result in row.results for case in result.cases])
        for row in rows
    )


def _names(cases: Sequence[str]) -> str:
    return markup.escaped(", ".join(cases))
