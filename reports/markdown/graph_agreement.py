"""Whether two runs measure the same CUDA-graph levels, case by case, such as by real graphs and by their emulation.

Cases that come out alike on both sides share a row. Must not know: how graphs are recorded, where runs come from.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from attncheck.reports.analysis import phrases
from attncheck.reports.analysis.graph_levels import broken_probe
from attncheck.reports.markdown import markup
from attncheck.reports.run_file.graph_levels import GraphLevels, GraphProbe
from attncheck.reports.run_file.records import Crashed, Errored, Record, Unavailable, Unsupported, graph_of

CHECK = "cudagraph"

Agreement = Literal["yes", "yes, at another probe", "no", "cannot tell"]

LEGEND = (
    "Measured is the highest level whose probes, and those of the levels below, all came out right; beneath it stands "
    "the first probe that did not. Cannot tell: one side at least examined nothing."
)

WIDTH = 160
"""Characters shown of a verdict without a level."""


@dataclass(frozen=True)
class Side:
    """What one run says of a case. ``verdict``: outcome and, where nothing was measured, why; ``graph``: else."""

    verdict: str
    graph: GraphLevels | None = None
    examined: bool = True

    @property
    def measured(self) -> str:
        """The level measured, or the verdict without one."""
        return phrases.measured_level(self.graph.measured) if self.graph else self.verdict

    @property
    def broke_at(self) -> GraphProbe | None:
        """The first probe that failed or could not be examined."""
        return broken_probe(self.graph) if self.graph else None

    @property
    def alike(self) -> tuple[object, ...]:
        """What must be equal for two sides to say the same."""
        return (self.verdict, self.graph and self.graph.declared, self.graph and self.graph.measured, self.examined)


@dataclass(frozen=True)
class Comparison:
    """What both sides say of one backend, and all ``cases`` (``suite/id``) of which they say it."""

    backend: str
    left: Side
    right: Side
    cases: tuple[str, ...]

    @property
    def agreement(self) -> Agreement:
        """Whether outcome, declared and measured level are the same; the probe that broke may be another."""
        if not (self.left.examined and self.right.examined):
            return "cannot tell"
        if self.left.alike != self.right.alike:
            return "no"
        return "yes" if _name(self.left.broke_at) == _name(self.right.broke_at) else "yes, at another probe"


def compare(left: Iterable[Record], right: Iterable[Record]) -> tuple[Comparison, ...]:
    """Both runs' records of the check ``cudagraph``; backends as they come, rows with most cases first."""
    asked = [
        {(record.backend, record.case): record for record in run if record.check == CHECK} for run in (left, right)
    ]
    rows: dict[tuple[object, ...], Comparison] = {}
    for backend, case in dict.fromkeys([*asked[0], *asked[1]]):
        one, other = (_side(run.get((backend, case))) for run in asked)
        alike = (backend, *((side.alike, _name(side.broke_at)) for side in (one, other)))
        known = rows.get(alike, Comparison(backend, one, other, cases=()))
        rows[alike] = replace(known, cases=(*known.cases, case))
    backends = list(dict.fromkeys(row.backend for row in rows.values()))
    return tuple(sorted(rows.values(), key=lambda row: (backends.index(row.backend), -len(row.cases))))


def tally(rows: Sequence[Comparison]) -> str:
    """How many cases agree, in one line."""
    words: dict[Agreement, str] = {"no": "differ", "cannot tell": "cannot be compared"}
    counts = dict.fromkeys(("agree", *words.values()), 0)
    for row in rows:
        counts[words.get(row.agreement, "agree")] += len(row.cases)
    total = phrases.plural(sum(counts.values()), "case")
    return f"{total} of all backends: {', '.join(f'{count} {what}' for what, count in counts.items())}"


def render(rows: Sequence[Comparison], left: str, right: str) -> str:
    """The table as Markdown, then what each side says where they differ; ``left``, ``right``: names."""
    headings = ["backend", "cases", "declared", f"measured, {left}", f"measured, {right}", "agree"]
    return "\n\n".join(
        [f"{tally(rows)}.", LEGEND, markup.table(headings, map(_cells, rows)), *_stories(rows, left, right)]
    )


def _name(probe: GraphProbe | None) -> str:
    return probe.name if probe else ""


def _side(record: Record | None) -> Side:
    match record:
        case None:
            return Side("no record", examined=False)
        case Unsupported() | Unavailable():
            return Side(f"{record.outcome}: {'; '.join(record.reasons)}", graph_of(record), examined=False)
        case Errored() | Crashed():
            return Side(f"{record.outcome}: {phrases.what_happened(record)}")
        case _:
            graph = graph_of(record)
            return Side(record.outcome, graph, examined=graph is None or graph.measured is not None)


def _cells(row: Comparison) -> list[str]:
    declared = dict.fromkeys(side.graph.declared for side in (row.left, row.right) if side.graph)
    first, *more = row.cases
    return [
        markup.escaped(row.backend),
        markup.escaped(f"{first} and {len(more)} more" if more else first),
        " / ".join(declared) or "-",
        _measured(row.left),
        _measured(row.right),
        f"**{row.agreement}**" if row.agreement == "no" else row.agreement,
    ]


def _measured(side: Side) -> str:
    broke_at = f"<br>{markup.escaped(side.broke_at.name)}" if side.broke_at else ""
    return f"{markup.escaped(phrases.cut(side.measured, WIDTH))}{broke_at}"


def _stories(rows: Sequence[Comparison], left: str, right: str) -> list[str]:
    """Each row where the sides say different things: its cases, and both sides in full."""
    told = []
    for row in rows:
        if row.left.alike == row.right.alike and row.agreement != "yes, at another probe":
            continue
        sides = [f"- {name}: {_story(side)}" for name, side in ((left, row.left), (right, row.right))]
        told += [f"### {markup.escaped(row.backend)}: {row.agreement}"]
        told += [f"Cases: {markup.escaped(', '.join(row.cases))}", "\n".join(sides)]
    return told


def _story(side: Side) -> str:
    words = [side.verdict]
    if side.graph:
        words.append(f"measured {side.measured}")
    if side.broke_at:
        words.append(phrases.broke_at(side.broke_at))
    return markup.escaped("; ".join(words))
