"""Results of a check: ``Holds``, ``Broken`` or ``NotExamined``, or ``Raised`` if the backend raised."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from attncheck.harness.driver.observation import Raised
from attncheck.reports.run_file.graph_levels import GraphLevels
from attncheck.reports.run_file.timings import Timing

Figures = Mapping[str, float | int]


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """Additional measurements of a check, copied unchanged into the record field of the same name.

    ``graph``: levels and probes of the check ``cudagraph``. ``chosen_kernels``: names of the kernels that a library
    chose, or None if not examined. ``timing``: times of the check ``timing``.
    """

    graph: GraphLevels | None = None
    chosen_kernels: tuple[str, ...] | None = None
    timing: Timing | None = None


@dataclass(frozen=True)
class Holds(Measurements):
    """The property holds. ``figures``: measured margins. ``notes``: facts a reader should see although it holds."""

    figures: Figures = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Broken(Measurements):
    """The property does not hold. ``summary``: one line, where and by how much. ``meaning``: the likely cause.

    ``finding``: a text shared by failures with one cause; if empty, the record derives it from meaning or summary.
    ``concerns``: the features that the likely cause involves.
    """

    summary: str
    figures: Figures = field(default_factory=dict)
    meaning: str | None = None
    details: tuple[str, ...] = ()
    finding: str = ""
    concerns: tuple[str, ...] = ()


@dataclass(frozen=True)
class NotExamined(Measurements):
    """Nothing was examined, for ``reasons``. ``by``: whose limitation this is."""

    reasons: tuple[str, ...]
    by: Literal["backend", "attncheck"] = "backend"


Finding = Holds | Broken | NotExamined | Raised
