"""Times drawn: against the work a case is, against the roofline, and the build of the metadata beside forward.

A record does not say how long the contexts of a case are; it says the least bytes the case has to move, which grow with
them. Must not know: how a time was measured.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from attncheck.reports.html.drawing import INK, MUTED, Style, chart, plot_area, text
from attncheck.reports.html.intervals import interval
from attncheck.reports.html.units import bytes_, digits, rate, time
from attncheck.reports.phrases import plural
from attncheck.reports.reasons import without_figures
from attncheck.reports.speed import Speed
from attncheck.reports.timings import Ceilings

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 430, 320
FEWEST_POINTS = 3
MOST_PANELS = 8
ALIKE = 2.0
"""Cases of one curve differ in operations a byte by less than this factor."""

Needs = Mapping[str, tuple[str, ...]]


class Panel(NamedTuple):
    """Cases that differ in little but their length: ``title``, what they have in common, and the speeds of them."""

    title: str
    about: str
    speeds: tuple[Speed, ...]


class Work(NamedTuple):
    """What a case has to move and compute at least."""

    moved_bytes: int
    flops: int

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.flops / self.moved_bytes


def work_of(speed: Speed) -> Work | None:
    """The work of a speed, where a record says it and it is more than nothing."""
    latency = speed.rounds[0]
    return Work(latency.moved_bytes, latency.flops) if latency.moved_bytes and latency.flops else None


def panels(speeds: Sequence[Speed], needs: Needs) -> tuple[Panel, ...]:
    """The curves of latency over length that these speeds of ``forward`` allow, those of most cases first.

    ``needs``: what each case needs. One panel is cases of one suite that need the same, and have ids that differ in
    figures alone; of the others, those with about as many operations a byte. None has fewer than three sizes.
    """
    work = {speed.case: own for speed in speeds if (own := work_of(speed)) is not None}
    families: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for case in work:
        families.setdefault((without_figures(case), needs.get(case, ())), []).append(case)
    found = [
        _panel(stem.replace("#", "*"), needed, cases, work, speeds)
        for (stem, needed), cases in families.items()
        if _has_sizes(cases, work)
    ]
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (stem, needed), cases in families.items():
        if not _has_sizes(cases, work):
            groups.setdefault((stem.partition("/")[0], needed), []).extend(cases)
    found += [
        _panel(suite, needed, alike, work, speeds)
        for (suite, needed), cases in groups.items()
        for alike in _alike(cases, work)
        if _has_sizes(alike, work)
    ]
    return tuple(sorted(found, key=lambda panel: -len({speed.case for speed in panel.speeds}))[:MOST_PANELS])


def length_chart(name: str, panel: Panel, looks: Mapping[str, Style]) -> "Markup":
    """Latency over the least bytes to move, a curve a backend, and what the device would take at best."""
    by_backend = _by_backend(panel.speeds)

    def draw(figure: "Figure") -> None:
        axes = _log_axes(figure, "least bytes to move", "forward")
        for backend, speeds in by_backend.items():
            points = sorted((work.moved_bytes, speed) for speed in speeds if (work := work_of(speed)))
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
            spans = [interval(speed) for _, speed in points]
            axes.vlines(
                xs,
                [span.low_ns for span in spans],
                [span.high_ns for span in spans],
                color=look.color,
                linewidth=2.4,
                alpha=0.4,
            )
        best = sorted(
            {
                (work.moved_bytes, least)
                for speed in panel.speeds
                if (work := work_of(speed)) and (least := _least(speed))
            }
        )
        if best:
            axes.plot(*zip(*best, strict=True), color=INK, linestyle=(0, (4, 3)), linewidth=1.1)
            axes.set_ylim(bottom=best[0][1] / 2)
            axes.annotate("roofline", best[0], xytext=(6, -4), textcoords="offset points", va="top", color=INK)
        _say_units(axes, bytes_, time)

    told = f"Latency over least bytes to move. {panel.title}, {panel.about}. " + _medians(by_backend)
    return chart(name, told, WIDTH, HEIGHT, draw)


def roofline_charts(name: str, speeds: Sequence[Speed], looks: Mapping[str, Style]) -> dict[str, "Markup"]:
    """Achieved rate over operations a byte, under what the device copies and multiplies; one chart a dtype of these."""
    by_dtype: dict[str, list[Speed]] = {}
    for speed in speeds:
        if work_of(speed) is not None and (ceilings := speed.timings[0].ceilings) is not None:
            by_dtype.setdefault(ceilings.dtype, []).append(speed)
    return {
        dtype: _roofline(f"{name}-{index}", dtype, members, looks)
        for index, (dtype, members) in enumerate(by_dtype.items())
    }


def build_chart(name: str, speeds: Sequence[Speed], looks: Mapping[str, Style]) -> "Markup | None":
    """The build of the metadata over forward, a point a case: above the line, a step waits for its metadata."""
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


def _roofline(name: str, dtype: str, speeds: Sequence[Speed], looks: Mapping[str, Style]) -> "Markup":
    found = [timing.ceilings for speed in speeds for timing in speed.timings if timing.ceilings is not None]
    copy, product = _middle(found, _copy), _middle(found, _product)
    ridge = product / copy

    def draw(figure: "Figure") -> None:
        axes = _log_axes(figure, "operations a byte", "")
        reached = []
        for backend, members in _by_backend(speeds).items():
            points = [(work.intensity, speed.flops_per_s or 0.0) for speed in members if (work := work_of(speed))]
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

    told = f"Roofline, {dtype}: copy {bytes_(copy)}/s, matmul {rate(product)}"
    return chart(name, told, WIDTH, HEIGHT, draw)


def _log_axes(figure: "Figure", x: str, y: str) -> "Axes":
    axes = plot_area(figure, left=78, right=16, top=22, bottom=44)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(x)
    axes.annotate(y, (0, 1), xycoords="axes fraction", xytext=(0, 7), textcoords="offset points", color=MUTED)
    axes.grid()
    return axes


def _say_units(axes: "Axes", x: Callable[[float], str], y: Callable[[float], str]) -> None:
    """Ticks at decades, with their units; halfway ones too where there is hardly a decade."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    for axis, limits, word in ((axes.xaxis, axes.get_xlim(), x), (axes.yaxis, axes.get_ylim(), y)):
        axis.set_major_locator(FixedLocator(_ticks(*limits)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _, word=word: word(value)))
    axes.tick_params(labelsize=7.8)


