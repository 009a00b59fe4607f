"""Hand-made records: reports know nothing else."""

import itertools
import json
import os
import shutil
from html.parser import HTMLParser
from typing import Any

import pytest

from attncheck.reports.markdown import run as markdown
from attncheck.reports.run_file.header import BackendInfo, SuiteInfo
from attncheck.reports.run_file.records import RunFooter
from attncheck.reports.run_file.store import Run, count_outcomes


@pytest.fixture(scope="session")
def browser():
    """Chromium. A selected test fails without it, and names what is missing."""
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        pytest.fail("playwright is not installed: pip install 'attncheck[browser]', or `tox run -e browser`")
    program = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if program is None:
        pytest.fail("no chromium on PATH: install it (apt-get install chromium), or name one: CHROMIUM=/path/to/it")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def visit(browser):
    """``visit(address, ...)`` opens a page. Errors and requests to other places fail the test."""
    contexts, complaints = [], []

    def failed(request):
        if request.failure != "net::ERR_ABORTED":  # by a click on a link
            complaints.append(f"{request.failure}: {request.url}")

    def opened(address, within="file://", **options):
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda it: it.url.startswith(within) or complaints.append(f"request: {it.url}"))
        page.on("requestfailed", failed)
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.goto(address)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture(scope="session")
def make(make_record):
    """``make("failed", case_id="b", ...)``: short for ``make_record``."""
    return make_record


@pytest.fixture
def write(tmp_path, header, write_run):
    """``write(records)``: a complete run file of these records."""

    def write(*records, errors=(), name="run.jsonl"):
        return write_run(tmp_path / name, header, *records, errors=errors)

    return write


@pytest.fixture(scope="session")
def run_of(header):
    """``run_of(records, path="new.jsonl", is_complete=False, seed=1)``: a run; other fields are of its header."""

    numbers = itertools.count()

    def run(records, *, path="", is_complete=True, **fields):
        records = tuple(records)
        cases = {record.suite: {each.case_id for each in records if each.suite == record.suite} for record in records}
        backends = dict.fromkeys(record.backend for record in records)
        described = {
            "suites": tuple(SuiteInfo(name=name, ref=name, cases=len(ids)) for name, ids in cases.items()),
            "checks": tuple(dict.fromkeys(record.check for record in records)),
            "rounds": 1 + max((record.round for record in records), default=0),
            "backends": tuple(BackendInfo(name=name, ref=name, version="0.1.0") for name in backends),
        }
        footer = RunFooter(finished="2026-01-01T00:10:00+00:00", counts=count_outcomes(records))
        return Run(
            path or f"run-{next(numbers)}.jsonl",
            header.model_copy(update=described | fields),
            records,
            footer if is_complete else None,
        )

    return run


def latency(part: str, median_ns: float, **fields: Any) -> dict[str, Any]:
    found = {
        "part": part,
        "clock": "host" if part == "build" else "events",
        "median_ns": median_ns,
        "low_ns": median_ns * 0.98,
        "high_ns": median_ns * 1.02,
        "samples_ns": [round(median_ns * share) for share in (0.98, 1.0, 1.02, 1.0, 5.0)],
        "is_settled": True,
    }
    return found | fields


@pytest.fixture(scope="session")
def timed(make):
    """``timed({"forward": 1e6, "build": 5e4}, round=1)``: a passed timing with these medians, in nanoseconds.

    ``work``: other fields of the latency of ``forward``. ``timing``: other fields of the timing.
    """

    def build(medians, *, work=None, timing=None, **fields):
        latencies = [latency(part, ns, **(work or {} if part == "forward" else {})) for part, ns in medians.items()]
        return make("passed", check="timing", timing={"latencies": latencies} | (timing or {}), **fields)

    return build


@pytest.fixture(scope="session")
def rounds_of(timed):
    """``rounds_of(medians, build=medians, backend="Wrong")``: one record a round."""

    def build(forward, *, build=(), **fields):
        medians = {"forward": forward} | ({"build": build} if build else {})
        return [
            timed({part: own[index] for part, own in medians.items()}, round=index, **fields)
            for index in range(len(forward))
        ]

    return build


@pytest.fixture(scope="session")
def graph(make):
    """``graph("failed", levels, case_id=...)``: a record of the check ``cudagraph`` with these levels."""

    def record(outcome, found, **fields):
        extra = {} if found is None else {"graph": found}
        return make(outcome, check="cudagraph", **extra, **fields)

    return record


@pytest.fixture(scope="session")
def graph_header(header):
    return header.model_copy(update={"checks": ("numerics", "cudagraph")})


@pytest.fixture
def as_markdown(graph_header):
    return lambda *records: markdown.render_run(Run("graphs.jsonl", graph_header, records))


class Parsed(HTMLParser):
    """An HTML page taken apart: elements with their attributes, and texts by the element around them.

    ``faults``: elements that are not closed, once and in order.
    """

    VOID = frozenset({"meta", "br", "input", "wbr"})

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.faults: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        self.faults += [f"<{tag}> is not closed" for tag in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop() != tag:
            self.faults.append(f"</{tag}> closes nothing, at {self.getpos()}")

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self._open[-1] if self._open else "", []).append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """The attributes of every element of that name."""
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def shown(self) -> str:
        """All text that a reader without JavaScript sees."""
        parts = [text for tag, texts in self.texts.items() if tag not in ("script", "style") for text in texts]
        return " ".join(" ".join(parts).split())

    @property
    def data(self) -> dict[str, Any]:
        """The data of the records on the page."""
        return json.loads(self.texts["script"][0])


@pytest.fixture(scope="session")
def parsed():
    """``parsed(page)``: an HTML page taken apart."""
    return Parsed
