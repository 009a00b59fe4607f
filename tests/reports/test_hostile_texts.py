"""Whatever the texts of a run file are, every report shows them as text: no terminal, viewer or runner obeys them."""

import re
import unicodedata
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise

import pytest
from markdown_it import MarkdownIt

from attncheck.reports.comparison.compare import compare_runs
from attncheck.reports.formats import FORMATS
from attncheck.reports.run_file.header import BackendInfo, CaseInfo, Environment, RunHeader, SuiteInfo
from attncheck.reports.run_file.records import OUTCOMES, RunFooter
from attncheck.reports.run_file.store import Run
from attncheck.reports.terminal.columns import Style

HOSTILE = (
    "<script>hacked()</script>",
    '"><img src=x onerror=hacked()> [a](javascript:hacked()) ![b](x)',
    "\x1b[31mred\x1b[2J\x07\x00\x85 \u202egnp.exe\u2066 \ufeff",
    "a\n\n# heading\n\n<b>\n::error::told\n##[error]told\r::stop-commands::x",
    "| a | b |\n|---|---|\n``` ` ~~~ </details>",
    "</script></style></title></text></svg><svg onload=hacked()> ' onmouseover='hacked() <!-- --> $body $",
)
TEXT_FORMATS = ("terminal", "markdown", "github", "csv", "junit", "sarif")


@pytest.fixture(params=HOSTILE, ids=range(len(HOSTILE)))
def run(request, header, make):
    """A run in which every text is hostile."""
    text = request.param
    known = header.environment.model_dump()
    facts = {name: text for name, value in known.items() if isinstance(value, str)} | {
        "driver": text,
        "git_commit": text,
    }
    fields = {"backend": text, "backend_ref": text, "suite": text, "check": text, "needs": [text]}
    texts = {
        "passed": {"notes": [text], "figures": {text: 1.0}},
        "failed": {"summary": text, "meaning": text, "details": [text], "output": text, "figures": {text: 2.0}},
        "errored": {"stage": text, "error_type": text, "message": text, "traceback": text, "output": text},
        "crashed": {"stage": text, "cause": text, "output": text},
        "timed_out": {
            "stage": text,
            "cause": text,
            "output": text,
            "native_stack": f"Thread 1\n    {text}",
            "recurrence": "after",
            "after": text,
        },
        "unsupported": {"reasons": [text]},
        "unavailable": {"reasons": [text]},
        "xfailed": {"summary": text, "reason": text},
        "xpassed": {"reason": text},
    }
    records = [make(each, case_id=text, round=n, **fields, **texts[each]) for n, each in enumerate(OUTCOMES)]
    latency = {"clock": "host", "median_ns": 1, "low_ns": 1, "high_ns": 1, "samples_ns": [1], "is_settled": False}
    timing = {"latencies": [latency | {"part": "forward"}], "kernels": [{"name": text, "count": 1, "duration_ns": 1}]}
    device = {"throttle_reasons": [text]}
    probe = {"name": text, "level": "ALWAYS", "outcome": "failed", "reason": text}
    graph = {"declared": "ALWAYS", "measured": "NEVER", "recorder": "cuda", "probes": [probe], "notes": [text]}
    records += [
        make("passed", **fields | {"check": "timing"}, timing=timing | {"device": device, "notes": [text]}),
        make("failed", **fields | {"check": "cudagraph"}, **texts["failed"], graph=graph),
        make("failed", **fields | {"check": "utilities"}, **texts["failed"]),
    ]
    whole = RunHeader(
        started=text,
        environment=Environment(**(known | facts)),
        suites=(SuiteInfo(name=text, ref=text, cases=1),),
        cases=(CaseInfo(suite=text, id=text, shape=text, description=text, keys={text: text}),),
        checks=(text, "timing", "cudagraph", "utilities"),
        device=text,
        seed=0,
        rounds=len(OUTCOMES),
        backends=(BackendInfo(name=text, ref=text, version=text, conventions={text: text}, features=(text,)),),
        command=("attncheck", text),
        notes=(text,),
    )
    return Run(f"{text}.jsonl", whole, tuple(records), RunFooter(finished=text, counts={}, errors=(text,)))


