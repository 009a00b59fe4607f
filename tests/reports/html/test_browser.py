"""The page's script in a real browser: filter, sort, open, copy, theme and print; and never a network request."""

import pytest

from attncheck.reports.html import render_runs
from attncheck.reports.run_file.header import CaseInfo

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]

LENGTHS = (512, 1024, 2048, 4096)


@pytest.fixture
def show(visit, tmp_path):
    """``show(run, ..., address="#...")`` opens the page of these runs as a file, without a network."""

    def opened(*runs, address="", **options):
        file = tmp_path / "report.html"
        file.write_text(render_runs(runs), encoding="utf-8")
        return visit(file.as_uri() + address, within=file.as_uri(), offline=True, **options)

    return opened


@pytest.fixture
def run(timed, run_with, record_of):
    """Three backends, eight cases that were timed, and one that failed for the last."""
    failed = record_of(
        "failed",
        backend="third",
        case_id="window",
        summary="7 of 40 rows",
        meaning="the window is one key too long",
        details=("a\nb",),
        figures={"budget_share": 18.4},
    )
    case = CaseInfo(suite="decode", id="window", shape="8 heads, 2 KV heads", description="one new token each")
    return run_with([*timed(["first", "second", "third"], LENGTHS, rounds=5), failed], cases=(case,))


def cells(page, column):
    """The texts of one column of the records."""
    return [text.strip() for text in page.locator(f".rows tbody tr > :nth-child({column})").all_inner_texts()]


def wait_for(page, count):
    """Wait until the page shows ``count`` cases; the page's policy forbids to poll by a script."""
    page.locator(".pager [role=status]").get_by_text(count, exact=True).wait_for()


def test_filters_narrow_the_records_and_are_in_the_address(show, run):
    page = show(run)
    wait_for(page, "25 cases")
    page.get_by_label("Backend").select_option("third")
    wait_for(page, "9 cases")
    assert set(cells(page, 2)) == {"third"}
    page.get_by_label("Outcome").select_option("did not pass")
    wait_for(page, "1 case")
    assert cells(page, 3) == ["decode/window"]
    assert page.url.endswith("#backend=third&outcome=did+not+pass")
    again = show(run, address=page.url.partition("html")[2])
    wait_for(again, "1 case")
    assert again.get_by_label("Outcome").input_value() == "did not pass"
    again.get_by_role("button", name="Show all").click()
    wait_for(again, "25 cases")
    again.get_by_label("Text").fill("one KEY window")
    wait_for(again, "1 case")
    assert cells(again, 6) == ["7 of 40 rows"]


def test_columns_sort_both_ways(show, run):
    page = show(run)
    head = page.locator(".rows").get_by_role("button", name="error / allowed")
    head.click()
    page.locator(".rows [aria-sort=ascending]").wait_for()
    ascending = [float(text) for text in cells(page, 5)]
    assert ascending == sorted(ascending)
    assert ascending[-1] == 18.4
    head.click()
    page.locator(".rows [aria-sort=descending]").wait_for()
    assert [float(text) for text in cells(page, 5)] == ascending[::-1]
    assert page.url.endswith("#sort=-4")
    speeds = page.locator("section:not(#explorer) table", has_text="TFLOP/s")
    speeds.get_by_role("button", name="median").click()
    medians = [float(text.strip(" *").replace(",", "")) for text in speeds.locator("td:nth-child(4)").all_inner_texts()]
    assert medians == sorted(medians)


def test_many_records_come_in_pages(show, run_with, record_of):
    page = show(run_with([record_of(case_id=f"case-{index}") for index in range(230)]))
    wait_for(page, "1 to 100 of 230 cases")
    assert page.get_by_role("button", name="Previous").is_disabled()
    page.get_by_role("button", name="Next").click()
    page.get_by_role("button", name="Next").click()
    wait_for(page, "201 to 230 of 230 cases")
    assert len(cells(page, 3)) == 30
    assert page.get_by_role("button", name="Next").is_disabled()
    page.locator(".rows").get_by_role("button", name="case", exact=True).click()
    assert cells(page, 3)[:3] == ["decode/case-0", "decode/case-1", "decode/case-2"]  # numbers as numbers


