"""Measured CUDA-graph levels: rows of the declared level, the measured level and the probe that failed.

Cases with equal layer and cache share one examination, whose result is on the record of each. This module merges such
records, together with those that differ only in the figures of a reason or in the probes played. It computes rows;
``document.graph_levels`` makes tables of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from attncheck.reports.analysis.reasons import without_figures
from attncheck.reports.run_file.graph_levels import (
    CUDAGRAPH,
    GRAPH_LEVELS,
    PADDING_EFFECT,
    PADDING_FAULTS,
    GraphLevel,
    GraphLevels,
    GraphProbe,
    PaddingRows,
    worst_padding,
)
from attncheck.reports.run_file.records import EXAMINED, OUTCOMES, Record, XFailed, graph_of

LEGEND = "probes: passed / run; head-room: the backend may declare this higher level"

LEGEND_OF_EMULATION = "emulated: no GPU, the operators of forward are recorded and replayed on the CPU"


@dataclass(frozen=True)
class LevelResult:
    """One result, with all probes of its row, and the ``cases`` (``suite/id``) that have it."""

    graph: GraphLevels
    cases: tuple[str, ...]


@dataclass(frozen=True)
class LevelRow:
    """Results of one backend that differ only in their reasons, those with most cases first.

    ``graph``: what they share, that is, the levels and the outcome of every probe, without reasons. ``notes``: the
    notes of all of them. ``padding_rows``: their worst state. ``repeats``: an earlier row of the backend broke at the
    same probe for the same reason.
    """

    backend: str
    graph: GraphLevels
    results: tuple[LevelResult, ...]
    notes: tuple[str, ...] = ()
    padding_rows: PaddingRows = "not examined"
    repeats: bool = False

    @property
    def cases(self) -> int:
        """The number of cases in the row."""
        return sum(len(result.cases) for result in self.results)

    @property
    def other_cases(self) -> int:
        """The number of cases with another reason than :attr:`broke_at`."""
        return self.cases - len(self.results[0].cases)

    @property
    def broke_at(self) -> GraphProbe | None:
        """The first probe that failed or could not be examined, with the reason of most cases, or None."""
        return broken_probe(self.results[0].graph)

    @property
    def proven(self) -> GraphLevel:
        """The measured level; if it is unknown, the highest level up to which all probes passed."""
        if self.graph.measured is not None:
            return self.graph.measured
        open_levels = [GRAPH_LEVELS.index(probe.level) for probe in self.graph.probes if probe.outcome != "passed"]
        return GRAPH_LEVELS[max(min(open_levels, default=0) - 1, 0)]

    @property
    def head_room(self) -> GraphLevel | None:
        """The level that could be declared instead of a lower one, or None."""
        return self.proven if GRAPH_LEVELS.index(self.proven) > GRAPH_LEVELS.index(self.graph.declared) else None

    @property
    def falls_short(self) -> bool:
        """Whether the measured level is below the declared one."""
        measured = self.graph.measured
        return measured is not None and GRAPH_LEVELS.index(measured) < GRAPH_LEVELS.index(self.graph.declared)

    @property
    def probes(self) -> str:
        """Passed of examined probes, such as ``9/10``."""
        outcomes = [probe.outcome for probe in self.graph.probes]
        passed = outcomes.count("passed")
        return f"{passed}/{passed + outcomes.count('failed')}"


def level_rows(records: Sequence[Record]) -> tuple[LevelRow, ...]:
    """Return the rows of a run: backends in the order of the records, rows with most cases first.

    Cases with equal levels and the same broken probe form one row, whichever probes each of them played. A row that
    breaks at the same probe for the same reason as an earlier one comes directly after it.
    """
    groups: dict[tuple[str, GraphLevels], dict[GraphLevels, dict[str, None]]] = {}
    found: dict[tuple[str, GraphLevels], list[GraphLevels]] = {}
    for record in records:
        if (graph := graph_of(record)) is not None:
            broken = broken_probe(graph)
            alike = graph.model_copy(update={"probes": () if broken is None else (broken,)})
            group = (record.backend, without_reasons(_without_notes(alike)))
            bare = _without_notes(graph).model_copy(update={"played_in_full": graph.played_in_full})
            groups.setdefault(group, {}).setdefault(bare, {})[record.case] = None
            found.setdefault(group, []).append(graph)
    rows = [_row(backend, members, found[backend, key]) for (backend, key), members in groups.items()]
    order = list(dict.fromkeys(record.backend for record in records))
    rows.sort(key=lambda row: (order.index(row.backend), -row.cases))
    same_end: dict[tuple[str, GraphProbe | None], list[LevelRow]] = {}
    for row in rows:
        same_end.setdefault((row.backend, row.broke_at), []).append(row)
    return tuple(
        replace(row, repeats=row.broke_at is not None and row is not members[0])
        for members in same_end.values()
        for row in members
    )


def unmeasured_cases(records: Sequence[Record]) -> dict[str, dict[str, int]]:
    """Return, by backend and outcome, how many cases raised or died before a level was measured; zeros are left out."""
    cases: dict[str, dict[str, set[str]]] = {}
    for record in records:
        if record.check == CUDAGRAPH and record.outcome in EXAMINED and graph_of(record) is None:
            outcome = record.underlying if isinstance(record, XFailed) else record.outcome
            cases.setdefault(record.backend, {}).setdefault(outcome, set()).add(record.case)
    return {
        backend: {outcome: len(by_outcome[outcome]) for outcome in OUTCOMES if outcome in by_outcome}
        for backend, by_outcome in cases.items()
    }


def level_notes(rows: Sequence[LevelRow]) -> dict[str, tuple[str, ...]]:
    """Return, by backend, the distinct notes on how its levels were measured; backends without notes are left out."""
    notes: dict[str, dict[str, None]] = {}
    for row in rows:
        for note in row.notes:
            notes.setdefault(row.backend, {})[note] = None
    return {backend: tuple(found) for backend, found in notes.items()}


def notes_of(graph: GraphLevels) -> tuple[str, ...]:
    """Return the notes on one level: how it was measured, and what was found beside it."""
    notes = list(graph.notes)
    if graph.padding_rows in PADDING_FAULTS:
        notes.append(f"{PADDING_FAULTS[graph.padding_rows]}; {PADDING_EFFECT}")
    notes += [f"{claim.name} is declared, {claim.outcome}" for claim in graph.claims if claim.outcome != "passed"]
    if graph.played_in_full:
        notes.append(f"probes are shared out over layers and caches; that of {graph.played_in_full} played all of them")
    return tuple(notes)


def legend(rows: Sequence[LevelRow]) -> str:
    """Return the legend of these rows."""
    emulated = any(row.graph.recorder == "emulated" for row in rows)
    return "; ".join([LEGEND_OF_EMULATION, LEGEND] if emulated else [LEGEND])


def broken_probe(graph: GraphLevels) -> GraphProbe | None:
    """Return the first probe that failed or could not be examined, or None."""
    return next((probe for probe in graph.probes if probe.outcome in ("failed", "not examined")), None)


def without_reasons(graph: GraphLevels) -> GraphLevels:
    """Return a copy without the reasons of its probes."""
    probes = tuple(probe.model_copy(update={"reason": ""}) for probe in graph.probes)
    return graph.model_copy(update={"probes": probes})


def _without_notes(graph: GraphLevels) -> GraphLevels:
    return graph.model_copy(update={"notes": (), "played_in_full": "", "padding_rows": "not examined", "claims": ()})


def _row(backend: str, members: Mapping[GraphLevels, Iterable[str]], found: Sequence[GraphLevels]) -> LevelRow:
    """Return the row of cases that are alike. Each result gets the probes of all, since these hold for the whole row.

    ``found``: the levels of its records, with their notes. If a case played only some probes and its reasons differ
    only in figures, it gets the reasons of the case that played all of them.
    """
    played: dict[str, GraphProbe] = {}
    for graph in sorted(members, key=lambda each: (bool(each.played_in_full), -len(each.probes))):
        for probe in graph.probes:
            played.setdefault(probe.name, probe)
    ladder = sorted(played.values(), key=lambda probe: GRAPH_LEVELS.index(probe.level))
    cases: dict[GraphLevels, tuple[str, ...]] = {}
    for graph, own_cases in members.items():
        own = {
            probe.name: probe
            for probe in graph.probes
            if not graph.played_in_full or without_figures(probe.reason) != without_figures(played[probe.name].reason)
        }
        probes = tuple(own.get(probe.name, probe) for probe in ladder)
        whole = _without_notes(graph).model_copy(update={"probes": probes})
        cases[whole] = (*cases.get(whole, ()), *own_cases)
    results = sorted(
        (LevelResult(graph, tuple(own)) for graph, own in cases.items()), key=lambda each: -len(each.cases)
    )
    notes = dict.fromkeys(note for graph in found for note in notes_of(graph))
    padding = worst_padding(graph.padding_rows for graph in found)
    return LevelRow(backend, without_reasons(results[0].graph), tuple(results), tuple(notes), padding)
