"""The page in a real browser: with mouse and keyboard, on the screen and on paper, and never with a network."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attncheck.reports.html import render_runs
from attncheck.reports.run_file.graph_levels import GraphLevels, GraphProbe
from attncheck.reports.run_file.header import CaseInfo
from attncheck.reports.run_file.records import Failed, Unsupported

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]

LENGTHS = (512, 1024, 2048, 4096)


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """``show(runs, ...)``: the page, opened as a file. A network request or an error on its console fails the test."""
    contexts, complaints = [], []

    def opened(*runs: Any, **options: Any) -> Any:
        file = tmp_path / "report.html"
        file.write_text(render_runs(runs), encoding="utf-8")
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
        contexts.append(context)
        context.set_offline(True)
        page = context.new_page()
        page.on("request", lambda request: request.url == file.as_uri() or complaints.append(f"request: {request.url}"))
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.goto(file.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture
def run(timed: Any, run_with: Any, record_of: Any) -> Any:
    """Three backends, eight cases that were timed, and one that failed for the last."""
    failed = record_of(
        Failed,
        backend="third",
        case_id="window",
        summary="7 of 40 rows",
        meaning="the window is one key too long",
        figures={"budget_share": 18.4},
    )
    return run_with([*timed(["first", "second", "third"], LENGTHS, rounds=5), failed])


def cells(page: Any, column: int, table: str = "#record-table") -> list[str]:
    """The texts of one column, its heading left out."""
    return [text.strip() for text in page.locator(f"{table} tr.row > :nth-child({column})").all_inner_texts()]


def status(page: Any) -> str:
    return page.locator("#record-table [role=status]").inner_text()


def wait_for(page: Any, text: str) -> None:
    """Wait until the page shows ``text`` as its count; the page's policy forbids to poll by a script."""
    page.locator("#record-table [role=status]").get_by_text(text, exact=True).wait_for()


def test_filters_narrow_the_records(show: Any, run: Any) -> None:
    page = show(run)
    assert status(page) == "25 cases"
    page.select_option("#filter-backend", "third")
    assert status(page) == "9 cases"
    assert set(cells(page, 2)) == {"third"}
    page.select_option("#filter-outcome", "short")
    assert cells(page, 3) == ["decode/window"]
    page.click("#filters button[type=reset]")
    wait_for(page, "25 cases")
    page.select_option("#filter-check", "lse")
    assert set(cells(page, 4)) == {"unsupported"}
    assert status(page) == "24 cases"
    page.select_option("#filter-check", "")
    page.fill("#filter-words", "one KEY window")
    wait_for(page, "1 case")
    assert cells(page, 6) == ["7 of 40 rows"]
    page.fill("#filter-words", "third decode.512")
    page.locator("#record-table tr.row").get_by_text("decode.512").wait_for()
    assert status(page) == "1 case"


def test_speeds_are_filtered_with_the_records(show: Any, run: Any) -> None:
    page = show(run)
    assert page.locator("#speed-table [role=status]").inner_text() == "48 speeds"
    page.select_option("#filter-backend", "second")
    assert page.locator("#speed-table [role=status]").inner_text() == "16 speeds"
    assert set(cells(page, 1, "#speed-table")) == {"second"}


def test_columns_sort_both_ways_and_what_is_missing_comes_last(show: Any, run: Any) -> None:
    page = show(run)
    head = page.get_by_role("button", name="worst error")
    head.click()
    ascending = [float(text) for text in cells(page, 5)]
    assert ascending == sorted(ascending)
    assert ascending[-1] == 18.4
    head.click()
    assert page.locator("#record-table th[aria-sort]").get_attribute("aria-sort") == "descending"
    assert [float(text) for text in cells(page, 5)] == ascending[::-1]
    page.locator("#speed-table").get_by_role("button", name="roofline").click()
    shares = cells(page, 10, "#speed-table")
    assert shares.count("") == 24  # a build has no roofline
    assert set(shares[-24:]) == {""}


