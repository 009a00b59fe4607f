"""What was found in vLLM's own backends: pages made from run files, every finding with whose it is."""

import re
from pathlib import Path

import pytest

from attncheck.harness.expectations import load_expectations
from attncheck.reports.markdown import render_run
from attncheck.reports.records import XFailed
from attncheck.reports.store import read_run

DOCS = Path(__file__).resolve().parent.parent / "docs"
RUNS = DOCS / "evidence" / "vllm-0.32.0"
PAGES = {"vllm-cpu-attn.md": "cpu-attn.jsonl.xz", "vllm-triton-attn.md": "triton-attn.jsonl.xz"}


@pytest.mark.parametrize(("page", "run"), PAGES.items())
def test_the_page_is_the_report_of_its_run(page: str, run: str) -> None:
    assert (DOCS / page).read_text(encoding="utf-8") == render_run(read_run(RUNS / run))


@pytest.mark.parametrize("run", PAGES.values())
def test_nothing_is_found_that_is_not_explained(run: str) -> None:
    found = read_run(RUNS / run)
    assert found.complete
    assert found.errors == ()
    assert {record.outcome for record in found.records} == {"passed", "xfailed", "unsupported"} | (
        {"unavailable"} if "triton" in run else set()
    )
    reasons = {record.reason for record in found.records if isinstance(record, XFailed)}
    assert reasons
    assert all(re.match(r"theirs[:,]|ours:|a documented difference:", reason) for reason in reasons), reasons


def test_everything_that_is_expected_was_found() -> None:
    for file in sorted((DOCS / "expected").glob("*.yaml")):
        found = [record for run in PAGES.values() for record in read_run(RUNS / run).records]
        reasons = {record.reason for record in found if isinstance(record, XFailed)}
        assert {entry.expectation.reason for entry in load_expectations(file)} <= reasons
