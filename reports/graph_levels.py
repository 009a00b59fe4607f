"""Which CUDA-graph levels a run measured: rows of what is declared, what is measured, and the probe that broke.

Cases equal in layer and cache share one examination, and its result stands on the record of each of them: here they
come together again. Rows only; tables are made by ``terminal`` and ``markdown``. Must not know: what a probe does,
colours, Markdown.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from attncheck.reports.records import (
    GRAPH_LEVELS,
    GraphLevel,
    GraphLevels,
    GraphProbe,
    GraphRecorder,
    Record,
    graph_of,
)

LEGEND = "probes: passed of examined; head-room: more is measured than declared"

LEGEND_OF_EMULATION = "emulated: no GPU, the operators of forward are recorded and replayed on the CPU"


@dataclass(frozen=True)
class SharedResult:
    """One result, and all ``cases`` (``suite/id``) it stands for."""

    graph: GraphLevels
    cases: tuple[str, ...]


@dataclass(frozen=True)
class LevelRow:
    """What is alike in level and in the first probe that broke; ``results`` may differ in the probes behind that.

    ``measured`` is None where nothing can be said here. ``broke_at``: the first probe that failed or could not be
    examined, None where every probe passed.
    """

    backend: str
    declared: GraphLevel
    measured: GraphLevel | None
    recorder: GraphRecorder
    broke_at: GraphProbe | None
    results: tuple[SharedResult, ...]

    @property
    def cases(self) -> int:
        """How many cases the row stands for."""
        return sum(len(result.cases) for result in self.results)

    @property
    def head_room(self) -> GraphLevel | None:
        """The level that could be declared instead of a lower one, or None."""
        return self.measured if self._above_declared() > 0 else None

    @property
    def falls_short(self) -> bool:
        """Whether less is measured than declared."""
        return self._above_declared() < 0

    @property
    def probes(self) -> str:
        """Passed of examined, ``9/10``; the least and the most where results differ, ``9/10-10/10``."""
        counts = sorted(passed_of_examined(result.graph) for result in self.results)
        return "-".join(f"{passed}/{examined}" for passed, examined in dict.fromkeys((counts[0], counts[-1])))

    def _above_declared(self) -> int:
        if self.measured is None:
            return 0
        return GRAPH_LEVELS.index(self.measured) - GRAPH_LEVELS.index(self.declared)


def level_rows(records: Sequence[Record]) -> tuple[LevelRow, ...]:
    """The rows of a run: backends in the order in which records first name them, rows with most cases first."""
    groups: dict[tuple[str, GraphLevel, GraphLevel | None, GraphRecorder, GraphProbe | None], list[Record]] = {}
    for record in records:
        if (graph := graph_of(record)) is not None:
            group = (record.backend, graph.declared, graph.measured, graph.recorder, broken_probe(graph))
            groups.setdefault(group, []).append(record)
    rows = [LevelRow(*group, results=_results(members)) for group, members in groups.items()]
    order = list(dict.fromkeys(record.backend for record in records))
    return tuple(sorted(rows, key=lambda row: (order.index(row.backend), -row.cases)))


def legend(rows: Sequence[LevelRow]) -> str:
    """What the words of these rows mean."""
    emulated = any(row.recorder == "emulated" for row in rows)
    return "; ".join([LEGEND_OF_EMULATION, LEGEND] if emulated else [LEGEND])


def broken_probe(graph: GraphLevels) -> GraphProbe | None:
    """The first probe that failed or could not be examined, or None."""
    return next((probe for probe in graph.probes if probe.outcome in ("failed", "not examined")), None)


def passed_of_examined(graph: GraphLevels) -> tuple[int, int]:
    """How many probes passed, and how many either passed or failed."""
    outcomes = [probe.outcome for probe in graph.probes]
    passed = outcomes.count("passed")
    return passed, passed + outcomes.count("failed")


def subject(record: Record) -> GraphLevels | str:
    """What a record that fell short is about: the result it shares with other cases, else its own case."""
    graph = graph_of(record)
    return record.case if graph is None else graph


def _results(records: Sequence[Record]) -> tuple[SharedResult, ...]:
    cases: dict[GraphLevels, list[str]] = {}
    for record in records:
        if (graph := graph_of(record)) is not None:
            cases.setdefault(graph, []).append(record.case)
    return tuple(SharedResult(graph, tuple(dict.fromkeys(names))) for graph, names in cases.items())
