"""Expected failures, dumps, defaults and failed examinations in a pytest session; all in the process of this one."""

import xml.etree.ElementTree as ET

import pytest

import attncheck.backends.candidates.reference
import attncheck.backends.candidates.torch_sdpa
import attncheck.harness.api  # noqa: F401 (pytester forgets what is imported while it runs)
from attncheck.harness.pytest_plugin.items import FewProcesses
from attncheck.harness.workers.pool import WorkerPool

pytest_plugins = ["pytester"]

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
