"""What became of the first run in another, as the page shows it. Values for templates, unescaped.

Must not know: HTML, when a change counts.
"""

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attncheck.errors import QuestionError
from attncheck.reports.comparison.compare import OutcomeChange, RunComparison, SpeedChange, compare_runs
from attncheck.reports.comparison.outcome_changes import KINDS
from attncheck.reports.comparison.speed_changes import VERDICTS
from attncheck.reports.comparison.summary import verdict_of
from attncheck.reports.html.change_chart import change_chart, in_order
from attncheck.reports.html.support_view import Tone
from attncheck.reports.run_file.store import Run

if TYPE_CHECKING:
    from markupsafe import Markup

MOST_ROWS = 400
"""Rows of a table; what there is no room for is counted."""
CHARTED = 40


@dataclass(frozen=True)
class ComparisonView:
    """``refusal``: why the runs cannot be compared; then there is no ``found``. ``counts``: pairs by verdict."""

    key: str
    base: str
    new: str
    found: RunComparison | None = None
    refusal: str = ""
    counts: tuple[tuple[str, int], ...] = ()
    speeds: tuple[SpeedChange, ...] = ()
    outcomes: tuple[OutcomeChange, ...] = ()
    chart: "Markup | None" = None

    @property
    def verdict(self) -> tuple[str, Tone]:
        """The comparison in a word, as `attncheck compare` has it, and its colour."""
        word = "cannot tell" if self.found is None else verdict_of(self.found)
        tones: dict[str, Tone] = {"regression": "bad", "no regression": "good", "cannot tell": "warn"}
        return word, tones[word]


def comparison_view(base: Run, new: Run, key: str, names: tuple[str, str]) -> ComparisonView:
    """The comparison of two runs; ``key`` is its own within the page, ``names`` are theirs."""
    try:
        found = compare_runs(base, new)
    except QuestionError as error:
        return ComparisonView(key, *names, refusal=str(error))
    speeds = in_order(found.speeds)
    verdicts = Counter(change.verdict for change in speeds)
    return ComparisonView(
        key,
        *names,
        found=found,
        counts=tuple((verdict, verdicts[verdict]) for verdict in VERDICTS if verdicts[verdict]),
        speeds=speeds[:MOST_ROWS],
        outcomes=tuple(sorted(found.outcomes, key=lambda change: KINDS.index(change.kind)))[:MOST_ROWS],
        chart=change_chart(key, speeds[:CHARTED]) if speeds else None,
    )