def test_many_records_come_in_pages(show: Any, run_with: Any, record_of: Any) -> None:
    page = show(run_with([record_of(case_id=f"case-{index}") for index in range(230)]))
    assert status(page) == "1\u2013100 of 230 cases"
    table = page.locator("#record-table")
    assert table.get_by_role("button", name="Previous").is_disabled()
    table.get_by_role("button", name="Next").click()
    table.get_by_role("button", name="Next").click()
    assert status(page) == "201\u2013230 of 230 cases"
    assert len(cells(page, 3)) == 30
    assert table.get_by_role("button", name="Next").is_disabled()
    table.get_by_role("button", name="case", exact=True).click()
    assert cells(page, 3)[:3] == ["decode/case-0", "decode/case-1", "decode/case-2"]  # numbers as numbers


def test_a_case_opens_by_keyboard_and_shows_all_checks(show: Any, run: Any) -> None:
    page = show(run)
    button = page.get_by_role("button", name="Details of lengths/decode.512").first
    button.focus()
    page.keyboard.press("Enter")
    opened = page.locator("tr.drill")
    assert button.get_attribute("aria-expanded") == "true"
    assert [" ".join(text.split()) for text in opened.locator(".answer h4").all_inner_texts()] == [
        "timing passed in 5 rounds 1.00 s",
        "numerics passed 10.0 ms",
        "lse unsupported",
    ]
    assert opened.locator("svg.box").count() == 10  # two parts, five rounds
    command = (
        "attncheck run --backend first --suite lengths --case decode.512 --check numerics --device cuda --in-process"
    )
    assert opened.get_by_text(command).count() == 1
    opened.get_by_text("The same case on every backend").click()
    assert cells(page, 2) == ["first", "second", "third"]
    assert page.locator("tr.drill").count() == 1
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Details of lengths/decode.512").first.click()
    assert page.locator("tr.drill").count() == 0


def test_the_command_that_repeats_is_copied(show: Any, run: Any) -> None:
    page = show(run, permissions=["clipboard-read", "clipboard-write"])
    failure = page.locator("article.failure")
    failure.get_by_role("button").click()
    failure.get_by_text("Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == failure.locator("code").inner_text()


def test_the_command_is_copied_without_the_clipboard_interface(show: Any, run: Any) -> None:
    page = show(run, permissions=["clipboard-read"])
    page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(new Error('refused')); }")
    page.locator("article.failure").get_by_role("button").click()
    page.locator("article.failure").get_by_text("Copied").wait_for()
    assert "--case window" in page.evaluate("navigator.clipboard.readText()")


def test_a_cell_leads_to_its_records(show: Any, run: Any) -> None:
    page = show(run)
    page.get_by_role("link", name="8/9").click()
    assert page.input_value("#filter-backend") == "third"
    assert page.input_value("#filter-check") == "numerics"
    assert status(page) == "9 cases"


def test_dark_is_the_systems_choice_until_the_reader_chooses(show: Any, run: Any) -> None:
    def ground(page: Any) -> str:
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    light, dark = (show(run, color_scheme=scheme) for scheme in ("light", "dark"))
    assert ground(light) == "rgb(251, 251, 249)"
    assert ground(dark) == "rgb(19, 22, 26)"
    ink = "getComputedStyle(document.querySelector('.chart text')).fill"
    assert light.evaluate(ink) != dark.evaluate(ink)
    for page, expected in ((light, ground(dark)), (dark, ground(light))):
        page.get_by_role("button", name="Dark").click()
        assert ground(page) == expected
        page.reload()
        assert ground(page) == expected


def test_hostile_texts_run_nothing(show: Any, hostile: Any, hostile_texts: Any) -> None:
    page = show(hostile)
    for button in page.get_by_role("button", name="Details of").all()[:80]:
        button.evaluate("button => button.click()")
    assert page.locator("tr.drill").count() > 60
    page.fill("#filter-words", hostile_texts[0])
    wait_for(page, "9 cases")
    assert cells(page, 2)
    page.locator("[data-look]").nth(3).evaluate("link => link.click()")
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0


