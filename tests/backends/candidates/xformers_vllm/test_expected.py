"""The expectation file of ``xformers_vllm``: complete for its suites, and confirmed by a run."""

from pathlib import Path

import pytest

from attncheck.backends.candidates.xformers.backend import library_reasons
from attncheck.cases.loader import load_suite
from attncheck.harness.run.expectation_file import load_expectations

FILE = Path(__file__).parents[4] / "docs" / "expected" / "xformers-vllm.yaml"


def test_every_entry_is_about_a_case_of_a_shipped_suite():
    cases = [case for name in ("interpreted", "xformers") for case in load_suite(name)]
    for entry in load_expectations(FILE):
        wanted = entry.expectation
        assert wanted.backend in ("xformers_vllm", "xformers_vllm:auto")
        found = [case for case in cases if wanted.fits_case(case.suite, case.id)]
        assert any(case.checks is None or wanted.check in case.checks for case in found), str(entry)


@pytest.mark.parametrize(
    ("backend", "cases", "expected"),
    [
        (
            "xformers_vllm",
            ["window-mixed", "soft-cap-alone", "head-size-without-operator.80", "padded-decode", "mixed"],
            "PASSED WITH 6 KNOWN FAULTS: 5 cases failed as expected\n",
        ),
        ("xformers_vllm:auto", ["decode"], "PASSED WITH 1 KNOWN FAULT: 1 case failed as expected\n"),
    ],
)
@pytest.mark.slow
def test_a_run_falls_short_as_foreseen(backend, cases, expected, shell, tmp_path):
    if reasons := library_reasons("cpu"):
        pytest.skip("; ".join(reasons))
    chosen = " ".join(f"--case {case}" for case in cases)
    command = f"attncheck run --backend {backend} --suite xformers {chosen} --expect {FILE} --device cpu --in-process"
    code, printed = shell(f"TRITON_INTERPRET=1 {command}", tmp_path)
    assert code == 0, printed
    assert expected in printed, printed
