"""Recorded traffic: the time of each case counts as often as the case came, where all backends were timed in it."""

import json

import pytest

from attncheck.reports.data import runs_document
from attncheck.reports.html.page import render_runs
from attncheck.reports.markdown import run as markdown
from attncheck.reports.run_file.header import CaseInfo
from attncheck.reports.run_file.store import Run
from attncheck.reports.speeds.speed import speeds
from attncheck.reports.speeds.tables import traffic
from attncheck.reports.terminal import run as terminal


@pytest.fixture
def weighted(timing_header):
    def made(**weights):
        cases = tuple(CaseInfo(suite="smoke", id=name, shape="", weight=weight) for name, weight in weights.items())
        return timing_header.model_copy(update={"cases": cases})

    return made


def test_a_case_counts_as_often_as_it_came(timed, weighted):
    records = [
        timed({"forward": 1e6, "build": 7e6}, case_id="often"),
        timed({"forward": 4e6}, case_id="seldom"),
        timed({"forward": 3e6}, case_id="often", backend="Wrong"),
        timed({"forward": 1e6}, case_id="seldom", backend="Wrong"),
    ]
    (found,) = traffic(weighted(often=90.0, seldom=10.0), speeds(records))
    # 90 x 1 + 10 x 4 = 130 ms, and 90 x 3 + 10 x 1 = 280 ms: builds are not in it.
    assert found.table.headings == ("backend", "calls timed", "100.0% of calls (ms)", "times the least")
    assert found.table.rows == (("reference", "100.0%", "130", "1"), ("Wrong", "100.0%", "280", "2.15"))


def test_what_a_backend_was_not_timed_in_is_left_out_of_all(timed, weighted):
    records = [
        timed({"forward": 1e6}, case_id="often"),
        timed({"forward": 4e6}, case_id="seldom"),
        timed({"forward": 3e6}, case_id="often", backend="Wrong"),
    ]
    header = weighted(often=90.0, seldom=6.0, never=4.0)
    (found,) = traffic(header, speeds(records))
    assert found.table.headings[2] == "90.0% of calls (ms)"
    assert [row[:3] for row in found.table.rows] == [("reference", "96.0%", "90.0"), ("Wrong", "90.0%", "270.0")]
    text = " ".join(terminal.render(header, records).split())
    assert "On this traffic: forward of 1 case timed for every backend" in text
    run = Run("r", header, tuple(records), None)
    assert "On this traffic: forward of 1 case" in markdown.render_run(run)
    assert "On this traffic: forward of 1 case" in render_runs([run])
    (exported,) = json.loads(runs_document([run]))["runs"][0]["traffic"]
    assert (exported["suite"], exported["cases"], exported["calls_compared"]) == ("smoke", 1, 0.9)
    assert [(each["backend"], each["calls_timed"], each["forward_ns"]) for each in exported["times"]] == [
        ("reference", 0.96, 90e6),
        ("Wrong", 0.9, 270e6),
    ]


def test_backends_without_a_common_case_are_not_compared(timed, weighted):
    records = [timed({"forward": 1e6}, case_id="a"), timed({"forward": 3e6}, case_id="b", backend="Wrong")]
    header = weighted(a=1.0, b=1.0)
    (found,) = traffic(header, speeds(records))
    assert [row[2:] for row in found.table.rows] == [("-", "-"), ("-", "-")]
    assert "none is compared" in " ".join(terminal.render(header, records).split())


def test_a_suite_without_weights_has_no_such_table(timed, timing_header):
    assert traffic(timing_header, speeds([timed({"forward": 1e6})])) == ()
