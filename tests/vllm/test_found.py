"""The commands of docs/ about vLLM's own backends; what the pages say is found is found again."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

DOCS = Path(__file__).resolve().parents[2] / "docs"
COMMAND = re.search(r"^attncheck (run --backend vllm:CPU_ATTN .*)$", (DOCS / "vllm.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("more", [[], ["--suite", "fp8_kv", "--suite", "soft_cap"]], ids=["as told", "what is known"])
def test_all_that_is_found_in_cpu_attn_is_known(tmp_path, more):
    if more and not torch.cpu._is_avx512_supported():
        pytest.skip("the expectations are for vLLM's kernels for AVX-512; those for AVX2 lack some of the faults")
    expected = ["--expect", str(DOCS / "expected" / "vllm-cpu-attn.yaml")]
    words = [*shlex.split(COMMAND[1]), *more, *expected, "--output", str(tmp_path / "run.jsonl")]
    done = subprocess.run(
        [sys.executable, "-m", "attncheck", *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "expected: vllm:CPU_ATTN: " in done.stdout
