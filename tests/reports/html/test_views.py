"""The values of a page: support in words and tones, each failure once, bars and the fastest."""

import re
from collections.abc import Iterator
from importlib import resources
from typing import Any

import pytest

from attncheck.reports.analysis.findings import by_check
from attncheck.reports.analysis.graph_levels import level_rows
from attncheck.reports.analysis.support import SupportRow
from attncheck.reports.document.run_values import RunValues
from attncheck.reports.html.finding_view import finding_views
from attncheck.reports.html.speed_view import speed_view
from attncheck.reports.html.support_view import support_matrix
from attncheck.reports.run_file.causes import EVIDENCE
from attncheck.reports.run_file.graph_levels import GraphLevels
from attncheck.reports.run_file.header import CaseInfo
from attncheck.reports.run_file.records import Crashed, Failed, Passed, XFailed


def test_a_cell_is_a_sign_with_its_cases_and_words() -> None:
    rows = [
        SupportRow("one", "alibi", is_declared=True, right=3),
        SupportRow("one", "sinks", is_declared=True, right=1, short=2),
        SupportRow("two", "alibi", is_declared=False, refused=4),
        SupportRow("two", "sinks", is_declared=False, wrong=1, refused=2),
        SupportRow("two", "lse", is_declared=True, left=5),
    ]
    found = support_matrix(rows, {"one": (), "two": ("cascade",)})
    assert found.features == ("alibi", "cascade", "lse", "sinks")
    shown = {
        line.backend: [cell and (cell.sign.sign, cell.sign.tone, cell.small, cell.words) for cell in line.features]
        for line in found.lines
    }
    assert shown["one"] == [("✓", "good", "3", "right (3)"), None, None, ("✗", "bad", "2/3", "wrong in 2 of 3")]
    assert shown["two"] == [
        ("\u2013", "calm", "4", "not declared: refused (4)"),
        ("○", "none", "", "declared: no case"),
        ("○", "none", "", "declared: not examined"),
        ("!", "bad", "1", "not declared: refused (2); accepted, and the output is wrong (1)"),
    ]
    used = {cell[:2] for cells in shown.values() for cell in cells if cell}
    assert {sign[:2] for sign in found.signs} == used  # the legend has every sign that occurs, and no other


def test_values_of_a_form_are_under_their_verdict_by_size() -> None:
    sizes = [SupportRow("one", f"head_size={size}", is_declared=True, right=1) for size in (128, 64, 8)]
    sizes += [SupportRow("one", "head_size=72", is_declared=False, refused=1)]
    sizes += [SupportRow("one", "head_size=96", is_declared=True, right=1, short=2)]
    (line,) = support_matrix(sizes, {"one": ()}).lines
    assert [(found.sign.sign, found.values) for found in line.forms[0]] == [
        ("✓", ("8", "64", "128")),
        ("✗", ("96 (1 of 3 right)",)),
        ("\u2013", ("72",)),
    ]


def test_a_graph_level_is_right_where_the_declared_one_is_true(record_of: Any) -> None:
    def levels(declared: Any, measured: Any) -> Any:
        graph = GraphLevels(declared=declared, measured=measured, recorder="emulated", probes=())
        kind = Passed if declared == measured else Failed
        failure = {} if kind is Passed else {"summary": "below"}
        return level_rows([record_of(kind, check="cudagraph", graph=graph, backend="one", **failure)])

    def cell(rows: Any) -> Any:
        (line,) = support_matrix([], {"one": ()}, rows).lines
        return line.features[-1]

    assert cell(levels("ALWAYS", "ALWAYS"))[0].sign == "✓"
    wrong = cell(levels("ALWAYS", "UNIFORM_BATCH"))
    assert (wrong.sign.sign, wrong.small, wrong.words) == (
        "✗",
        "uniform",
        "declared ALWAYS, measured UNIFORM_BATCH",
    )


def test_a_finding_is_shown_once_with_its_smallest_case(record_of: Any, run_with: Any) -> None:
    cause = f"the window is ignored{EVIDENCE.format('output')} all rows"
    common = {"finding": "the window is ignored", "meaning": cause, "summary": "7 of 40 rows"}
    records = [
        record_of(Failed, case_id="large", details=("a\nb",), **common),
        record_of(Failed, case_id="small", **common),
        record_of(Failed, case_id="small", check="lse", **common),
        record_of(case_id="fine"),
        record_of(Crashed, case_id="fine", check="refusals", stage="refusals", cause="killed", output="last words"),
    ]
    cases = tuple(
        CaseInfo(suite="decode", id=name, shape=f"{heads} heads", description=f"a {name} one", keys=keys)
        for name, heads, keys in (
            ("large", 64, {"layer.num_heads": 64, "layer.sliding_window": 8}),
            ("small", 2, {"layer.num_heads": 2, "layer.sliding_window": 4}),
            ("fine", 2, {"layer.num_heads": 2}),
        )
    )
    run = run_with(records, cases=cases)
    window, crash = finding_views(RunValues.of(run))
    assert window.finding.title == "the window is ignored"
    assert (window.evidence, window.cause) == ("a reference with this fault gives the same output in all rows", "")
    assert window.finding.example.case_id == "small"
    assert [other.case_id for other in window.others] == ["large"]
    assert (crash.finding.example.outcome, crash.trail) == ("crashed", "last words")


