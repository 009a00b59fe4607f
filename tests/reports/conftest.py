"""Hand-made records: reports know nothing else."""

import itertools
import json
import os
import shutil
from html.parser import HTMLParser

import pytest

from attncheck.reports.run_file.header import BackendInfo, CaseInfo, SuiteInfo
from attncheck.reports.run_file.records import BUDGET_SHARE, RunFooter
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
def run_of(make_header):
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
            make_header().model_copy(update=described | fields),
            records,
            footer if is_complete else None,
        )

    return run


def latency(part, median_ns, **fields):
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


@pytest.fixture
def graph_header(header):
    return header.model_copy(update={"checks": ("numerics", "cudagraph")})


class Parsed(HTMLParser):
    """An HTML page taken apart: elements with their attributes, and texts by the element around them.

    ``faults``: elements that are not closed, once and in order.
    """

    VOID = frozenset({"meta", "br", "input", "wbr"})

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.elements = []
        self.texts = {}
        self.faults = []
        self._open = []
        self.feed(page)
        self.close()
        self.faults += [f"<{tag}> is not closed" for tag in self._open]

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if not self._open or self._open.pop() != tag:
            self.faults.append(f"</{tag}> closes nothing, at {self.getpos()}")

    def handle_data(self, data):
        self.texts.setdefault(self._open[-1] if self._open else "", []).append(data)

    def all(self, tag):
        """The attributes of every element of that name."""
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def shown(self):
        """All text that a reader without JavaScript sees."""
        parts = [text for tag, texts in self.texts.items() if tag not in ("script", "style") for text in texts]
        return " ".join(" ".join(parts).split())

    @property
    def data(self):
        """The data of the records on the page."""
        return json.loads(self.texts["script"][0])


@pytest.fixture(scope="session")
def parsed():
    """``parsed(page)``: an HTML page taken apart."""
    return Parsed


SINGLE = "UNIFORM_SINGLE_TOKEN_DECODE"
READ = "host read: .item() at wrong.py:9 in forward"


@pytest.fixture
def timing_header(header):
    return header.model_copy(update={"checks": ("numerics", "timing"), "rounds": 10})


def levels(declared, measured):
    probes = [
        {"name": "decode", "level": SINGLE, "outcome": "failed", "reason": READ},
        {"name": "verify", "level": "UNIFORM_BATCH", "outcome": "not run", "reason": "'decode' broke"},
    ]
    if measured == SINGLE:
        probes = [probes[0] | {"outcome": "passed", "reason": ""}, probes[1] | {"outcome": "failed", "reason": READ}]
    return {"declared": declared, "measured": measured, "recorder": "emulated", "probes": probes}


@pytest.fixture
def passing_run(header, make, graph):
    """One backend that passes and could declare a higher level, with two reasons why checks were not examined."""
    checks = ("numerics", "lse", "cudagraph")
    header = header.model_copy(update={"suites": header.suites[:1], "backends": header.backends[:1], "checks": checks})
    records = (
        make("passed", figures={BUDGET_SHARE: 0.5}, needs=["sinks", "head_size=64"]),
        graph("passed", levels("NEVER", SINGLE)),
        make("unsupported", check="lse", reasons=["feature 'lse' is not declared"]),
        *(make("unsupported", check=check, case_id="wide") for check in checks),
    )
    return Run("run.jsonl", header, records, RunFooter(finished="2026-01-01T00:01:00+00:00", counts={}))


@pytest.fixture
def failing_run(header, make, graph, timed):
    """Two backends in two suites: findings, an expected one, levels, times, and a backend that cannot run here."""
    third = BackendInfo(name="third", ref="third", conventions={"lse_base": "e"})
    shape = "4 heads, 2 KV heads, head size 64, bfloat16"
    cases = tuple(
        CaseInfo(suite="smoke", id=name, shape=shape, description=f"case {name}", keys={"layer.sliding_window": window})
        for name, window in (("edge", "none"), ("window", 128), ("both", 128))
    )
    header = header.model_copy(
        update={
            "backends": (*header.backends, third),
            "cases": cases,
            "checks": ("numerics", "lse", "cache_write", "cudagraph", "timing"),
            "command": ("attncheck", "run", "reference", "./wrong.py:Wrong"),
            "notes": ("a note | of the run",),
        }
    )
    wrong = {"backend": "Wrong"}
    failure = wrong | {
        "figures": {"rows": 40, "bad_rows": 7, BUDGET_SHARE: 18.4},
        "summary": "7 of 40 rows are wrong, the first is row 3 (request 0, position 35), all heads; the largest error is 18.4 times the allowed error, at head 2",
        "meaning": "the window is one key too long (the truth with sliding_window=129 fits all rows)",
        "details": ["row 3: found 0.5, expected 0.25"],
        "needs": ["sliding_window"],
    }
    records = (
        make("passed", figures={BUDGET_SHARE: 0.5}, needs=["head_size=64"]),
        make("passed", case_id="window", figures={BUDGET_SHARE: 0.25}, needs=["sliding_window"], chosen_kernels=["a"]),
        make("passed", suite="mine"),
        timed({"forward": 1e6, "build": 1e5}),
        make("failed", case_id="window", **failure),
        make("failed", case_id="both", **failure),
        make("errored", **wrong, check="cache_write", traceback='  File "wrong.py", line 9, in forward\n    x'),
        graph("failed", levels(SINGLE, "NEVER"), **wrong, summary=f"declared {SINGLE}: {READ}"),
        *(make("unsupported", **wrong, check="lse", case_id=f"c{n}", reasons=["no lse"]) for n in range(3)),
        make("xfailed", **wrong, check="lse", case_id="known", reason="upstream issue 5"),
        timed({"forward": 2e6}, **wrong),
        make("unavailable", backend="third"),
    )
    footer = RunFooter(finished="2026-01-01T00:01:00+00:00", counts={}, errors=("entry 2 matches no case",))
    return Run("run.jsonl", header, records, footer)
