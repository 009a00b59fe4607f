"""Charts: the positions of what is drawn; colours of the page; text that is text."""

import math
import re
from itertools import pairwise
from typing import Any

import pytest

from attncheck.reports.html.budget_chart import TALLEST, budget_chart, budget_uses
from attncheck.reports.html.curves import length_panels
from attncheck.reports.html.drawing import BAD, SERIES, chart, plot_area, series_styles
from attncheck.reports.html.speed_charts import build_chart, length_chart, roofline_charts
from attncheck.reports.html.units import measured_time, time
from attncheck.reports.run_file.records import Failed
from attncheck.reports.speeds.speed import speeds

RED = "var(--bad)"


def dots(svg: str, color: str) -> list[tuple[float, float]]:
    """The positions of the markers of one colour."""
    found = re.findall(r'<use xlink:href="[^"]*" x="([\d.]+)" y="([\d.]+)" style="fill: (var\([\w-]+\))', svg)
    return [(float(x), float(y)) for x, y, fill in found if fill == color]


@pytest.fixture
def budgets(record_of: Any) -> Any:
    """The chart of one backend that used these shares."""

    def draw(*shares: float) -> str:
        records = [
            record_of(Failed, case_id=str(i), summary="", figures={"budget_share": s}) for i, s in enumerate(shares)
        ]
        return budget_chart("budgets", budget_uses(records))

    return draw


def line_at_one(svg: str) -> float:
    (x,) = set(re.findall(r'd="M ([\d.]+) [\d.]+\nL \1 [\d.]+\n" [^>]*stroke: var\(--bad\)', svg))
    return float(x)


def test_a_share_just_beyond_the_budget_is_beyond_the_line_and_looks_different(budgets: Any) -> None:
    svg = budgets(0.999, 1.0, 1.001, 0.1)
    ((beyond, _),) = dots(svg, RED)
    within = [x for x, _ in dots(svg, "var(--series-0)")]
    assert len(within) == 3
    assert max(within) <= line_at_one(svg) < beyond


def test_shares_are_on_a_log_scale(budgets: Any) -> None:
    xs = sorted(x for x, _ in dots(budgets(0.001, 0.01, 0.1, 1.0), "var(--series-0)"))
    steps = [later - earlier for earlier, later in pairwise(xs)]
    assert steps == pytest.approx([steps[0]] * 3, rel=1e-3)


def test_what_is_zero_infinite_or_no_number_is_drawn_at_the_ends(budgets: Any) -> None:
    svg = budgets(0.0, 0.5, math.inf, math.nan)
    assert len(dots(svg, "var(--series-0)")) == 2
    assert len(dots(svg, RED)) == 2
    assert ">worst inf<" in svg


def test_equal_dots_are_stacked_up_to_a_height(budgets: Any) -> None:
    few, many = dots(budgets(*[0.3] * 3), "var(--series-0)"), dots(budgets(*[0.3] * 300), "var(--series-0)")
    assert len(few) == 3
    assert len({x for x, _ in few}) == 1
    assert len({y for _, y in few}) == 3
    assert len(many) == TALLEST


def test_uses_are_counted_over_records(record_of: Any) -> None:
    (use,) = budget_uses([record_of(case_id=str(i), figures={"budget_share": i / 4}) for i in range(1, 7)])
    assert (use.median, use.worst, use.over, use.worst_case) == (0.875, 1.5, 2, "decode/6")


def test_a_chart_takes_its_colours_from_the_page_and_shows_texts_verbatim() -> None:
    def draw(figure: Any) -> None:
        axes = plot_area(figure, 50, 10, 10, 30)
        axes.plot([1, 2], [1, 2], color=SERIES[3])
        axes.text(1, 1, r"$\alpha$ <b> & $", color=BAD)

    svg = chart("one", 'a "label" <b>', 300, 200, draw)
    assert "stroke: var(--series-3)" in svg
    assert "#0a0b" not in svg
    assert r">$\alpha$ &lt;b&gt; &amp; $</text>" in svg
    assert 'aria-label="a &#34;label&#34; &lt;b&gt;"' in svg
    assert "font-family" not in svg
    assert set(re.findall(r"url\(#([^)]+)\)", svg)) <= set(re.findall(r'id="([^"]+)"', svg))


def test_a_name_that_the_measuring_font_cannot_show_is_drawn_all_the_same(record_of: Any) -> None:
    name = "\u6ce8\u610f\u529b \U0001f680"
    svg = budget_chart("budgets", budget_uses([record_of(backend=name, figures={"budget_share": 0.5})]))
    assert f">{name}</text>" in svg


def test_series_differ_in_colour_and_in_shape() -> None:
    looks = series_styles(f"backend {index}" for index in range(12))
    assert len({look.color for look in looks.values()}) == len({look.marker for look in looks.values()}) == 12


@pytest.fixture
def times(timed: Any) -> Any:
    return speeds(timed(["one", "two"], (512, 1024, 2048, 4096), rounds=3))


