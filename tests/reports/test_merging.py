"""Run files that are joined: shards of one run, in the order of a run that was not divided."""

import pytest

from attncheck.errors import RunFileError
from attncheck.reports.run_file.header import CaseInfo
from attncheck.reports.run_file.merging import merge_runs
from attncheck.reports.run_file.records import RunFooter
from attncheck.reports.run_file.store import Run, count_outcomes


@pytest.fixture
def part(header):
    """``part("1/2", record, ...)``: a shard with these records; keywords are fields of its header."""

    def make(shard, *records, errors=(), complete=True, **fields):
        cases = tuple(CaseInfo(suite="smoke", id=name, shape="") for name in "abc")
        own = header.model_copy(update={"shard": shard, "cases": cases, "notes": ("one",), **fields})
        counts = count_outcomes(records)
        footer = RunFooter(finished=f"2026-01-0{shard[:1] or 1}T00:00:00+00:00", counts=counts, errors=errors)
        return Run(f"{shard.replace('/', 'of')}.jsonl", own, records, footer if complete else None)

    return make


def test_records_come_in_the_order_of_the_header(part, make_record):
    records = [
        make_record("passed", backend=backend, case_id=case, check=check, round=number)
        for number in (0, 1)
        for backend in ("reference", "Wrong")
        for case in "abc"
        for check in ("numerics", "lse")
    ]
    ours = [record for record in records if record.case_id == "b"]
    others = [record for record in records if record.case_id != "b"]
    merged = merge_runs([part("2/2", *others, notes=("two",), rounds=2), part("1/2", *ours, rounds=2)])
    assert list(merged.records) == records
    assert merged.header.shard == ""
    assert merged.header.notes == ("two", "one")
    assert merged.complete


def test_the_merged_run_began_with_the_first_and_ended_with_the_last(part, make_record):
    early, late = (f"2026-01-0{day}T00:00:00+00:00" for day in (1, 2))
    shards = part("1/2", started=late, errors=("x",)), part("2/2", started=early, errors=("x", "y"))
    merged = merge_runs(shards)
    assert (merged.header.started, merged.footer.finished) == (early, late)
    assert merged.errors == ("x", "y")


@pytest.mark.parametrize(
    ("shards", "words"),
    [
        (["1/3", "3/3"], "shard 2/3 is missing"),
        (["3/4"], "shards 1/4, 2/4, 4/4 are missing"),
        (["1/2", "2/3"], "one of 3 shards"),
    ],
)
def test_shards_that_are_not_all_are_refused(part, shards, words):
    with pytest.raises(RunFileError, match=words):
        merge_runs([part(shard) for shard in shards])


def test_a_run_of_another_question_is_refused_by_what_differs(part, header):
    environment = header.environment.model_copy(update={"torch": "9.9"})
    fewer = (header.suites[0].model_copy(update={"cases": 1}), *header.suites[1:])
    for fields, words in (
        ({"seed": 3}, r"differ in seed \(0 and 3\); `attncheck compare` compares two runs$"),
        ({"environment": environment}, r"differ in environment.torch \('2.13.0\+cpu' and '9.9'\)"),
        ({"backends": header.backends[:1], "checks": ("lse",)}, "differ in backends, checks"),
        ({"cases": header.cases[1:], "suites": fewer}, "differ in cases; `"),
    ):
        with pytest.raises(RunFileError, match=words):
            merge_runs([part("1/2"), part("2/2", **fields)])


def test_what_two_runs_found_alike_is_kept_once(part, make_record):
    one, again = (make_record("passed", case_id="a", duration_s=seconds) for seconds in (1.0, 2.0))
    assert list(merge_runs([part("1/2", one), part("2/2", again)]).records) == [one]
    whole = part("", one)
    assert list(merge_runs([whole, part("3/7", again)]).records) == [one]


def test_records_that_contradict_each_other_are_named(part, make_record):
    with pytest.raises(RunFileError, match=r"2of2.jsonl: contradicts 1of2.jsonl: smoke/a, .* outcome \(passed and f"):
        merge_runs([part("1/2", make_record("passed", case_id="a")), part("2/2", make_record("failed", case_id="a"))])
    right, other = (make_record("passed", case_id="a", figures={"rows": rows}) for rows in (1, 2))
    with pytest.raises(RunFileError, match="differs in figures"):
        merge_runs([part("1/2", right), part("2/2", other)])
