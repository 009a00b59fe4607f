"""Expected failures hold, or the run fails by the line of the entry that does not."""

import json
from collections.abc import Callable
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from inline_snapshot import snapshot

from attncheck.harness.run.expectations import Expectations, load_expectations
from attncheck.reports.run_file.graph_levels import GraphLevels
from attncheck.reports.run_file.records import Record, XFailed, XPassed

CASES = [SimpleNamespace(suite="smoke", id=name) for name in ("window.a", "window.b", "cap")]
ENTRY = {"backend": "Wrong", "case": "smoke/window.*", "check": "numerics", "outcome": "failed", "reason": "issue 17"}
OWN: dict[str, dict[str, Any]] = {
    "passed": {},
    "failed": {"summary": "7 of 40 rows"},
    "errored": {"stage": "forward", "error_type": "RuntimeError", "message": "no kernel"},
    "crashed": {"stage": "check numerics", "cause": "killed by SIGABRT", "output": "free(): invalid pointer"},
    "unsupported": {"reasons": ["no window"]},
}

Apply = Callable[..., Record]
Expecting = Callable[..., Expectations]


@pytest.fixture
def record(make_record: Callable[..., Record]) -> Callable[..., Record]:
    """``record("failed", case_id="cap")``: a record of the backend Wrong, by default of ``smoke/window.a``."""
    who = {"backend": "Wrong", "case_id": "window.a"}
    return lambda outcome, **fields: make_record(outcome, **who | OWN[outcome] | fields)


@pytest.fixture
def expecting(tmp_path: Path) -> Expecting:
    """``expecting({"case": "*"}, strict=True)``: the expectations of ENTRY with these fields, in such a run."""

    def expecting(entry: dict[str, Any] | None = None, **limits: Any) -> Expectations:
        path = tmp_path / "e.yaml"
        path.write_text(json.dumps([ENTRY | (entry or {})], indent=1))  # JSON is YAML
        of_run = {"cases": CASES, "selected": CASES, "backends": ["Wrong"], "checks": ["numerics", "lse"]}
        return Expectations(load_expectations(path), **{**of_run, "today": date(2026, 11, 22), **limits})

    return expecting


FINDING = {"case": "*", "says": "* not a number *", "reason": "the cap overflows"}
NAN = {"summary": "row 3 is not a number at head 2"}
AMX, VEC = ({"backend_version": f"0.32.0, {isa}"} for isa in ("amx", "vec"))
BOUNDED = {"within": {"budgets": 30, "rows": 4, "heads": 2, "values": ["nan", "finite"]}}
FIGURES = {"finite_budget_share": 29.5, "rows_wrong": 4, "heads_wrong": 2, "rows_nan": 1}


@pytest.mark.parametrize(
    ("entry", "outcome", "fields", "becomes"),
    [
        ({}, "failed", {}, "xfailed"),
        ({}, "passed", {}, "xpassed"),
        ({}, "errored", {}, "errored"),
        ({}, "unsupported", {}, "unsupported"),
        ({}, "failed", {"case_id": "cap"}, "failed"),
        ({}, "failed", {"check": "lse"}, "failed"),
        ({}, "failed", {"backend": "Other"}, "failed"),
        ({"case": "window.?"}, "failed", {}, "xfailed"),
        ({"outcome": "crashed"}, "crashed", {}, "xfailed"),
        ({"outcome": "crashed"}, "failed", {}, "failed"),
        ({"version": "*, amx"}, "failed", AMX, "xfailed"),
        ({"version": "*, amx"}, "failed", VEC, "failed"),
        ({"check": "*"}, "failed", {"check": "lse"}, "xfailed"),
        (FINDING, "failed", NAN, "xfailed"),
        (FINDING, "failed", {"case_id": "cap", "meaning": "it is not a number by overflow"}, "xfailed"),
        (FINDING, "failed", {"meaning": "the cap is ignored"}, "failed"),
        (FINDING, "passed", {}, "passed"),
        (FINDING | {"needs": ["sinks", "dtype=float16"]}, "failed", NAN | {"needs": ["sinks"]}, "failed"),
        (
            FINDING | {"needs": ["sinks", "dtype=float16"]},
            "failed",
            NAN | {"needs": ["dtype=float16", "alibi", "sinks"]},
            "xfailed",
        ),
        (BOUNDED, "failed", {"figures": FIGURES}, "xfailed"),
        (BOUNDED, "failed", {"figures": FIGURES | {"rows_finite_wrong": 3}}, "xfailed"),
        ({"within": {"budgets": 30}}, "failed", {"figures": {"budget_share": 12.0}}, "xfailed"),
        ({"within": {"budgets": 30}}, "failed", {"figures": {"budget_share": 31.0}}, "failed"),
        ({"until": "2026-11-22"}, "failed", {}, "xfailed"),
        ({"until": "2026-11-21"}, "failed", {}, "failed"),
    ],
)
def test_an_entry_is_about_these_records_and_no_others(
    expecting: Expecting, record: Apply, entry: dict[str, Any], outcome: str, fields: dict[str, Any], becomes: str
) -> None:
    given = record(outcome, **fields)
    found = expecting(entry).apply(given)
    assert found.outcome == becomes
    assert found.key == given.key


