"""With the expectations that are written from a run, the same run is green, and another fault in it is not."""

import json
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from inline_snapshot import snapshot

from attncheck.harness.run.expectations import Expectations, expectations_text, load_expectations
from attncheck.harness.run.outcomes import OURSELVES
from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.records import FALLEN_SHORT, Record, RunFooter, XFailed, parse_line
from attncheck.reports.run_file.store import Run

HEADER = {
    "started": "2026-11-22T10:00:00+00:00",
    "environment": dict.fromkeys(("attncheck", "python", "torch", "numpy", "platform", "cpu", "device"), "x")
    | {"device_name": "x", "cores": 2},
    "suites": [{"name": name, "ref": name, "cases": 9} for name in ("smoke", "gqa")],
    "checks": ["numerics"],
    "device": "cpu",
    "seed": 0,
    "backends": [{"name": "Gqa", "ref": "a.py:Gqa"}],
}


def record(outcome: str, case: str = "smoke/a.1", **own: Any) -> Record:
    suite, _, case_id = case.partition("/")
    names = ("suite", "case_id", "case_hash", "check", "backend", "backend_ref", "backend_version", "environment")
    values = (suite, case_id, "0" * 12, "numerics", "Gqa", "a.py:Gqa", "", "e" * 12)
    who = dict(zip(names, values, strict=True)) | {"kind": "record", "seed": 0, "attncheck_version": "0.1.0"}
    parsed = parse_line(json.dumps(who | own | {"outcome": outcome}))
    assert not isinstance(parsed, RunHeader | RunFooter)
    return parsed


def failed(case: str = "smoke/a.1", summary: str = "7 of 40 rows", **own: Any) -> Record:
    return record("failed", case, summary=summary, **own)


def errored(case: str, message: str, **own: Any) -> Record:
    return record("errored", case, stage="forward", error_type="ValueError", message=message, **own)


def again(
    tmp_path: Path, records: Sequence[Record], *, then: Sequence[Record] | None = None
) -> tuple[str, list[Record]]:
    """The file written from ``records``, and ``then`` (the same) as a run with that file has them; nothing is unmet."""
    text = expectations_text(Run("run.jsonl", RunHeader.model_validate(HEADER), tuple(records)))
    path = tmp_path / "expect.yaml"
    path.write_text(text, encoding="utf-8")
    cases = [SimpleNamespace(suite=each.suite, id=each.case_id) for each in records]
    entries = load_expectations(path)
    of_run = {"cases": cases, "selected": cases, "backends": ["Gqa"], "checks": ["numerics"]}
    expected = Expectations(entries, today=date(2026, 11, 22), **of_run)
    found = [expected.apply(each) for each in (records if then is None else then)]
    assert expected.unmet() == []
    return text, found


CRASH = {"stage": "check numerics", "cause": "killed by SIGSEGV"}


@pytest.mark.parametrize(
    "records",
    [
        [],
        [record("passed"), record("unsupported", "smoke/b", reasons=["no window"])],
        [failed(), record("passed", "smoke/b")],
        [failed("smoke/a.1"), failed("smoke/a.2", "9 of 80 rows"), record("passed", "smoke/a.3")],
        [failed("smoke/a.1", meaning="window 3 is ignored"), failed("gqa/z", "all", meaning="window 9 is ignored")],
        [errored("smoke/a.1", "no kernel at 0x7fa3 for [64]*?"), errored("smoke/a.2", "no kernel at 0x1bee for [8]*?")],
        [record("crashed", "smoke/a[1]*?", **CRASH), record("passed", "smoke/a1xy")],
        [errored("smoke/a", 'tab\there, "quotes": #hash\u200b and \x07')],
        [failed(round=0), record("passed", round=1), failed(round=2, summary="not a number")],
        [failed("smoke/a.1"), failed("smoke/a.2"), failed("smoke/a.1", "8 of 40 rows", round=1)],
        [record("xfailed", underlying="errored", summary="ValueError in forward: no", reason="known: issue 17")],
    ],
)
def test_a_run_with_its_own_expectations_is_green(tmp_path: Path, records: list[Record]) -> None:
    again_fallen = [
        errored(each.case, "no") if isinstance(each, XFailed) else each for each in records
    ]  # a run without the earlier file
    _, found = again(tmp_path, records, then=again_fallen)
    assert [each.outcome for each in found if each.outcome in FALLEN_SHORT] == []


def test_every_finding_is_one_entry_with_its_story_above(tmp_path: Path) -> None:
    records = [
        failed("smoke/window.1", "row 3 is wrong", meaning="the window is ignored"),
        failed("smoke/window.2", "row 4 is wrong", meaning="the window is ignored"),
        errored("smoke/b", "no kernel"),
    ]
    text, found = again(tmp_path, records)
    assert text == snapshot("""\
# Expected failures, from run.jsonl: 2 findings.
# The run is incomplete: a whole run may find more.

# 1 case, such as smoke/b: ValueError in forward: no kernel
- backend: "Gqa"
  case: "smoke/b"
  check: "numerics"
  outcome: "errored"
  reason: "not explained yet; found by the run of 2026-11-22"

# 2 cases, such as smoke/window.1: row 3 is wrong
# perhaps: the window is ignored
- backend: "Gqa"
  case: "smoke/window.*"
  check: "numerics"
  outcome: "failed"
  says: "the window is ignored"
  reason: "not explained yet; found by the run of 2026-11-22"
""")
    assert {each.outcome for each in found} == {"xfailed"}


def test_figures_and_addresses_may_be_others_the_next_time(tmp_path: Path) -> None:
    records = [
        errored("smoke/a.1", "no kernel at 0x7fa3 for [64]"),
        errored("smoke/a.2", "no kernel at 0x1bee for [8]"),
    ]
    other = [errored("smoke/a.1", "no kernel at 0xfade for [7]"), errored("smoke/a.2", "no kernel for [8]")]
    text, found = again(tmp_path, records, then=other)
    assert text.count("- backend:") == 1
    assert [each.outcome for each in found] == ["xfailed", "errored"]


def test_another_fault_in_the_same_cases_is_not_excused(tmp_path: Path) -> None:
    records = [failed("smoke/a.1", "7 of 40 rows"), failed("smoke/a.2", "9 of 40 rows")]
    other = [failed("smoke/a.1", "row 3 is not a number"), records[1]]
    _, found = again(tmp_path, records, then=other)
    assert [each.outcome for each in found] == ["failed", "xfailed"]


def test_an_earlier_reason_is_kept_and_a_fault_of_attncheck_is_never_excused(tmp_path: Path) -> None:
    known = record("xfailed", underlying="failed", summary="7 of 40 rows", reason="known: issue 17")
    ours = record("errored", "smoke/b", stage=OURSELVES, error_type="WorkerError", message="no")
    text = expectations_text(Run("run.jsonl", RunHeader.model_validate(HEADER), (known, ours)))
    assert 'reason: "known: issue 17"' in text
    assert "smoke/b" not in text