def test_on_paper_all_is_open_and_nothing_is_to_be_clicked(show: Any, run: Any) -> None:
    page = show(run, viewport={"width": 710, "height": 1000})
    page.emulate_media(media="print", color_scheme="dark")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("button:visible, select:visible, input:visible, nav:visible").count() == 0
    assert page.locator("main details:not([open])").count() == 0
    assert page.get_by_text("another process may well").count() + page.get_by_text("geometric mean of the").count() > 0
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(28, 32, 37)"  # dark ink, whatever the screen
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.pdf(format="A4").startswith(b"%PDF-")


@pytest.mark.parametrize("width", [340, 2200])
def test_the_page_fits_the_window(show: Any, timed: Any, run_with: Any, width: int) -> None:
    names = [f"a_backend_of_a_long_name_{index}" for index in range(12)]
    page = show(run_with(timed(names, LENGTHS, rounds=2)), viewport={"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_without_a_script_the_summary_is_readable(show: Any, run: Any) -> None:
    page = show(run, java_script_enabled=False)
    assert page.get_by_text("Browsing the records takes JavaScript").is_visible()
    assert page.locator("button:visible, select:visible").count() == 0
    for text in ("failed", "7 of 40 rows", "the window is one key too long"):
        assert page.get_by_text(text).first.is_visible()
    assert page.locator("svg.chart").first.is_visible()


def test_a_filter_selects_one_of_several_runs(show: Any, run: Any, run_with: Any, record_of: Any) -> None:
    other = run_with([record_of(Unsupported, backend="first", reasons=("no",))], path="other.jsonl")
    page = show(run, other)
    assert status(page) == "26 cases"
    page.select_option("#filter-run", "other.jsonl")
    assert cells(page, 2) == ["other.jsonl"]


def test_the_first_screen_of_a_phone_has_the_answer(show: Any, run: Any) -> None:
    page = show(run, viewport={"width": 390, "height": 844})
    lines = page.locator(".answers li")
    assert [" ".join(text.split()) for text in lines.all_inner_texts()] == [
        "passed first 8 cases right 8 of 8 declared",
        "passed second 8 cases right 8 of 8 declared",
        "failed third 1 finding in 1 of 9 cases; 8 right 9 of 9 declared",
    ]
    for place in (lines.last, page.get_by_text("Fastest of the right ones")):
        box = place.bounding_box()
        assert box["y"] + box["height"] < 844
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_rows_of_graph_levels_fit_a_phone(show: Any, run_with: Any, record_of: Any) -> None:
    probe = GraphProbe(name="mixed", level="ALWAYS", outcome="failed", reason="numbers are frozen at capture " * 8)
    levels = GraphLevels(declared="UNIFORM_BATCH", measured="UNIFORM_BATCH", recorder="emulated", probes=(probe,))
    page = show(run_with([record_of(check="cudagraph", graph=levels)]), viewport={"width": 390, "height": 844})
    cells = page.locator("section:has(#run-0-graphs) td:visible")
    assert cells.count() == 6
    for cell in cells.all():
        box = cell.bounding_box()
        assert 0 <= box["x"] <= box["x"] + box["width"] <= 390


def test_what_opens_below_a_case_describes_it(show: Any, run_with: Any, record_of: Any) -> None:
    case = CaseInfo(suite="decode", id="edge", shape="8 heads, 2 KV heads", description="one new token each")
    page = show(run_with([record_of(Failed, summary="7 of 40 rows", details=("a\nb",))], cases=(case,)))
    page.get_by_role("button", name="Details of decode/edge").click()
    opened = page.locator("tr.drill")
    for text in ("8 heads, 2 KV heads", "one new token each"):
        assert opened.get_by_text(text).is_visible()
    assert opened.locator("pre").inner_text() == "a\nb"
    page.fill("#filter-words", "2 KV heads")
    wait_for(page, "1 case")
