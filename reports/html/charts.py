"""Charts with a row for each case and an interval for each time, as SVG in the colours of the page, light or dark.

matplotlib draws in placeholder colours, which become variables of the style sheet. Text remains text, so that it uses
the page's font and can be searched and read aloud. Equal charts give equal SVG.
"""

import html
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from typing import TYPE_CHECKING, NamedTuple

from attncheck.reports.analysis import phrases
from attncheck.reports.comparison.compare import SpeedChange
from attncheck.reports.comparison.speed_changes import VERDICTS
from attncheck.reports.html.text import Drawing
from attncheck.reports.speeds.speed import Speed, mean_ceilings
from attncheck.reports.speeds.tables import case_id, suites_of, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, ROW, BAND, NAME = 900, 16, 9, 52
"""Pixels of a chart's width, of a row, and of each further mark in it; characters of a row's name."""
MOST_ROWS = 40
"""Maximum rows of a chart; the tables have all of them."""
LEAST, MOST = 1e-12, 1e15
"""Limits of the values that an axis can show, nanoseconds or ratios."""
LONGEST_LABEL = 800
"""Maximum characters of the text for screen readers."""

INK, MUTED, RULE, GOOD, BAD, CALM = (f"#0a0b{index:02x}" for index in range(6))
"""Placeholder colours of text, secondary text, lines, faster, slower, and the same."""
SERIES = tuple(f"#0a0b{index:02x}" for index in range(0x20, 0x2C))
"""Placeholder colours of backends, ``--series-0`` and on."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*")
"""Markers that distinguish backends in addition to colours."""

_VARIABLES = {INK: "ink", MUTED: "muted", RULE: "rule", GOOD: "good", BAD: "bad", CALM: "calm"}
_VARIABLES |= {color: f"series-{index}" for index, color in enumerate(SERIES)}
_PLACEHOLDER = re.compile("|".join(_VARIABLES))
_VERDICTS = {"slower": (BAD, "X"), "faster": (GOOD, "D"), "same": (CALM, "o"), "cannot tell": (MUTED, "|")}


class Mark(NamedTuple):
    """A value with its interval, and the series that it belongs to."""

    series: str
    value: float
    low: float
    high: float


class ChartRow(NamedTuple):
    """The marks of one row, and the least possible value, if it is known."""

    name: str
    marks: tuple[Mark, ...]
    least: float | None = None

    @property
    def height(self) -> int:
        """The height in pixels."""
        return ROW + BAND * (len(self.marks) - 1)


def speed_charts(key: str, speeds: Sequence[Speed]) -> list[Drawing]:
    """Return a chart of ``forward`` for each suite: a row for each case, a mark for each backend.

    ``key``: unique in the page. A mark has the range of the medians of all rounds, or the interval of a single round.
    """
    forward = [speed for speed in speeds if speed.part == "forward"]
    names = dict.fromkeys(speed.backend for speed in forward)
    looks = {name: (SERIES[place % 12], MARKERS[place % 12]) for place, name in enumerate(names)}
    charts = []
    for place, (suite, members) in enumerate(suites_of(forward).items()):
        rows = _case_rows(members)
        about = f"forward in {suite}: median, with the range of all rounds, or the interval within a single one"
        if any(row.least for row in rows):
            about += "; | the least time that the device allows"
        charts.append(_chart(f"{key}-{place}", about, rows, looks, _times))
    return charts


def ratio_chart(key: str, changes: Sequence[SpeedChange]) -> Drawing:
    """Return a chart of ratios NEW / BASE with simultaneous intervals: slower ones first, the largest change first.

    ``changes`` must not be empty.
    """
    ordered = sorted(changes, key=lambda each: (VERDICTS.index(each.verdict), -max(each.ratio, 1 / each.ratio)))
    rows = [
        ChartRow(
            f"{each.backend}  {each.case}  {each.part}",
            (Mark(each.verdict, each.ratio, each.low or each.ratio, each.high or each.ratio),),
        )
        for each in ordered
    ]
    about = "time of NEW / time of BASE; intervals hold for all pairs at once, and a single process has none"
    return _chart(key, about, rows, _VERDICTS, _ratios)


def _case_rows(speeds: Sequence[Speed]) -> list[ChartRow]:
    cases: dict[str, list[Speed]] = {}
    for speed in speeds:
        cases.setdefault(case_id(speed), []).append(speed)
    return [
        ChartRow(case, tuple(Mark(each.backend, each.median_ns, *each.interval_ns) for each in own), _least_ns(own[0]))
        for case, own in cases.items()
    ]


def _least_ns(speed: Speed) -> float | None:
    """Return the roofline's time of the case, or None without measured ceilings."""
    latency, ceilings = speed.rounds[0], list(mean_ceilings([speed]).values())
    if not (latency.moved_bytes and latency.flops and ceilings):
        return None
    return ceilings[0].least_ns(latency.moved_bytes, latency.flops)


