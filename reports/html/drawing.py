"""Draw charts with matplotlib, as SVG whose colours come from the page's style sheet, light or dark.

Charts are drawn in placeholder colours that are replaced by variables of the style sheet. Text remains text, so that it
uses the page's font, can be searched and can be read aloud; dollar signs in names do not start mathematics. Equal
charts give equal SVG.
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
"""Placeholder colours of text, secondary text, lines, good, bad, neutral, and the page's background."""

_NAMED = {INK: "ink", MUTED: "muted", RULE: "rule", GOOD: "good", BAD: "bad", CALM: "calm", GROUND: "ground"}
_STAND_IN = re.compile(r"(fill|stroke): (#0a0b[0-9a-f]{2})")

SERIES = tuple(f"#0a0b{index:02x}" for index in range(0x20, 0x2C))
"""Placeholder colours of series, ``--series-0`` and on."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*")
"""Markers that distinguish series in addition to colours."""


class SeriesStyle(NamedTuple):
    """The style of a series: ``color`` is a placeholder, ``marker`` a matplotlib marker."""

    color: str
    marker: str


def series_styles(names: Iterable[str]) -> dict[str, SeriesStyle]:
    """Return a style for each series, in their order; styles repeat after twelve."""
    return {
        name: SeriesStyle(SERIES[index % len(SERIES)], MARKERS[index % len(MARKERS)])
        for index, name in enumerate(names)
    }


def chart(name: str, label: str, width: int, height: int, draw: "Callable[[Figure], None]") -> "Markup":
    """Return what ``draw`` draws into a figure of ``width`` by ``height`` pixels, as ``<svg>`` markup.

    ``name``: unique in the page, since parts of a drawing refer to each other by id. ``label``: the text for screen
    readers.
    """
    import matplotlib as mpl
    from markupsafe import Markup
    from matplotlib.figure import Figure

    with mpl.rc_context(), warnings.catch_warnings():
        # matplotlib's font is used only for measuring. The reader's browser has other fonts for missing characters.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        _set(name)
        figure = Figure(figsize=(width / 100, height / 100), dpi=100)
        draw(figure)
        written = StringIO()
        figure.savefig(written, format="svg", transparent=True)
    # The markup is matplotlib's own, which has escaped every text.
    return Markup(_for_page(written.getvalue(), label, width, height))  # noqa: S704


def plot_area(figure: "Figure", left: int, right: int, top: int, bottom: int) -> "Axes":
    """Return axes with these margins in pixels, without the top and right spines and without tick marks."""
    width, height = figure.get_size_inches() * 100
    axes = figure.add_axes((left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(which="both", length=0)
    axes.set_axisbelow(True)
    return axes


def text(value: str, width: int) -> str:
    """Return a name for a chart: one line, without control characters, at most ``width`` characters."""
    return phrases.cut(phrases.one_line(value), width)


def _set(name: str) -> None:
    """Set matplotlib's parameters for all charts, independent of the user's; ``name`` is the salt of SVG ids."""
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
    """Return the drawing without declaration, style sheet and date, and without ids that are not referred to."""
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
