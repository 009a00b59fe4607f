"""How a chart comes about: drawn by matplotlib, kept as SVG whose colours the page decides, light or dark.

Every colour a chart is drawn with is a stand-in for a variable of the page's style sheet. Text stays text, so that it
is set in the page's font, found by a search and read aloud; none of it is mathematics, whatever dollar signs a name
has. The same chart is the same text each time.
"""

import re
import warnings
from collections.abc import Callable, Iterable
from io import StringIO
from typing import TYPE_CHECKING, NamedTuple

from attncheck.reports.analysis import phrases

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, RULE, GOOD, BAD, CALM, GROUND = (f"#0a0b{index:02x}" for index in range(7))
"""Stand-ins for the colours of text, of what is beside it, of lines, of good, bad and neither, of the page."""

_NAMED = {INK: "ink", MUTED: "muted", RULE: "rule", GOOD: "good", BAD: "bad", CALM: "calm", GROUND: "ground"}
_STAND_IN = re.compile(r"(fill|stroke): (#0a0b[0-9a-f]{2})")

SERIES = tuple(f"#0a0b{index:02x}" for index in range(0x20, 0x2C))
"""Stand-ins for the colours of series, ``--series-0`` and on."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*")
"""Beside its colour, what tells a series apart."""


class SeriesStyle(NamedTuple):
    """What a series looks like: ``color`` is a stand-in, ``marker`` a word of matplotlib."""

    color: str
    marker: str


def series_styles(names: Iterable[str]) -> dict[str, SeriesStyle]:
    """A style for each series, in their order; the thirteenth looks like the first."""
    return {
        name: SeriesStyle(SERIES[index % len(SERIES)], MARKERS[index % len(MARKERS)])
        for index, name in enumerate(names)
    }


def chart(name: str, label: str, width: int, height: int, draw: "Callable[[Figure], None]") -> "Markup":
    """What ``draw`` draws into a figure of ``width`` by ``height`` pixels, as an ``<svg>`` for a page.

    ``name``: one of its own within a page, since parts of a drawing refer to each other; ``label``: what one who does
    not see the chart is told of it.
    """
    import matplotlib as mpl
    from markupsafe import Markup
    from matplotlib.figure import Figure

    with mpl.rc_context(), warnings.catch_warnings():
        # A character that the measuring font lacks is shown all the same, by a font of the reader's.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        _set(name)
        figure = Figure(figsize=(width / 100, height / 100), dpi=100)
        draw(figure)
        written = StringIO()
        figure.savefig(written, format="svg", transparent=True)
    # What was drawn is matplotlib's own markup, in which it has escaped every text.
    return Markup(_for_page(written.getvalue(), label, width, height))  # noqa: S704


def plot_area(figure: "Figure", left: int, right: int, top: int, bottom: int) -> "Axes":
    """Axes that leave these margins, in pixels, with no more lines than are needed."""
    width, height = figure.get_size_inches() * 100
    axes = figure.add_axes((left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(which="both", length=0)
    axes.set_axisbelow(True)
    return axes


def text(value: str, width: int) -> str:
    """A name as a chart shows it: on one line, without control characters, at most ``width`` characters."""
    return phrases.cut(phrases.one_line(value), width)


def _set(name: str) -> None:
    """Make matplotlib's settings those of every chart, whatever the user's are; ``name`` makes its names of parts."""
    import matplotlib as mpl

    mpl.rcdefaults()
    mpl.rc("svg", fonttype="none", hashsalt=name)
    mpl.rc("text", parse_math=False, color=INK)
    mpl.rc("font", size=8.5)
    mpl.rc("axes", unicode_minus=False, labelcolor=MUTED, edgecolor=RULE, linewidth=0.8)
    mpl.rc("grid", color=RULE, linewidth=0.6)
    mpl.rc("xtick", color=MUTED)
    mpl.rc("ytick", color=MUTED)
    mpl.rc("xtick.major", pad=5)
    mpl.rc("ytick.major", pad=6)


def _for_page(svg: str, label: str, width: int, height: int) -> str:
    """The drawing alone: no declaration, style sheet or date, and names only of parts that are referred to."""
    from markupsafe import escape

    body = svg[svg.index(">", svg.index("<svg")) + 1 :]
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", body, flags=re.DOTALL)
    wanted = set(re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", body))
    body = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in wanted else "", body)
    body = _STAND_IN.sub(lambda match: f"{match[1]}: {_variable(match[2])}", body)
    body = re.sub(r"font-family: [^;\"]*;? ?| transform=\"rotate\(-0 [^\"]*\"|<g/>", "", body)
    points = f"0 0 {width * 0.72:g} {height * 0.72:g}"
    opening = f'<svg class="chart" role="img" aria-label="{escape(text(label, 400))}" viewBox="{points}"'
    body = re.sub(r"\s*\n\s*", "\n", body).strip()
    return f'{opening} width="{width}" height="{height}">{body}'


def _variable(stand_in: str) -> str:
    if stand_in in _NAMED:
        return f"var(--{_NAMED[stand_in]})"
    return f"var(--series-{SERIES.index(stand_in)})" if stand_in in SERIES else stand_in
