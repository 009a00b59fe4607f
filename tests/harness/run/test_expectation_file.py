"""An expectation file is read whole, or refused with the place of its first mistake."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from inline_snapshot import snapshot

from attncheck.errors import CaseFileError
from attncheck.harness.run.expectations import load_expectations

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
        (
            "backend: Wrong\n",
            ":1:1",
            snapshot(
                "TMP/expect.yaml:1:1: a list of expectations belongs here, and this is a mapping; write - backend: ..., one entry after the other"
            ),
        ),
        (
            "- Wrong\n",
            ":1:3",
            snapshot("TMP/expect.yaml:1:3: [0]: an expectation must be a mapping (found 'Wrong'); give a mapping"),
        ),
        (
            "- backend: Wrong\n  case: a\n",
            ":1:3",
            snapshot("""\
TMP/expect.yaml:1:3: [0].check: check is missing; give it (name of the check; *: any)
TMP/expect.yaml:1:3: [0].outcome: outcome is missing; give it (the expected outcome: failed, errored, crashed or timed_out)
TMP/expect.yaml:1:3: [0].reason: reason is missing; give it (why it is expected)\
"""),
        ),
        (
            None,
            ":5:",
            snapshot(
                "TMP/expect.yaml:5:12: [0].outcome: outcome must be one of 'failed', 'errored', 'crashed' or 'timed_out' (found 'passed'); meaning of outcome: the expected outcome: failed, errored, crashed or timed_out"
            ),
        ),
        (
            "- {backend: W, case: a, check: numeric, outcome: failed, reason: r}\n",
            ":1:32",
            snapshot(
                "TMP/expect.yaml:1:32: [0].check: unknown check (found 'numeric'); did you mean 'numerics'? (known: ...)"
            ),
        ),
        (
            "- {backend: W, case: a, check: lse, outcome: failed, reason: ''}\n",
            ":1:62",
            snapshot("TMP/expect.yaml:1:62: [0].reason: an expected failure needs a reason; say why it is known"),
        ),
        (
            "- {backend: W, case: a, check: lse, outcome: failed, reason: r, seed: 3}\n",
            ":1:65",
            snapshot(
                "TMP/expect.yaml:1:65: [0].seed: an expectation has no key 'seed'; did you mean 'needs'? (known: ...)"
            ),
        ),
        (
            "- {backend: W, case: a, check: lse, outcome: failed, reason: r, until: soon}\n",
            ":1:72",
            snapshot("TMP/expect.yaml:1:72: [0].until: until must be a date (found 'soon'); write YYYY-MM-DD"),
        ),
        (
            "- {backend: W, case: a, check: lse, outcome: failed, reason: r, until: 2026}\n",
            ":1:72",
            snapshot(
                "TMP/expect.yaml:1:72: [0].until: until must be a text (found 2026); meaning of until: last day on which it is expected, YYYY-MM-DD"
            ),
        ),
        (
            "- {backend: W, case: a, check: lse, outcome: failed, reason: r, within: {budget: 3}}\n",
            ":1:74",
            snapshot(
                "TMP/expect.yaml:1:74: [0].within.budget: within has no key 'budget'; did you mean 'budgets'? (known: ...)"
            ),
        ),
        (
            "- {backend: W, case: a, check: lse, outcome: failed, reason: r, within: {values: [NaN]}}\n",
            ":1:83",
            snapshot(
                "TMP/expect.yaml:1:83: [0].within.values[0]: an element of values must be one of 'nan', 'inf', 'finite' or 'unwritten' (found 'NaN'); meaning of values: sorts of wrong values: nan, inf, finite, unwritten"
            ),
        ),
        (
            "- {backend: [}\n",
            ":1:",
            snapshot("TMP/expect.yaml:1:14: not YAML: did not find expected node content; see the line before, too"),
        ),
    ],
)
def test_a_wrong_file_is_answered_with_the_place(
    plain: Callable[[str], str], tmp_path: Path, text: str | None, place: str, message: str
) -> None:
    path = tmp_path / "expect.yaml"
    path.write_text(
        text if text is not None else "- backend: W\n  case: a\n  check: lse\n\n  outcome: passed\n  reason: r\n"
    )
    with pytest.raises(CaseFileError) as caught:
        load_expectations(path)
    assert f"{path}{place}" in str(caught.value)
    assert plain(str(caught.value)) == message


def test_a_file_that_is_not_there(plain: Callable[[str], str], tmp_path: Path) -> None:
    with pytest.raises(CaseFileError) as refused:
        load_expectations(tmp_path / "expect.yaml")
    assert plain(str(refused.value)) == snapshot("TMP/expect.yaml: there is no such file")


@pytest.mark.parametrize(
    ("need", "message"), [("soft_cap", "logits_soft_cap"), ("dtyp=float16", "dtype"), ("sinks=1", "no such form")]
)
def test_a_need_that_no_record_has_is_refused(tmp_path: Path, need: str, message: str) -> None:
    with pytest.raises(CaseFileError, match=message):
        load_expectations(write(tmp_path / "e.yaml", ENTRY | {"needs": [need]}))
