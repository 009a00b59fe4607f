"""Two runs compared: speeds, outcomes, what only one of them asked, and what they were made with.

Cases are matched by ``suite/id`` and by their hash: a case that was rewritten is another question. Backends are matched
by name, or as told. Must not know: how a comparison is shown.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from attncheck.reports.environment_changes import Difference
from attncheck.reports.outcome_changes import OutcomeChange
from attncheck.reports.speed_changes import SpeedChange
from attncheck.reports.store import Run

__all__ = ["Difference", "OneSided", "OutcomeChange", "RunComparison", "SpeedChange", "compare_runs"]


@dataclass(frozen=True)
class OneSided:
    """What only one run asked of ``backend``: these ``cases``; all there are where the other run lacks the backend."""

    backend: str
    cases: tuple[str, ...]
    is_whole: bool


@dataclass(frozen=True)
class RunComparison:
    """What became of BASE in NEW.

    ``speeds``: every pair of speeds, in the order of BASE. ``outcomes``: those that changed. ``only_base``,
    ``only_new``: what one run alone asked. ``changed_cases``: asked by both under one name, with another hash, and not
    compared. ``warnings``: what makes the comparison worth less, a sentence each; like all text here, unescaped.
    """

    base: Run
    new: Run
    speeds: tuple[SpeedChange, ...]
    outcomes: tuple[OutcomeChange, ...]
    only_base: tuple[OneSided, ...] = ()
    only_new: tuple[OneSided, ...] = ()
    changed_cases: tuple[str, ...] = ()
    environments: tuple[Difference, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def is_regression(self) -> bool:
        """Whether NEW fell behind BASE: an outcome worse, or a pair slower by as much as counts."""
        return any(change.kind == "worse" for change in self.outcomes) or any(
            change.is_regression for change in self.speeds
        )


def compare_runs(base: Run, new: Run, *, backends: Mapping[str, str] | None = None) -> RunComparison:
    """Compare two runs; ``backends`` names the backend of NEW that answers to one of BASE where names differ."""
    raise NotImplementedError
