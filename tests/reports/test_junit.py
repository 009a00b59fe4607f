"""JUnit XML: well-formed for any text of a backend, named as pytest names the same checks, counts that add up."""

import re
import xml.etree.ElementTree as ET

import pytest

from attncheck.reports import junit
from attncheck.reports.run_file.header import CaseInfo
from attncheck.reports.run_file.records import RunFooter
from attncheck.reports.run_file.store import Run

# The schema that Jenkins publishes: elements, what they may hold in which order, their required and optional attributes.
CHILDREN = {
    "testsuites": ["testsuite"],
    "testsuite": ["properties", "testcase", "system-out", "system-err"],
    "properties": ["property"],
    "testcase": ["skipped", "error", "failure", "system-out", "system-err"],
}
REQUIRED = {
    "testsuite": {"name", "tests", "failures", "errors", "time", "timestamp", "hostname", "id"},
    "testcase": {"classname", "name", "time"},
    "property": {"name", "value"},
    "failure": {"type", "message"},
    "error": {"type", "message"},
}


def document(header, *records, errors=(), complete=True):
    footer = RunFooter(finished="2026-01-01T00:01:00+00:00", counts={}, errors=errors) if complete else None
    root = ET.fromstring(junit.render_runs([Run("run.jsonl", header, records, footer)]))
    for element in root.iter():
        tags = [child.tag for child in element]
        allowed = CHILDREN.get(element.tag, [])
        assert tags == sorted(tags, key=allowed.index), element.tag
        assert REQUIRED.get(element.tag, set()) <= set(element.attrib), element.tag
        if element.tag == "testsuite":
            assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", element.attrib["timestamp"])
            cases = element.findall("testcase")
            counted = [len(cases), *(sum(case.find(tag) is not None for case in cases) for tag in COUNTED)]
            stated = [int(element.attrib[key]) for key in ("tests", "failures", "errors", "skipped")]
            assert stated == counted
    return root


COUNTED = ("failure", "error", "skipped")


def the_case(root):
    (case,) = root.iter("testcase")
    return case


@pytest.mark.parametrize(
    ("outcome", "tag", "message"),
    [
        ("passed", None, ""),
        ("failed", "failure", "7 of 40 rows"),
        ("errored", "error", "RuntimeError in forward: no such kernel"),
        ("crashed", "error", "killed by SIGABRT during check numerics"),
        ("timed_out", "error", "not finished within the time limit during check lse; the limit was 3 s"),
        ("unsupported", "skipped", "unsupported: head_size 80 is not one of 64, 128"),
        ("unavailable", "skipped", "unavailable: needs CUDA"),
        ("xfailed", "skipped", "did not pass, as expected: known: 7 of 40 rows"),
        ("xpassed", "failure", "passed, though expected to fail: known; remove or narrow this expectation"),
    ],
)
def test_every_outcome_has_its_tag(make, header, outcome, tag, message):
    case = the_case(document(header, make(outcome)))
    assert case.attrib["classname"] == "attncheck.smoke.edge.reference"
    assert case.attrib["name"] == "numerics"
    assert [child.tag for child in case] == ([] if tag is None else [tag])
    if tag is not None:
        assert message in (case[0].text or "")  # all that GitLab shows
        assert case[0].attrib["message"] == message
    if tag == "skipped":
        assert case[0].attrib["type"] == outcome
    if tag in ("failure", "error"):
        assert case[0].attrib["type"].startswith(f"{outcome}: ")  # and the words of the finding, to group by
        assert "repeat: attncheck run --backend reference --suite smoke --case edge" in (case[0].text or "")


