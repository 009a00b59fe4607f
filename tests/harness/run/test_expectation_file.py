"""An expectation file is read whole, or refused with the place of its first mistake."""

from collections.abc import Callable
from pathlib import Path

import pytest

from attncheck.errors import CaseFileError
from attncheck.harness.run.expectations import expectation_file, load_expectations

OWN = sorted((Path(__file__).resolve().parents[3] / "docs" / "expected").glob("*.yaml"))


@pytest.mark.parametrize("text", ["", "\n", "# the last fault is repaired\n\n  # and nothing else\n", "[]\n"])
def test_a_file_without_entries_expects_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "e.yaml").write_text(text)
    assert load_expectations(tmp_path / "e.yaml") == ()


LINE = "- {backend: W, case: a, check: lse, outcome: failed, reason: r"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "backend: Wrong\n",
            "1:1: a list of expectations belongs here, and this is a mapping; write - backend: ..., one entry after the other",
        ),
        ("- Wrong\n", "1:3: [0]: an expectation must be a mapping (found 'Wrong'); give a mapping"),
        (
            "- backend: Wrong\n  case: a\n  check: lse\n  outcome: failed\n",
            "1:3: [0].reason: reason is missing; give it (why it is expected)",
        ),
        (
            "- backend: W\n  case: a\n  check: lse\n\n  outcome: passed\n  reason: r\n",
            "5:12: [0].outcome: outcome must be one of 'failed', 'errored', 'crashed' or 'timed_out' (found 'passed'); meaning of outcome: the expected outcome: failed, errored, crashed or timed_out",
        ),
        (
            "- {backend: W, case: a, check: numeric, outcome: failed, reason: r}\n",
            "1:32: [0].check: unknown check (found 'numeric'); did you mean 'numerics'? (known: ...)",
        ),
        (
            "- {backend: W, case: a, check: lse, outcome: failed, reason: ''}\n",
            "1:62: [0].reason: an expected failure needs a reason; say why it is known",
        ),
        (
            f"{LINE}, seed: 3}}\n",
            "1:65: [0].seed: an expectation has no key 'seed'; did you mean 'needs'? (known: ...)",
        ),
        (f"{LINE}, until: soon}}\n", "1:72: [0].until: until must be a date (found 'soon'); write YYYY-MM-DD"),
        (
            f"{LINE}, within: {{budget: 3}}}}\n",
            "1:74: [0].within.budget: within has no key 'budget'; did you mean 'budgets'? (known: ...)",
        ),
        (
            f"{LINE}, within: {{values: [NaN]}}}}\n",
            "1:83: [0].within.values[0]: an element of values must be one of 'nan', 'inf', 'finite' or 'unwritten' (found 'NaN'); meaning of values: sorts of wrong values: nan, inf, finite, unwritten",
        ),
        (
            f"{LINE}, needs: [soft_cap]}}\n",
            "1:72: [0].needs: unknown feature (found 'soft_cap'); did you mean 'logits_soft_cap'? (known: ...)",
        ),
        (
            f"{LINE}, needs: [dtyp=float16]}}\n",
            "1:72: [0].needs: cases have no such form (found 'dtyp=float16'); did you mean 'dtype'? (known: ...)",
        ),
        ("- {backend: [}\n", "1:14: not YAML: did not find expected node content; see the line before, too"),
    ],
)
def test_a_wrong_file_is_answered_with_the_place(
    plain: Callable[[str], str], tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "expect.yaml"
    path.write_text(text)
    with pytest.raises(CaseFileError) as caught:
        load_expectations(path)
    assert plain(str(caught.value)) == f"TMP/expect.yaml:{message}"


def test_a_file_that_is_not_there(plain: Callable[[str], str], tmp_path: Path) -> None:
    with pytest.raises(CaseFileError) as refused:
        load_expectations(tmp_path / "expect.yaml")
    assert plain(str(refused.value)) == "TMP/expect.yaml: there is no such file"


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.stem)
def test_a_file_of_attncheck_is_named_without_its_path(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = expectation_file(Path(path.stem))
    assert found.samefile(path)
    assert load_expectations(found)


def test_a_file_of_the_user_comes_first_and_other_names_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("missing", "missing.yaml", "folder/vllm-cpu-attn"):
        assert expectation_file(Path(name)) == Path(name)
    (tmp_path / "vllm-cpu-attn").write_text("")
    assert expectation_file(Path("vllm-cpu-attn")) == Path("vllm-cpu-attn")
