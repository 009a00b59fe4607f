"""Expected failures hold, or the run fails by the line of the entry that does not."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from inline_snapshot import snapshot

from attncheck.harness.run.expectations import Expectations, load_expectations
from attncheck.reports.run_file.graph_levels import GraphLevels
from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.records import Failed, Passed, Record, RunFooter, XFailed, XPassed, parse_line


@dataclass(frozen=True)
class Named:
    suite: str
    id: str


CASES = [Named("smoke", "window.a"), Named("smoke", "window.b"), Named("smoke", "cap")]
ENTRY = {"backend": "Wrong", "case": "smoke/window.*", "check": "numerics", "outcome": "failed", "reason": "issue 17"}


def record(outcome: str, case_id: str = "window.a", check: str = "numerics", backend: str = "Wrong") -> Record:
    own: dict[str, Any] = {
        "passed": {},
        "failed": {"summary": "7 of 40 rows"},
        "errored": {"stage": "forward", "error_type": "RuntimeError", "message": "no kernel"},
        "crashed": {"stage": "check numerics", "cause": "killed by SIGABRT", "output": "free(): invalid pointer"},
        "unsupported": {"reasons": ["no window"]},
    }[outcome]
    names = ("suite", "case_id", "case_hash", "check", "backend", "backend_ref", "backend_version", "environment")
    values = ("smoke", case_id, "0" * 12, check, backend, backend, "", "e" * 12)
    who = dict(zip(names, values, strict=True)) | {"kind": "record", "seed": 0, "attncheck_version": "0.1.0"}
    parsed = parse_line(json.dumps(who | own | {"outcome": outcome}))
    assert not isinstance(parsed, RunHeader | RunFooter)
    return parsed


def write(path: Path, *entries: dict[str, Any]) -> Path:
    path.write_text(json.dumps(list(entries), indent=1))  # JSON is YAML
    return path


def expectations(path: Path, **limits: Any) -> Expectations:
    of_run: dict[str, Any] = {"cases": CASES, "selected": CASES, "backends": ["Wrong"], "checks": ["numerics", "lse"]}
    of_run["today"] = date(2026, 11, 22)
    return Expectations(load_expectations(path), **of_run | limits)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "expect.yaml", ENTRY)


def test_a_failure_that_was_expected(file: Path) -> None:
    expected = expectations(file)
    found = expected.apply(record("failed"))
    assert isinstance(found, XFailed)
    assert (found.underlying, found.summary, found.reason) == ("failed", snapshot("7 of 40 rows"), "issue 17")
    assert found.key == record("failed").key
    assert expected.unmet() == []


def test_a_death_that_was_expected_is_no_other_failure(tmp_path: Path) -> None:
    expected = expectations(write(tmp_path / "expect.yaml", ENTRY | {"outcome": "crashed"}))
    assert expected.apply(record("failed")) == record("failed")
    found = expected.apply(record("crashed", "window.b"))
    assert isinstance(found, XFailed)
    assert (found.underlying, found.summary) == ("crashed", snapshot("killed by SIGABRT during check numerics"))
    assert expected.unmet() == []


def test_a_pass_that_was_not(file: Path) -> None:
    expected = expectations(file)
    expected.apply(record("failed"))
    found = expected.apply(record("passed", "window.b"))
    assert isinstance(found, XPassed)
    assert found.reason == f"issue 17 ({file}:2)"
    assert expected.unmet() == []  # the record itself fails the run


@pytest.mark.parametrize("outcome", ["failed", "passed"])
def test_levels_are_kept_whatever_was_expected(file: Path, outcome: str) -> None:
    graph = GraphLevels(declared="ALWAYS", measured="NEVER", recorder="emulated")
    plain = record(outcome)
    assert isinstance(plain, Passed | Failed)
    found = expectations(file).apply(plain.model_copy(update={"graph": graph}))
    assert isinstance(found, XFailed | XPassed)
    assert found.graph == graph


@pytest.mark.parametrize(
    "other",
    [
        record("failed", case_id="cap"),
        record("failed", check="lse"),
        record("failed", backend="Other"),
        record("errored"),
        record("unsupported"),
    ],
)
def test_everything_else_stays_what_it_is(file: Path, other: Record) -> None:
    assert expectations(file).apply(other) is other


@pytest.mark.parametrize("outcome", ["errored", "unsupported"])
def test_an_entry_no_record_bears_out_fails_the_run(file: Path, outcome: str) -> None:
    expected = expectations(file)
    expected.apply(record(outcome))
    (error,) = expected.unmet()
    assert error.startswith(f"{file}:2: Wrong, smoke/window.*, numerics: failed expected, but no record")
    assert expected.unmet(stopped_early=True) == [error]


def test_of_a_run_that_stopped_early_only_what_it_saw_is_judged(file: Path) -> None:
    assert expectations(file).unmet(stopped_early=True) == []
    assert len(expectations(file).unmet()) == 1


@pytest.mark.parametrize("pattern", ["smoke/windw.*", "windw*"])
def test_an_entry_that_matches_no_case_fails_the_run(tmp_path: Path, pattern: str) -> None:
    path = write(tmp_path / "expect.yaml", ENTRY | {"case": pattern})
    (error,) = expectations(path).unmet()
    assert f"{path}:2" in error
    assert "but no case of this run's suites matches" in error
    assert re.search(
        r"; did you mean smoke/window\.[ab]\?$" if "/" in pattern else r"; did you mean window\.[ab]\?$", error
    )


@pytest.mark.parametrize(
    ("entry", "limits"),
    [
        ({"case": "alibi/*"}, {}),
        ({"backend": "Other"}, {}),
        ({}, {"selected": CASES[2:]}),
        ({}, {"checks": ["lse"]}),
    ],
)
def test_entries_outside_the_filters_are_not_looked_at(
    tmp_path: Path, entry: dict[str, str], limits: dict[str, Any]
) -> None:
    assert expectations(write(tmp_path / "expect.yaml", ENTRY | entry), **limits).unmet() == []


def test_an_unknown_case_is_reported_with_the_nearest_one(plain: Callable[[str], str], tmp_path: Path) -> None:
    (error,) = expectations(write(tmp_path / "e.yaml", ENTRY | {"case": "smoke/windows.a"})).unmet()
    assert plain(error) == snapshot(
        "TMP/e.yaml:2: Wrong, smoke/windows.a, numerics: failed expected, but no case of this run's suites is called smoke/windows.a; did you mean smoke/window.a?"
    )
    assert "smoke/windows.a" in error
    assert "smoke/window.a" in error


@pytest.mark.parametrize("name", ["backend", "case"])
def test_a_name_in_other_capitals_fails_the_run(tmp_path: Path, name: str) -> None:
    wrong, right = {"backend": ("wrong", "Wrong"), "case": ("Smoke/cap", "smoke")}[name]
    expected = expectations(write(tmp_path / "e.yaml", ENTRY | {name: wrong}))
    (error,) = expected.unmet()
    assert error.startswith(f"{tmp_path}/e.yaml:2: ")
    assert error.endswith(f"; write {right}")
    assert expected.unseen() == []


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"backend": "Worng"},
            snapshot(
                "TMP/e.yaml:2: Worng, smoke/window.*, numerics: failed expected: not looked at, since there is no backend Worng in this run; did you mean Wrong?"
            ),
        ),
        (
            {"backend": "torch_spda"},
            snapshot(
                "TMP/e.yaml:2: torch_spda, smoke/window.*, numerics: failed expected: not looked at, since there is no backend torch_spda in this run; did you mean torch_sdpa?"
            ),
        ),
        (
            {"backend": "Mine"},
            snapshot(
                "TMP/e.yaml:2: Mine, smoke/window.*, numerics: failed expected: not looked at, since there is no backend Mine in this run; this run has Wrong"
            ),
        ),
        (
            {"case": "smok/cap"},
            snapshot(
                "TMP/e.yaml:2: Wrong, smok/cap, numerics: failed expected: not looked at, since there is no suite smok in this run; did you mean smoke?"
            ),
        ),
        (
            {"case": "of_mine/cap"},
            snapshot(
                "TMP/e.yaml:2: Wrong, of_mine/cap, numerics: failed expected: not looked at, since there is no suite of_mine in this run; this run has smoke"
            ),
        ),
    ],
)
def test_an_unknown_name_is_never_passed_over_in_silence(
    plain: Callable[[str], str], tmp_path: Path, entry: dict[str, str], message: str
) -> None:
    expected = expectations(write(tmp_path / "e.yaml", ENTRY | entry))
    (note,) = expected.unseen()
    assert note.startswith(f"{tmp_path}/e.yaml:2: ")
    assert plain(note) == message
    assert expected.unmet() == []


@pytest.mark.parametrize("entry", [{"backend": "torch_sdpa"}, {"backend": "vllm:CPU_ATTN"}, {"case": "gqa/x"}])
def test_a_known_name_that_the_run_leaves_out_is_not_looked_at(tmp_path: Path, entry: dict[str, str]) -> None:
    expected = expectations(write(tmp_path / "e.yaml", ENTRY | entry))
    assert (expected.unseen(), expected.unmet()) == ([], [])


@pytest.mark.parametrize(("until", "is_excused"), [("2026-11-22", True), ("2026-11-21", False)])
def test_an_entry_excuses_nothing_after_its_last_day(tmp_path: Path, until: str, is_excused: bool) -> None:
    expected = expectations(write(tmp_path / "e.yaml", ENTRY | {"until": until}))
    outcomes = [expected.apply(record("failed", case)).outcome for case in ("window.a", "window.b")]
    assert outcomes == (["xfailed"] * 2 if is_excused else ["failed"] * 2)
    message = (
        f"{tmp_path}/e.yaml:2: Wrong, smoke/window.*, numerics: failed expected, but only until 2026-11-21, and today "
        "is 2026-11-22: 2 records not excused; repair the fault, or move the date"
    )
    assert expected.unmet() == ([] if is_excused else [message])


def test_an_issue_follows_the_reason(plain: Callable[[str], str], tmp_path: Path) -> None:
    entry = ENTRY | {"reason": "one key too long", "issue": "https://example.org/17"}
    expected = expectations(write(tmp_path / "e.yaml", entry))
    failed, passed = expected.apply(record("failed")), expected.apply(record("passed", "window.b"))
    assert isinstance(failed, XFailed)
    assert plain(failed.reason) == snapshot("one key too long (https://example.org/17)")
    assert isinstance(passed, XPassed)
    assert plain(passed.reason) == snapshot("one key too long (https://example.org/17) (TMP/e.yaml:2)")
    assert "/example.org/17" in passed.reason


def test_the_id_alone_will_do(tmp_path: Path) -> None:
    expected = expectations(write(tmp_path / "expect.yaml", ENTRY | {"case": "window.?"}))
    assert isinstance(expected.apply(record("failed")), XFailed)


FINDING = ENTRY | {"case": "*", "says": "* not a number *", "reason": "the cap overflows"}


def failed_with(summary: str, meaning: str | None = None, needs: tuple[str, ...] = (), case_id: str = "cap") -> Record:
    return record("failed", case_id).model_copy(update={"summary": summary, "meaning": meaning, "needs": needs})


def test_a_finding_is_expected_wherever_it_turns_up_and_nothing_else_is(tmp_path: Path) -> None:
    expected = expectations(write(tmp_path / "e.yaml", FINDING))
    assert isinstance(expected.apply(failed_with("row 3 is not a number at head 2")), XFailed)
    assert isinstance(
        expected.apply(failed_with("7 of 40 rows", "it is not a number by overflow", case_id="window.a")), XFailed
    )
    assert isinstance(expected.apply(failed_with("7 of 40 rows", "the cap is ignored")), Failed)
    assert isinstance(expected.apply(record("passed", "window.b")), Passed)
    assert expected.unmet() == []


def test_a_finding_may_be_narrowed_down_to_what_cases_take(tmp_path: Path) -> None:
    expected = expectations(write(tmp_path / "e.yaml", FINDING | {"needs": ["logits_soft_cap", "dtype=float16"]}))
    summary = "row 3 is not a number at head 2"
    assert isinstance(expected.apply(failed_with(summary, needs=("logits_soft_cap",))), Failed)
    assert isinstance(
        expected.apply(failed_with(summary, needs=("logits_soft_cap", "sinks", "dtype=float16"))), XFailed
    )


def test_a_finding_that_is_not_seen_is_reported_and_fails_only_a_strict_run(
    plain: Callable[[str], str], tmp_path: Path
) -> None:
    file = write(tmp_path / "e.yaml", FINDING)
    expected, elsewhere = expectations(file), expectations(file)
    strict, strict_elsewhere = expectations(file, strict=True), expectations(file, strict=True)
    for each in (expected, strict):
        each.apply(record("passed"))
    elsewhere.apply(record("passed", check="lse"))
    assert expected.unmet() == elsewhere.unmet() == []
    (line,) = expected.unseen()
    assert plain(line) == snapshot(
        "TMP/e.yaml:2: Wrong, *, numerics: failed expected: not seen in this run; remove it if this is repaired"
    )
    assert "e.yaml:2" in line
    assert elsewhere.unseen() == []  # nothing was examined that it is about
    assert (strict.unseen(), strict_elsewhere.unmet()) == ([], [])
    (line,) = strict.unmet()
    assert "e.yaml:2" in line
    assert "no record matched it" in line


BOUNDED = FINDING | {"within": {"budgets": 30, "rows": 4, "heads": 2, "values": ["nan", "finite"]}}
FIGURES = {"budget_share": float("inf"), "finite_budget_share": 29.5, "rows_wrong": 4, "heads_wrong": 2, "rows_nan": 1}


@pytest.mark.parametrize(
    ("figures", "beyond"),
    [
        (FIGURES, ""),
        (FIGURES | {"rows_finite_wrong": 3}, ""),
        (FIGURES | {"finite_budget_share": 30.5}, "budgets: at most 30, and found 30.5"),
        (FIGURES | {"finite_budget_share": float("nan")}, "budgets: at most 30, and found nan"),
        (FIGURES | {"rows_wrong": 5}, "rows: at most 4, and found 5"),
        (FIGURES | {"heads_wrong": 3}, "heads: at most 2, and found 3"),
        (FIGURES | {"rows_inf": 1}, "values: nan, finite alone, and found inf"),
        (FIGURES | {"rows_unwritten": 2}, "values: nan, finite alone, and found unwritten"),
        ({}, "budgets: at most 30, and the record has no such figure"),
    ],
)
def test_a_finding_beyond_its_bound_stays_failed(tmp_path: Path, figures: dict[str, float], beyond: str) -> None:
    file = write(tmp_path / "expect.yaml", BOUNDED)
    failed = failed_with("row 3 is not a number at head 2").model_copy(update={"figures": figures})
    found = expectations(file).apply(failed)
    if not beyond:
        assert isinstance(found, XFailed)
        return
    assert isinstance(found, Failed)
    assert found.details == (f"more than {file}:2 expects: {beyond}",)


def test_without_finite_figures_the_share_of_the_budget_is_bounded(tmp_path: Path) -> None:
    file = write(tmp_path / "expect.yaml", FINDING | {"within": {"budgets": 30}})
    for share, kind in ((12.0, XFailed), (31.0, Failed), (float("inf"), Failed)):
        failed = failed_with("row 3 is not a number at head 2").model_copy(update={"figures": {"budget_share": share}})
        assert isinstance(expectations(file).apply(failed), kind)


def test_an_entry_may_be_about_one_version_alone(tmp_path: Path) -> None:
    file = write(tmp_path / "expect.yaml", ENTRY | {"version": "*, amx"})
    other, named = (record("failed").model_copy(update={"backend_version": f"0.32.0, {isa}"}) for isa in ("vec", "amx"))
    expected = expectations(file)
    assert expected.apply(other) == other
    assert expected.unmet() == []
    assert isinstance(expected.apply(named), XFailed)


def test_an_entry_may_be_about_every_check(tmp_path: Path) -> None:
    file = write(tmp_path / "expect.yaml", ENTRY | {"check": "*", "outcome": "crashed", "says": "killed by SIG*"})
    expected = expectations(file)
    for check in ("numerics", "lse"):
        assert isinstance(expected.apply(record("crashed", check=check)), XFailed)
        assert expected.apply(record("failed", check=check)).outcome == "failed"
