"""Pages that are reports of runs: made from the run files beside them, every finding with whose it is."""

import re
from pathlib import Path

import pytest

from attncheck.backends.registry import builtin_names
from attncheck.cases.loader import load_suite
from attncheck.harness.run.expectation_file import load_expectations
from attncheck.harness.run.selection import DEFAULT_SUITES
from attncheck.reports.audit.page import render as render_audit
from attncheck.reports.markdown.run import render_run
from attncheck.reports.run_file.causes import likely_causes, without_figures
from attncheck.reports.run_file.records import Failed, XFailed
from attncheck.reports.run_file.store import Run, read_run

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = {
    "vllm-cpu-attn.md": "vllm-0.32.0/cpu-attn.jsonl.xz",
    "vllm-mla.md": "vllm-0.32.0/mla.jsonl.xz",
    "vllm-triton-attn.md": "vllm-0.32.0/triton-attn.jsonl.xz",
    "measured-support.md": "cpu-2026-11-26/candidates.jsonl.xz",
    "xformers-vllm.md": "cpu-2026-11-26/xformers-vllm.jsonl.xz",
}
EXPLAINED = {page: run for page, run in PAGES.items() if page != "measured-support.md"}


def run_of(page: str) -> Run:
    return read_run(DOCS / "evidence" / PAGES[page])


@pytest.mark.parametrize("page", PAGES)
def test_the_page_is_the_report_of_its_run(page: str) -> None:
    assert (DOCS / page).read_text(encoding="utf-8") == render_run(run_of(page))


def test_the_audit_is_that_of_its_run() -> None:
    run = read_run(DOCS / "evidence" / "vllm-0.32.0" / "audit.jsonl.xz")
    assert run.complete
    assert (DOCS / "vllm-audit.md").read_text(encoding="utf-8").endswith(f"\n\n{render_audit(run)}")
    examined = {record.backend for record in run.records if record.outcome == "passed"}
    assert examined >= {"vllm:CPU_ATTN", "vllm:CPU_MLA", "vllm:TRITON_ATTN", "vllm:TRITON_MLA"}


@pytest.mark.parametrize("page", EXPLAINED)
def test_nothing_is_found_that_is_not_explained(page: str) -> None:
    found = run_of(page)
    assert found.complete
    assert found.errors == ()
    outcomes = {record.outcome for record in found.records}
    assert outcomes - {"unavailable"} == {"passed", "xfailed", "unsupported"}
    reasons = {record.reason for record in found.records if isinstance(record, XFailed)}
    assert reasons
    if page.startswith("vllm"):
        assert all(re.match(r"theirs[:,]|ours:|a documented difference:", reason) for reason in reasons), reasons


def test_everything_that_is_expected_was_found() -> None:
    kept = [read_run(path) for path in (DOCS / "evidence").rglob("*.jsonl.xz")]
    reasons = {record.reason for run in kept for record in run.records if isinstance(record, XFailed)}
    for file in sorted((DOCS / "expected").glob("*.yaml")):
        expected = [entry.expectation for entry in load_expectations(file)]
        assert {each.reason for each in expected if each.version is None} <= reasons


AGREEING = {
    "NaN or Inf just where a score is N soft caps or more": "a score of more than about 88 soft caps is NaN",
    "slots behind the last key of a request are read; only NaN": "slots behind the last key of a request are multiplied by",
    "the ALiBi bias is missing": "encoder attention ignores the ALiBi slopes",
    "the soft cap is ignored": "encoder attention ignores the soft cap",
    "the window is ignored on both sides": "takes a window of the own key alone (0 on both sides) for no window",
}
"""Starts of causes that attncheck named in kept runs, and parts of the reason that a person wrote for the same case.

Somebody has compared the two of each pair.
"""


def test_automatic_causes_agree_with_the_reasons_of_people() -> None:
    entries = [each.expectation for file in (DOCS / "expected").glob("*.yaml") for each in load_expectations(file)]
    kept = [record for path in (DOCS / "evidence").rglob("*.jsonl.xz") for record in read_run(path).records]
    pairs = {
        (record.finding, entry.reason)
        for record in kept
        if isinstance(record, Failed) and record.finding in map(without_figures, likely_causes(record.meaning))
        for entry in entries
        if entry.is_about(record) and (entry.foresees(record) or "*" not in entry.case)
    }
    different = {
        (cause, reason)
        for cause, reason in pairs
        if not any(cause.startswith(start) and part in reason for start, part in AGREEING.items())
    }
    assert different == set()
    assert len(pairs) == len(AGREEING)


def test_the_support_table_is_of_all_candidates_and_all_cases_and_nothing_fell_short() -> None:
    found = run_of("measured-support.md")
    assert found.complete
    assert found.errors == ()
    assert tuple(backend.name for backend in found.header.backends) == builtin_names()
    assert {record.outcome for record in found.records} == {"passed", "unsupported", "unavailable"}
    for suite in DEFAULT_SUITES:
        recorded = {(record.case_id, record.case_hash) for record in found.records if record.suite == suite}
        assert recorded == {(case.id, case.hash) for case in load_suite(suite)}, "make the run and its pages anew"
    interpreted = {record.backend for record in found.records if record.suite == "interpreted"}
    assert interpreted == {"triton_unified", "xformers", "triton_mla"}
    passed = {record.backend for record in found.records if record.outcome == "passed"}
    assert passed >= interpreted
