"""The JSON documents hold every table, and their fields are those that the docs explain."""

import csv
import io
import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from attncheck.reports.comparison.compare import EnvironmentChange, OutcomeChange, compare_runs
from attncheck.reports.comparison.speed_changes import SuiteSpeedChange
from attncheck.reports.data import comparison_document, csv_table, runs_document
from attncheck.reports.run_file.records import OUTCOMES
from attncheck.reports.run_file.store import Run, read_run

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
