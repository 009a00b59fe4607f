"""Charts of times: over the work of a case, under the roofline, and of metadata build against forward."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from attncheck.reports.html.curves import LengthPanel, least_work
from attncheck.reports.html.drawing import INK, MUTED, SeriesStyle, chart, plot_area, text
from attncheck.reports.html.units import bytes_, digits, rate, time
from attncheck.reports.speeds.speed import Speed, mean_ceilings

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 430, 320


def length_chart(name: str, panel: LengthPanel, looks: Mapping[str, SeriesStyle]) -> "Markup":
    """Return a chart of latency over least bytes to move: a curve for each backend, and the roofline."""
    by_backend = _by_backend(panel.speeds)

    def draw(figure: "Figure") -> None:
        axes = _log_axes(figure, "least bytes to move", "forward")
        for backend, speeds in by_backend.items():
            found = [(work.moved_bytes, speed) for speed in speeds if (work := least_work(speed))]
            points = sorted(found, key=lambda point: point[0])
            xs = [moved for moved, _ in points]
            look = looks[backend]
            axes.plot(
                xs,
                [speed.median_ns for _, speed in points],
                color=look.color,
                marker=look.marker,
                markersize=4.5,
                markeredgewidth=0,
                linewidth=1.3,
            )
            spans = [speed.interval_ns for _, speed in points]
            axes.vlines(
                xs,
                [low for low, _ in spans],
                [high for _, high in spans],
                color=look.color,
                linewidth=2.4,
                alpha=0.4,
            )
        best = _least(panel.speeds)
        if best:
            axes.plot(*zip(*best, strict=True), color=INK, linestyle=(0, (4, 3)), linewidth=1.1)
            axes.set_ylim(bottom=best[0][1] / 2)
            axes.annotate("roofline", best[0], xytext=(6, -4), textcoords="offset points", va="top", color=INK)
        _say_units(axes, bytes_, time)

    description = f"Latency over least bytes to move. {panel.title}, {panel.about}. " + _medians(by_backend)
    return chart(name, description, WIDTH, HEIGHT, draw)


def roofline_charts(name: str, speeds: Sequence[Speed], looks: Mapping[str, SeriesStyle]) -> dict[str, "Markup"]:
    """Return, by dtype, a chart of achieved rate over operations a byte, under the device's copy and matmul rates."""
    by_dtype: dict[str, list[Speed]] = {}
    for speed in speeds:
        if least_work(speed) is not None and (ceilings := speed.timings[0].ceilings) is not None:
            by_dtype.setdefault(ceilings.dtype, []).append(speed)
    return {
        dtype: _roofline(f"{name}-{index}", dtype, members, looks)
        for index, (dtype, members) in enumerate(by_dtype.items())
    }


def build_chart(name: str, speeds: Sequence[Speed], looks: Mapping[str, SeriesStyle]) -> "Markup | None":
    """Return a chart of build over forward, or None without builds; above the line, build takes longer."""
    forward = {(speed.backend, speed.case): speed for speed in speeds if speed.part == "forward"}
    pairs = [
        (each.backend, forward[key].median_ns, each.median_ns)
        for each in speeds
        if each.part == "build" and (key := (each.backend, each.case)) in forward
    ]
    if not pairs:
        return None

    def draw(figure: "Figure") -> None:
        axes = _log_axes(figure, "forward", "build (host)")
        for backend in dict.fromkeys(backend for backend, _, _ in pairs):
            xs, ys = zip(*((x, y) for owner, x, y in pairs if owner == backend), strict=True)
            _scatter(axes, xs, ys, looks[backend])
        times = [value for _, x, y in pairs for value in (x, y)]
        ends = (min(times), max(times))
        axes.plot(ends, ends, color=MUTED, linestyle=(0, (4, 3)), linewidth=1.0)
        axes.annotate("equal", (ends[1], ends[1]), xytext=(-4, 4), textcoords="offset points", ha="right", color=MUTED)
        _say_units(axes, time, time)

    slow = sum(build > step for _, step, build in pairs)
    return chart(name, f"Build over forward: build takes longer in {slow} of {len(pairs)}", WIDTH, HEIGHT, draw)


