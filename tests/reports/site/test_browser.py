"""The site in a real browser: filters, addresses, hostile names, offline use, zoom, keyboard, and accessibility."""

import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import combinations

import pytest

from attncheck.reports.analysis.recommendation import STANDINGS, known_needs, recommend

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]

HOSTILE = "</script><img src=x onerror=window.hacked=1>/../../\u202e{{ 7 * 7 }}"
KINDS = ("index", "cases", "runs", "backends/*", "devices/*")


@pytest.fixture
def files(run_file):
    """On one device ``Mine`` is right, ``Other`` returns wrong output, ``Stopped`` was not finished."""
    both = ("sinks", "sliding_window", "block_size=16")
    needs = {"a": both, "b": ("sinks", "head_size=64"), "c": ("lse", "block_size=16")}
    return [
        run_file(1, {"a": "passed", "b": "passed", "c": "unsupported"}, needs=needs, times={"a": 1e5}),
        run_file(1, {"a": "failed", "b": "passed", "c": "passed"}, needs=needs, backend="Other", concerns=("sinks",)),
        run_file(1, {"c": "passed"}, needs=needs, backend="Stopped", stopped=("a", "b")),
        run_file(1, {"a": "passed"}, needs=both, backend="Able", times={"a": 53e5}),
        run_file(2, {"a": "passed"}, device="b gpu", needs=("sinks", "block_size=32")),
    ]


@pytest.fixture
def site(build, files):
    return build(files)


def pages(site):
    """A page of each kind."""
    found = [path for kind in KINDS for path in sorted(site.glob(f"{kind}.html"))[:1]]
    assert len(found) == len(KINDS)
    return found


def answers(page):
    """Name and standing of each backend, from the top."""
    rows = page.locator("table.matrix tbody tr").all()
    return [
        (row.locator("th a").text_content(), row.locator(".together").text_content().partition(" (")[0]) for row in rows
    ]


def test_the_page_answers_every_pair_of_needs_as_the_command_does(visit, site, files, subjects_of):
    members = [subject for subject in subjects_of(*files) if subject.device == "a gpu"]
    page = visit((site / "index.html").as_uri())
    for needs in combinations(known_needs(members), 2):
        page.evaluate("(needs) => judge(needs)", list(needs))
        expected = {each.subject.name: STANDINGS[each.standing] for each in recommend(needs, members)}
        assert dict(answers(page)) == expected, needs


def test_what_returns_wrong_output_is_first_and_a_slow_backend_is_no_noise(visit, site):
    page = visit((site / "index.html").as_uri())
    page.get_by_text("features").click()
    page.check("[value=sinks]")
    page.check("[value=sliding_window]")
    assert answers(page)[:3] == [
        ("Other", STANDINGS["wrong"]),
        ("Mine", STANDINGS["right"]),
        ("Able", STANDINGS["right"]),
    ]
    slow = page.locator("tr", has=page.get_by_role("link", name="Able")).locator(".time")
    assert slow.inner_text() == "53 times the fastest *, 1 case"


def test_the_address_holds_the_selection(visit, site):
    page = visit((site / "index.html").as_uri())
    page.select_option("select >> nth=1", "block_size=16")
    page.get_by_text("features").click()
    page.check("[value=sinks]")
    page.fill("[name=find]", "o")
    copy = visit(page.evaluate("location.href"))  # `page.url` may be late
    assert answers(copy) == answers(page)
    assert copy.locator("tbody tr:visible").count() == page.locator("tbody tr:visible").count() == 2
    copy.get_by_role("navigation", name="Devices").get_by_role("link", name="b gpu").click()
    assert copy.locator("[value=sinks]").is_checked()
    copy.get_by_role("link", name="Clear").click()
    assert not copy.locator("[value=sinks]").is_checked()


def test_hostile_names_are_text(visit, run_file, build):
    hostile = run_file(1, {"a": "failed"}, backend=HOSTILE, device=HOSTILE, version=HOSTILE, finding=HOSTILE)
    site = build([hostile, run_file(2, {"a": "passed"}, backend="b", device="b")])
    for path in pages(site):
        page = visit(path.as_uri())
        assert page.evaluate("window.hacked") is None
        assert page.locator("img:not([src^='../badges/'])").count() == 0


def test_the_site_works_below_a_path_of_a_server_and_offline(visit, site):
    for path in pages(site):
        visit(path.as_uri(), offline=True)
    handler = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(site.parent))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{server.server_port}/site/"
        page = visit(f"{base}index.html", within=base)
        for name in ("Cases", "Runs", "Backends"):
            page.wait_for_load_state("networkidle")
            page.get_by_role("navigation", name="Pages").get_by_role("link", name=name).click()
        page.wait_for_load_state("networkidle")
        page.get_by_role("link", name="Mine").click()
        assert page.locator("h1").inner_text() == "Mine"
        page.wait_for_load_state("networkidle")
        server.shutdown()


@pytest.mark.parametrize("width", [1440, 320])
def test_pages_fit_the_window_at_every_zoom(visit, site, width):
    for path in pages(site):
        page = visit(path.as_uri(), viewport={"width": width, "height": 800}, device_scale_factor=2)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path


def test_the_keyboard_suffices(visit, site):
    page = visit((site / "index.html").as_uri())
    focused = "document.activeElement"
    page.keyboard.press("Tab")
    assert page.evaluate(f"{focused}.className") == "skip"
    page.keyboard.press("Enter")
    for _ in range(30):
        page.keyboard.press("Tab")
        assert page.evaluate(f"getComputedStyle({focused}).outlineStyle") != "none", "the focus is visible"
        if page.evaluate(f"{focused}.tagName") == "SUMMARY":
            page.keyboard.press("Enter")
        if page.evaluate(f"{focused}.value") == "sinks":
            break
    page.keyboard.press("Space")
    assert answers(page)[0] == ("Other", STANDINGS["wrong"])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(visit, site, scheme):
    from axe_playwright_python.sync_playwright import Axe

    for path in pages(site):
        page = visit(path.as_uri(), color_scheme=scheme, bypass_csp=True)
        page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        result = Axe().run(page, options={"preload": False}).response["violations"]
        assert [(each["id"], each["nodes"][0]["html"]) for each in result] == [], path
