"""Reports that programs read: JUnit XML, GitHub's annotations, pytest-benchmark's JSON and JSON documents."""

import csv
import io
import itertools
import json
import re
import statistics
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import fields
from pathlib import Path
from urllib.parse import unquote

import pytest

from attncheck.errors import QuestionError
from attncheck.reports import github, junit
from attncheck.reports.comparison.compare import EnvironmentChange, OutcomeChange, compare_runs
from attncheck.reports.comparison.speed_changes import SuiteSpeedChange
from attncheck.reports.data import comparison_document, csv_table, runs_document
from attncheck.reports.pytest_benchmark import benchmark_names, render_run
from attncheck.reports.run_file.header import BackendInfo, CaseInfo
from attncheck.reports.run_file.records import OUTCOMES, RunFooter
from attncheck.reports.run_file.store import Run, read_run

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


COMMAND = re.compile(r"::(?P<kind>error|warning) (?P<properties>[^:]*)::(?P<message>.*)")


def run_of(header, *records, errors=(), complete=True):
    footer = RunFooter(finished="2026-01-01T00:01:00+00:00", counts={}, errors=errors)
    return Run("run.jsonl", header, records, footer if complete else None)


def commands(run):
    """Annotations as the runner reads them: it unescapes properties and message."""
    found = []
    for line in github.annotations([run]).splitlines():
        match = COMMAND.fullmatch(line)
        assert match, line
        named = dict(each.split("=", 1) for each in match["properties"].split(","))
        named = {key: unquote(value) for key, value in named.items()}
        found.append((match["kind"], named, unquote(match["message"])))
    return found


def test_a_function_of_a_provider_and_a_run_that_was_cut_off_are_errors(make, header):
    record = make("failed", suite="utilities", check="utilities", case_id="cdiv", summary="3 of 9 differ")
    ((kind, named, message),) = commands(run_of(header, record))
    assert (kind, named) == ("error", {"title": "reference: cdiv: failed"})
    assert message.startswith("3 of 9 differ\nrepeat: attncheck run --provider ")
    ((kind, _, message),) = commands(run_of(header, make("passed"), make("passed", backend="Wrong"), complete=False))
    assert kind == "error"
    assert "was cut off before its footer" in message


def test_an_expected_finding_is_no_error_and_states_what_cases_share(make, header):
    keys = {"a": {"cache.block_size": 1}, "b": {"cache.block_size": 16}}
    infos = tuple(CaseInfo(suite="smoke", id=name, shape="", keys=own) for name, own in keys.items())
    records = (make("failed", case_id="a"), make("passed", case_id="b"), make("xfailed", case_id="b", check="lse"))
    ((_, _, message),) = commands(run_of(header.model_copy(update={"cases": infos}), *records))
    assert "\nunlike passing cases: cache.block_size is 1 in the one case that fails" in message


def test_no_more_are_printed_than_github_shows(make, header):
    failures = [make("failed", case_id=name, summary=f"{name} is wrong") for name in "abcdefghijkl"]
    ten = commands(run_of(header, *failures[:10]))
    assert [named["title"] for _, named, _ in ten] == [f"reference: {name} is wrong" for name in "abcdefghij"]
    many = commands(run_of(header, *failures))
    assert len(many) == 10
    assert many[-1][1]["title"] == "and 3 more"


def test_warnings_are_of_backends_that_did_not_run_and_of_doubtful_times(make, timed, header):
    slow = timed(
        {"forward": 1e6}, timing={"device": {"throttle_reasons": ["sw_power_cap"]}}, work={"is_settled": False}
    )
    found = commands(run_of(header, slow, make("unavailable", backend="Wrong")))
    assert [kind for kind, _, _ in found] == ["warning"] * 3
    assert found[0][1:] == ({"title": "Wrong: nothing was examined"}, "needs CUDA")
    assert "held back (sw_power_cap)" in found[1][2]
    assert found[2][2].startswith("too noisy")
    assert commands(run_of(header, make("passed"), make("passed", backend="Wrong"))) == []
    # Several processes give their spread, whatever one of them did not settle.
    rounds = [timed({"forward": 1e6}, work={"is_settled": False}, round=number) for number in range(2)]
    assert commands(run_of(header.model_copy(update={"rounds": 2}), *rounds)) == []


