"""The pytest plugin: how tests are made of cases, divided among workers, and judged."""

import re
import xml.etree.ElementTree as ET
from collections import defaultdict
from types import SimpleNamespace

import pytest

import attncheck.backends.candidates.reference
import attncheck.backends.candidates.torch_sdpa
import attncheck.harness.api  # noqa: F401 (pytester forgets what is imported while it runs)
from attncheck.harness.pytest_plugin import items
from attncheck.harness.pytest_plugin.items import FewProcesses
from attncheck.harness.run import selection
from attncheck.harness.workers.pool import WorkerPool
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


TESTS = """\
import attncheck

test_wrong = attncheck.backend_tests("./wrong.py:Wrong", "small.yaml", cases=("decode", "mixed"), checks="numerics")
test_right = attncheck.backend_tests("torch_sdpa", "small.yaml", cases="decode", checks=("numerics", "refusals"))

class TestNothing:
    test_nowhere = attncheck.backend_tests("./nowhere.py:Nowhere", "small.yaml", cases="decode", checks="numerics")
"""


def expectation(case, *, backend="Wrong", **further):
    fields = {"backend": backend, "case": case, "check": "numerics", "outcome": "failed", "reason": "issue 7"} | further
    return f"- {{{', '.join(f'{name}: {value!r}' for name, value in fields.items())}}}\n"


@pytest.fixture
def run(inside, folder):
    """``run(words, *backends)``: the session; with ``known``, these entries are expected."""

    def run(words, *backends, known=()):
        (folder.path / "known.yaml").write_text("".join(known))
        expected = "@expect known.yaml" if known else ""
        cases = "@case decode,mixed @check numerics" if backends else ""
        return inside(f"@in-process {cases} {expected} {words}", *backends)

    return run


WRONG = "./wrong.py:Wrong"


def test_what_fails_as_expected_is_an_xfail(run, folder):
    known = [expectation("small/*")]
    result = run("-rx --junitxml out.xml", WRONG, known=known)
    result.assert_outcomes(xfailed=2)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["XFAIL attncheck::small::decode::Wrong::numerics - issue 7 (2 of 2 rows*"])
    (skipped, _) = ET.parse(folder.path / "out.xml").iter("skipped")
    assert skipped.get("type") == "pytest.xfail"
    run("--runxfail", WRONG, known=known).assert_outcomes(failed=2)


def test_what_passes_unexpectedly_fails(run):
    result = run("", "torch_sdpa", known=[expectation("decode", backend="torch_sdpa")])
    result.assert_outcomes(passed=1, failed=1)
    assert "issue 7 (known.yaml:1)" in result.stdout.str()


def test_an_expectation_that_is_not_met_fails_the_session(run):
    known = [expectation("mixed", says="no such words"), expectation("small/gone"), expectation("*")]
    result = run("", WRONG, known=known)
    result.assert_outcomes(xfailed=2)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            "attncheck: error: known.yaml:2:*no case of this run's suites is called small/*",
            "attncheck: known.yaml:1: *not seen in this run*",
        ]
    )
    # What was not examined is no evidence.
    assert run("-k decode", WRONG, known=[expectation("small/decode"), expectation("small/mixed")]).ret == 0


def test_a_broken_file_of_expectations_is_a_usage_error(run):
    result = run("", WRONG, known=["- {backend: 3}\n"])
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert any("known.yaml:1" in line for line in result.errlines)


def test_failing_tensors_are_dumped_and_defaults_replaced(run, folder):
    result = run("@dump wrong @set layer.num_heads=4 -k decode", WRONG)
    result.assert_outcomes(failed=1, deselected=1)
    assert [path.suffix for path in (folder.path / "wrong").iterdir()] == [".pt"]
    assert "small.yaml{layer.num_heads: 4}" in result.stdout.str()


