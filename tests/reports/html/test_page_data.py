"""The data of the page: every record with all its fields, each text once."""

import json
from typing import Any

import pytest

from attncheck.reports.analysis.repro import repro_command
from attncheck.reports.document.run_values import RunValues
from attncheck.reports.html.page_data import page_data
from attncheck.reports.run_file.records import Crashed, Errored, Failed, Unsupported, XFailed, XPassed
from attncheck.reports.run_file.store import Run


def data_of(run: Run) -> Any:
    """The data of a page with this run alone."""
    return json.loads(page_data([RunValues.of(run)], ["run"]))


@pytest.fixture
def body_of(record_of: Any, run_with: Any) -> Any:
    """The body of the only record, with its outcome."""

    def body(*args: Any, **fields: Any) -> dict[str, Any]:
        data = data_of(run_with([record_of(*args, **fields)]))
        (group,) = data["groups"]
        (found,) = group[-1]
        return data["bodies"][found[4]] | {"outcome": data["outcomes"][found[1]]}

    return body


def test_every_record_is_there_under_its_case(record_of: Any, run_with: Any) -> None:
    run = run_with(
        [
            record_of(case_id="a", duration_s=0.25),
            record_of(case_id="a", check="lse"),
            record_of(case_id="a", backend="other"),
            record_of(Unsupported, case_id="b", reasons=("no",)),
            record_of(Unsupported, case_id="c", reasons=("no",), needs=("sinks",)),
        ]
    )
    data = data_of(run)
    rebuilt = [
        (
            data["backends"][backend],
            data["suites"][suite],
            case,
            data["checks"][check],
            data["outcomes"][outcome],
            repro,
        )
        for _, backend, suite, case, *_, records in data["groups"]
        for check, outcome, _, _, _, repro in records
    ]
    recorded = [(r.backend, r.suite, r.case_id, r.check, r.outcome) for r in run.records]
    assert sorted(row[:-1] for row in rebuilt) == sorted(recorded)
    assert [data["repros"][row[-1]] for row in rebuilt[:2]] == [repro_command(r, run.header) for r in run.records[:2]]
    assert len(data["groups"]) == 4
    assert len(data["bodies"]) == 2  # none for those that passed, and one reason
    assert data["groups"][0][-1][0][3] == 0.25
    assert data["needs"][data["groups"][-1][4]] == "sinks"


def test_the_body_of_each_outcome_has_its_fields(body_of: Any) -> None:
    assert body_of(notes=("careful",), figures={"rows": 3}) == {
        "outcome": "passed",
        "notes": ["careful"],
        "figures": {"rows": 3},
    }
    failed = body_of(Failed, summary="7 rows", meaning="off by one", details=("row 3",), figures={"budget_share": 18.4})
    assert failed == {
        "outcome": "failed",
        "what": "7 rows",
        "meaning": "perhaps: off by one",
        "details": ["row 3"],
        "figures": {"budget_share": 18.4},
        "share": 18.4,
    }
    errored = body_of(Errored, stage="forward", error_type="ValueError", message="no\nsuch", traceback="File 1\n  no")
    assert errored["what"] == "ValueError in forward: no"
    assert (errored["message"], errored["trail"]) == ("no\nsuch", "File 1\n  no")
    assert body_of(Crashed, stage="check lse", cause="killed by SIGABRT", output="x") == {
        "outcome": "crashed",
        "what": "killed by SIGABRT during check lse",
        "trail": "x",
    }
    assert body_of(Unsupported, reasons=("one", "two"), by="attncheck")["reasons"] == ["one", "two"]
    assert body_of(XFailed, underlying="crashed", summary="died", reason="known")["expected"] == "known"
    assert "out of date" in body_of(XPassed, reason="out of date")["what"]


@pytest.mark.parametrize(("share", "shown"), [(float("nan"), "inf"), (float("inf"), "inf"), (0.123456789, 0.123457)])
def test_figures_that_json_cannot_hold_are_words(body_of: Any, share: float, shown: object) -> None:
    body = body_of(figures={"budget_share": share})
    assert body["share"] == shown


def test_samples_are_summarised_by_their_quartiles(body_of: Any, timed: Any, run_with: Any) -> None:
    (first, *_) = timed(["one"], (512,))
    data = data_of(run_with([first]))
    part, clock, median, *_, count, quarters, settled, moved, _ = data["bodies"][0]["timing"]["parts"][0]
    latency = first.timing.latencies[0]
    assert (part, clock, median, count, settled, moved) == (
        "forward",
        "events",
        latency.median_ns,
        40,
        1,
        latency.moved_bytes,
    )
    assert quarters[0] == min(latency.samples_ns)
    assert quarters[4] == max(latency.samples_ns)
    assert quarters == sorted(quarters)


def test_a_speed_is_one_row_for_all_rounds(timed: Any, run_with: Any) -> None:
    run = run_with(timed(["fast", "slow"], (4096,), rounds=6))
    data = data_of(run)
    rows = [row for row in data["speeds"] if row[3] == "decode.4096" and row[4] == "forward"]
    assert [(data["backends"][row[1]], row[8], row[-1]) for row in rows] == [("fast", 6, 1), ("slow", 6, 0)]
    medians = [r.timing.latencies[0].median_ns for r in run.records if r.check == "timing" and r.backend == "fast"][:6]
    assert rows[0][6:8] == [min(medians), max(medians)]


@pytest.mark.parametrize("character", ["\x1b", "\x07", "\x7f", "\u202e"])
def test_what_a_reader_would_obey_is_taken_out(body_of: Any, character: str) -> None:
    found = body_of(notes=(f"a{character}b",), figures={f"c{character}": 1})
    assert (found["notes"], found["figures"]) == (["a?b"], {"c?": 1})
