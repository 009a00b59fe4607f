"""The commands of docs/ about vLLM's own backends; what the pages say is found is found again."""

import re
import shlex
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

DOCS = Path(__file__).resolve().parents[2] / "docs"
COMMAND = re.search(r"^attncheck run (--backend vllm:CPU_ATTN .*)$", (DOCS / "vllm.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("more", [[], ["--suite", "fp8_kv", "--suite", "soft_cap"]], ids=["as told", "what is known"])
def test_all_that_is_found_in_cpu_attn_is_known(run_vllm, tmp_path, more):
    if more and not torch.cpu._is_avx512_supported():
        pytest.skip("the expectations are for vLLM's kernels for AVX-512; those for AVX2 lack some of the faults")
    expected = ["--expect", str(DOCS / "expected" / "vllm-cpu-attn.yaml")]
    _, printed = run_vllm(tmp_path / "run.jsonl", *shlex.split(COMMAND[1]), *more, *expected)
    assert "expected: vllm:CPU_ATTN: " in printed
