"""Values for templates, unescaped, that show the first run compared with another, and a chart of time ratios.

The chart has a row with the interval of each pair of times, and a line at the ratio 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attncheck.errors import QuestionError
from attncheck.reports.comparison.compare import OutcomeChange, RunComparison, SpeedChange, compare_runs
from attncheck.reports.comparison.outcome_changes import KINDS
from attncheck.reports.comparison.speed_changes import VERDICTS
from attncheck.reports.comparison.summary import closing
from attncheck.reports.html.drawing import BAD, CALM, GOOD, INK, MUTED, chart, plot_area, text
from attncheck.reports.html.support_view import Tone
from attncheck.reports.run_file.store import Run

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.figure import Figure

MOST_ROWS = 400
"""Maximum rows of a table; further rows are only counted."""
CHARTED = 40
"""Maximum pairs of times in the chart."""

WIDTH, ROW, NAME = 860, 17, 64

_LOOKS = {"slower": (BAD, "X", 34), "faster": (GOOD, "D", 24), "same": (CALM, "o", 18), "cannot tell": (MUTED, "|", 30)}


@dataclass(frozen=True)
class ComparisonView:
    """A comparison. ``refusal``: why the runs cannot be compared; then ``found`` is None. ``closing``: the verdict.

    ``sentences``: the speed of NEW relative to BASE, one sentence for each part of a suite.
    """

    key: str
    base: str
    new: str
    found: RunComparison | None = None
    refusal: str = ""
    closing: str = ""
    sentences: tuple[str, ...] = ()
    speeds: tuple[SpeedChange, ...] = ()
    outcomes: tuple[OutcomeChange, ...] = ()
    chart: "Markup | None" = None

    @property
    def verdict(self) -> tuple[str, Tone]:
        """The verdict as in `attncheck compare`, and its colour."""
        word = "cannot tell" if self.found is None else self.found.verdict
        tones: dict[str, Tone] = {
            "regression": "bad",
            "incomplete": "bad",
            "no regression": "good",
            "cannot tell": "warn",
        }
        return word, tones[word]


def comparison_view(base: Run, new: Run, key: str, names: tuple[str, str]) -> ComparisonView:
    """Compare two runs; ``key`` must be unique in the page, ``names`` are those of the runs."""
    try:
        found = compare_runs(base, new)
    except QuestionError as error:
        return ComparisonView(key, *names, refusal=str(error))
    speeds = _in_order(found.speeds)
    return ComparisonView(
        key,
        *names,
        found=found,
        closing=closing(found).partition(": ")[2],
        sentences=tuple(change.in_words for change in found.suite_speeds),
        speeds=speeds[:MOST_ROWS],
        outcomes=tuple(sorted(found.outcomes, key=lambda change: KINDS.index(change.kind)))[:MOST_ROWS],
        chart=_change_chart(key, speeds[:CHARTED]) if speeds else None,
    )


def _in_order(changes: Sequence[SpeedChange]) -> tuple[SpeedChange, ...]:
    """Return the pairs by verdict, within a verdict those furthest from 1.0 first."""
    return tuple(
        sorted(changes, key=lambda change: (VERDICTS.index(change.verdict), -max(change.ratio, 1 / change.ratio)))
    )


def _change_chart(name: str, changes: Sequence[SpeedChange]) -> "Markup":
    """Return the chart of these pairs, top to bottom; there must be at least one."""
    names = [text(f"{change.backend}  {change.case}  {change.part}", NAME) for change in changes]
    ends = [end for change in changes for end in (change.ratio, change.low, change.high) if end is not None]
    low, high = min(0.8, *ends) * 0.97, max(1.25, *ends) * 1.03

    def draw(figure: "Figure") -> None:
        from matplotlib.ticker import FixedLocator, NullLocator

        axes = plot_area(figure, left=24 + round(6.0 * max(map(len, names))), right=24, top=10, bottom=40)
        axes.set_xscale("log")
        axes.set_xlim(low, high)
        axes.set_ylim(len(changes) - 0.4, -0.6)
        axes.spines["left"].set_visible(False)
        axes.set_yticks(range(len(changes)), names, color=INK)
        ticks = [tick for tick in (0.1, 0.2, 0.5, 0.8, 0.9, 1, 1.1, 1.25, 2, 5, 10, 100) if low <= tick <= high]
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticklabels([f"{tick:g}" for tick in ticks])
        axes.set_xlabel("time of the new run / time of the base run")
        axes.grid(axis="x")
        axes.axvline(1, color=INK, linewidth=1.0)
        for row, change in enumerate(changes):
            color, marker, size = _LOOKS[change.verdict]
            if change.low is not None and change.high is not None:
                axes.hlines(row, change.low, change.high, color=color, linewidth=1.6, alpha=0.6)
            axes.scatter([change.ratio], [row], s=size, c=color, marker=marker, linewidths=1.4 if marker == "|" else 0)

    ratios = "; ".join(
        f"{name}: {change.ratio:.2f}, {change.verdict}" for name, change in zip(names, changes, strict=True)
    )
    return chart(name, f"Ratios of times. {ratios}", WIDTH, 54 + ROW * len(changes), draw)