def test_the_summary_stays_below_the_limit_and_states_what_it_left_out(make, header, monkeypatch):
    monkeypatch.setattr(github, "MAX_SUMMARY_BYTES", 2**16)
    words = ["".join(letters) for letters in itertools.product("abcdefgh", repeat=2)]
    many = [make("failed", case_id=word, summary=f"{word} {'é' * 1500}") for word in words]
    text = github.summary([run_of(header, *many)])
    assert 50_000 < len(text.encode()) <= 2**16
    assert text.count("<details>") == text.count("</details>") == 1
    assert text.rstrip().endswith("The rest was cut, since a summary holds 1 MiB: the run file has it all.")
    both = github.summary([run_of(header, *many), run_of(header, *many)])
    assert len(both.encode()) <= 2**16
    assert both.count("## attncheck: failed") == 2
    assert "was cut" not in github.summary([run_of(header, *many[:3])])
    # Even tables that are too long are cut.
    names = [f"{'b' * 2000}{number}" for number in range(40)]
    header = header.model_copy(update={"backends": tuple(BackendInfo(name=name, ref=name) for name in names)})
    text = github.summary([run_of(header, *(make("passed", backend=name) for name in names))])
    assert len(text.encode()) <= 2**16
    assert text.rstrip().endswith("the run file has it all.")


CEILINGS = {"copy_bytes_per_s": 1e12, "matmul_flops_per_s": 1e14, "dtype": "bfloat16"}


def converted(header, *records):
    footer = RunFooter(finished="2026-01-01T00:01:00+00:00", counts={})
    return json.loads(render_run(Run("run.jsonl", header, records, footer)))


def test_each_part_of_each_case_of_each_backend_is_a_benchmark(timed, timing_header):
    work = {"moved_bytes": 200_000_000, "flops": 10_000_000_000}
    records = [
        timed({"forward": 1e6, "build": 5e4}, work=work, timing={"ceilings": CEILINGS, "cache": "cold"}),
        timed({"forward": 3e6}, backend="Wrong"),
    ]
    found = converted(timing_header, *records)["benchmarks"]
    assert [(each["name"], each["group"]) for each in found] == [
        ("edge[reference-forward]", "smoke/edge forward"),
        ("edge[reference-build]", "smoke/edge build"),
        ("edge[Wrong-forward]", "smoke/edge forward"),
    ]
    assert found[0]["fullname"] == "attncheck::smoke::edge::reference::timing[forward]"
    assert found[2]["params"] == {"suite": "smoke", "case": "edge", "backend": "Wrong", "part": "forward"}
    info = found[0]["extra_info"]
    assert (info["backend_version"], info["case_hash"]) == ("0.1.0", "0123456789ab")
    assert (info["clock"], info["cache"], info["is_settled"]) == ("events", "cold", True)
    assert info["interval_s"] == pytest.approx([0.98e-3, 1.02e-3])
    assert info["bytes_per_s"] == pytest.approx(2e11)
    assert info["roofline_share"] == pytest.approx(0.2)
    names = benchmark_names("smoke", "edge", "evil\x1b[2J\nname", "forward")
    assert all(text.isprintable() for text in (names.name, names.fullname, names.group, names.param))


def test_statistics_are_of_all_samples_in_seconds(timed, timing_header):
    records = [timed({"forward": 2e6}, round=0), timed({"forward": 4e6}, round=1)]
    (found,) = converted(timing_header, *records)["benchmarks"]
    # Each round holds 0.98, 1, 1.02, 1 and 5 times its median.
    samples = [median * share for median in (2e-3, 4e-3) for share in (0.98, 1.0, 1.02, 1.0, 5.0)]
    assert found["stats"]["data"] == pytest.approx(samples)
    assert found["stats"]["rounds"] == 10
    assert found["stats"]["iterations"] == 1
    assert found["stats"]["median"] == pytest.approx(statistics.median(samples))
    assert found["stats"]["mean"] == pytest.approx(sum(samples) / 10)
    assert found["stats"]["ops"] == pytest.approx(10 / sum(samples))
    # Sorted: 1.96 2 2 2.04 3.92 | 4 4 4.08 10 20 ms; the quartiles are the medians of the halves.
    assert found["stats"]["iqr"] == pytest.approx(4.08e-3 - 2e-3)
    assert found["stats"]["iqr_outliers"] == 2
    # What counts of a process is its median.
    assert found["extra_info"]["round_medians_s"] == pytest.approx([2e-3, 4e-3])
    assert found["extra_info"]["median_s"] == pytest.approx((2e-3 * 4e-3) ** 0.5)


