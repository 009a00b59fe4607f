"""Expected failures: the file and its mistakes, the records it excuses, and how one is written from a run."""

import json
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import pytest
from inline_snapshot import snapshot

from attncheck.errors import CaseFileError
from attncheck.harness.run.expectations import Expectations, expectation_file, expectations_text, load_expectations
from attncheck.harness.run.outcomes import OURSELVES
from attncheck.reports.run_file.graph_levels import GraphLevels
from attncheck.reports.run_file.records import FALLEN_SHORT, XFailed, XPassed
from attncheck.reports.run_file.store import Run

OWN_FILES = sorted((Path(__file__).resolve().parents[3] / "docs" / "expected").glob("*.yaml"))
CASES = [SimpleNamespace(suite="smoke", id=name) for name in ("window.a", "window.b", "cap")]
ENTRY = {"backend": "Wrong", "case": "smoke/window.*", "check": "numerics", "outcome": "failed", "reason": "issue 17"}
OWN = {
    "passed": {},
    "failed": {"summary": "7 of 40 rows"},
    "errored": {"stage": "forward", "error_type": "ValueError", "message": "no kernel"},
    "crashed": {"stage": "check numerics", "cause": "killed by SIGABRT", "output": "free(): invalid pointer"},
    "unsupported": {"reasons": ["no window"]},
    "unavailable": {},
    "xfailed": {"underlying": "failed", "summary": "7 of 40 rows", "reason": "known: issue 17"},
}


@pytest.fixture
def record(make_record):
    """``record("failed", case_id="cap")``: a record of the backend Wrong, by default of ``smoke/window.a``."""
    who = {"backend": "Wrong", "case_id": "window.a"}
    return lambda outcome, **fields: make_record(outcome, **who | OWN[outcome] | fields)


@pytest.fixture
def expecting(tmp_path):
    """``expecting({"case": "*"}, strict=True)``: the expectations of ENTRY with these fields, in such a run."""

    def expecting(entry=None, **limits):
        path = tmp_path / "e.yaml"
        path.write_text(json.dumps([ENTRY | (entry or {})], indent=1))  # JSON is YAML
        of_run = {"cases": CASES, "selected": CASES, "backends": ["Wrong"], "checks": ["numerics", "lse"]}
        return Expectations(load_expectations(path), **{**of_run, "today": date(2026, 11, 22), **limits})

    return expecting


# The file


@pytest.mark.parametrize("text", ["", "# the last fault is repaired\n\n  # and nothing else\n", "[]\n"])
def test_a_file_without_entries_expects_nothing(tmp_path, text):
    (tmp_path / "e.yaml").write_text(text)
    assert load_expectations(tmp_path / "e.yaml") == ()


