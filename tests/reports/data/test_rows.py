"""Every record is one row of the CSV, with the same columns."""

import csv
import io
from pathlib import Path

from attncheck.reports.data import csv_table
from attncheck.reports.run_file.records import OUTCOMES
from attncheck.reports.run_file.store import read_run


def rows_of(*paths: Path) -> list[dict[str, str]]:
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