def test_a_wrong_answer_has_no_benchmark_and_none_at_all_is_an_error(timed, make, timing_header):
    with pytest.raises(QuestionError, match=r"run\.jsonl: .*: its times are of wrong outputs"):
        converted(timing_header, make("failed", check="timing"), make("passed"))
    with pytest.raises(QuestionError, match=r"run\.jsonl: .*: it has no times; run with --check timing"):
        converted(timing_header, make("passed"))


def test_pytest_benchmark_itself_compares_two_of_them(timed, timing_header, tmp_path):
    for name, factor in (("base", 1.0), ("new", 1.5)):
        records = (timed({"forward": 2e6 * factor, "build": 5e4}), timed({"forward": 3e6 * factor}, backend="Wrong"))
        (tmp_path / f"{name}.json").write_text(render_run(Run("run.jsonl", timing_header, records)), encoding="utf-8")
    words = "compare base.json new.json --group-by=group --columns=median,iqr,outliers,ops,rounds --sort=name"
    command = [sys.executable, "-m", "pytest_benchmark", *words.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"benchmark 'smoke/edge forward': (\d+) tests", done.stdout) == ["4"]
    rows = dict(re.findall(r"^(edge\[\S+\] \(\S+\)) +([\d.,]+)", done.stdout, re.MULTILINE))
    assert rows["edge[Wrong-forward] (base)"].startswith("3.0000")
    assert rows["edge[Wrong-forward] (new)"].startswith("4.5000")


DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "run-files.md").read_text(encoding="utf-8")


@pytest.fixture
def run(header, make, timed, run_of):
    probe = {"name": "decode", "level": "UNIFORM_SINGLE_TOKEN_DECODE", "outcome": "failed", "reason": "host read"}
    levels = {"declared": "ALWAYS", "measured": "NEVER", "recorder": "emulated", "probes": [probe]}
    records = (
        make("passed", case_id="a", figures={"budget_share": 0.5}, needs=["sinks"]),
        make("failed", case_id="b", figures={"budget_share": "NaN"}, needs=["sinks"]),
        make("unsupported", case_id="c", check="lse"),
        make("failed", case_id="a", check="cudagraph", figures={}, graph=levels),
        timed({"forward": 2e6}, case_id="d", figures={}),
    )
    return run_of(records, backends=header.backends)


def keys_of(value, under=""):
    """Every key with the keys it is under, lists left out: ``runs.summary.backend``."""
    for member in value if isinstance(value, list) else [value]:
        for key, own in member.items() if isinstance(member, dict) else ():
            yield f"{under}{key}"
            yield from keys_of(own, f"{under}{key}.")


def test_a_run_has_every_table(run):
    document = json.loads(runs_document([run, run]))
    assert (document["format"], document["kind"], len(document["runs"])) == (1, "runs", 2)
    data = document["runs"][0]
    assert (data["run"], data["verdict"], data["complete"]) == (run.path, "failed", True)
    assert data["header"]["environment"]["torch"] == "2.13.0+cpu"
    assert data["summary"][0] == {
        "backend": "reference",
        "check": "numerics",
        "outcomes": {"passed": 1, "failed": 1},
        "examined": 2,
        "fell_short": 1,
        "worst_budget_share": "Infinity",
    }
    assert [each["reasons"] for each in data["not_examined"]] == [["head_size 80 is not one of 64, 128"]]
    (sinks,) = (row for row in data["support"] if row["feature"] == "sinks")
    assert (sinks["verdict"], sinks["right"], sinks["short"]) == ("short", 1, 1)
    (level,) = data["graph_levels"]
    assert (level["declared"], level["measured"], level["cases"]) == ("ALWAYS", "NEVER", ["smoke/a"])
    assert level["broke_at"]["name"] == "decode"
    (speed,) = data["speeds"]
    assert (speed["case"], speed["part"], speed["rounds"]) == ("smoke/d", "forward", 1)
    assert speed["median_ns"] == pytest.approx(2e6)
    assert [row["outcome"] for row in data["records"]] == [record.outcome for record in run.records]
    assert data["records"][1]["budget_share"] == "NaN"


