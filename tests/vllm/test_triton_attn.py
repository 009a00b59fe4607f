"""vLLM's Triton kernels, their source run by Triton's interpreter: what they get right, and every known fault."""

from collections import Counter
from pathlib import Path

import pytest

from attncheck.backends.candidates.vllm import package
from attncheck.backends.candidates.vllm.interpreted import launches_triton
from attncheck.harness.cli import app as cli

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

EXPECTED = Path(__file__).resolve().parents[2] / "docs" / "expected" / "vllm-triton-attn.yaml"
WORDS = ("--backend", "vllm:TRITON_ATTN", "--suite", "vllm_interpreted")


@pytest.fixture(scope="module")
def examined(run_vllm, tmp_path_factory):
    """The run of the whole suite, in a process that was started as Triton needs it."""
    words = (*WORDS, "--in-process", "--expect", str(EXPECTED))
    return run_vllm(tmp_path_factory.mktemp("run") / "run.jsonl", *words, TRITON_INTERPRET="1")[0]


def test_every_kernel_is_right_but_for_the_known_faults(examined):
    outcomes = Counter(record.outcome for record in examined.records)
    assert set(outcomes) == {"passed", "xfailed", "unavailable", "unsupported"}
    passed = {record.case_id for record in examined.records if record.outcome == "passed"}
    assert {"decode", "mixed", "window", "soft-cap", "alibi", "sinks", "non-causal", "cross", "encoder-only"} <= passed
    assert outcomes["xfailed"] == 7


def test_what_the_interpreter_computes_wrongly_or_hides_is_not_judged(examined):
    left_out = {record.case_id: record.reasons for record in examined.records if record.outcome == "unavailable"}
    assert set(left_out) == {"bfloat16", "fp8-kv", "output-quant"}
    assert all("Triton's interpreter" in reason for reasons in left_out.values() for reason in reasons)
    (graph,) = (record for record in examined.records if record.check == "cudagraph")
    assert graph.outcome == "unsupported"
    assert "cannot be examined here: forward does work that torch's dispatcher does not see" in graph.reasons[0]


def test_every_verdict_states_that_it_is_the_interpreters(examined, capsys):
    assert {record.backend_version for record in examined.records} == {"0.32.0, interpreted"}
    assert cli.main(["report", examined.path, "--section", "table"]) == 0
    assert "vllm:TRITON_ATTN 0.32.0, interpreted" in capsys.readouterr().out


def test_a_process_is_started_as_triton_needs_it(run_vllm, tmp_path):
    run, _ = run_vllm(tmp_path / "run.jsonl", *WORDS, "--case", "soft-cap", "--check", "numerics")
    assert [record.outcome for record in run.records] == ["passed"]
    assert run.header.backends[0].required_environment == {"TRITON_INTERPRET": "1"}
    assert run.header.backends[0].version == "0.32.0, interpreted"


def test_a_scale_per_token_and_head_is_examined_where_the_interpreter_can(run_vllm, tmp_path):
    words = (*WORDS[:2], "--suite", "low_bit_kv", "--case", "decode*", "--check", "numerics", "--check", "cache_write")
    run, _ = run_vllm(tmp_path / "run.jsonl", *words)
    found = {record.case_id.partition(".")[2]: record for record in run.records if record.check == "cache_write"}
    assert found["int8_per_token_head"].outcome == "passed"
    assert found["int8_per_token_head"].figures["slots_written"] == 3
    reasons = {"fp8": "loses carries", "int4": "zero point", "nvfp4": "is not known here"}
    for kind, reason in reasons.items():
        (record,) = (record for name, record in found.items() if name.startswith(kind))
        assert record.outcome == "unavailable"
        assert reason in record.reasons[0]


@pytest.mark.parametrize(
    ("name", "launches"),
    [("TRITON_ATTN", True), ("TRITON_MLA", True), ("CPU_ATTN", False), ("CPU_MLA", False), ("FLEX_ATTENTION", False)],
)
def test_backends_made_of_triton_kernels_are_told_from_others(name, launches):
    registry = package.module("vllm.v1.attention.backends.registry")
    assert launches_triton(registry.AttentionBackendEnum[name].get_class()) is launches


def test_values_of_another_head_size_than_keys_reach_the_class_for_them(run_vllm, tmp_path):
    suite = tmp_path / "sizes.yaml"
    suite.write_text(
        "suite: sizes\n"
        "defaults: {layer: {num_heads: 2, num_kv_heads: 1, dtype: float16}}\n"
        "cases:\n"
        "  - {id: values, batch: q1s40_q5s37, layer: {head_size: 64}, matrix: {layer.head_size_v: [32, 160]}}\n"
        "  - {id: equal, batch: q1s40_q5s37, layer: {head_size: 160}}\n"
    )
    words = ("--backend", "vllm:TRITON_ATTN_DIFFKV", "--suite", str(suite), "--check", "numerics,cache_write")
    run, _ = run_vllm(tmp_path / "run.jsonl", *words, "--in-process", TRITON_INTERPRET="1")
    assert [record.outcome for record in run.records] == ["passed"] * 6
