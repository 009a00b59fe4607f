"""What a check saw, as one of three kinds of value. Must not know: backends.

``graph``, in each of them: the levels and probes of the check ``cudagraph``, which records carry as they are; so do
they ``timing``, the times of the check ``timing``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from attncheck.harness.driver.observation import Raised
from attncheck.reports.run_file.graph_levels import GraphLevels
from attncheck.reports.run_file.timings import Timing

Figures = Mapping[str, float | int]


@dataclass(frozen=True)
class Holds:
    """The property holds; ``figures`` measure by how much, ``notes`` what a reader should know all the same."""

    figures: Figures = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    graph: GraphLevels | None = None
    timing: Timing | None = None


@dataclass(frozen=True)
class Broken:
    """The property does not hold. ``summary``: one line, where and how much; ``meaning``: what it looks like."""

    summary: str
    figures: Figures = field(default_factory=dict)
    meaning: str | None = None
    details: tuple[str, ...] = ()
    graph: GraphLevels | None = None
    timing: Timing | None = None


@dataclass(frozen=True)
class NotExamined:
    """Nothing was examined, for these reasons; ``by`` says whose limit it is."""

    reasons: tuple[str, ...]
    by: Literal["backend", "attncheck"] = "backend"
    graph: GraphLevels | None = None


Finding = Holds | Broken | NotExamined | Raised
