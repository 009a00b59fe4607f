"""Each fault planted in vLLM's backends fails beside what is known of them, and the first finding names it."""

from pathlib import Path

import pytest
import torch

from attncheck.reports.analysis.findings import findings

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


@pytest.fixture
def first_findings(run_vllm, tmp_path):
    """``first_findings(fault, known, cases, *words)``: the titles of what the documented expectations do not cover."""

    def first_findings(fault, known, cases, *words):
        ref = f"vllm:{FAULTS}:{fault}"
        text = (EXPECTED / known).read_text(encoding="utf-8")
        backend = next(line for line in text.splitlines() if line.startswith("- backend: "))
        (tmp_path / "expect.yaml").write_text(text.replace(backend, f"- backend: {ref}"), encoding="utf-8")
        selection = [word for case in cases for word in ("--case", case)]
        selected = ("--backend", ref, *selection, *words, "--expect", str(tmp_path / "expect.yaml"))
        run, _ = run_vllm(tmp_path / "run.jsonl", *selected, code=0 if fault == "Right" else 1)
        return [found.title for found in findings(run.records, run.header) if not found.is_expected]

    return first_findings


def suites(cases):
    """The options that name the suites of the cases."""
    return tuple(word for name in dict.fromkeys(case.partition("/")[0] for case in cases) for word in ("--suite", name))


def test_without_a_fault_nothing_is_new(first_findings):
    cases = (*PLAIN, *WINDOW, *CAPS, *FP8, "smoke/alibi", "smoke/padded-tokens", "smoke/padded-mixed")
    assert first_findings("Right", "vllm-cpu-attn.yaml", cases, *suites(cases), *PAGES) == []


@pytest.mark.parametrize("fault", CPU)
def test_a_fault_in_the_cpu_backend(first_findings, fault):
    cases, cause = CPU[fault]
    if cases == FP8 and not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM has no kernel for an FP8 cache on a CPU without AVX-512")
    new = first_findings(fault, "vllm-cpu-attn.yaml", cases, *suites(cases), *PAGES)
    assert new[0].removeprefix("perhaps: ").startswith(cause), new


@pytest.mark.parametrize("fault", TRITON)
def test_a_fault_in_the_triton_backend(first_findings, fault):
    cases, cause = TRITON[fault]
    new = first_findings(fault, "vllm-triton-attn.yaml", cases, "--suite", "vllm_interpreted")
    assert new[0].removeprefix("perhaps: ").startswith(cause), new
