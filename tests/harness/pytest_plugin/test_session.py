"""Expected failures, dumps, defaults and failed examinations in a pytest session; all in the process of this one."""

import xml.etree.ElementTree as ET

import pytest

import attncheck.backends.candidates.reference
import attncheck.backends.candidates.torch_sdpa
import attncheck.harness.api  # noqa: F401 (pytester forgets what is imported while it runs)
from attncheck.harness.pytest_plugin.items import FewProcesses
from attncheck.harness.workers.pool import WorkerPool

pytest_plugins = ["pytester"]

SUITE = """\
suite: small
description: a small question
defaults:
  layer: {num_heads: 2, num_kv_heads: 1, head_size: 16, dtype: float32}
cases:
  - {id: decode, batch: q1s20_q1s7}
  - {id: mixed, batch: q1s20_q5s9}
"""
WRONG = """\
from attncheck import kernel_backend

def attend(query, key_cache, value_cache, metadata, params, out):
    out.zero_()

Wrong = kernel_backend(attend, name="wrong")
"""
TESTS = """\
import attncheck

test_wrong = attncheck.backend_tests("./wrong.py:Wrong", "small.yaml", checks="numerics")
test_right = attncheck.backend_tests("torch_sdpa", "small.yaml", cases="decode", checks=("numerics", "refusals"))

class TestNothing:
    test_nowhere = attncheck.backend_tests("./nowhere.py:Nowhere", "small.yaml", cases="decode", checks="numerics")
"""


def expectation(case: str, *, backend: str = "Wrong", **further: str) -> str:
    fields = {"backend": backend, "case": case, "check": "numerics", "outcome": "failed", "reason": "issue 7"} | further
    return f"- {{{', '.join(f'{name}: {value!r}' for name, value in fields.items())}}}\n"


@pytest.fixture
def folder(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):  # of the run around it
        monkeypatch.delenv(name, raising=False)
    (pytester.path / "small.yaml").write_text(SUITE)
    (pytester.path / "wrong.py").write_text(WRONG)
    return pytester


def run(folder: pytest.Pytester, *words: str, backend: str | None = "./wrong.py:Wrong") -> pytest.RunResult:
    options = ["--attncheck-device", "cpu", "--attncheck-in-process"]
    if backend is not None:
        options += ["--attncheck-suite", "small.yaml", "--attncheck-check", "numerics", "--attncheck-backend", backend]
    return folder.runpytest_inprocess("-p", "no:cacheprovider", *options, *words)


def expecting(folder: pytest.Pytester, *entries: str) -> tuple[str, str]:
    (folder.path / "known.yaml").write_text("".join(entries))
    return "--attncheck-expect", "known.yaml"


def test_what_fails_as_expected_is_an_xfail(folder: pytest.Pytester) -> None:
    result = run(folder, *expecting(folder, expectation("small/*")), "-rx", "--junitxml", "out.xml")
    result.assert_outcomes(xfailed=2)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["XFAIL attncheck::small::decode::Wrong::numerics - issue 7 (2 of 2 rows*"])
    (skipped, _) = ET.parse(folder.path / "out.xml").iter("skipped")
    assert skipped.get("type") == "pytest.xfail"
    run(folder, *expecting(folder, expectation("small/*")), "--runxfail").assert_outcomes(failed=2)


def test_what_passes_unexpectedly_fails(folder: pytest.Pytester) -> None:
    entry = expectation("decode", backend="torch_sdpa")
    result = run(folder, *expecting(folder, entry), backend="torch_sdpa")
    result.assert_outcomes(passed=1, failed=1)
    assert "issue 7 (known.yaml:1)" in result.stdout.str()


def test_an_expectation_that_is_not_met_fails_the_session(folder: pytest.Pytester) -> None:
    entries = (expectation("mixed", says="no such words"), expectation("small/gone"), expectation("*"))
    result = run(folder, *expecting(folder, *entries))
    result.assert_outcomes(xfailed=2)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            "attncheck: error: known.yaml:2:*no case of this run's suites is called small/*",
            "attncheck: known.yaml:1: *not seen in this run*",
        ]
    )
    # What was not examined is no evidence.
    late = (*expecting(folder, expectation("small/decode"), expectation("small/mixed")), "-k", "decode")
    assert run(folder, *late).ret == 0


def test_a_broken_file_of_expectations_is_a_usage_error(folder: pytest.Pytester) -> None:
    result = run(folder, *expecting(folder, "- {backend: 3}\n"))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert any("known.yaml:1" in line for line in result.errlines)


def test_failing_tensors_are_dumped_and_defaults_replaced(folder: pytest.Pytester) -> None:
    words = ("--attncheck-dump", "wrong", "--attncheck-set", "layer.num_heads=4", "-k", "decode")
    result = run(folder, *words)
    result.assert_outcomes(failed=1, deselected=1)
    assert [path.suffix for path in (folder.path / "wrong").iterdir()] == [".pt"]
    assert "small.yaml{layer.num_heads: 4}" in result.stdout.str()


def test_a_module_has_an_item_for_each_case_and_check(folder: pytest.Pytester) -> None:
    folder.makepyfile(test_mine=TESTS)
    # pytest-xdist takes what is behind a bracket for a part of the name.
    folder.makeconftest(
        """
        def pytest_collection_modifyitems(items):
            assert not any("]" in mark.args[0] for item in items for mark in item.iter_markers("xdist_group"))
        """
    )
    result = run(folder, *expecting(folder, expectation("mixed"), expectation("small/other")), "-v", backend=None)
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
    one = run(folder, "test_mine.py::test_right[decode-refusals]", backend=None)
    one.assert_outcomes(passed=1)


def test_a_wrong_question_of_a_module_is_a_collection_error(folder: pytest.Pytester) -> None:
    folder.makepyfile(test_mine='import attncheck\ntest_mine = attncheck.backend_tests("torch_sdpa", "smoky")\n')
    result = run(folder, backend=None)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["test_mine: unknown suite 'smoky'; did you mean 'smoke'?*"])


def test_a_worker_of_xdist_keeps_one_process_while_backends_describe_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    discarded: list[str] = []
    monkeypatch.setattr(WorkerPool, "describe", lambda _, refs: [f"{ref} described" for ref in refs])
    monkeypatch.setattr(WorkerPool, "discard", lambda _, ref: discarded.append(ref))
    assert FewProcesses().describe(["a", "b", "c"]) == ["a described", "b described", "c described"]
    assert discarded == ["b", "c"]


@pytest.mark.parametrize("verbosity", ["-v", "-vv", "-q"])
def test_an_examination_is_shown_whole_where_an_assertion_fails(folder: pytest.Pytester, verbosity: str) -> None:
    folder.makepyfile(
        test_own="""
        import attncheck

        def test_own():
            found = attncheck.examine("./wrong.py:Wrong", "small.yaml", checks="numerics", device="cpu")
            assert found.passed

        def test_checked():
            attncheck.examine("./wrong.py:Wrong", "small.yaml", checks="numerics", device="cpu").check()
        """
    )
    result = run(folder, verbosity, backend=None)
    result.assert_outcomes(failed=2)
    (own, checked) = result.stdout.str().partition("= FAILURES =")[2].split("_ test_checked _")
    for text in (own.partition("- attncheck -")[2], checked):
        assert "finding 1 of 1, Wrong: the output is all zeros" in text
        assert "repeat: attncheck run --backend ./wrong.py:Wrong --suite small.yaml --case decode" in text
