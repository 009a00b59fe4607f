"""Which CUDA-graph levels a run measured: rows of what is declared, what is measured, and the probe that broke.

Cases equal in layer and cache share one examination, and its result stands on the record of each of them: here they
come together again, and with them those that differ in nothing but the figures of a reason, or played other probes.
Rows only; tables are made by ``terminal.run`` and ``markdown.graph_levels``.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from attncheck.reports.analysis.reasons import without_figures
from attncheck.reports.run_file.graph_levels import CUDAGRAPH, GRAPH_LEVELS, GraphLevel, GraphLevels, GraphProbe
from attncheck.reports.run_file.records import EXAMINED, OUTCOMES, Record, XFailed, graph_of

LEGEND = "probes: passed of examined; head-room: more is measured than declared"

LEGEND_OF_EMULATION = "emulated: no GPU, the operators of forward are recorded and replayed on the CPU"


@dataclass(frozen=True)
class LevelResult:
    """One result, with the probes of its row, and all ``cases`` (``suite/id``) it stands for."""

    graph: GraphLevels
    cases: tuple[str, ...]


@dataclass(frozen=True)
class LevelRow:
    """Results of one backend that are alike but for their reasons, those with most cases first.

    ``graph`` is what they have in common: the levels and the outcome of every probe, without reasons. ``notes``: of any
    of them. ``repeats``: an earlier row of the backend broke at the same probe for the same reason.
    """

    backend: str
    graph: GraphLevels
    results: tuple[LevelResult, ...]
    notes: tuple[str, ...] = ()
    repeats: bool = False

    @property
    def cases(self) -> int:
        """How many cases the row stands for."""
        return sum(len(result.cases) for result in self.results)

    @property
    def other_cases(self) -> int:
        """How many of them have another reason than :attr:`broke_at`."""
        return self.cases - len(self.results[0].cases)

    @property
    def broke_at(self) -> GraphProbe | None:
        """The first probe that failed or could not be examined, with the reason that most cases have."""
        return broken_probe(self.results[0].graph)

    @property
    def proven(self) -> GraphLevel:
        """The level measured; where that cannot be told, the highest one whose probes, and those below, passed."""
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
        """Whether less is measured than declared."""
        measured = self.graph.measured
        return measured is not None and GRAPH_LEVELS.index(measured) < GRAPH_LEVELS.index(self.graph.declared)

    @property
    def probes(self) -> str:
        """Passed of examined, ``9/10``."""
        outcomes = [probe.outcome for probe in self.graph.probes]
        passed = outcomes.count("passed")
        return f"{passed}/{passed + outcomes.count('failed')}"


def level_rows(records: Sequence[Record]) -> tuple[LevelRow, ...]:
    """The rows of a run: backends in the order in which records first name them, rows with most cases first.

    Cases with equal levels and the same broken probe are one row, whichever probes each of them played.
    A row that breaks at the same probe for the same reason as one before it follows that one.
    """
    groups: dict[tuple[str, GraphLevels], dict[GraphLevels, dict[str, None]]] = {}
    notes: dict[tuple[str, GraphLevels], dict[str, None]] = {}
    for record in records:
        if (told := graph_of(record)) is not None:
            broken = broken_probe(told)
            alike = told.model_copy(update={"probes": () if broken is None else (broken,)})
            group = (record.backend, without_reasons(_without_notes(alike)))
            groups.setdefault(group, {}).setdefault(told.model_copy(update={"notes": ()}), {})[record.case] = None
            notes.setdefault(group, {}).update(dict.fromkeys(notes_of(told)))
    rows = [_row(backend, members, tuple(notes[backend, key])) for (backend, key), members in groups.items()]
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
    """How many cases of each backend raised or died before a level could be told, by outcome; none: no entry."""
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
    """What is to be known of how each backend's levels were measured, each thing once; backends without: no entry."""
    notes: dict[str, dict[str, None]] = {}
    for row in rows:
        for note in row.notes:
            notes.setdefault(row.backend, {})[note] = None
    return {backend: tuple(found) for backend, found in notes.items()}


def notes_of(graph: GraphLevels) -> tuple[str, ...]:
    """Return what is to be known of how one level was measured."""
    if not graph.played_in_full:
        return graph.notes
    shared = f"probes are shared out over layers and caches; that of {graph.played_in_full} played all of them"
    return (*graph.notes, shared)


def legend(rows: Sequence[LevelRow]) -> str:
    """What the words of these rows mean."""
    emulated = any(row.graph.recorder == "emulated" for row in rows)
    return "; ".join([LEGEND_OF_EMULATION, LEGEND] if emulated else [LEGEND])


def broken_probe(graph: GraphLevels) -> GraphProbe | None:
    """The first probe that failed or could not be examined, or None."""
    return next((probe for probe in graph.probes if probe.outcome in ("failed", "not examined")), None)


def without_reasons(graph: GraphLevels) -> GraphLevels:
    """The levels and the outcome of every probe alone."""
    probes = tuple(probe.model_copy(update={"reason": ""}) for probe in graph.probes)
    return graph.model_copy(update={"probes": probes})


def _without_notes(graph: GraphLevels) -> GraphLevels:
    return graph.model_copy(update={"notes": (), "played_in_full": ""})


def _row(backend: str, members: Mapping[GraphLevels, Iterable[str]], notes: tuple[str, ...]) -> LevelRow:
    """Return the row of cases that are alike. Each result has the probes of all: what one played counts for the row.

    A case that played a share has the reason of the one that played every probe, where figures alone differ.
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
    return LevelRow(backend, without_reasons(results[0].graph), tuple(results), notes)
