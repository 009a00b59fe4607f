"""The pytest plugin as its users run it: processes of their own, alone and under pytest-xdist."""

import re
import xml.etree.ElementTree as ET
from collections import defaultdict

import pytest

pytest_plugins = ["pytester"]

SUITE = """\
suite: small
description: two small questions
defaults:
  layer: {num_heads: 4, num_kv_heads: 2, head_size: 32, dtype: float32}
cases:
  - {id: decode, batch: q1s20_q1s7}
  - {id: capped.x-1, batch: q17, layer: {logits_soft_cap: 5.0}, checks: [numerics, lse]}
"""
WRONG = """\
import os, pathlib
from attncheck.backends.reference_backend import ReferenceBackend, ReferenceImpl

class Wrong(ReferenceBackend):
    class Impl(ReferenceImpl):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            with pathlib.Path("constructed.txt").open("a") as log:
                log.write(f"{os.getpid()} {self.logits_soft_cap}\\n")
        def forward(self, *args, **kwargs):
            result = super().forward(*args, **kwargs)
            result.mul_(1.25)
            return result
    @classmethod
    def get_name(cls): return "WRONG"
    @classmethod
    def get_impl_cls(cls): return cls.Impl

class Raising(Wrong):
    class Impl(ReferenceImpl):
        def forward(self, *args, **kwargs):
            raise RuntimeError("no such kernel")

class Nowhere(ReferenceBackend):
    @classmethod
    def unavailable_reasons(cls, device): return ["needs a moon"]
"""
OURS = ("--attncheck-suite", "small.yaml", "--attncheck-device", "cpu")


@pytest.fixture
def folder(pytester: pytest.Pytester) -> pytest.Pytester:
    (pytester.path / "small.yaml").write_text(SUITE)
    (pytester.path / "wrong.py").write_text(WRONG)
    return pytester


def run(folder: pytest.Pytester, *words: str) -> pytest.RunResult:
    return folder.runpytest_subprocess("-p", "no:cacheprovider", *words, timeout=300)


def test_each_check_of_each_case_of_each_backend_is_an_item(folder: pytest.Pytester) -> None:
    backends = ("--attncheck-backend", "torch_sdpa", "--attncheck-backend", "reference")
    result = run(folder, *OURS, *backends, "--collect-only", "-q")
    checks = ("numerics", "lse", "cache_write", "containment", "claims")
    expected = [
        f"attncheck::small::{case}::{backend}::{check}"
        for case, asked in (("decode", checks), ("capped.x-1", checks[:2]))
        for backend in ("torch_sdpa", "reference")
        for check in asked
    ]
    assert [line for line in result.outlines if line.startswith("attncheck::")] == expected


def test_outcomes_skips_and_failures_without_our_traceback(folder: pytest.Pytester) -> None:
    backends = [
        word
        for name in ("torch_sdpa", "./wrong.py:Wrong", "./wrong.py:Nowhere")
        for word in ("--attncheck-backend", name)
    ]
    result = run(folder, *OURS, *backends, "-rs", "-v", "--attncheck-check", "numerics", "--attncheck-check", "lse")
    # Wrong answers both cases wrongly but returns the right LSE; torch_sdpa has no LSE and no soft cap.
    result.assert_outcomes(passed=3, failed=2, skipped=7)
    text = result.stdout.str()
    assert "attncheck::small::decode::torch_sdpa::numerics PASSED" in text
    assert re.search(r"SKIPPED \[\d\] .*small\.yaml:6: unsupported: feature 'lse' is not declared", text)
    assert re.search(r"SKIPPED \[\d\] .*small\.yaml:\d: unavailable: needs a moon", text)
    failure = text.partition("= FAILURES =")[2]
    assert "_ small/decode  Wrong  numerics _" in failure
    assert "2 of 2 rows" in failure
    assert "repeat: attncheck run --backend ./wrong.py:Wrong --suite small.yaml --case decode" in failure
    assert "pytest_items.py" not in failure
    assert "Traceback" not in failure