def test_an_unfinished_run_has_no_verdict(run):
    (data,) = json.loads(runs_document([Run(run.path, run.header, run.records[:1])]))["runs"]
    assert (data["verdict"], data["complete"]) == ("unfinished", False)


def test_a_comparison_is_written_whole(run):
    new = Run("new.jsonl", run.header, run.records[1:], run.footer)
    document = json.loads(comparison_document(compare_runs(run, new)))
    assert (document["format"], document["kind"], document["new"]["run"]) == (1, "comparison", "new.jsonl")
    assert (document["verdict"], document["fails"]) == ("incomplete", True)
    assert document["missing"] == [
        {"backend": "reference", "check": "numerics", "is_whole_backend": False, "cases": ["smoke/a"]}
    ]
    assert document["compared"]["of_backends"] == 2
    (speed,) = document["speeds"]
    assert (speed["verdict"], speed["ratio"], speed["low"]) == ("cannot tell", 1.0, None)


def test_the_page_names_every_field(run):
    """Fields of the header are those of the run file, which the schema describes."""
    documents = [
        runs_document([run]),
        comparison_document(compare_runs(run, Run("new.jsonl", run.header, run.records))),
    ]
    keys = {key for text in documents for key in keys_of(json.loads(text)) if ".header." not in key}
    names = {key.rpartition(".")[2] for key in keys if ".outcomes." not in key}
    names.update(field.name for kind in (OutcomeChange, SuiteSpeedChange, EnvironmentChange) for field in fields(kind))
    named = set(re.findall(r"`(\w+)`", PAGE))
    assert names - named == set()


def rows_of(*paths):
    return list(csv.DictReader(io.StringIO(csv_table([read_run(path) for path in paths]))))


def test_a_row_for_each_record_of_each_run(write, make):
    first = write(*(make(outcome, case_id=outcome) for outcome in OUTCOMES))
    second = write(make("passed"), name="second.jsonl")
    rows = rows_of(first, second)
    assert [row["outcome"] for row in rows] == [*OUTCOMES, "passed"]
    assert [row["run"] for row in rows] == [str(first)] * len(OUTCOMES) + [str(second)]
    assert {row["outcome"]: row["what"] for row in rows[: len(OUTCOMES)]} == {
        "passed": "",
        "failed": "7 of 40 rows",
        "errored": "RuntimeError in forward: no such kernel",
        "crashed": "killed by SIGABRT during check numerics",
        "timed_out": "not finished within the time limit during check lse; the limit was 3 s",
        "unsupported": "head_size 80 is not one of 64, 128",
        "unavailable": "needs CUDA",
        "xfailed": "failed: 7 of 40 rows (expected: known)",
        "xpassed": "passed, though expected to fail: known; remove or narrow this expectation",
    }


def test_figures_levels_times_and_causes_have_columns(write, make, timed):
    (row,) = rows_of(
        write(
            make(
                "failed", figures={"budget_share": 18.5}, meaning="the window\nis ignored", needs=["sinks", "dtype=f"]
            ),
            name="a.jsonl",
        )
    )
    assert (row["budget_share"], row["cause"], row["needs"]) == ("18.5", "the window is ignored", "sinks dtype=f")
    assert row["forward_median_ns"] == row["declared_level"] == ""
    record = timed({"forward": 2e6}).model_copy(update={"check": "numerics"})
    (row,) = rows_of(write(record, name="b.jsonl"))
    assert (row["forward_median_ns"], row["build_median_ns"]) == ("2000000.0", "")


def test_a_text_that_a_spreadsheet_would_calculate_has_an_apostrophe(write, make):
    texts = ("=1+1", "+1", "-1", "@SUM(A1)", "1-1", "\t=1")
    rows = rows_of(write(*(make("unsupported", case_id=text, reasons=(text,)) for text in texts)))
    assert [row["case_id"] for row in rows] == ["'=1+1", "'+1", "'-1", "'@SUM(A1)", "1-1", "\t=1"]
    (row,) = rows_of(write(make("errored", message='a "b", c;\x1b[2J\nd'), name="foreign.jsonl"))
    assert (row["check"], row["what"]) == ("numerics", 'RuntimeError in forward: a "b", c;?[2J')
    assert [row["what"] for row in rows] == ["'=1+1", "'+1", "'-1", "'@SUM(A1)", "1-1", "'=1"]
