"""``attncheck report --format expect``: what it writes makes the next run green, and it loads no torch."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from attncheck.harness.cli import app as cli
from attncheck.harness.run.expectations import load_expectations

Attncheck = Callable[..., int]


def test_a_wrong_backend_is_green_with_the_file_written_from_its_run(
    here: Attncheck, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--backend", "./wrong.py:Wrong", "--check", "numerics", "--check", "lse")
    assert here(*options, "--output", "run.jsonl") == 1
    report = ["report", "run.jsonl", "--format", "expect"]
    assert cli.main([*report, "--output", "known.yaml"]) == 0
    assert here(*options, "--expect", "known.yaml") == 0
    assert {entry.expectation.check for entry in load_expectations(folder / "known.yaml")} == {"numerics"}
    capsys.readouterr()
    assert cli.main(report) == 0
    assert capsys.readouterr().out == (folder / "known.yaml").read_text(encoding="utf-8")
    assert cli.main([*report, "--output", "run.jsonl"]) == 2
    code = "import sys; from attncheck.__main__ import main; sys.exit(main() or 'torch' in sys.modules)"
    words = [sys.executable, "-c", code, *report]
    assert subprocess.run(words, capture_output=True, check=False).returncode == 0