def _roofline(name: str, dtype: str, speeds: Sequence[Speed], looks: Mapping[str, SeriesStyle]) -> "Markup":
    ceilings = mean_ceilings(speeds)[dtype]
    copy, product = ceilings.copy_bytes_per_s, ceilings.matmul_flops_per_s
    ridge = product / copy

    def draw(figure: "Figure") -> None:
        axes = _log_axes(figure, "operations a byte", "")
        reached = []
        for backend, members in _by_backend(speeds).items():
            points = [(work.intensity, speed.flops_per_s or 0.0) for speed in members if (work := least_work(speed))]
            reached += points
            _scatter(axes, [x for x, _ in points], [y for _, y in points], looks[backend])
        low = min(x for x, _ in reached) / 2
        high = max(ridge * 4, max(x for x, _ in reached) * 2)
        axes.plot([low, ridge, high], [low * copy, product, product], color=INK, linewidth=1.2)
        middle = low**0.3 * ridge**0.7
        axes.annotate(
            f"copy {bytes_(copy)}/s",
            (middle, middle * copy),
            xytext=(-6, 5),
            textcoords="offset points",
            color=INK,
            ha="right",
        )
        axes.annotate(
            f"matmul {rate(product)}", (high, product), xytext=(0, 4), textcoords="offset points", color=INK, ha="right"
        )
        axes.set_xlim(low, high)
        axes.set_ylim(min(y for _, y in reached) / 2, product * 2.5)
        _say_units(axes, digits, rate)

    description = f"Roofline, {dtype}: copy {bytes_(copy)}/s, matmul {rate(product)}"
    return chart(name, description, WIDTH, HEIGHT, draw)


def _log_axes(figure: "Figure", x: str, y: str) -> "Axes":
    axes = plot_area(figure, left=78, right=16, top=22, bottom=44)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(x)
    axes.annotate(y, (0, 1), xycoords="axes fraction", xytext=(0, 7), textcoords="offset points", color=MUTED)
    axes.grid()
    return axes


def _say_units(axes: "Axes", x: Callable[[float], str], y: Callable[[float], str]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    for axis, limits, word in ((axes.xaxis, axes.get_xlim(), x), (axes.yaxis, axes.get_ylim(), y)):
        axis.set_major_locator(FixedLocator(_ticks(*limits)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _, word=word: word(value)))
    axes.tick_params(labelsize=7.8)


def _ticks(low: float, high: float) -> list[float]:
    """Return at most seven round numbers from ``low`` to ``high``: decades, or also numbers between them."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 5), (1, 3), (1,)):
        found = [step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade <= high]
        if len(found) <= 6:
            return found
    return found[:: math.ceil(len(found) / 6)]


def _scatter(axes: "Axes", xs: Sequence[float], ys: Sequence[float], look: SeriesStyle) -> None:
    axes.scatter(xs, ys, s=20, c=look.color, marker=look.marker, linewidths=0, alpha=0.8)


def _least(speeds: Sequence[Speed]) -> list[tuple[int, float]]:
    """Return (least bytes to move, best time in nanoseconds) of each case; empty without measured ceilings."""
    if not (ceilings := [*mean_ceilings(speeds).values()]):
        return []
    work = {found for speed in speeds if (found := least_work(speed)) is not None}
    return sorted((each.moved_bytes, ceilings[0].least_ns(each.moved_bytes, each.flops)) for each in work)


def _by_backend(speeds: Sequence[Speed]) -> dict[str, list[Speed]]:
    found: dict[str, list[Speed]] = {}
    for speed in speeds:
        found.setdefault(speed.backend, []).append(speed)
    return found


def _medians(by_backend: Mapping[str, Sequence[Speed]]) -> str:
    return "; ".join(
        f"{text(backend, 30)}: {time(min(times))} to {time(max(times))}"
        for backend, own in by_backend.items()
        if (times := [speed.median_ns for speed in own])
    )
