"""A chart of error-budget shares: one dot for each record, one row for each backend, a line at 1.0."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from attncheck.reports.analysis import phrases
from attncheck.reports.html.drawing import BAD, INK, MUTED, RULE, SERIES, chart, plot_area, text
from attncheck.reports.run_file.records import Record, budget_share

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.figure import Figure

WIDTH, ROW, NAME = 860, 38, 30
COLUMNS = 28
"""Columns of dots in a decade of the axis."""
TALLEST = 9
"""Maximum number of dots above each other; further ones are not drawn."""
LEAST, MOST = 1e-4, 1e4
"""Shares outside this range are drawn at its ends."""


class BudgetUse(NamedTuple):
    """The budget shares of one backend, one for each record, and the case of the largest."""

    backend: str
    shares: tuple[float, ...]
    worst_case: str

    @property
    def worst(self) -> float:
        """The largest share."""
        return max(self.shares)

    @property
    def median(self) -> float:
        """The median share."""
        return median(self.shares)

    @property
    def over(self) -> int:
        """The number of records beyond the budget."""
        return sum(share > 1 for share in self.shares)


def budget_uses(records: Sequence[Record]) -> tuple[BudgetUse, ...]:
    """Return the budget shares of each backend that has any, in the order of the records; NaN becomes infinity."""
    found: dict[str, list[tuple[float, str]]] = {}
    for record in records:
        if (share := budget_share(record)) is not None:
            found.setdefault(record.backend, []).append((share, record.case))
    return tuple(
        BudgetUse(backend, tuple(share for share, _ in uses), max(uses, key=lambda use: use[0])[1])
        for backend, uses in found.items()
    )


def budget_chart(name: str, uses: Sequence[BudgetUse]) -> "Markup":
    """Return the chart of these backends, of which there must be at least one."""
    finite = [min(max(share, LEAST), MOST) for use in uses for share in use.shares]
    low = 10.0 ** math.floor(math.log10(min(finite)))
    high = 10.0 ** math.ceil(math.log10(max(finite))) if max(finite) > 1 else 2.0
    names = {use.backend: text(use.backend, NAME) for use in uses}

    def draw(figure: "Figure") -> None:
        axes = plot_area(figure, left=_room(names), right=86, top=24, bottom=40)
        axes.set_xscale("log")
        axes.set_xlim(low * 0.8, high * 1.15)
        axes.set_ylim(len(uses) - 0.5, -0.5)
        axes.spines["left"].set_visible(False)
        axes.set_yticks(range(len(uses)), list(names.values()), color=INK)
        decades = range(round(math.log10(low)), math.floor(math.log10(high)) + 1)
        axes.set_xticks([10.0**decade for decade in decades], [_decade(decade) for decade in decades])
        axes.set_xticks([], minor=True)
        axes.set_xlabel("error / allowed error")
        axes.grid(axis="x")
        axes.hlines([row + 0.5 for row in range(len(uses) - 1)], *axes.get_xlim(), color=RULE, linewidth=0.5)
        axes.axvline(1, color=BAD, linewidth=1.1)
        axes.annotate(
            "1.0: used up",
            (1, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 5),
            color=BAD,
            textcoords="offset points",
            ha="center",
        )
        for row, use in enumerate(uses):
            for is_over, color, marker, size in ((False, SERIES[0], "o", 9), (True, BAD, "X", 20)):
                dots = [dot for dot in _dots(use.shares, low, high) if (dot[0] > 1) is is_over]
                if dots:
                    xs, offsets = zip(*dots, strict=True)
                    ys = [row + offset for offset in offsets]
                    axes.scatter(xs, ys, s=size, c=color, marker=marker, linewidths=0, clip_on=False)
            axes.annotate(
                f"worst {phrases.budgets(use.worst)}",
                (1, row),
                xycoords=("axes fraction", "data"),
                xytext=(8, 0),
                textcoords="offset points",
                va="center",
                color=BAD if use.worst > 1 else MUTED,
            )

    largest = "; ".join(f"{names[use.backend]}: worst {phrases.budgets(use.worst)}" for use in uses)
    return chart(name, f"Error divided by the allowed error. {largest}", WIDTH, 64 + ROW * len(uses), draw)


def _dots(shares: Sequence[float], low: float, high: float) -> Iterator[tuple[float, float]]:
    """Yield a dot (x, offset from the middle of the row) for each share; equal ones are stacked around the middle."""
    for place, count in sorted(Counter(_place(share, low, high) for share in shares).items()):
        shown = min(count, TALLEST)
        for index in range(shown):
            yield 10.0 ** (place / COLUMNS), (index - (shown - 1) / 2) * 0.095


def _place(share: float, low: float, high: float) -> int:
    """Return whole steps from 1.0; a share just above 1.0 is never drawn below it, nor the reverse."""
    place = round(math.log10(min(max(share, low), high)) * COLUMNS)
    return max(place, 1) if share > 1 else min(place, 0)


def _decade(exponent: int) -> str:
    return f"{10.0**exponent:g}" if exponent > -5 else f"1e{exponent}"


def _room(names: Mapping[str, str]) -> int:
    """Return the width of the longest name in pixels."""
    return 24 + round(6.4 * max(map(len, names.values())))
