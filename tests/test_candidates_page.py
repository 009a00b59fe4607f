"""docs/candidates.md is true: it names every candidate, and its commands do what is said."""

import re
from pathlib import Path

import pytest

from attncheck.backends.registry import FAMILIES, builtin_names, known_names

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "candidates.md").read_text(encoding="utf-8")
((COMMAND, OUTPUT),) = re.findall(r"^```console\n\$ (.*?)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def test_every_candidate_is_named() -> None:
    told = re.findall(r"^\| `(\w+)(?::NAME)?` \|", TEXT, re.MULTILINE)
    assert sorted(told) == sorted(
        name for name in known_names() if name in {*builtin_names(), "xformers_vllm", *FAMILIES}
    )


def test_an_interpreted_candidate_runs_as_is_said(shell, assert_printed, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="nothing is interpreted without Triton")
    code, printed = shell(COMMAND, tmp_path)
    assert code == 0, printed
    assert_printed(OUTPUT, printed)