def test_a_module_has_an_item_for_each_case_and_check(run, folder):
    folder.makepyfile(test_mine=TESTS)
    # pytest-xdist takes what is behind a bracket for a part of the name.
    folder.makeconftest(
        """
        def pytest_collection_modifyitems(items):
            assert not any("]" in mark.args[0] for item in items for mark in item.iter_markers("xdist_group"))
        """
    )
    result = run("-v", known=[expectation("mixed"), expectation("small/other")])
    result.assert_outcomes(passed=2, failed=2, xfailed=1)
    result.stdout.fnmatch_lines(
        [
            "test_mine.py::test_wrong[[]decode-numerics[]] FAILED*",
            "test_mine.py::test_wrong[[]mixed-numerics[]] XFAIL*",
            "test_mine.py::test_right[[]decode-numerics[]] PASSED*",
            "test_mine.py::test_right[[]decode-refusals[]] PASSED*",
            "test_mine.py::TestNothing::test_nowhere[[]decode-numerics[]] FAILED*",
            "*perhaps: the output is all zeros*",
            "backend './nowhere.py:Nowhere': cannot read nowhere.py: No such file or directory*",
            "attncheck: error: known.yaml:2:*no case of this run's suites is called small/*",
        ]
    )
    run("test_mine.py::test_right[decode-refusals]").assert_outcomes(passed=1)


def test_a_wrong_question_of_a_module_is_a_collection_error(run, folder):
    folder.makepyfile(test_mine='import attncheck\ntest_mine = attncheck.backend_tests("torch_sdpa", "smoky")\n')
    result = run("")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["test_mine: unknown suite 'smoky'; did you mean 'smoke'?*"])


def test_a_worker_of_xdist_keeps_one_process_while_backends_describe_themselves(monkeypatch):
    discarded = []
    monkeypatch.setattr(WorkerPool, "describe", lambda _, refs: [f"{ref} described" for ref in refs])
    monkeypatch.setattr(WorkerPool, "discard", lambda _, ref: discarded.append(ref))
    assert FewProcesses().describe(["a", "b", "c"]) == ["a described", "b described", "c described"]
    assert discarded == ["b", "c"]


@pytest.mark.parametrize("verbosity", ["-vv", "-q"])
def test_an_examination_is_shown_whole_where_an_assertion_fails(run, folder, verbosity):
    folder.makepyfile(
        test_own="""
        import attncheck

        def examined():
            given = {"cases": ("decode", "mixed"), "checks": "numerics", "device": "cpu"}
            return attncheck.examine("./wrong.py:Wrong", "small.yaml", **given)

        def test_own():
            found = examined()
            assert found.passed

        def test_checked():
            examined().check()
        """
    )
    result = run(verbosity)
    result.assert_outcomes(failed=2)
    (own, checked) = result.stdout.str().partition("= FAILURES =")[2].split("_ test_checked _")
    for text in (own.partition("- attncheck -")[2], checked):
        assert "finding 1 of 1, Wrong: the output is all zeros" in text
        assert "repeat: attncheck run --backend ./wrong.py:Wrong --suite small.yaml --case decode" in text


def test_items_that_the_time_does_not_reach_are_skipped_and_those_that_find_most_come_first(run, folder, monkeypatch):
    monkeypatch.setattr(selection, "telling_ranks", lambda: {("small/mixed", "numerics"): 0})
    words = '"torch_sdpa", "small.yaml", cases=("decode", "mixed"), checks=("numerics", "refusals", "timing"), within="1e-6s"'
    folder.makepyfile(test_mine=f"import attncheck\ntest_mine = attncheck.backend_tests({words})\n")
    result = run("-v -rs")
    result.assert_outcomes(passed=1, skipped=4)
    result.stdout.fnmatch_lines(
        [
            "test_mine.py::test_mine[[]mixed-numerics[]] PASSED*",
            "test_mine.py::test_mine[[]decode-numerics[]] SKIPPED*",
            "test_mine.py::test_mine[[]decode-refusals[]] SKIPPED*",
            "*not reached within 1e-6s",
        ]
    )


def test_loading_takes_none_of_the_time(run, folder, monkeypatch):
    clock = [0.0]
    opened = items.Question._open

    def open_slowly(question):
        clock[0] += 100.0
        return opened(question)

    monkeypatch.setattr(items, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(items.Question, "_open", open_slowly)
    words = '"torch_sdpa", "small.yaml", cases=("decode", "mixed"), checks=("numerics",), within="60s"'
    folder.makepyfile(test_mine=f"import attncheck\ntest_mine = attncheck.backend_tests({words})\n")
    run("").assert_outcomes(passed=2)