def _ticks(low: float, high: float) -> list[float]:
    """At most seven round numbers from ``low`` to ``high``: decades, or with 2 and 5 between them."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 5), (1, 3), (1,)):
        found = [step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade <= high]
        if len(found) <= 6:
            return found
    return found[:: math.ceil(len(found) / 6)]


def _scatter(axes: "Axes", xs: Sequence[float], ys: Sequence[float], look: Style) -> None:
    axes.scatter(xs, ys, s=20, c=look.color, marker=look.marker, linewidths=0, alpha=0.8)


def _has_sizes(cases: Sequence[str], work: Mapping[str, Work]) -> bool:
    """Whether these make a curve: three sizes or more, the greatest twice the least or more."""
    sizes = {work[case].moved_bytes for case in cases}
    return len(sizes) >= FEWEST_POINTS and max(sizes) >= ALIKE * min(sizes)


def _panel(
    name: str, needed: Sequence[str], cases: Sequence[str], work: Mapping[str, Work], speeds: Sequence[Speed]
) -> Panel:
    about = [*needed, f"{_range(sorted(work[case].intensity for case in cases))} flop/byte"]
    own = tuple(speed for speed in speeds if speed.case in cases)
    return Panel(f"{name}, {plural(len(cases), 'case')}", ", ".join(about), own)


def _alike(cases: Sequence[str], work: Mapping[str, Work]) -> list[list[str]]:
    """Cases by their operations a byte, those within a factor of :data:`ALIKE` of the least together."""
    found: list[list[str]] = []
    for case in sorted(cases, key=lambda case: work[case].intensity):
        if found and work[case].intensity < ALIKE * work[found[-1][0]].intensity:
            found[-1].append(case)
        else:
            found.append([case])
    return found


def _least(speed: Speed) -> float | None:
    """Nanoseconds the device would take at best, by its ceilings; None where these were not measured."""
    work = work_of(speed)
    found = [timing.ceilings for timing in speed.timings if timing.ceilings is not None]
    if work is None or not found:
        return None
    return max(work.moved_bytes / _middle(found, _copy), work.flops / _middle(found, _product)) * 1e9


def _copy(ceilings: Ceilings) -> float:
    return ceilings.copy_bytes_per_s


def _product(ceilings: Ceilings) -> float:
    return ceilings.matmul_flops_per_s


def _middle(ceilings: Sequence[Ceilings], which: Callable[[Ceilings], float]) -> float:
    return math.exp(sum(math.log(which(each)) for each in ceilings) / len(ceilings))


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


def _range(ordered: Sequence[float]) -> str:
    low, high = digits(ordered[0]), digits(ordered[-1])
    return low if low == high else f"{low} to {high}"
