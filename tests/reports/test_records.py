"""Records survive the way through JSON, and nothing unknown slips in."""

import itertools
import json
import math
from pathlib import Path

import pytest
from pydantic import ValidationError

from attncheck.reports.run_file.graph_levels import GraphLevels
from attncheck.reports.run_file.records import (
    OUTCOMES,
    RunFooter,
    XFailed,
    chosen_kernels_of,
    format_line,
    graph_of,
    is_not_reached,
    parse_line,
    without_outcome,
)
from attncheck.reports.run_file.schema import run_file_schema
from attncheck.reports.run_file.store import read_lines
from attncheck.reports.run_file.timings import Ceilings, Latency, Timing
from attncheck.reports.speeds.speed import Speed

MEASURED = {
    "declared": "ALWAYS",
    "measured": None,
    "recorder": "cuda",
    "probes": [
        {"name": "one", "level": "UNIFORM_BATCH", "outcome": "passed"},
        {"name": "two", "level": "ALWAYS", "outcome": "not examined", "reason": "hidden work"},
    ],
}
LEVELS = GraphLevels.model_validate(MEASURED)


def test_a_line_comes_back_equal_and_of_its_class(make, header):
    backend = header.backends[1].model_copy(update={"required_environment": {"TRITON_INTERPRET": "1"}})
    stated = header.model_copy(update={"backends": (header.backends[0], backend)})
    records = [make(outcome) for outcome in OUTCOMES]
    assert len({type(record) for record in records}) == len(OUTCOMES)
    assert {record.key for record in records} == {records[0].key} != {make("passed", seed=4).key}  # the question
    named = make("failed", finding="the words of the check", figures={"worst_budget": "Infinity", "n": 3})
    graphs = [each.model_copy(update={"graph": LEVELS}) for each in records if "graph" in type(each).model_fields]
    printed = make("crashed", output="free(): \x1b[31minvalid\n\x00 pointer")
    for line in (*records, *graphs, named, printed, stated, RunFooter(finished="now", counts={"passed": 3})):
        text = format_line(line)
        assert "\n" not in text
        again = parse_line(text)
        assert (type(again), again) == (type(line), line)


def test_another_outcome_keeps_the_question_and_what_was_measured(make):
    failed = make("failed", needs=["sinks"], duration_s=0.5, round=2, graph=MEASURED, chosen_kernels=["flash"])
    again = XFailed(**without_outcome(failed), underlying="failed", summary="7 of 40 rows", reason="known")
    assert (again.key, again.needs, again.duration_s, again.graph) == (failed.key, ("sinks",), 0.5, LEVELS)
    assert chosen_kernels_of(again) == ("flash",)
    assert graph_of(XFailed(**without_outcome(make("errored")), underlying="errored", summary="", reason="")) is None


def test_the_words_of_a_backend_alone_do_not_make_a_record_not_reached(make):
    late = "the case did not run, because earlier cases used up the time of the backend by --within; give more time"
    own = {late: True, f"my library: {late}": False, "the time of the backend by --within is too short for it": False}
    assert {why: is_not_reached(make("unavailable", reasons=[why])) for why in own} == own


def test_what_no_record_may_hold_is_refused(make):
    for changes in (
        {"graph": MEASURED | {"measured": "SOME"}},
        {"graph": MEASURED | {"seconds": 3}},
        {"outcome": "unsupported", "reasons": []},
    ):
        data = json.loads(format_line(make("passed"))) | changes
        with pytest.raises(ValidationError):
            parse_line(json.dumps(data))


def test_records_share_what_pydantic_keeps_of_their_fields_and_a_copy_changes_no_other(make_record):
    """A set of field names for each record takes more memory than all its values."""
    one, other = make_record("passed"), make_record("failed", case_id="b")
    assert one.__pydantic_fields_set__ is other.__pydantic_fields_set__
    known = set(one.model_fields_set)
    copy = other.model_copy(update={"output": "printed"})
    assert (copy.output, other.output) == ("printed", "")
    assert one.model_fields_set == known
    assert parse_line(format_line(copy)) == copy


LATENCY = {
    "part": "forward",
    "clock": "host",
    "median_ns": 2.0,
    "low_ns": 1.0,
    "high_ns": 3.0,
    "samples_ns": (1, 2, 3),
    "is_settled": True,
}
CEILINGS = {"copy_bytes_per_s": 1e9, "matmul_flops_per_s": 1e12, "dtype": "float32"}


def test_times_work_and_ceilings_are_numbers_that_can_be_divided():
    assert Latency.model_validate(LATENCY).median_ns == 2
    assert Latency.model_validate(LATENCY | {"flops": 0, "moved_bytes": 0}).flops == 0
    assert Ceilings.model_validate(CEILINGS).least_ns(1, 0) == 1
    no_times = (0.0, -1.0, 1e31, 1e-31, 10**400, float("nan"), float("inf"), "NaN")
    for model, valid, names, values in (
        (Latency, LATENCY, ("median_ns", "low_ns", "high_ns"), no_times),
        (Latency, LATENCY, ("moved_bytes", "flops"), (-1, 2**63, 10**400)),
        (Ceilings, CEILINGS, ("copy_bytes_per_s", "matmul_flops_per_s"), (0.0,)),
    ):
        for name, value in itertools.product(names, values):
            with pytest.raises(ValidationError, match=name):
                model.model_validate(valid | {name: value})


def test_the_least_and_the_largest_times_and_work_can_be_put_together():
    for time_ns, rate, work in itertools.product((1e-30, 1e30), (1e-30, 1e30), (0, 1, 2**63 - 1)):
        latency = Latency.model_validate(
            LATENCY | {"median_ns": time_ns, "low_ns": time_ns, "high_ns": time_ns, "moved_bytes": work, "flops": work}
        )
        ceilings = Ceilings(copy_bytes_per_s=rate, matmul_flops_per_s=rate, dtype="float32")
        speed = Speed("a", "b", "forward", (latency,) * 2, (Timing(latencies=(latency,), ceilings=ceilings),) * 2)
        assert speed.median_ns == pytest.approx(time_ns)
        assert speed.bytes_per_s is not None
        assert math.isfinite(speed.bytes_per_s)
        assert (speed.roofline_share is None) == (work == 0)


DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
KEPT = sorted((DOCS / "evidence").rglob("*.jsonl.xz"))
SCHEMA = run_file_schema()


def definition_of(line):
    """The part of the schema about a line, found by its ``kind`` and ``outcome``."""
    reference = SCHEMA["discriminator"]["mapping"][line["kind"]]
    if isinstance(reference, dict):
        reference = reference["discriminator"]["mapping"][line["outcome"]]
    return SCHEMA["$defs"][reference.rpartition("/")[2]]


def test_the_copy_in_the_docs_is_up_to_date():
    kept = json.loads((DOCS / "run-file.schema.json").read_text(encoding="utf-8"))
    assert kept == SCHEMA, "write it again: attncheck list schema --of run > docs/run-file.schema.json"


def test_it_holds_for_lines_of_kept_runs():
    for path in KEPT:
        lines = list(read_lines(str(path)))
        for text in {*lines[::50], lines[-1]}:  # the header is the first line, the footer the last
            line = json.loads(text)
            definition = definition_of(line)
            assert set(definition.get("required", ())) <= set(line) <= set(definition["properties"]), path.name