def test_cases_that_differ_in_length_make_a_curve(times: Any) -> None:
    forward = [speed for speed in times if speed.part == "forward"]
    found = length_panels(forward, {})
    assert [panel.title for panel in found] == ["lengths/decode.*, 4 cases", "lengths/prefill.*, 4 cases"]
    # 8 queries of 32 heads over keys of 8 heads in bfloat16: 32 / 8 operations a byte, however long.
    assert [panel.about for panel in found] == ["4 flop/byte", "512 to 4,096 flop/byte"]
    assert all(len(panel.speeds) == 8 for panel in found)


def test_other_cases_are_joined_by_what_they_need_and_do_to_a_byte(times: Any) -> None:
    names = {
        f"lengths/decode.{length}": f"lengths/{word}"
        for length, word in zip((512, 1024, 2048, 4096), "abcd", strict=True)
    }
    renamed = [
        type(speed)(speed.backend, names[speed.case], speed.part, speed.rounds, speed.timings)
        for speed in times
        if speed.part == "forward" and speed.case in names
    ]
    assert [panel.title for panel in length_panels(renamed, {})] == ["lengths, 4 cases"]
    apart = {name: (("sinks",) if name.endswith("a") else ()) for name in names.values()}
    assert [panel.title for panel in length_panels(renamed, apart)] == ["lengths, 3 cases"]
    apart["lengths/b"] = ("alibi",)
    assert length_panels(renamed, apart) == ()  # two sizes are no curve


def test_the_roofline_is_below_every_time(times: Any) -> None:
    forward = [speed for speed in times if speed.part == "forward"]
    looks = series_styles(["one", "two"])
    svg = length_chart("lengths", length_panels(forward, {})[0], looks)
    (dashed,) = re.findall(r'd="(M [^"]+)"[^>]*stroke-dasharray[^>]*stroke: var\(--ink\)', svg)
    floor = [float(y) for y in re.findall(r" [\d.]+ ([\d.]+)\n", dashed)]
    for color in ("var(--series-0)", "var(--series-1)"):
        heights = [y for _, y in dots(svg, color)]
        assert len(heights) == len(floor) == 4
        assert all(time < least for time, least in zip(heights, floor, strict=True))  # y grows downwards


def test_cases_of_one_size_and_ceilings_that_differ_make_one_line(times: Any, timed: Any) -> None:
    """Two cases of each size, as of two layouts; the second backend's processes found the device slower."""

    def slowed(record: Any) -> Any:
        ceilings = record.timing.ceilings.model_copy(update={"copy_bytes_per_s": 1e12})
        timing = record.timing.model_copy(update={"ceilings": ceilings})
        return record.model_copy(update={"timing": timing}) if record.backend == "two" else record

    decodes = [
        slowed(record)
        for record in timed(["one", "two"], (512, 1024, 2048))
        if record.check == "timing" and "decode" in record.case_id
    ]
    twins = [record.model_copy(update={"case_id": record.case_id.replace("decode", "decode.7")}) for record in decodes]
    forward = [speed for speed in speeds([*decodes, *twins]) if speed.part == "forward"]
    (panel,) = length_panels(forward, {})
    svg = length_chart("lengths", panel, series_styles(["one", "two"]))
    (dashed,) = re.findall(r'd="(M [^"]+)"[^>]*stroke-dasharray[^>]*stroke: var\(--ink\)', svg)
    assert len(re.findall(r"[ML] ", dashed)) == 3
    assert len(dots(svg, "var(--series-0)")) == 6


def test_each_dtype_of_ceilings_has_its_roofline(times: Any) -> None:
    forward = [speed for speed in times if speed.part == "forward"]
    drawn = roofline_charts("roofline", forward, series_styles(["one", "two"]))
    assert list(drawn) == ["bfloat16"]
    assert ">copy 4 TB/s<" in drawn["bfloat16"]
    assert ">matmul 600 TFLOP/s<" in drawn["bfloat16"]


def test_the_build_is_drawn_beside_forward(times: Any) -> None:
    looks = series_styles(["one", "two"])
    svg = str(build_chart("build", times, looks))
    assert len(dots(svg, "var(--series-0)")) == 8
    slower = sum(
        build.median_ns > forward.median_ns
        for build in times
        for forward in times
        if (build.part, forward.part) == ("build", "forward")
        and (build.backend, build.case) == (forward.backend, forward.case)
    )
    assert f"build takes longer in {slower} of 16" in svg
    assert build_chart("none", [speed for speed in times if speed.part == "forward"], looks) is None


@pytest.mark.parametrize(
    ("ns", "shown", "measured"),
    [
        (12, "12 ns", "12.0 ns"),
        (1234, "1.23 µs", "1.23 µs"),
        (999_600, "1 ms", "1.00 ms"),
        (5e12, "5,000 s", "5,000 s"),
    ],
)
def test_times_come_in_the_unit_that_suits_them(ns: float, shown: str, measured: str) -> None:
    assert time(ns) == shown.replace("µ", "\u00b5")
    assert measured_time(ns) == measured.replace("µ", "\u00b5")