LINE = "- {backend: W, case: a, check: lse, outcome: failed, reason: r"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, " there is no such file"),
        (
            "backend: Wrong\n",
            "1:1: a list of expectations belongs here, and this is a mapping; write - backend: ..., one entry after the other",
        ),
        ("- Wrong\n", "1:3: [0]: an expectation must be a mapping (found 'Wrong'); give a mapping"),
        (
            "- backend: Wrong\n  case: a\n  check: lse\n  outcome: failed\n",
            "1:3: [0].reason: reason is missing; give it (why it is expected)",
        ),
        (
            "- backend: W\n  case: a\n  check: lse\n\n  outcome: passed\n  reason: r\n",
            "5:12: [0].outcome: outcome must be one of 'failed', 'errored', 'crashed' or 'timed_out' (found 'passed'); meaning of outcome: the expected outcome: failed, errored, crashed or timed_out",
        ),
        (
            LINE.replace("lse", "numeric") + "}\n",
            "1:32: [0].check: unknown check (found 'numeric'); did you mean 'numerics'? (known: ...)",
        ),
        (
            LINE.removesuffix("r") + "''}\n",
            "1:62: [0].reason: an expected failure needs a reason; say why it is known",
        ),
        (
            f"{LINE}, seed: 3}}\n",
            "1:65: [0].seed: an expectation has no key 'seed'; did you mean 'needs'? (known: ...)",
        ),
        (f"{LINE}, until: soon}}\n", "1:72: [0].until: until must be a date (found 'soon'); write YYYY-MM-DD"),
        (
            f"{LINE}, within: {{budget: 3}}}}\n",
            "1:74: [0].within.budget: within has no key 'budget'; did you mean 'budgets'? (known: ...)",
        ),
        (
            f"{LINE}, within: {{values: [NaN]}}}}\n",
            "1:83: [0].within.values[0]: an element of values must be one of 'nan', 'inf', 'finite' or 'unwritten' (found 'NaN'); meaning of values: sorts of wrong values: nan, inf, finite, unwritten",
        ),
        (
            f"{LINE}, needs: [soft_cap]}}\n",
            "1:72: [0].needs: unknown feature (found 'soft_cap'); did you mean 'logits_soft_cap'? (known: ...)",
        ),
        (
            f"{LINE}, needs: [dtyp=float16]}}\n",
            "1:72: [0].needs: cases have no such form (found 'dtyp=float16'); did you mean 'dtype'? (known: ...)",
        ),
        ("- {backend: [}\n", "1:14: not YAML: did not find expected node content; see the line before, too"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(plain, tmp_path, text, message):
    path = tmp_path / "expect.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(CaseFileError) as caught:
        load_expectations(path)
    assert plain(str(caught.value)) == f"TMP/expect.yaml:{message}"


def test_a_file_of_attncheck_is_named_without_its_path_and_one_of_the_user_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert OWN_FILES
    for path in OWN_FILES:
        found = expectation_file(Path(path.stem))
        assert found.samefile(path)
        assert load_expectations(found)
    for name in ("missing", "missing.yaml", "folder/vllm-cpu-attn"):
        assert expectation_file(Path(name)) == Path(name)
    (tmp_path / "vllm-cpu-attn").write_text("")
    assert expectation_file(Path("vllm-cpu-attn")) == Path("vllm-cpu-attn")


# The records of a run


FINDING = {"case": "*", "says": "* not a number *", "reason": "the cap overflows"}
NAN = {"summary": "row 3 is not a number at head 2"}
AMX, VEC = ({"backend_version": f"0.32.0, {isa}"} for isa in ("amx", "vec"))
TWO_NEEDS = FINDING | {"needs": ["sinks", "dtype=float16"]}
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
        (TWO_NEEDS, "failed", NAN | {"needs": ["sinks"]}, "failed"),
        (TWO_NEEDS, "failed", NAN | {"needs": ["dtype=float16", "alibi", "sinks"]}, "xfailed"),
        (BOUNDED, "failed", {"figures": FIGURES}, "xfailed"),
        (BOUNDED, "failed", {"figures": FIGURES | {"rows_finite_wrong": 3}}, "xfailed"),
        ({"within": {"budgets": 30}}, "failed", {"figures": {"budget_share": 12.0}}, "xfailed"),
        ({"within": {"budgets": 30}}, "failed", {"figures": {"budget_share": 31.0}}, "failed"),
        ({"until": "2026-11-22"}, "failed", {}, "xfailed"),
        ({"until": "2026-11-21"}, "failed", {}, "failed"),
    ],
)
def test_an_entry_is_about_these_records_and_no_others(expecting, record, entry, outcome, fields, becomes):
    given = record(outcome, **fields)
    found = expecting(entry).apply(given)
    assert (found.outcome, found.key) == (becomes, given.key)


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
def test_a_finding_beyond_its_bound_stays_failed(plain, expecting, record, figures, beyond):
    own = {} if figures is None else FIGURES | figures
    failed = record("failed").model_copy(update={"figures": own})  # a file has no NaN
    found = expecting(BOUNDED).apply(failed)
    assert found.outcome == "failed"
    assert plain(found.details[0]) == f"more than TMP/e.yaml:2 expects: {beyond}"


def test_a_record_states_what_happened_and_why_it_was_expected(plain, expecting, record):
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
    assert crashed.summary == "killed by SIGABRT during check numerics"


NO_MATCH = ", but no record matched it; remove the entry if the fault is fixed"
NO_CASE = ", but no case of this run's suites"
OTHER_RUN = ": not looked at, since there is no"
EXPIRED = (
    ", but only until 2026-11-21, and today is 2026-11-22: 1 record not excused; repair the fault, or move the date"
)


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
        ({"until": "2026-11-21"}, {}, ["failed"], EXPIRED, ""),
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
    plain, expecting, record, entry, limits, outcomes, unmet, unseen
):
    expected, wanted = expecting(entry, **limits), ENTRY | entry
    for outcome in outcomes:
        expected.apply(record(outcome))
    which = f"TMP/e.yaml:2: {wanted['backend']}, {wanted['case']}, numerics: failed expected"
    assert [plain(line) for line in expected.unmet()] == ([f"{which}{unmet}"] if unmet else [])
    assert [plain(line) for line in expected.unseen()] == ([f"{which}{unseen}"] if unseen else [])


def test_of_a_run_that_stopped_early_only_what_it_saw_is_judged(expecting, record):
    expected = expecting()
    assert (len(expected.unmet(stopped_early=True)), len(expected.unmet())) == (0, 1)
    expected.apply(record("errored"))
    assert len(expected.unmet(stopped_early=True)) == 1
    resumed = expecting()
    resumed.recall(expecting().apply(record("failed")))  # of an earlier part of the run
    assert resumed.unmet() == []


def test_what_was_not_reached_excuses_the_entries_about_it_alone(expecting, record):
    late = {"reasons": ["the case did not run, because earlier cases used up the time of the backend by --within"]}
    excused, mistaken = expecting(), expecting({"check": "lse"})
    for expected in (excused, mistaken):
        expected.apply(record("unavailable", **late))
    assert (len(excused.unmet()), len(mistaken.unmet())) == (0, 1)


