"""The site in a real browser: filters, addresses, hostile names, offline use, zoom, keyboard, and accessibility."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from attncheck.reports.analysis.recommendation import STANDINGS
from attncheck.reports.site.build import names_of, read_runs, write_site
from attncheck.reports.site.model import SiteRun

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]

HOSTILE = "</script><img src=x onerror=window.hacked=1>/../../\u202e{{ 7 * 7 }}"
KINDS = ("index", "backends", "devices", "cases", "runs", "backends/*", "devices/*", "cases/*")


@pytest.fixture
def site(tmp_path: Path, run_file: Callable[..., Path]) -> Path:
    """Two devices; ``Mine`` is wrong in version 1 and right in version 2, ``other`` is wrong."""
    files = (
        run_file(1, {"a": "failed", "b": "unsupported"}),
        run_file(2, {"a": "passed", "b": "unsupported"}, version="2", times={"a": 2e5}),
        run_file(2, {"a": "failed", "b": "passed"}, backend="other", finding="the sinks are ignored"),
        run_file(3, {"a": "passed"}, device="b gpu", needs=("sinks", "block_size=32")),
    )
    return build(files, tmp_path / "site")


def build(files: Any, output: Path) -> Path:
    write_site(*read_runs(names_of(files), 1), output)
    return output


def pages(site: Path) -> list[Path]:
    """A page of each kind."""
    found = [path for kind in KINDS for path in sorted(site.glob(f"{kind}.html"))[:1]]
    assert len(found) == len(KINDS)
    return found


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """``visit(address, ...)`` opens a page. Errors and requests to other places fail the test."""
    contexts, complaints = [], []

    def failed(request: Any) -> None:
        if request.failure != "net::ERR_ABORTED":  # by a click on a link
            complaints.append(f"{request.failure}: {request.url}")

    def opened(address: str, within: str = "file://", **options: Any) -> Any:
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda it: it.url.startswith(within) or complaints.append(f"request: {it.url}"))
        page.on("requestfailed", failed)
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.goto(address)
        settled(page)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []


def settled(page: Any) -> None:
    """Wait until a script has filled the page, if the page has one."""
    if page.locator("#found").count():
        page.locator("#found > *").first.wait_for()


def found(page: Any) -> dict[str, list[str]]:
    """The backends by the heading of their standing."""
    headings = page.locator("#found .standing").all_inner_texts()
    tables = page.locator("#found table").all()
    return {
        heading.partition(" (")[0]: table.locator("tbody th").all_inner_texts()
        for heading, table in zip(headings, tables, strict=True)
    }


def test_filters_select_what_was_measured(visit: Any, site: Path) -> None:
    page = visit((site / "index.html").as_uri())
    page.select_option("[name=device]", "a gpu")
    page.check("[value=sliding_window]")
    assert found(page) == {STANDINGS["right"]: ["Mine"], STANDINGS["wrong"]: ["other"]}
    assert "the sinks are ignored" in page.locator("#found").inner_text()
    page.select_option("[name=device]", "b gpu")
    page.locator("#found h2", has_text="b gpu").wait_for()
    assert "Mine" not in found(page).get(STANDINGS["right"], [])
    page.uncheck("[value=sliding_window]")
    page.check("[value=sinks]")
    page.select_option("[name=block_size]", "32")
    assert found(page)[STANDINGS["right"]] == ["Mine"]
    for group in ("*", "*Hopper"):
        page.select_option("[name=device]", "a gpu")
        page.select_option("[name=device]", group)
        page.locator("#found h2").nth(1).wait_for()
        assert page.locator("#found h2").count() == 2


def test_the_address_holds_the_selection(visit: Any, site: Path) -> None:
    page = visit((site / "index.html").as_uri())
    page.select_option("[name=device]", "b gpu")
    page.select_option("[name=block_size]", "32")
    page.check("[value=sinks]")
    page.locator("#found h2", has_text="b gpu").wait_for()
    copy = visit(page.url)
    assert copy.locator("[name=device]").input_value() == "b gpu"
    assert copy.locator("[name=block_size]").input_value() == "32"
    assert copy.locator("[value=sinks]").is_checked()
    assert found(copy) == found(page)
    copy.get_by_role("button", name="Clear").click()
    copy.locator("#found h2", has_text="a gpu").wait_for()
    assert "block_size" not in copy.url
    assert "sinks" not in copy.url


def test_the_fastest_is_named_only_if_intervals_are_apart(visit: Any, run_of: Any, tmp_path: Path) -> None:
    def timed(name: str, low: float, high: float, **fields: Any) -> Any:
        (backend,) = run_of(1, {"a": "passed"}, backend=name).backends
        case = replace(backend.cases["smoke/a"], time=((low + high) / 2, low, high, fields.pop("processes", 3)))
        return replace(backend, cases={"smoke/a": case}, **fields)

    def remarks(*backends: Any) -> list[str]:
        run: SiteRun = replace(run_of(1, {"a": "passed"}), backends=backends)
        write_site([run], {}, tmp_path / "site")
        page = visit((tmp_path / "site/index.html").as_uri())
        return [text.partition("), ")[2] for text in page.locator("#found tbody td:nth-child(3)").all_inner_texts()]

    assert remarks(timed("slow", 2e5, 2.1e5), timed("fast", 1e5, 1.1e5)) == ["fastest", ""]
    assert remarks(timed("slow", 1.05e5, 2.1e5), timed("fast", 1e5, 1.1e5)) == [
        "lowest, but not certain",
        "within the noise, or not certain",
    ]
    assert remarks(timed("slow", 2e5, 2.1e5, processes=2), timed("fast", 1e5, 1.1e5))[0] == "lowest, but not certain"


def test_without_a_need_a_backend_without_a_right_case_is_not_tried(visit: Any, run_file: Any, tmp_path: Path) -> None:
    refusing = run_file(1, {"a": "passed"}, check="refusals", notes=("refused at forward: no",))
    page = visit((build([refusing], tmp_path / "site") / "index.html").as_uri())
    assert found(page) == {STANDINGS["not tried"]: ["Mine"]}


def test_hostile_names_are_text(visit: Any, run_file: Any, tmp_path: Path) -> None:
    hostile = run_file(1, {"a": "failed"}, backend=HOSTILE, device=HOSTILE, version=HOSTILE, finding=HOSTILE)
    site = build([hostile, run_file(2, {"a": "passed"}, backend=HOSTILE, device=HOSTILE)], tmp_path / "site")
    for path in pages(site):
        page = visit(path.as_uri())
        assert page.evaluate("window.hacked") is None
        assert page.locator("img:not([src^='../badges/'])").count() == 0
        if path.parent.name in ("backends", "devices") or path.stem in ("index", "backends", "devices"):
            assert "{{ 7 * 7 }}" in page.locator("main").inner_text()


def test_every_page_works_offline_as_a_file(visit: Any, site: Path) -> None:
    for path in site.rglob("*.html"):
        visit(path.as_uri(), offline=True)


def test_the_site_works_below_a_path_of_a_server(visit: Any, site: Path) -> None:
    handler = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(site.parent))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{server.server_port}/site/"
        page = visit(f"{base}index.html", within=base)
        for name in ("Backends", "Devices", "Cases", "Runs"):
            page.get_by_role("navigation").get_by_role("link", name=name).click()
            settled(page)
        page.goto(f"{base}backends.html")
        page.locator("tbody th a").first.click()
        assert page.locator("h1").inner_text() == "Mine"
        page.wait_for_load_state("networkidle")
        server.shutdown()


@pytest.mark.parametrize("width", [1440, 640, 320])
def test_pages_fit_the_window_at_every_zoom(visit: Any, site: Path, width: int) -> None:
    """A window of 1280 pixels has 640 at a zoom of 200 %, and 320 at 400 %."""
    for path in pages(site):
        page = visit(path.as_uri(), viewport={"width": width, "height": 800}, device_scale_factor=2)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path


def test_the_keyboard_suffices(visit: Any, site: Path) -> None:
    page = visit((site / "index.html").as_uri())
    focused = "document.activeElement"
    page.keyboard.press("Tab")
    assert page.evaluate(f"{focused}.className") == "skip"
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate(f"{focused}.name") == "device"
    page.keyboard.press("ArrowDown")
    page.locator("#found h2", has_text="b gpu").wait_for()
    for _ in range(30):
        page.keyboard.press("Tab")
        assert page.evaluate(f"getComputedStyle({focused}).outlineStyle") != "none", "the focus is visible"
        if page.evaluate(f"{focused}.value") == "sinks":
            break
    page.keyboard.press("Space")
    assert found(page)[STANDINGS["right"]] == ["Mine"]
    page.locator("#found tbody a").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/backends/*")
    page.get_by_role("button", name="Dark").focus()
    page.keyboard.press("Space")
    assert page.get_by_role("button", name="Dark").get_attribute("aria-pressed") == "true"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(visit: Any, site: Path, scheme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    for path in pages(site):
        page = visit(path.as_uri(), color_scheme=scheme, bypass_csp=True)
        page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        result = Axe().run(page, options={"preload": False}).response["violations"]
        assert [(each["id"], each["nodes"][0]["html"]) for each in result] == [], path