def test_expected_failures_are_grouped_by_reason_and_check(record_of: Any, run_with: Any) -> None:
    records = [
        record_of(XFailed, case_id=case, check=check, underlying="failed", summary="s", reason=reason)
        for case, check, reason in (
            ("a", "lse", "known"),
            ("b", "lse", "known"),
            ("c", "refusals", "known"),
            ("d", "lse", "x"),
        )
    ]
    found = [each for finding in RunValues.of(run_with(records)).found.findings for each in by_check(finding)]
    assert [(first.case_id, further) for first, further in found] == [("a", 1), ("c", 0), ("d", 0)]


def bars(view: Any) -> dict[str, list[tuple[str, bool]]]:
    return {
        case.case: [(bar.backend, bar.is_fastest) for bar in case.bars] for suite in view.bars for case in suite.cases
    }


def test_the_fastest_is_named_only_outside_of_the_noise(timed: Any, run_with: Any) -> None:
    enough = speed_view(RunValues.of(run_with(timed(["one", "two"], (4096,), rounds=5))), "run")
    assert set(map(tuple, bars(enough).values())) == {(("one", True), ("two", False))}
    few = speed_view(RunValues.of(run_with(timed(["one", "two"], (4096,), rounds=4))), "run")
    # As fast as the second, whose factor is 1.65 where the first has 1.3.
    even = speed_view(RunValues.of(run_with(timed(["one", "two"], (65536,), rounds=5, slower=1.65 / 1.3))), "run")
    for view in (few, even):
        assert not any(is_fastest for case in bars(view).values() for _, is_fastest in case)


def test_bars_of_a_case_share_a_scale_from_zero(timed: Any, run_with: Any) -> None:
    records = timed(["one", "two"], (4096,), rounds=3)
    (suite,) = speed_view(RunValues.of(run_with(records)), "run").bars
    case = next(case for case in suite.cases if case.case == "lengths/decode.4096")
    medians = {
        name: [
            r.timing.latencies[0].median_ns
            for r in records
            if r.check == "timing" and r.backend == name and r.case_id == "decode.4096"
        ]
        for name in ("one", "two")
    }
    longest = max(max(times) for times in medians.values())
    assert max(bar.high for bar in case.bars) == 100
    for bar in case.bars:
        assert bar.low == pytest.approx(100 * min(medians[bar.backend]) / longest, abs=0.06)
        assert bar.low <= bar.share <= bar.high


def test_cases_beyond_the_room_are_counted(timed: Any, run_with: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attncheck.reports.html.speed_view.MOST_BARS", 5)
    (suite,) = speed_view(RunValues.of(run_with(timed(["one", "two"], (512, 1024, 2048)))), "run").bars
    assert (len(suite.cases), suite.left_out) == (2, 4)


def test_a_run_without_times_has_no_speeds(record_of: Any, run_with: Any) -> None:
    assert speed_view(RunValues.of(run_with([record_of(Passed)])), "run") is None


def colours() -> Iterator[tuple[str, tuple[str, str]]]:
    """The named colours of the style sheet: for a light page, and for a dark one."""
    style = (resources.files("attncheck.reports.html") / "templates" / "page.css").read_text(encoding="utf-8")
    for name, light, dark in re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", style):
        yield name, (light, dark)


def luminance(colour: str) -> float:
    """Relative luminance, as WCAG 2 defines it."""
    channels = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    brighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (brighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_colours_can_be_read(theme: int) -> None:
    """4.5 to 1 for text and 3 to 1 for marks, as WCAG 2 requires (AA)."""
    shown = {name: pair[theme] for name, pair in colours()}
    for text in ("ink", "muted", "link", "good", "bad", "warn", "calm"):
        for ground in ("ground", "surface", "raised"):
            assert contrast(shown[text], shown[ground]) >= 4.5, (text, ground)
    for tone in ("good", "bad", "warn", "calm"):
        assert contrast(shown[tone], shown[f"{tone}-ground"]) >= 4.5, tone
    for index in range(12):
        assert contrast(shown[f"series-{index}"], shown["ground"]) >= 3, index