# Written from a run


@pytest.fixture
def again(tmp_path, header):
    """``again(records, then)``: the file written from ``records``, and ``then`` as a run with that file has them."""

    def again(records, then):
        text = expectations_text(Run("run.jsonl", header, tuple(records)))
        path = tmp_path / "expect.yaml"
        path.write_text(text, encoding="utf-8")
        cases = [SimpleNamespace(suite=each.suite, id=each.case_id) for each in records]
        of_run = {"cases": cases, "selected": cases, "backends": ["Wrong"], "checks": ["numerics"]}
        expected = Expectations(load_expectations(path), today=date(2026, 11, 22), **of_run)
        found = [expected.apply(each) for each in then]
        assert expected.unmet() == []
        return text, found

    return again


def failed(case="a.1", summary="7 of 40 rows", **own):
    return "failed", {"case_id": case, "summary": summary, **own}


def errored(case, message):
    return "errored", {"case_id": case, "message": message}


@pytest.mark.parametrize(
    ("before", "then", "outcomes"),
    [
        ([], [], []),
        ([("passed", {}), ("unsupported", {"case_id": "b"})], None, ["passed", "unsupported"]),
        ([failed(), failed("a.2", "9 of 80 rows"), ("passed", {"case_id": "a.3"})], None, ["xfailed"] * 2 + ["passed"]),
        (
            [failed(meaning="window 3 is ignored"), failed("z", "all", suite="gqa", meaning="window 9 is ignored")],
            None,
            ["xfailed"] * 2,
        ),
        (
            [errored("a.1", "no kernel at 0x7fa3 for [64]*?"), errored("a.2", "none at 0x1b [8]*?")],
            None,
            ["xfailed"] * 2,
        ),
        ([("crashed", {"case_id": "a[1]*?"}), ("passed", {"case_id": "a1xy"})], None, ["xfailed", "passed"]),
        ([errored("a", 'tab\there, "quotes": #hash\u200b and \x07')], None, ["xfailed"]),
        (
            [failed(round=0), ("passed", {"case_id": "a.1", "round": 1}), failed(round=2, summary="not a number")],
            None,
            ["xfailed", "passed", "xfailed"],
        ),
        ([failed(), failed("a.2"), failed("a.1", "8 of 40 rows", round=1)], None, ["xfailed"] * 3),
        ([("xfailed", {})], [("failed", {})], ["xfailed"]),
        (
            [errored("a.1", "no kernel at 0x7fa3 for [64]"), errored("a.2", "no kernel at 0x1bee for [8]")],
            [errored("a.1", "no kernel at 0xfade for [7]"), errored("a.2", "no kernel for [8]")],
            ["xfailed", "errored"],
        ),
        (
            [failed(), failed("a.2", "9 of 40 rows")],
            [failed("a.1", "row 3 is not a number"), failed("a.2", "9 of 40 rows")],
            ["failed", "xfailed"],
        ),
    ],
)
def test_a_run_with_its_own_expectations_is_green_and_one_with_another_fault_is_not(
    again, record, before, then, outcomes
):
    first, second = ([record(outcome, **own) for outcome, own in each] for each in (before, then or before))
    _, found = again(first, second)
    assert [each.outcome for each in found] == outcomes
    assert then or not [each for each in found if each.outcome in FALLEN_SHORT]


def test_every_finding_is_one_entry_with_its_story_above(again, record):
    window = {"meaning": "the window is ignored"}
    stories = [failed("window.1", "row 3 is wrong", **window), failed("window.2", "row 4 is wrong", **window)]
    records = [record(outcome, **own) for outcome, own in (*stories, errored("b", "no kernel"))]
    text, _ = again(records, records)
    assert text == snapshot("""\
# Expected failures, from run.jsonl: 2 findings.
# The run is incomplete: a whole run may find more.

# 1 case, such as smoke/b: ValueError in forward: no kernel
- backend: "Wrong"
  case: "smoke/b"
  check: "numerics"
  outcome: "errored"
  reason: "not explained yet; found by the run of 2026-01-01"

# 2 cases, such as smoke/window.1: row 3 is wrong
# perhaps: the window is ignored
- backend: "Wrong"
  case: "smoke/window.*"
  check: "numerics"
  outcome: "failed"
  says: "the window is ignored"
  reason: "not explained yet; found by the run of 2026-01-01"
""")


def test_an_earlier_reason_is_kept_and_a_fault_of_attncheck_is_never_excused(header, record):
    ours = record("errored", case_id="b", stage=OURSELVES)
    text = expectations_text(Run("run.jsonl", header, (record("xfailed"), ours)))
    assert 'reason: "known: issue 17"' in text
    assert "smoke/b" not in text
