"""The pytest plugin as its users run it: processes of their own, alone and under pytest-xdist."""

import re
import xml.etree.ElementTree as ET
from collections import defaultdict

import pytest

from attncheck.reference.spec import DEFAULT_CHECKS

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
from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl

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

class Dying(Wrong):
    class Impl(ReferenceImpl):
        def forward(self, *args, **kwargs):
            os.abort()

class Huge(Wrong):
    class Impl(ReferenceImpl):
        def forward(self, *args, **kwargs):
            bytearray(2**36)

class Nowhere(ReferenceBackend):
    @classmethod
    def unavailable_reasons(cls, device): return ["needs a moon"]
"""
OURS = ("--attncheck-suite", "small.yaml", "--attncheck-device", "cpu")


@pytest.fixture
def folder(pytester: pytest.Pytester, preloaded: None) -> pytest.Pytester:
    (pytester.path / "small.yaml").write_text(SUITE)
    (pytester.path / "wrong.py").write_text(WRONG)
    return pytester


def run(folder: pytest.Pytester, *words: str) -> pytest.RunResult:
    return folder.runpytest_subprocess("-p", "no:cacheprovider", *words, timeout=300)


def test_each_check_of_each_case_of_each_backend_is_an_item(folder: pytest.Pytester) -> None:
    backends = ("--attncheck-backend", "torch_sdpa", "--attncheck-backend", "reference")
    result = run(folder, *OURS, *backends, "--collect-only", "-q")
    checks = DEFAULT_CHECKS
    expected = [
        f"attncheck::small::{case}::{backend}::{check}"
        for backend in ("torch_sdpa", "reference")
        for case, checks_of_case in (("decode", checks), ("capped.x-1", checks[:2]))
        for check in checks_of_case
    ]
    assert [line for line in result.outlines if line.startswith("attncheck::")] == expected


def test_outcomes_skips_failures_and_junit(folder: pytest.Pytester) -> None:
    names = ("torch_sdpa", "./wrong.py:Wrong", "./wrong.py:Raising", "./wrong.py:Dying", "./wrong.py:Nowhere")
    backends = [word for name in names for word in ("--attncheck-backend", name)]
    checks = ("--attncheck-check", "numerics", "--attncheck-check", "lse")
    result = run(
        folder,
        *OURS,
        *backends,
        *checks,
        "-m",
        "attncheck",
        "-rfs",
        "-v",
        "--junitxml",
        "out.xml",
        "-o",
        "junit_family=xunit2",
    )
    # Wrong gives wrong outputs with the right LSE; torch_sdpa has no LSE and no soft cap; Nowhere cannot run.
    result.assert_outcomes(passed=3, failed=2 + 4 + 4, skipped=3 + 4)
    text = result.stdout.str()
    assert "attncheck::small::decode::torch_sdpa::numerics PASSED" in text
    assert re.search(r"SKIPPED \[\d\] .*small\.yaml:6: unsupported: feature 'lse' is not declared", text)
    assert re.search(r"SKIPPED \[\d\] .*small\.yaml:\d: unavailable: needs a moon", text)
    assert "attncheck: Nowhere cannot run here: needs a moon" in text
    result.stdout.fnmatch_lines(["FAILED attncheck::small::decode::Raising::numerics - RuntimeError in forward*"])

    failures = text.partition("= FAILURES =")[2]
    wrong = failures.partition("_ small/decode  Wrong  numerics _")[2].partition("\n___")[0]
    assert "2 of 2 rows" in wrong
    assert "repeat: attncheck run --backend ./wrong.py:Wrong --suite small.yaml --case decode" in wrong
    assert "Traceback" not in wrong
    raising = failures.partition("_ small/decode  Raising  lse _")[2].partition("\n___")[0]
    assert "RuntimeError in forward: no such kernel" in raising
    assert re.search(r'File ".*wrong\.py", line \d+, in forward', raising)
    dying = failures.partition("_ small/decode  Dying  numerics _")[2].partition("\n___")[0]
    assert "killed by SIGABRT during check numerics" in dying
    assert re.search(r'File ".*wrong\.py", line \d+ in forward', dying)
    assert not re.search(r"driver/session\.py|pytest_plugin/items\.py", failures)

    junit = {
        (case.get("classname"), case.get("name")): case for case in ET.parse(folder.path / "out.xml").iter("testcase")
    }
    assert len(junit) == 20
    assert len(junit["attncheck.small.decode.torch_sdpa", "numerics"]) == 0
    (skipped,) = junit["attncheck.small.decode.torch_sdpa", "lse"]
    assert (skipped.tag, skipped.get("message")) == ("skipped", "unsupported: feature 'lse' is not declared")
    (failed,) = junit["attncheck.small.decode.Wrong", "numerics"]
    assert failed.tag == "failure"
    assert (failed.get("message") or "").startswith("2 of 2 rows")
    assert "repeat: attncheck run" in (failed.text or "")


def test_tests_beside_ours_still_run_and_selection_works(folder: pytest.Pytester) -> None:
    folder.makepyfile("def test_own(): pass")
    question = (*OURS, "--attncheck-backend", "reference", "--strict-markers")
    run(folder, *question, "-k", "capped or own").assert_outcomes(passed=3, deselected=10)


@pytest.mark.slow
def test_under_xdist_a_case_is_examined_once_a_backend(folder: pytest.Pytester) -> None:
    pytest.importorskip("xdist")
    folder.makepyfile("def test_own(): pass")
    checks = ("--attncheck-check", "numerics", "--attncheck-check", "lse")
    result = run(folder, *OURS, "--attncheck-backend", "./wrong.py:Wrong", *checks, "-n", "2", "-v")
    result.assert_outcomes(passed=3, failed=2)
    workers = defaultdict(set)
    for worker, pair in re.findall(r"\[(gw\d)\] .*?(?:PASSED|FAILED) attncheck::(.*?)::\w+\s", result.stdout.str()):
        workers[pair].add(worker)
    assert len(workers) == 2
    assert all(len(names) == 1 for names in workers.values())
    # One construction a case: a second worker, or a second examination, would have made more.
    constructed = (folder.path / "constructed.txt").read_text().splitlines()
    assert len(constructed) == 2


def test_a_group_is_a_case_and_a_backend_however_xdist_writes_it() -> None:
    pytest.importorskip("xdist")
    from attncheck.harness.pytest_plugin.items import pair_scheduling

    scheduling = object.__new__(pair_scheduling())  # the base class wants a whole session; the split needs none
    pair = "attncheck::small::decode::Wrong"
    assert scheduling._split_scope(f"{pair}::lse") == pair
    assert scheduling._split_scope(f"{pair}::lse@small.decode.Wrong") == pair
    assert scheduling._split_scope("test_a.py::test_one") == "test_a.py::test_one"
    assert scheduling._split_scope("test_a.py::test_one@group") == "group"


def test_a_wrong_question_is_a_usage_error(folder: pytest.Pytester) -> None:
    result = run(folder, *OURS, "--attncheck-backend", "refrence")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert any("did you mean 'reference'?" in line for line in result.errlines)
    assert not any("INTERNALERROR" in line for line in (*result.outlines, *result.errlines))


def test_a_limit_of_memory_is_kept_and_named(folder: pytest.Pytester) -> None:
    words = ("--attncheck-backend", "wrong.py:Huge", "--attncheck-case", "decode", "--attncheck-check", "numerics")
    result = run(folder, *OURS, *words, "--attncheck-memory-limit", "1GiB")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*MemoryError in forward: (no message) (--memory-limit: 1 GiB)*"])
    result = run(folder, *OURS, *words, "--attncheck-memory-limit", "much")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--attncheck-memory-limit 'much': give a size, such as 512MiB*"])


def test_without_its_options_the_plugin_costs_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_own(pytestconfig):
            assert pytestconfig.pluginmanager.hasplugin("attncheck")
            loaded = {name.partition(".")[0] for name in sys.modules}
            assert not loaded & {"torch", "pydantic", "numpy", "yaml", "typer"}
            ours = {name for name in sys.modules if name.startswith("attncheck")}
            plugin = "attncheck.harness.pytest_plugin"
            options = ("attncheck.errors", "attncheck.harness.run", "attncheck.harness.run.options")
            assert ours == {"attncheck", "attncheck.harness", *options, plugin, f"{plugin}.plugin"}
        """
    )
    # Other plugins of this environment may load what they like.
    run(
        pytester, "-p", "no:hypothesispytest", "-p", "no:benchmark", "-p", "no:cov", "-p", "no:inline_snapshot"
    ).assert_outcomes(passed=1)


