"""Records survive the way through JSON, and nothing unknown slips in."""

import json
import math
from dataclasses import fields

import pytest
from pydantic import ValidationError

from attncheck.harness.checks.findings import Measurements
from attncheck.reports.run_file.graph_levels import GraphLevels, GraphProbe
from attncheck.reports.run_file.records import (
    OUTCOMES,
    Crashed,
    Errored,
    Failed,
    Passed,
    Record,
    RunFooter,
    TimedOut,
    Unavailable,
    Unsupported,
    XFailed,
    XPassed,
    chosen_kernels_of,
    format_line,
    graph_of,
    parse_line,
    without_outcome,
)

WHO = {
    "suite": "smoke",
    "case_id": "edge.bfloat16-16",
    "case_hash": "0123456789ab",
    "check": "numerics",
    "seed": 3,
    "backend": "Wrong",
    "backend_ref": "./wrong.py:Wrong",
    "backend_version": "",
    "environment": "abcdefabcdef",
    "attncheck_version": "0.1.0",
}
ONE_OF_EACH: list[Record] = [
    Passed(**WHO, figures={"rows": 40, "worst_budget": 0.5}, notes=("ran math",)),
    Failed(**WHO, figures={"worst_budget": math.inf}, summary="7 of 40 rows", meaning="window", details=("row 3",)),
    Errored(**WHO, stage="forward", error_type="RuntimeError", message="no", traceback="Traceback ..."),
    Crashed(**WHO, stage="check numerics", cause="killed by SIGABRT", output="free(): \x1b[31minvalid\n\x00 pointer"),
    TimedOut(
        **WHO,
        stage="check lse",
        cause="not finished within the time limit; the limit was 3 s",
        limit_s=3.0,
        recurrence="flaky",
    ),
    Unsupported(**WHO, reasons=("head_size 80 is not one of 64",), by="attncheck"),
    Unavailable(**WHO, reasons=("needs CUDA",)),
    XFailed(**WHO, underlying="failed", summary="7 of 40 rows", reason="known"),
    XPassed(**WHO, reason="known"),
]
LEVELS = GraphLevels(
    declared="ALWAYS",
    measured=None,
    recorder="cuda",
    probes=(
        GraphProbe(name="one", level="UNIFORM_BATCH", outcome="passed"),
        GraphProbe(name="two", level="ALWAYS", outcome="not examined", reason="hidden work"),
    ),
)


def test_one_class_an_outcome():
    assert [record.outcome for record in ONE_OF_EACH] == list(OUTCOMES)
    assert {record.key for record in ONE_OF_EACH} == {ONE_OF_EACH[0].key}  # the question
    assert ONE_OF_EACH[0].key != Passed(**(WHO | {"seed": 4})).key


def test_a_line_comes_back_equal_and_of_its_class(header):
    backend = header.backends[1].model_copy(update={"required_environment": {"TRITON_INTERPRET": "1"}})
    stated = header.model_copy(update={"backends": (header.backends[0], backend)})
    named = Failed(**WHO, summary="7 of 40 rows", meaning="a window", finding="the words of the check")
    graphs = [each.model_copy(update={"graph": LEVELS}) for each in ONE_OF_EACH if "graph" in type(each).model_fields]
    assert len(graphs) == 5
    for line in (*ONE_OF_EACH, *graphs, named, stated, RunFooter(finished="now", counts={"passed": 3})):
        text = format_line(line)
        assert "\n" not in text
        again = parse_line(text)
        assert (type(again), again) == (type(line), line)


@pytest.mark.parametrize("record", ONE_OF_EACH)
def test_what_was_measured_is_written_last(record):
    measured = [field.name for field in fields(Measurements) if field.name in type(record).model_fields]
    keys = list(json.loads(format_line(record)))
    assert keys[:2] == ["kind", "suite"]
    assert keys[len(keys) - len(measured) :] == measured
    assert set(keys) == set(type(record).model_fields)


def test_another_outcome_keeps_the_question_and_what_was_measured():
    measured = {"graph": LEVELS, "chosen_kernels": ("flash",)}
    failed = ONE_OF_EACH[1].model_copy(update={"needs": ("sinks",), "duration_s": 0.5, "round": 2} | measured)
    again = XFailed(**without_outcome(failed), underlying="failed", summary="7 of 40 rows", reason="known")
    assert (again.key, again.needs, again.duration_s, again.graph) == (failed.key, ("sinks",), 0.5, LEVELS)
    assert chosen_kernels_of(again) == ("flash",)
    assert graph_of(XFailed(**without_outcome(ONE_OF_EACH[2]), underlying="errored", summary="", reason="")) is None


@pytest.mark.parametrize(
    "changes", [{"graph": {"measured": "SOME"}}, {"graph": {"seconds": 3}}, {"outcome": "unsupported", "reasons": []}]
)
def test_what_no_record_may_hold_is_refused(changes):
    data = json.loads(format_line(ONE_OF_EACH[0])) | changes
    if "graph" in changes:
        data["graph"] = LEVELS.model_dump() | changes["graph"]
    with pytest.raises(ValidationError):
        parse_line(json.dumps(data))


def test_a_line_from_before_kernels_were_recorded_is_read():
    written = json.loads(format_line(ONE_OF_EACH[0].model_copy(update={"chosen_kernels": ("flash",)})))
    assert written.pop("chosen_kernels") == ["flash"]
    assert parse_line(json.dumps(written)) == ONE_OF_EACH[0]


def test_nan_and_integers_keep_what_they_are():
    again = parse_line(format_line(Passed(**WHO, figures={"nan": math.nan, "inf": -math.inf, "n": 3, "x": 3.0})))
    assert isinstance(again, Passed)
    assert math.isnan(again.figures["nan"])
    assert again.figures["inf"] == -math.inf
    assert isinstance(again.figures["n"], int)
    assert isinstance(again.figures["x"], float)


def test_records_of_one_cause_have_one_finding_whatever_the_figures():
    first, second, other = (
        Failed(**WHO, summary=f"{count} slots are {what}") for count, what in ((3, "wrong"), (41, "wrong"), (3, "lost"))
    )
    assert first.finding == second.finding != other.finding
    assert ONE_OF_EACH[8].finding != ONE_OF_EACH[7].finding == "known"


def test_records_share_what_pydantic_keeps_of_their_fields_and_a_copy_changes_no_other(make_record):
    """A set of field names for each record takes more memory than all its values."""
    one, other = make_record("passed"), make_record("failed", case_id="b")
    assert one.__pydantic_fields_set__ is other.__pydantic_fields_set__
    known = set(one.model_fields_set)
    copy = other.model_copy(update={"output": "printed"})
    assert (copy.output, other.output) == ("printed", "")
    assert one.model_fields_set == known
    assert parse_line(format_line(copy)) == copy
