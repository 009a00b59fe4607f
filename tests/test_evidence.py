"""The kept runs of docs/evidence: every finding is explained, and docs/first-gpu-run.md has the figures of the GPU."""

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from attncheck.backends.registry import builtin_names
from attncheck.cases.loader import load_suite
from attncheck.harness.run.expectations import load_expectations
from attncheck.harness.run.selection import DEFAULT_SUITES
from attncheck.reports.run_file.causes import likely_causes, without_figures
from attncheck.reports.run_file.records import Failed, XFailed
from attncheck.reports.run_file.store import Run, read_run

DOCS = Path(__file__).resolve().parent.parent / "docs"
EVIDENCE = DOCS / "evidence"
CANDIDATES = "cpu-2026-11-26/candidates.jsonl.xz"
EXPLAINED = ("cpu-2026-11-26/xformers-vllm", "vllm-0.32.0/cpu-attn", "vllm-0.32.0/mla", "vllm-0.32.0/triton-attn")

STATE_LAYERS = {"vllm:GDN_ATTN", "vllm:MAMBA2", "vllm:SHORT_CONV", "vllm:LINEAR"}


@cache
def kept_run(path: Path) -> Run:
    return read_run(path)


@pytest.mark.parametrize("name", EXPLAINED)
def test_nothing_is_found_that_is_not_explained(name):
    found = kept_run(EVIDENCE / f"{name}.jsonl.xz")
    assert found.complete
    assert found.errors == ()
    outcomes = {record.outcome for record in found.records}
    assert outcomes - {"unavailable"} == {"passed", "xfailed", "unsupported"}
    reasons = {record.reason for record in found.records if isinstance(record, XFailed)}
    assert reasons
    if name.startswith("vllm"):
        assert all(re.match(r"vLLM's[:,]|ours:|a documented difference:", reason) for reason in reasons), reasons


def test_everything_that_is_expected_was_found_and_the_audit_examined_each_kind_of_class():
    kept = [kept_run(path) for path in EVIDENCE.rglob("*.jsonl.xz")]
    reasons = {record.reason for run in kept for record in run.records if isinstance(record, XFailed)}
    for file in sorted((DOCS / "expected").glob("*.yaml")):
        expected = [entry.expectation for entry in load_expectations(file)]
        assert {each.reason for each in expected if each.version is None} <= reasons
    audit = kept_run(EVIDENCE / "vllm-0.32.0" / "audit.jsonl.xz")
    assert audit.complete
    examined = {record.backend for record in audit.records if record.outcome == "passed"}
    assert examined >= {"vllm:CPU_ATTN", "vllm:CPU_MLA", "vllm:TRITON_ATTN", "vllm:TRITON_MLA"}
    of_state = [record for record in audit.records if record.suite == "vllm_state"]
    assert {record.backend for record in of_state if record.outcome == "passed"} == STATE_LAYERS
    assert {record.outcome for record in of_state} - {"unavailable"} == {"passed", "xfailed", "unsupported"}
    without_reason = {each.name for each in audit.header.surveyed if not each.reason}
    assert without_reason - examined == {"vllm:MAMBA1"}


AGREEING = {
    "NaN or Inf just where a score is N soft caps or more": "a score of more than about 88 soft caps is NaN",
    "slots behind the last key of a request are read; only NaN": "slots behind the last key of a request are multiplied by",
    "a length on the host is taken for exact": "lengths are read from seq_lens_cpu_upper_bound",
    "layers share what each must have for itself": "the builder copies",
    "the ALiBi bias is measured from the first new position": "is measured from the context's end, not from the query",
    "the ALiBi bias is missing": "encoder attention ignores the ALiBi slopes",
    "the soft cap is ignored": "encoder attention ignores the soft cap",
    "the window is ignored on both sides": "takes a window of the own key alone (0 on both sides) for no window",
}
"""Starts of causes that attncheck named in kept runs, and parts of the reason that a person wrote for the same case.

Somebody has compared the two of each pair.
"""


def test_automatic_causes_agree_with_the_reasons_of_people():
    entries = [each.expectation for file in (DOCS / "expected").glob("*.yaml") for each in load_expectations(file)]
    kept = [record for path in EVIDENCE.rglob("*.jsonl.xz") for record in kept_run(path).records]
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


def test_the_support_table_is_of_all_candidates_and_all_cases_and_nothing_fell_short():
    found = kept_run(EVIDENCE / CANDIDATES)
    assert found.complete
    assert found.errors == ()
    assert tuple(backend.name for backend in found.header.backends) == builtin_names()
    assert {record.outcome for record in found.records} == {"passed", "unsupported", "unavailable"}
    for suite in DEFAULT_SUITES:
        recorded = {(record.case_id, record.case_hash) for record in found.records if record.suite == suite}
        assert recorded == {(case.id, case.hash) for case in load_suite(suite)}, "make the run anew"
    interpreted = {record.backend for record in found.records if record.suite == "interpreted"}
    assert interpreted == {"triton_unified", "xformers", "triton_mla"}
    passed = {record.backend for record in found.records if record.outcome == "passed"}
    assert passed >= interpreted


