"""vLLM's own layers with a state: what they compute, and faults planted in them."""

import pytest
import torch

from attncheck.backends import registry
from attncheck.cases.loader import load_suite
from attncheck.harness.checks.findings import Broken
from attncheck.harness.checks.recurrence import RecurrenceChecks

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

GDN, MAMBA2 = ("--backend", "vllm:GDN_ATTN"), ("--backend", "vllm:MAMBA2")
SHORT_CONV = ("--backend", "vllm:SHORT_CONV")
SUITE = ("--suite", "vllm_state")


def selected(*cases):
    return [word for case in cases for word in ("--case", case)]


def outcomes(run):
    """The outcome by case and check, but of the backend alone that has such layers."""
    judged = [record for record in run.records if record.outcome != "unsupported"]
    return {(record.case_id, record.check): record.outcome for record in judged}


def test_the_layers_of_a_cpu_are_right_without_drafts(run_vllm, tmp_path):
    cases = selected(
        "gdn-mixed.float32", "gdn-large", "mamba2-mixed.bfloat16", "mamba2-prompts", "short_conv-mixed.true"
    )
    checks = ("--check", "numerics,cache_write,containment,determinism")
    run, _ = run_vllm(tmp_path / "run.jsonl", *GDN, *MAMBA2, *SHORT_CONV, *SUITE, *cases, *checks)
    assert len(outcomes(run)) == 20
    assert set(outcomes(run).values()) == {"passed"}


def test_faults_of_drafts_on_a_cpu_are_found(run_vllm, tmp_path):
    cases = selected("gdn-drafts", "gdn-few-drafts", "mamba2-drafts", "short_conv-drafts")
    run, printed = run_vllm(
        tmp_path / "run.jsonl", *GDN, *MAMBA2, *SHORT_CONV, *SUITE, *cases, "--check", "numerics,cache_write", code=1
    )
    found = outcomes(run)
    assert found["gdn-drafts", "numerics"] == found["gdn-drafts", "cache_write"] == "passed"
    assert found["gdn-few-drafts", "numerics"] == "errored"
    assert found["mamba2-drafts", "numerics"] == found["mamba2-drafts", "cache_write"] == "failed"
    assert "RuntimeError at gdn_attention.py:" in printed
    assert found["short_conv-drafts", "numerics"] == found["short_conv-drafts", "cache_write"] == "failed"
    assert "a column behind the first was written" in printed
    assert "The size of tensor a (6) must match the size of tensor b" in printed


def test_faults_of_linear_attention_are_found(run_vllm, tmp_path):
    words = ("--backend", "vllm:LINEAR", *SUITE, *selected("linear-*"), "--check", "numerics,cache_write")
    run, printed = run_vllm(tmp_path / "run.jsonl", *words, code=1)
    assert outcomes(run) == {
        ("linear-fresh", "numerics"): "passed",
        ("linear-fresh", "cache_write"): "passed",
        ("linear-one-row", "numerics"): "failed",
        ("linear-one-row", "cache_write"): "failed",
        ("linear-chunks", "numerics"): "failed",
        ("linear-chunks", "cache_write"): "passed",
    }
    assert "the state before a prompt's first row has not decayed" in printed
    assert "states are used where has_initial_states is False" in printed
    assert {record.backend_version for record in run.records} == {"0.32.0, interpreted"}


def swapped_slots(metadata):
    metadata.non_spec_state_indices_tensor = metadata.non_spec_state_indices_tensor.flip(0)


def fresh(metadata):
    metadata.has_initial_state = torch.zeros_like(metadata.has_initial_state)


@pytest.mark.parametrize(("fault", "check"), [(fresh, "numerics"), (swapped_slots, "cache_write")])
def test_a_fault_in_the_metadata_of_vllm_s_builder_is_found(monkeypatch, fault, check):
    backend = registry.load("vllm:GDN_ATTN").backend
    theirs = backend.their_backend.get_builder_cls()
    build = theirs.build

    def faulty(self, *arguments, **keywords):
        metadata = build(self, *arguments, **keywords)
        fault(metadata)
        return metadata

    monkeypatch.setattr(theirs, "build", faulty)
    case = next(case for case in load_suite("vllm_state").cases if case.id == "gdn-mixed.float32")
    assert isinstance(RecurrenceChecks(backend, case, 0, torch.device("cpu"), ()).find(check)(), Broken)