def test_an_exception_is_told_with_the_backends_own_frames(folder: pytest.Pytester) -> None:
    result = run(folder, *OURS, "--attncheck-backend", "./wrong.py:Raising", "--attncheck-case", "decode")
    failure = result.stdout.str().partition("= FAILURES =")[2]
    assert "RuntimeError in forward: no such kernel" in failure
    assert re.search(r'File ".*wrong\.py", line \d+, in forward', failure)
    assert "runner.py" not in failure
    result.stdout.fnmatch_lines(["FAILED attncheck::small::decode::Raising::numerics - RuntimeError in forward*"])


def test_tests_beside_ours_still_run_and_selection_works(folder: pytest.Pytester) -> None:
    folder.makepyfile("def test_own(): pass")
    question = (*OURS, "--attncheck-backend", "reference", "--strict-markers")
    run(folder, *question, "-k", "lse or own").assert_outcomes(passed=3, deselected=5)
    run(folder, *question, "-m", "not attncheck").assert_outcomes(passed=1, deselected=7)


def test_junit_names_every_item_and_says_why(folder: pytest.Pytester) -> None:
    backends = ("--attncheck-backend", "torch_sdpa", "--attncheck-backend", "./wrong.py:Wrong")
    run(folder, *OURS, *backends, "--junitxml", "out.xml", "-o", "junit_family=xunit2", "--attncheck-case", "decode")
    suite = ET.parse(folder.path / "out.xml").getroot()[0]
    cases = {(case.get("classname"), case.get("name")): case for case in suite}
    assert len(cases) == 10
    assert len(cases["attncheck.small.decode.torch_sdpa", "numerics"]) == 0
    (skipped,) = cases["attncheck.small.decode.torch_sdpa", "lse"]
    assert (skipped.tag, skipped.get("message")) == ("skipped", "unsupported: feature 'lse' is not declared")
    (failed,) = cases["attncheck.small.decode.Wrong", "numerics"]
    assert failed.tag == "failure"
    assert (failed.get("message") or "").startswith("2 of 2 rows")
    assert "repeat: attncheck run" in (failed.text or "")


@pytest.mark.parametrize("dist", [[], ["--dist", "loadgroup"]])
def test_under_xdist_a_case_is_examined_once_a_backend(folder: pytest.Pytester, dist: list[str]) -> None:
    pytest.importorskip("xdist")
    folder.makepyfile("def test_own(): pass")
    backends = ("--attncheck-backend", "reference", "--attncheck-backend", "./wrong.py:Wrong")
    checks = ("--attncheck-check", "numerics", "--attncheck-check", "lse")
    result = run(folder, *OURS, *backends, *checks, "-n", "2", "-v", *dist)
    result.assert_outcomes(passed=7, failed=2)
    workers = defaultdict(set)
    for worker, pair in re.findall(
        r"\[(gw\d)\] .*?(?:PASSED|FAILED) attncheck::(.*?)::\w+(?:@\S*)?\s", result.stdout.str()
    ):
        workers[pair].add(worker)
    assert len(workers) == 4
    assert all(len(names) == 1 for names in workers.values())
    # One construction a case: a second worker, or a second examination, would have made more.
    constructed = (folder.path / "constructed.txt").read_text().splitlines()
    assert len(constructed) == 2


def test_a_wrong_question_is_a_usage_error(folder: pytest.Pytester) -> None:
    for words, message in (
        (("--attncheck-backend", "refrence"), "did you mean 'reference'?"),
        (("--attncheck-case", "nothing"), "matches 'nothing'"),
        (("--attncheck-seed", "-1"), "seed -1"),
    ):
        result = run(folder, *OURS, *words)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        assert any(message in line for line in result.errlines), result.errlines
        assert not any("INTERNALERROR" in line for line in (*result.outlines, *result.errlines))


def test_without_its_options_the_plugin_costs_nothing(folder: pytest.Pytester) -> None:
    folder.makepyfile(
        """
        import sys

        def test_own(pytestconfig):
            assert pytestconfig.pluginmanager.hasplugin("attncheck")
            loaded = {name.partition(".")[0] for name in sys.modules}
            assert not loaded & {"torch", "pydantic", "numpy", "yaml", "typer"}
            ours = {name for name in sys.modules if name.startswith("attncheck")}
            assert ours == {"attncheck", "attncheck.harness", "attncheck.harness.pytest_plugin"}
        """
    )
    # Other plugins of this environment may load what they like.
    run(folder, "-p", "no:hypothesispytest", "-p", "no:benchmark", "-p", "no:cov").assert_outcomes(passed=1)