def test_failures_of_one_finding_have_one_type_and_state_what_is_common(make, header):
    sizes = {"a": 1, "b": 1, "c": 16}
    infos = tuple(
        CaseInfo(suite="smoke", id=name, shape=f"{name} heads", keys={"cache.block_size": size})
        for name, size in sizes.items()
    )
    window = "the window is ignored"
    records = (
        make("failed", case_id="a", meaning=window),
        make("failed", case_id="b", meaning=window, summary="3 of 40 rows"),
        make("failed", case_id="c", check="lse", meaning="the LSE has base 2"),
        make("passed", case_id="c"),
    )
    root = document(header.model_copy(update={"cases": infos}), *records)
    a, b, other = root.iter("failure")
    assert a.attrib["type"] == b.attrib["type"] == f"failed: {window}"
    assert other.attrib["type"] == "failed: the LSE has base N"
    for failure in (a, b):
        assert f"finding: {window} (2 cases, check numerics; in common: cache.block_size is 1" in (failure.text or "")
    assert "a heads" in (a.text or "")


def test_suites_are_by_suite_and_backend_and_times_add_up(make, header):
    records = (
        make("passed", duration_s=0.25),
        make("failed", check="lse", duration_s=0.5),
        make("passed", backend="Wrong", duration_s=1.0),
        make("passed", suite="mine", duration_s=2.0),
    )
    root = document(header, *records)
    found = [(suite.get("name"), suite.get("tests"), float(suite.get("time", ""))) for suite in root]
    assert found == [("smoke.reference", "2", 0.75), ("smoke.Wrong", "1", 1.0), ("mine.reference", "1", 2.0)]
    assert [suite.get("id") for suite in root] == ["0", "1", "2"]
    assert (root.get("tests"), root.get("failures"), float(root.get("time", ""))) == ("4", "1", 3.75)
    properties = {each.get("name"): each.get("value") for each in root[1].iter("property")}
    assert (properties["torch"], properties["seed"], properties["device_name"]) == ("2.13.0+cpu", "0", "a cpu")
    assert properties["conventions"] == "lse_base: 2, batch_invariant: yes"
    run = Run("run.jsonl", header, records, RunFooter(finished="", counts={}))
    both = ET.fromstring(junit.render_runs([run, run]))
    assert [suite.get("id") for suite in both] == ["0", "1", "2", "3", "4", "5"]
    assert both.get("tests") == "8"
    mine = make("passed", backend="Wrong", backend_ref="/work/kernels/mine.py:Mine")
    rooted = ET.fromstring(junit.render_runs([Run("run.jsonl", header, (mine, records[0]))], "/work"))
    assert [case.get("file") for case in rooted.iter("testcase")][:2] == ["kernels/mine.py", None]


def test_what_failed_the_run_besides_is_an_error(make, header):
    root = document(header, make("passed"), errors=("expectation 3 matched nothing",))
    assert root.get("errors") == "1"
    assert root[-1][0][0].attrib["message"] == "expectation 3 matched nothing"
    cut = document(header, make("passed"), complete=False)
    assert "was cut off before its footer" in cut[-1][0][0].attrib["message"]
    assert document(header, make("passed")).get("errors") == "0"


def test_a_test_has_its_traceback_what_was_printed_its_times_and_its_rounds(make, timed, header):
    trace = 'Traceback:\n  File "wrong.py", line 9, in forward\n    x'
    case = the_case(document(header, make("errored", traceback=trace)))
    assert trace in (case[0].text or "")
    case = the_case(document(header, make("crashed", output="Fatal Python error: Aborted")))
    assert (case[0].text or "").rstrip().endswith("the end of what it printed:\nFatal Python error: Aborted")
    case = the_case(document(header, timed({"forward": 2_500_000.0, "build": 40_000.0})))
    assert case[0].tag == "system-out"
    assert case[0].text == "forward: median 2.50 ms, 1 round\nbuild: median 40.0 us, 1 round"
    outcomes = enumerate(("passed", "failed", "passed"))
    case = the_case(document(header, *(make(each, check="timing", round=n, duration_s=1.0) for n, each in outcomes)))
    assert float(case.attrib["time"]) == 3.0
    assert case[0].attrib["message"] == "in 1 of 3 rounds: 7 of 40 rows"
