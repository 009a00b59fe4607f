"""Each fault planted in vLLM's backends fails beside what is known of them, and the first finding names it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attncheck.reports.analysis.findings import findings
from attncheck.reports.run_file.store import read_run

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

EXPECTED = Path(__file__).resolve().parents[3] / "docs" / "expected"
FAULTS = Path(__file__).with_name("faults.py")

PLAIN = ("smoke/extend", "smoke/scale")
WINDOW, CAPS = ("smoke/window-extend", "smoke/window-prefill.7"), ("smoke/soft-cap.5.0", "soft_cap/near-mixed.*")
FP8 = ("smoke/fp8-cache", "fp8_kv/powers-of-two", "fp8_kv/subnormal")

CPU = {
    "WindowLonger": (WINDOW, "the window is one key too long"),
    "CapTooLarge": (CAPS, "the soft cap is 1.05"),
    "SinksIgnored": (("smoke/sinks",), "the sinks are ignored"),
    "PaddingWritten": (("smoke/padded-tokens", "smoke/padded-mixed"), "rows with slot -1 were written to slot 0"),
    "HeadsExchangedInCache": (PLAIN, "query head 0 reads KV head 1 instead of 0"),
    "StaleLengths": (PLAIN, "something of an earlier step is kept"),
    "LevelRaised": (PLAIN, "build puts metadata.scheduler_metadata into new memory"),
    "QueryScaledInPlace": (PLAIN, "inputs were changed: query"),
    "KeyScaleIgnored": (FP8, "k_scale is left out"),
    "SubnormalsFlushed": (FP8, "subnormal codes are read as 0"),
    "NotANumberUnderACap": (CAPS, "NaN or Inf in the output. Possible causes"),
}
"""Fault: the selected cases, and how the first finding begins."""

TRITON = {
    "TritonWindowLonger": (("window",), "the window is one key too long"),
    "TritonSinksIgnored": (("sinks",), "the sinks are ignored"),
}
PAGES = ("--set", "cache.block_size=32", "--set", "cache.layout=HND")


def first_findings(folder: Path, fault: str, known: str, cases: tuple[str, ...], *words: str) -> tuple[int, list[str]]:
    """The exit status of a run under the documented expectations, and the titles of what they do not cover."""
    ref = f"vllm:{FAULTS}:{fault}"
    text = (EXPECTED / known).read_text(encoding="utf-8")
    backend = next(line for line in text.splitlines() if line.startswith("- backend: "))
    (folder / "expect.yaml").write_text(text.replace(backend, f"- backend: {ref}"), encoding="utf-8")
    selection = [word for case in cases for word in ("--case", case)]
    files = ("--expect", str(folder / "expect.yaml"), "--output", str(folder / "run.jsonl"))
    done = subprocess.run(
        [sys.executable, "-m", "attncheck", "run", "--backend", ref, *selection, *words, *files],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
        timeout=600,
    )
    run = read_run(folder / "run.jsonl")
    new = [found.title for found in findings(run.records, run.header) if not found.is_expected]
    assert run.records, done.stdout + done.stderr
    return done.returncode, new


def suites(cases: tuple[str, ...]) -> tuple[str, ...]:
    """The options that name the suites of the cases."""
    return tuple(word for name in dict.fromkeys(case.partition("/")[0] for case in cases) for word in ("--suite", name))


def test_without_a_fault_nothing_is_new(tmp_path: Path) -> None:
    cases = (*PLAIN, *WINDOW, *CAPS, *FP8, "smoke/alibi", "smoke/padded-tokens", "smoke/padded-mixed")
    assert first_findings(tmp_path, "Right", "vllm-cpu-attn.yaml", cases, *suites(cases), *PAGES) == (0, [])


@pytest.mark.parametrize("fault", CPU)
def test_a_fault_in_the_cpu_backend(tmp_path: Path, fault: str) -> None:
    cases, cause = CPU[fault]
    if cases == FP8 and not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM has no kernel for an FP8 cache on a CPU without AVX-512")
    status, new = first_findings(tmp_path, fault, "vllm-cpu-attn.yaml", cases, *suites(cases), *PAGES)
    assert status == 1
    assert new[0].removeprefix("perhaps: ").startswith(cause), new


@pytest.mark.parametrize("fault", TRITON)
def test_a_fault_in_the_triton_backend(tmp_path: Path, fault: str) -> None:
    cases, cause = TRITON[fault]
    status, new = first_findings(tmp_path, fault, "vllm-triton-attn.yaml", cases, "--suite", "vllm_interpreted")
    assert status == 1
    assert new[0].removeprefix("perhaps: ").startswith(cause), new
