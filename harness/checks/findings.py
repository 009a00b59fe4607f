"""What a check saw, as one of three kinds of value."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from attncheck.harness.driver.observation import Raised
from attncheck.reports.run_file.graph_levels import GraphLevels
from attncheck.reports.run_file.timings import Timing

Figures = Mapping[str, float | int]


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """What a check measured besides, which the record carries as it is, in the field of the same name.

    ``graph``: levels and probes of the check ``cudagraph``. ``chosen_kernels``: what a library chose to run; None: not
    looked at. ``timing``: times of the check ``timing``.
    """

    graph: GraphLevels | None = None
    chosen_kernels: tuple[str, ...] | None = None
    timing: Timing | None = None


@dataclass(frozen=True)
class Holds(Measurements):
    """The property holds; ``figures`` measure by how much, ``notes`` what a reader should know all the same."""

    figures: Figures = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Broken(Measurements):
    """The property does not hold. ``summary``: one line, where and how much; ``meaning``: the likely cause.

    ``finding``: words that failures of one cause share; empty: the record derives them from meaning or summary.
    ``concerns``: the features that the likely cause is about.
    """

    summary: str
    figures: Figures = field(default_factory=dict)
    meaning: str | None = None
    details: tuple[str, ...] = ()
    finding: str = ""
    concerns: tuple[str, ...] = ()


@dataclass(frozen=True)
class NotExamined(Measurements):
    """Nothing was examined, for these reasons; ``by`` says whose limit it is."""

    reasons: tuple[str, ...]
    by: Literal["backend", "attncheck"] = "backend"


Finding = Holds | Broken | NotExamined | Raised
