"""vLLM's Triton kernels, their source run by Triton's interpreter: what they get right, and every known fault."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from attncheck.backends.candidates.vllm import package
from attncheck.backends.candidates.vllm.interpreted import launches_triton
from attncheck.harness.cli import app as cli
from attncheck.reports.run_file.store import read_run

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

EXPECTED = Path(__file__).resolve().parents[2] / "docs" / "expected" / "vllm-triton-attn.yaml"
QUIET = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {
    "VLLM_LOGGING_LEVEL": "ERROR"
}


def examine(output, *arguments, **environment):
    """The run of a command that ends well."""
    command = [sys.executable, "-m", "attncheck", "run", "--backend", "vllm:TRITON_ATTN", "--output", str(output)]
    done = subprocess.run(
        [*command, "--suite", "vllm_interpreted", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=QUIET | environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return read_run(output), done.stdout


@pytest.fixture(scope="module")
def examined(tmp_path_factory):
    """The whole suite, in a process that was started as Triton needs it."""
    expected = ("--expect", str(EXPECTED))
    return examine(tmp_path_factory.mktemp("run") / "run.jsonl", "--in-process", *expected, TRITON_INTERPRET="1")


def test_every_kernel_is_right_but_for_the_known_faults(examined):
    run, _ = examined
    outcomes = Counter(record.outcome for record in run.records)
    assert set(outcomes) == {"passed", "xfailed", "unavailable", "unsupported"}
    passed = {record.case_id for record in run.records if record.outcome == "passed"}
    assert {"decode", "mixed", "window", "soft-cap", "alibi", "sinks", "non-causal", "cross", "encoder-only"} <= passed
    assert outcomes["xfailed"] == 7


def test_what_the_interpreter_computes_wrongly_is_not_asked(examined):
    run, _ = examined
    left_out = {record.case_id: record.reasons for record in run.records if record.outcome == "unavailable"}
    assert set(left_out) == {"bfloat16", "fp8-kv", "output-quant"}
    assert all("Triton's interpreter" in reason for reasons in left_out.values() for reason in reasons)


def test_a_graph_of_bare_launches_is_not_judged(examined):
    run, _ = examined
    (record,) = (record for record in run.records if record.check == "cudagraph")
    assert record.outcome == "unsupported"
    assert "cannot be examined here: forward does work that torch's dispatcher does not see" in record.reasons[0]


def test_every_verdict_tells_that_it_is_the_interpreters(examined, capsys):
    run, _ = examined
    assert {record.backend_version for record in run.records} == {"0.32.0, interpreted"}
    assert cli.main(["report", run.path, "--section", "table"]) == 0
    assert "vllm:TRITON_ATTN 0.32.0, interpreted" in capsys.readouterr().out


def test_a_process_is_started_as_triton_needs_it(tmp_path):
    run, _ = examine(tmp_path / "run.jsonl", "--case", "soft-cap", "--check", "numerics")
    assert [record.outcome for record in run.records] == ["passed"]
    assert run.header.backends[0].required_environment == {"TRITON_INTERPRET": "1"}
    assert run.header.backends[0].version == "0.32.0, interpreted"


@pytest.mark.parametrize(
    ("name", "launches"),
    [("TRITON_ATTN", True), ("TRITON_MLA", True), ("CPU_ATTN", False), ("CPU_MLA", False), ("FLEX_ATTENTION", False)],
)
def test_backends_made_of_triton_kernels_are_told_from_others(name, launches):
    registry = package.module("vllm.v1.attention.backends.registry")
    assert launches_triton(registry.AttentionBackendEnum[name].get_class()) is launches


def test_values_of_another_head_size_than_keys_reach_the_class_for_them(tmp_path):
    suite = tmp_path / "sizes.yaml"
    suite.write_text(
        "suite: sizes\n"
        "defaults: {layer: {num_heads: 2, num_kv_heads: 1, dtype: float16}}\n"
        "cases:\n"
        "  - {id: values, batch: q1s40_q5s37, layer: {head_size: 64}, matrix: {layer.head_size_v: [32, 160]}}\n"
        "  - {id: equal, batch: q1s40_q5s37, layer: {head_size: 160}}\n"
    )
    command = [sys.executable, "-m", "attncheck", "run", "--backend", "vllm:TRITON_ATTN_DIFFKV", "--in-process"]
    command += ["--suite", str(suite), "--check", "numerics,cache_write", "--output", str(tmp_path / "run.jsonl")]
    environment = QUIET | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [record.outcome for record in read_run(tmp_path / "run.jsonl").records] == ["passed"] * 6
