"""The section about providers: words, counts, who shares a sentence, and the line that repeats a record."""

import pytest

from attncheck.reports.analysis.repro import repro_command
from attncheck.reports.analysis.summary import summarise
from attncheck.reports.analysis.utilities import function_rows, notes_by_heading
from attncheck.reports.document.run_values import RunValues
from attncheck.reports.run_file.header import BackendInfo, SuiteInfo
from attncheck.reports.run_file.records import Passed
from attncheck.reports.terminal import run as terminal


@pytest.fixture
def function(make):
    def record(name, outcome="passed", **fields):
        return make(outcome, suite="utilities", case_id=name, check="utilities", backend="mine", **fields)

    return record


@pytest.fixture
def mine(header):
    return header.model_copy(
        update={
            "suites": (*header.suites, SuiteInfo(name="utilities", ref="utilities", cases=3)),
            "checks": (*header.checks, "utilities"),
            "backends": (*header.backends, BackendInfo(name="mine", ref="./mine.py", version="7")),
        }
    )


def test_functions_of_which_the_same_is_known_share_a_sentence(function):
    gone = {"reasons": ["went away"]}
    records = [
        function("f", "unsupported", **gone),
        function("g", notes=("drift: x",)),
        function("h", "unsupported", **gone),
        function("i", notes=("upper bound: 3 maxima",)),
    ]
    figures = {"questions": 9, "equal": 7, "drifted": 2, "judged": 0, "differs": 0, "drifts": 1, "judgements": 0}
    (row,) = function_rows([function("f", figures=figures)], "mine")
    assert (row.name, row.word, *row.counts) == ("f", "drifted", "9", "7", "2", "-", "-")
    assert function_rows(records, "another") == ()
    assert notes_by_heading(function_rows(records, "mine")) == (
        ("known departures", (("g", "drift: x"),)),
        ("missing", (("f, h", "went away"),)),
        ("notes", (("i", "upper bound: 3 maxima"),)),
    )


def test_providers_are_counted_apart_from_backends(function, make, mine):
    records = [make("passed"), function("f"), function("g", "unsupported", reasons=["went"])]
    summary = summarise(records, checks=mine.checks)
    assert "mine" not in summary.backends
    assert summary.providers == ("mine",)
    assert "utilities" not in {*summary.checks, *summary.suites}
    assert (summary.cases, summary.functions) == (1, 2)
    assert not summary.gaps
    counts = "passed: 1 backend, 1 case: 1 right; 1 provider, 2 functions: 1 passed, 1 unsupported"
    assert RunValues(mine, records).closing() == counts
    text = terminal.render(mine, records)
    assert text.index("backend ") < text.index("utilities of mine 7") < text.index("passed: 1 backend")


def test_functions_that_are_wrong_are_listed_with_the_line_that_repeats_them(function, mine):
    records = [function(f"f{n}", "failed", summary=f"{n} of 9 differ") for n in range(1, 6)]
    text = terminal.render(mine, records)
    assert [n for n in range(1, 6) if f"failed  mine  f{n}\n  {n} of 9 differ\n  repeat: " in text] == [1, 2, 3]
    assert "\n\nand 2 more functions\n  in full: --verbose\n" in text


def test_the_line_that_repeats_it_names_provider_function_and_suites(function, mine):
    record = function("v0.f")
    assert isinstance(record, Passed)
    record = record.model_copy(update={"backend_ref": "./mine.py", "seed": 3})
    line = "attncheck run --provider ./mine.py --case v0.f --suite smoke --suite './my suite.yaml'"
    assert repro_command(record, mine) == f"{line} --device cpu --seed 3"