@pytest.mark.parametrize(
    ("figures", "beyond"),
    [
        ({"finite_budget_share": 30.5}, "budgets: at most 30, and found 30.5"),
        ({"finite_budget_share": float("nan")}, "budgets: at most 30, and found nan"),
        ({"rows_wrong": 5}, "rows: at most 4, and found 5"),
        ({"heads_wrong": 3}, "heads: at most 2, and found 3"),
        ({"rows_inf": 1}, "values: nan, finite alone, and found inf"),
        ({"rows_unwritten": 2}, "values: nan, finite alone, and found unwritten"),
        (None, "budgets: at most 30, and the record has no such figure"),
    ],
)
def test_a_finding_beyond_its_bound_stays_failed(
    plain: Callable[[str], str], expecting: Expecting, record: Apply, figures: dict[str, float] | None, beyond: str
) -> None:
    own = {} if figures is None else FIGURES | figures
    failed = record("failed").model_copy(update={"figures": own})  # a file has no NaN
    found = expecting(BOUNDED).apply(failed)
    assert found.outcome == "failed"
    assert plain(found.details[0]) == f"more than TMP/e.yaml:2 expects: {beyond}"


def test_a_record_states_what_happened_and_why_it_was_expected(
    plain: Callable[[str], str], expecting: Expecting, record: Apply
) -> None:
    graph = GraphLevels(declared="ALWAYS", measured="NEVER", recorder="emulated")
    expected = expecting({"reason": "one key too long", "issue": "https://example.org/17"})
    failed, passed = (
        expected.apply(record(outcome).model_copy(update={"graph": graph})) for outcome in ("failed", "passed")
    )
    assert isinstance(failed, XFailed)
    assert isinstance(passed, XPassed)
    assert (failed.underlying, failed.summary, failed.graph, passed.graph) == ("failed", "7 of 40 rows", graph, graph)
    assert [plain(each.reason) for each in (failed, passed)] == snapshot(
        ["one key too long (https://example.org/17)", "one key too long (https://example.org/17) (TMP/e.yaml:2)"]
    )
    assert expected.unmet() == []  # the record itself fails the run
    crashed = expecting({"outcome": "crashed"}).apply(record("crashed"))
    assert isinstance(crashed, XFailed)
    assert crashed.summary == snapshot("killed by SIGABRT during check numerics")


NO_MATCH = ", but no record matched it; remove the entry if the fault is fixed"
NO_CASE = ", but no case of this run's suites"
OTHER_RUN = ": not looked at, since there is no"


@pytest.mark.parametrize(
    ("entry", "limits", "outcomes", "unmet", "unseen"),
    [
        ({}, {}, ["failed"], "", ""),
        ({}, {}, ["errored"], NO_MATCH, ""),
        ({"case": "alibi/*"}, {}, [], "", ""),
        ({"backend": "torch_sdpa"}, {}, [], "", ""),
        ({"backend": "vllm:CPU_ATTN"}, {}, [], "", ""),
        ({}, {"selected": CASES[2:]}, [], "", ""),
        ({}, {"checks": ["lse"]}, [], "", ""),
        ({"version": "*, amx"}, {}, ["failed"], "", ""),
        (
            {"until": "2026-11-21"},
            {},
            ["failed"],
            ", but only until 2026-11-21, and today is 2026-11-22: 1 record not excused; repair the fault, or move the date",
            "",
        ),
        ({"case": "smoke/windows.a"}, {}, [], f"{NO_CASE} is called smoke/windows.a; did you mean smoke/window.a?", ""),
        ({"case": "ca"}, {}, [], f"{NO_CASE} is called ca; did you mean cap?", ""),
        ({"case": "xyz*"}, {}, [], f"{NO_CASE} matches xyz*; `attncheck list cases` shows the ids", ""),
        ({"backend": "wrong"}, {}, [], ", but there is no backend wrong; write Wrong", ""),
        ({"case": "Smoke/cap"}, {}, [], ", but there is no suite Smoke; write smoke", ""),
        (
            {"backend": "torch_spda"},
            {},
            [],
            "",
            f"{OTHER_RUN} backend torch_spda in this run; did you mean torch_sdpa?",
        ),
        ({"backend": "Mine"}, {}, [], "", f"{OTHER_RUN} backend Mine in this run; this run has Wrong"),
        ({"case": "of_mine/cap"}, {}, [], "", f"{OTHER_RUN} suite of_mine in this run; this run has smoke"),
        (FINDING, {}, ["passed"], "", ": not seen in this run; remove it if this is repaired"),
        (FINDING, {}, [], "", ""),
        (FINDING, {"strict": True}, [], "", ""),
        (FINDING, {"strict": True}, ["passed"], NO_MATCH, ""),
    ],
)
def test_an_entry_that_does_not_hold_fails_the_run_or_is_noted(
    plain: Callable[[str], str],
    expecting: Expecting,
    record: Apply,
    entry: dict[str, Any],
    limits: dict[str, Any],
    outcomes: list[str],
    unmet: str,
    unseen: str,
) -> None:
    expected, wanted = expecting(entry, **limits), ENTRY | entry
    for outcome in outcomes:
        expected.apply(record(outcome))
    which = f"TMP/e.yaml:2: {wanted['backend']}, {wanted['case']}, numerics: failed expected"
    assert [plain(line) for line in expected.unmet()] == ([f"{which}{unmet}"] if unmet else [])
    assert [plain(line) for line in expected.unseen()] == ([f"{which}{unseen}"] if unseen else [])


def test_of_a_run_that_stopped_early_only_what_it_saw_is_judged(expecting: Expecting, record: Apply) -> None:
    expected = expecting()
    assert (len(expected.unmet(stopped_early=True)), len(expected.unmet())) == (0, 1)
    expected.apply(record("errored"))
    assert len(expected.unmet(stopped_early=True)) == 1


def test_a_record_of_an_earlier_part_of_the_run_counts(expecting: Expecting, record: Apply) -> None:
    expected = expecting()
    expected.recall(expecting().apply(record("failed")))
    assert expected.unmet() == []