LOSING = """\
import torch
from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl

def illegal_access(*arguments, **keywords):
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

class Losing(ReferenceBackend):
    class Impl(ReferenceImpl):
        def forward(self, attn_layer, query, *args, **kwargs):
            if len(query) == 17:
                torch.cuda.is_initialized = lambda: True
                torch.cuda.synchronize = illegal_access
                illegal_access()
            return super().forward(attn_layer, query, *args, **kwargs)
    @classmethod
    def get_impl_cls(cls): return cls.Impl
"""


def test_a_device_lost_in_process_fails_its_item_and_ends_the_session(folder: pytest.Pytester) -> None:
    (folder.path / "losing.py").write_text(LOSING)
    (folder.path / "small.yaml").write_text(f"{SUITE}  - {{id: last, batch: q3}}\n")
    result = run(
        folder,
        *OURS,
        "--attncheck-backend",
        "losing.py:Losing",
        "--attncheck-check",
        "numerics",
        "--attncheck-in-process",
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "the device was lost: CUDA error: an illegal memory access was encountered during check numerics,",
            "! attncheck: backend Losing, case small/capped.x-1, check numerics, in forward: the device was lost: *",
        ]
    )


@pytest.mark.parametrize(("words", "is_seen"), [((), "False"), (("--attncheck-pass-env", "DEPLOY_*"), "True")])
def test_a_backend_sees_the_variables_that_it_is_passed(
    folder: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], is_seen: str
) -> None:
    monkeypatch.setenv("DEPLOY_TOKEN", "x")
    shows = "pathlib.Path('seen').write_text(str('DEPLOY_TOKEN' in os.environ))\n"
    (folder.path / "shows.py").write_text(WRONG + shows)
    folder.runpytest_subprocess(*OURS, "--attncheck-backend", "./shows.py:Nowhere", *words)
    assert (folder.path / "seen").read_text() == is_seen