BITS = EVIDENCE / "bits-cpu-2026-11-28"


def test_the_levels_of_equal_bits_on_the_page_are_those_of_the_kept_runs():
    page = (DOCS / "equal-bits.md").read_text(encoding="utf-8")
    measured = page.partition("## What was measured")[2].partition("\n## ")[0]
    head, *rows = re.findall(r"^\| .* \|$", measured, re.MULTILINE)
    changes = re.findall(r"`(\w+)`", head)
    table = {}
    for row in rows:
        name, suite, cases, none, *of_changes = (cell.strip() for cell in row.strip("|").split("|"))
        counts = zip(("none", *changes), (none, *of_changes), strict=True)
        table[name.strip("`"), suite.partition(",")[0], int(cases)] = {
            each: int(count) for each, count in counts if count
        }

    def levels(run: Run) -> dict:
        found: dict[tuple[str, str], Counter] = {}
        for record in run.records:
            bits = getattr(record, "bits", None)
            if bits is not None:
                broken = bits.first_broken
                found.setdefault((record.backend, record.suite), Counter())[broken.name if broken else "none"] += 1
        return {(*key, counts.total()): dict(counts) for key, counts in found.items()}

    kept = {path.name.removesuffix(".jsonl.xz"): kept_run(path) for path in sorted(BITS.glob("*.xz"))}
    of_runs: dict = {}
    for run in kept.values():
        of_runs |= levels(run)
    assert table == of_runs
    for name in ("cpu-attn", "mla"):
        assert levels(kept[name]) == levels(kept[f"{name}-batch-invariant"])


H200 = EVIDENCE / "nvidia-h200-2026-11-26"
PAGE = (DOCS / "first-gpu-run.md").read_text(encoding="utf-8")
MEASURED = PAGE.partition("## What an H200 showed")[2].partition("\n## ")[0]


def runs(folder: str) -> dict[str, Run]:
    """The kept runs of a folder by name."""
    return {path.name.removesuffix(".jsonl.xz"): kept_run(path) for path in sorted((H200 / folder).glob("*.xz"))}


def levels(run: Run) -> set[tuple[str, str]]:
    graphs = {(record.backend, getattr(record, "graph", None)) for record in run.records}
    return {(backend, str(graph.measured)) for backend, graph in graphs if graph is not None}


def test_the_results_of_the_page_are_those_of_the_kept_runs():
    table = {}
    for names, cases, passed, found in re.findall(r"^\| (`.*`) \| (.*) \| (\d+).* \| (.*) \|$", MEASURED, re.MULTILINE):
        each = re.findall(r"`(\w+)`", names)
        for name, level in zip(each, (found.split(", ") * len(each))[: len(each)], strict=True):
            table[name] = (int(re.match(r"\d+", cases)[0]), not cases.endswith("stopped"), int(passed), level)
    kept = runs("smoke")
    assert table == {
        name: (
            len({record.case_id for record in run.records}),
            run.complete,
            sum(record.outcome == "passed" for record in run.records),
            "".join(level for _, level in levels(run)),
        )
        for name, run in kept.items()
    }
    assert {record.outcome for run in kept.values() for record in run.records} == {"passed", "unsupported"}
    (most,) = re.findall(r"largest error is (0\.\d+) of the allowed", MEASURED)
    shares = [
        record.figures.get("budget_share", 0)
        for run in kept.values()
        for record in run.records
        if record.outcome == "passed"
    ]
    assert round(max(shares), 2) == float(most)


def test_the_times_of_the_page_are_those_of_the_kept_runs():
    found: dict[tuple[str, str], list[float]] = {}
    for run in runs("timing").values():
        for record in run.records:
            timing = record.timing
            (forward,) = (each for each in timing.latencies if each.part == "forward")
            found.setdefault((record.backend, record.case_id), []).append(forward.median_ns)
            assert round(timing.overhead.empty_ns / 1000, 1) in (1.2, 1.3)
            assert timing.overhead.replay_ns < 50
            assert round(timing.ceilings.matmul_flops_per_s / 1e12) in (798, 799, 800)
    decodes, prompts = found["triton_unified", "large_decode"], found["triton_unified", "large_prefill"]
    assert [round(min(times) / 1000) for times in (decodes, prompts)] == [117, 120]
    assert round(max(max(each) / min(each) for each in (decodes, prompts)) - 1, 3) == 0.004