def test_a_case_opens_by_keyboard_and_shows_all_records(show, run):
    page = show(run)
    button = page.get_by_role("button", name="Details of lengths/decode.512").first
    button.focus()
    page.keyboard.press("Enter")
    opened = page.locator("tr.opened")
    assert [" ".join(text.split()[:2]) for text in opened.locator(".record h4").all_inner_texts()] == [
        *["timing passed"] * 5,
        "numerics passed",
        "lse unsupported",
    ]
    command = (
        "attncheck run --backend first --suite lengths --case decode.512 --check numerics --device cuda --in-process"
    )
    assert opened.get_by_text(command).count() == 1
    button.press("Enter")
    assert opened.count() == 0
    button.press("Enter")
    opened.get_by_text("This case on every backend").click()
    wait_for(page, "3 cases")
    assert cells(page, 2) == ["first", "second", "third"]


def test_cells_and_findings_lead_to_their_records(show, run, run_with, record_of):
    page = show(run)
    page.get_by_role("link", name="8/9").click()
    wait_for(page, "9 cases")
    assert page.url.endswith("#backend=third&check=numerics")
    page.get_by_role("link", name="Records of this finding").click()
    wait_for(page, "1 case")
    assert cells(page, 3) == ["decode/window"]
    page.get_by_role("button", name="Details of decode/window").click()
    opened = page.locator("tr.opened")
    for text in ("8 heads, 2 KV heads. one new token each", "the window is one key too long"):
        assert opened.get_by_text(text).first.is_visible()
    assert opened.locator("pre").inner_text() == "a\nb"
    several = show(run, run_with([record_of(backend="first")], path="other.jsonl"))
    wait_for(several, "26 cases")
    several.get_by_label("Run").select_option("other.jsonl")
    wait_for(several, "1 case")
    assert cells(several, 2) == ["other.jsonl"]


def test_dark_is_the_systems_choice_until_the_reader_chooses(show, run):
    def ground(page):
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


def test_on_paper_all_is_open_and_nothing_is_to_be_clicked(show, run):
    page = show(run, viewport={"width": 710, "height": 1000})
    page.emulate_media(media="print", color_scheme="dark")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("button:visible:not(thead button), select:visible, input:visible, nav:visible").count() == 0
    assert page.locator("main details:not([open])").count() == 0
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(28, 32, 37)"  # dark ink, whatever the screen
    assert page.pdf(format="A4").startswith(b"%PDF-")


def test_without_a_script_the_summary_is_readable_and_on_the_first_screen_of_a_phone(show, run):
    page = show(run, java_script_enabled=False, viewport={"width": 390, "height": 844})
    for backend, verdict in (("first", "passed"), ("second", "passed"), ("third", "failed")):
        line = page.locator("section > ul > li", has_text=f"{backend}:").first
        assert line.locator(".chip").inner_text() == verdict
        box = line.bounding_box()
        assert box["y"] + box["height"] < 844
    assert page.get_by_text("The table of records needs JavaScript").is_visible()
    assert page.locator("button:visible, select:visible").count() == 0
    for text in ("7 of 40 rows", "the window is one key too long"):
        assert page.get_by_text(text).first.is_visible()
    assert page.locator("svg.chart").first.is_visible()


def test_the_line_of_a_finding_is_copied(show, run):
    page = show(run, permissions=["clipboard-read", "clipboard-write"])
    card = page.locator(".card")
    card.get_by_role("button").click()
    card.get_by_text("Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == card.locator(".command code").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_accessible(show, run, scheme):
    from axe_playwright_python.sync_playwright import Axe

    page = show(run, color_scheme=scheme, bypass_csp=True)
    page.locator("button.open").first.click()
    found = Axe().run(page).response["violations"]
    assert [(fault["id"], fault["nodes"][0]["html"]) for fault in found] == []