@pytest.fixture
def comparison(run):
    """The run compared with one in which the same question passed."""
    passed = (run.records[0], *run.records[len(OUTCOMES) :])
    return compare_runs(replace(run, path="base.jsonl", records=passed), replace(run, path="new.jsonl"))


def test_nothing_is_left_that_a_terminal_or_a_runner_obeys(run, comparison):
    reports = [FORMATS[name].render_runs([run], Style(100, color=False)) for name in TEXT_FORMATS]
    reports += [FORMATS[name].render_comparison(comparison, Style()) for name in ("terminal", "markdown", "github")]
    for text, log in reports:
        for each in set(text + log) - set("\n\t"):
            assert unicodedata.category(each) not in ("Cc", "Cf")
        assert not re.search(r"^\s*(::|##\[)", text, re.MULTILINE)
        assert all(line.startswith(("::error ", "::warning ")) for line in log.splitlines())
    coloured, _ = FORMATS["terminal"].render_runs([run], Style(100, color=True))
    assert set(re.findall("\x1b.{3}", coloured)) <= {"\x1b[31", "\x1b[32", "\x1b[33", "\x1b[1m", "\x1b[0m", "\x1b[2m"}
    junit, _ = FORMATS["junit"].render_runs([run], Style())
    assert {element.tag for element in ET.fromstring(junit).iter()} <= {
        *("testsuites", "testsuite", "testcase", "properties", "property"),
        *("failure", "error", "skipped", "system-out"),
    }


@pytest.mark.parametrize("name", ["markdown", "github"])
def test_no_markup_comes_from_a_text(run, comparison, name):
    text, _ = FORMATS[name].render_runs([run], Style())
    compared, _ = FORMATS[name].render_comparison(comparison, Style())
    tokens = [*MarkdownIt("commonmark").enable("table").parse(f"{text}\n\n{compared}")]
    tokens += [child for token in tokens for child in token.children or ()]
    own = re.compile(r"(</?(details|summary)>|<br>|Findings \(\d+\)|About these figures|\s)*")
    assert [each.content for each in tokens if each.type.startswith("html") and not own.fullmatch(each.content)] == []
    assert not {"link_open", "image"} & {token.type for token in tokens}
    headings = [after.content for token, after in pairwise(tokens) if token.type == "heading_open"]
    assert "heading" not in headings


def test_html_has_no_element_and_no_attribute_of_a_text(run, parsed):
    text, _ = FORMATS["html"].render_runs([run], Style())
    page = parsed(text)
    assert page.faults == []
    assert [each.get("type") for each in page.all("script")] == ["application/json", None]
    assert len(page.all("style")) == len(page.all("title")) == 1
    assert {tag for tag, _ in page.elements}.isdisjoint({"img", "details>", "textarea", "link", "iframe"})
    names = {name for _, attributes in page.elements for name in attributes}
    assert not {name for name in names if name.startswith("on") or "hacked" in name}
    assert "<!--" not in text
    assert {each for each in text if unicodedata.category(each) in ("Cc", "Cf")} <= {"\n", "\t"}
    name = "".join("?" if unicodedata.category(c) in ("Cc", "Cf") and not c.isspace() else c for c in run.header.device)
    assert "".join(name.split()) in "".join(page.shown.split())


@pytest.mark.browser
def test_no_text_runs_as_a_script_in_a_browser(run, browser, tmp_path):
    file = tmp_path / "report.html"
    file.write_text(FORMATS["html"].render_runs([run], Style()).text, encoding="utf-8")
    page = browser.new_page()
    page.add_init_script("window.calls = 0; window.hacked = () => { window.calls += 1; }")
    page.goto(file.as_uri())
    for button in page.get_by_role("button", name="Details of").all():
        button.evaluate("button => button.click()")
    assert page.locator("tr.opened").count() > 0
    assert page.evaluate("window.calls") == 0
    assert page.locator("img").count() == 0
    page.close()
