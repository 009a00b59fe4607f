"""The pytest plugin as its users run it: processes of their own, alone and under pytest-xdist."""

import re
import xml.etree.ElementTree as ET
from collections import defaultdict

import pytest

from attncheck.reference.spec import DEFAULT_CHECKS

pytest_plugins = ["pytester"]


def test_each_check_of_each_case_of_each_backend_is_an_item(inside, preloaded):
    result = inside("--collect-only -q", "torch_sdpa", "reference")
    checks = {"decode": DEFAULT_CHECKS, "capped.x-1": DEFAULT_CHECKS[:2], "mixed": DEFAULT_CHECKS[:1]}
    assert [line for line in result.outlines if line.startswith("attncheck::")] == [
        f"attncheck::small::{case}::{backend}::{check}"
        for backend in ("torch_sdpa", "reference")
        for case, own in checks.items()
        for check in own
    ]


def test_outcomes_skips_failures_and_junit(apart, folder):
    folder.makepyfile("def test_own(): pass")
    names = ("torch_sdpa", "./wrong.py:Wrong", "./wrong.py:Raising", "./wrong.py:Dying", "./wrong.py:Nowhere")
    words = "@check numerics @check lse -m attncheck -k 'not mixed' -rfs -v --strict-markers"
    result = apart(f"{words} --junitxml out.xml -o junit_family=xunit2", *names)
    # Wrong gives wrong outputs with the right LSE; torch_sdpa has no LSE and no soft cap; Nowhere cannot run.
    result.assert_outcomes(passed=3, failed=2 + 4 + 4, skipped=3 + 4, deselected=6)
    text = result.stdout.str()
    assert "attncheck::small::decode::torch_sdpa::numerics PASSED" in text
    assert re.search(r"SKIPPED \[\d\] .*small\.yaml:5: unsupported: feature 'lse' is not declared", text)
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

    cases = ET.parse(folder.path / "out.xml").iter("testcase")
    junit = {(case.get("classname"), case.get("name")): case for case in cases}
    assert len(junit) == 20
    assert len(junit["attncheck.small.decode.torch_sdpa", "numerics"]) == 0
    (skipped,) = junit["attncheck.small.decode.torch_sdpa", "lse"]
    assert (skipped.tag, skipped.get("message")) == ("skipped", "unsupported: feature 'lse' is not declared")
    (failed,) = junit["attncheck.small.decode.Wrong", "numerics"]
    assert failed.tag == "failure"
    assert failed.get("message").startswith("2 of 2 rows")
    assert "repeat: attncheck run" in failed.text


@pytest.mark.slow
def test_under_xdist_a_case_is_examined_once_a_backend(apart, folder):
    pytest.importorskip("xdist")
    folder.makepyfile("def test_own(): pass")
    result = apart("@check numerics @check lse -k 'not mixed' -n 2 -v", "./wrong.py:Wrong")
    result.assert_outcomes(passed=3, failed=2)
    workers = defaultdict(set)
    for worker, pair in re.findall(r"\[(gw\d)\] .*?(?:PASSED|FAILED) attncheck::(.*?)::\w+\s", result.stdout.str()):
        workers[pair].add(worker)
    assert len(workers) == 2
    assert all(len(names) == 1 for names in workers.values())
    # One construction a case: a second worker, or a second examination, would have made more.
    assert len((folder.path / "constructed.txt").read_text().splitlines()) == 2


def test_a_group_is_a_case_and_a_backend_however_xdist_writes_it():
    pytest.importorskip("xdist")
    from attncheck.harness.pytest_plugin.items import pair_scheduling

    scheduling = object.__new__(pair_scheduling())  # the base class wants a whole session; the split needs none
    pair = "attncheck::small::decode::Wrong"
    assert scheduling._split_scope(f"{pair}::lse") == pair
    assert scheduling._split_scope(f"{pair}::lse@small.decode.Wrong") == pair
    assert scheduling._split_scope("test_a.py::test_one") == "test_a.py::test_one"
    assert scheduling._split_scope("test_a.py::test_one@group") == "group"


@pytest.mark.parametrize(
    ("words", "backend", "message"),
    [
        ("@in-process", "refrence", "*did you mean 'reference'?*"),
        ("@memory-limit much", "reference", "*--attncheck-memory-limit 'much': give a size, such as 512MiB*"),
        ("-p no:benchmark @timing @in-process", "reference", "*made through pytest-benchmark, which is switched off*"),
    ],
)
def test_a_wrong_question_is_a_usage_error(inside, words, backend, message):
    result = inside(words, backend)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([message])
    assert not any("INTERNALERROR" in line for line in (*result.outlines, *result.errlines))


def test_a_backend_has_its_limit_of_memory_and_the_variables_that_it_is_passed(inside, folder, monkeypatch, preloaded):
    monkeypatch.setenv("DEPLOY_TOKEN", "x")
    monkeypatch.setenv("OTHER_TOKEN", "x")
    result = inside("@case decode @check numerics @memory-limit 1GiB @pass-env DEPLOY_*", "wrong.py:Huge")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*MemoryError in forward: (no message) (--memory-limit: 1 GiB)*"])
    assert (folder.path / "seen").read_text() == "DEPLOY_TOKEN"


def test_without_its_options_the_plugin_costs_nothing(pytester):
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
    others = ("hypothesispytest", "benchmark", "cov", "inline_snapshot")  # which may load what they like
    left_out = [word for name in ("cacheprovider", *others) for word in ("-p", f"no:{name}")]
    pytester.runpytest_subprocess(*left_out, timeout=300).assert_outcomes(passed=1)


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


def test_a_device_lost_in_process_fails_its_item_and_ends_the_session(apart, folder):
    (folder.path / "losing.py").write_text(LOSING)
    result = apart("@check numerics @in-process", "losing.py:Losing")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "the device was lost: CUDA error: an illegal memory access was encountered during check numerics,",
            "! attncheck: backend Losing, case small/capped.x-1, check numerics, in forward: the device was lost: *",
        ]
    )