def _chart(
    key: str,
    about: str,
    rows: Sequence[ChartRow],
    looks: Mapping[str, tuple[str, str]],
    write: Callable[[float], str],
) -> Drawing:
    """Return a chart of at most :data:`MOST_ROWS` rows on a logarithmic axis, whose ticks ``write`` labels."""
    shown = rows[:MOST_ROWS]
    if left_out := len(rows) - len(shown):
        about += f"; {left_out} more rows are in the table"
    names = [phrases.cut(phrases.one_line(row.name), NAME) for row in shown]
    height = 84 + sum(row.height for row in shown)

    def draw(figure: "Figure") -> None:
        axes = _axes(figure, max(map(len, names)), height)
        axes.set_xlim(*_limits(shown))
        marks: dict[str, list[tuple[float, Mark]]] = {}
        middles = []
        ends = []
        top = 0.0
        for row in shown:
            for place, mark in enumerate(row.marks):
                marks.setdefault(mark.series, []).append((top + ROW / 2 + BAND * place, mark))
            if row.least is not None:
                axes.vlines(row.least, top + 2, top + row.height - 2, color=INK, linewidth=1.4)
            middles.append(top + row.height / 2)
            top += row.height
            ends.append(top)
        axes.hlines(ends, 0, 1, color=RULE, linewidth=0.6, transform=axes.get_yaxis_transform())
        used = {}
        for series, own in marks.items():
            # Drawn at once, since matplotlib takes a millisecond for each call.
            color, marker = looks[series]
            places = [y for y, _ in own]
            lows, values, highs = zip(*((mark.low, mark.value, mark.high) for _, mark in own), strict=True)
            axes.hlines(places, lows, highs, color=color, linewidth=3, alpha=0.45)
            used[series] = axes.scatter(values, places, s=20, c=color, marker=marker, linewidths=1)
        axes.set_yticks(middles, names, color=INK)
        axes.set_ylim(top, 0)
        _label_values(axes, write)
        labels = [phrases.cut(phrases.one_line(name), 30) for name in used]
        figure.legend(used.values(), labels, loc="upper right", ncols=min(len(used), 6), frameon=False)

    values = [f"{row.name}: {mark.series} {write(mark.value)}" for row in shown for mark in row.marks]
    label = phrases.cut(phrases.one_line("; ".join(values)), LONGEST_LABEL)
    return Drawing(phrases.one_line(about), _svg(key, label, height, draw))


def _limits(rows: Sequence[ChartRow]) -> tuple[float, float]:
    """Return the ends of the axis, somewhat beyond all marks; a damaged run file may have times of 1e-300 or 1e300."""
    marks = [value for row in rows for mark in row.marks for value in (mark.low, mark.value, mark.high)]
    values = [value for value in (*marks, *(row.least for row in rows)) if value and LEAST < value < MOST]
    return min(values, default=1.0) / 1.1, max(values, default=1.0) * 1.1


def _axes(figure: "Figure", longest: int, height: int) -> "Axes":
    """Return axes with a logarithmic scale and with room for names of rows of at most ``longest`` characters."""
    left = 24 + 6.2 * longest
    axes = figure.add_axes((left / WIDTH, 34 / height, 1 - (left + 24) / WIDTH, 1 - 84 / height))
    axes.set_xscale("log")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(which="both", length=0)
    axes.set_axisbelow(True)
    axes.grid(axis="x")
    return axes


def _label_values(axes: "Axes", write: Callable[[float], str]) -> None:
    """Label round values of the axis, and draw a line at 1 if ``write`` is for ratios."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = axes.get_xlim()
    if write is _ratios:
        low, high = min(low, 0.8), max(high, 1.25)
        axes.set_xlim(low, high)
        axes.axvline(1, color=INK, linewidth=1)
    for steps in ((1, 1.1, 1.25, 1.5, 2, 3, 5, 8, 9), (1, 2, 5), (1,)):
        values = [step * 10.0**exponent for exponent in range(-12, 15) for step in steps]
        ticks = [value for value in values if low <= value <= high]
        if len(ticks) <= 9:
            break
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: write(value)))


def _times(nanoseconds: float) -> str:
    unit = time_unit([nanoseconds])
    return f"{nanoseconds / unit.size:.3g} {unit.name}"


def _ratios(ratio: float) -> str:
    return f"{ratio:.3g}"


def _svg(key: str, label: str, height: int, draw: "Callable[[Figure], None]") -> str:
    """Return what ``draw`` draws. ``key``: the salt of ids in it. ``label``: the text for screen readers."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(), warnings.catch_warnings():
        # matplotlib's font only measures texts. The reader's browser has other fonts for missing characters.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        mpl.rcdefaults()
        mpl.rc("svg", fonttype="none", hashsalt=key)
        mpl.rc("text", parse_math=False, color=INK)
        mpl.rc("font", size=8.5)
        mpl.rc("axes", unicode_minus=False, labelcolor=MUTED, edgecolor=RULE, linewidth=0.8)
        mpl.rc("grid", color=RULE, linewidth=0.6)
        mpl.rc("xtick", color=MUTED)
        figure = Figure(figsize=(WIDTH / 100, height / 100), dpi=100)
        draw(figure)
        written = StringIO()
        figure.savefig(written, format="svg", transparent=True)
    svg = written.getvalue()
    # Without the declaration, the date, and ids that nothing refers to.
    body = svg[svg.index(">", svg.index("<svg")) + 1 :]
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", body, flags=re.DOTALL)
    wanted = set(re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", body))
    body = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in wanted else "", body)
    body = _PLACEHOLDER.sub(lambda match: f"var(--{_VARIABLES[match[0]]})", body)
    body = re.sub(r"font-family: [^;\"]*;? ?", "", body)
    size = f'viewBox="0 0 {WIDTH * 0.72:g} {height * 0.72:g}" width="{WIDTH}" height="{height}"'
    return f'<svg class="chart" role="img" aria-label="{html.escape(label)}" {size}>{body.strip()}'
