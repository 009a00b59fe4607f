"""An expectation file is read whole, or refused with the place of its first mistake."""

import json
from pathlib import Path
from typing import Any

import pytest

from attncheck.errors import CaseFileError
from attncheck.harness.run.expectation_file import load_expectations

ENTRY = {"backend": "Wrong", "case": "smoke/window.*", "check": "numerics", "outcome": "failed", "reason": "issue 17"}


def write(path: Path, *entries: dict[str, Any]) -> Path:
    path.write_text(json.dumps(list(entries), indent=1))  # JSON is YAML
    return path


@pytest.mark.parametrize("text", ["", "\n", "# the last fault is repaired\n\n  # and nothing else\n", "[]\n"])
def test_a_file_without_entries_expects_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "e.yaml").write_text(text)
    assert load_expectations(tmp_path / "e.yaml") == ()


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("backend: Wrong\n", ":1:1", "a list of expectations belongs here, and this is a mapping"),
        ("- Wrong\n", ":1:3", "mapping"),
        ("- backend: Wrong\n  case: a\n", ":1:3", "missing"),
        (None, ":5:", "one of 'failed'"),
        ("- {backend: W, case: a, check: numeric, outcome: failed, reason: r}\n", ":1:32", "did you mean 'numerics'"),
        ("- {backend: W, case: a, check: lse, outcome: failed, reason: ''}\n", ":1:62", "needs a reason"),
        ("- {backend: W, case: a, check: lse, outcome: failed, reason: r, seed: 3}\n", ":1:65", "no key 'seed'"),
        ("- {backend: W, case: a, check: lse, outcome: failed, reason: r, until: soon}\n", ":1:72", "write YYYY-MM-DD"),
        ("- {backend: W, case: a, check: lse, outcome: failed, reason: r, until: 2026}\n", ":1:72", "a text"),
        (
            "- {backend: W, case: a, check: lse, outcome: failed, reason: r, within: {budget: 3}}\n",
            ":1:74",
            "did you mean 'budgets'",
        ),
        (
            "- {backend: W, case: a, check: lse, outcome: failed, reason: r, within: {values: [NaN]}}\n",
            ":1:83",
            "one of 'nan'",
        ),
        ("- {backend: [}\n", ":1:", "not YAML"),
    ],
)
def test_a_wrong_file_is_answered_with_the_place(tmp_path: Path, text: str | None, place: str, message: str) -> None:
    path = tmp_path / "expect.yaml"
    path.write_text(
        text if text is not None else "- backend: W\n  case: a\n  check: lse\n\n  outcome: passed\n  reason: r\n"
    )
    with pytest.raises(CaseFileError) as caught:
        load_expectations(path)
    assert f"{path}{place}" in str(caught.value)
    assert message in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CaseFileError, match="there is no such file"):
        load_expectations(tmp_path / "expect.yaml")


@pytest.mark.parametrize(
    ("need", "told"), [("soft_cap", "logits_soft_cap"), ("dtyp=float16", "dtype"), ("sinks=1", "no such form")]
)
def test_a_need_that_no_record_has_is_refused(tmp_path: Path, need: str, told: str) -> None:
    with pytest.raises(CaseFileError, match=told):
        load_expectations(write(tmp_path / "e.yaml", ENTRY | {"needs": [need]}))
