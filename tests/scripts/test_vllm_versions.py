"""scripts/vllm_versions.py puts the runs of several versions into columns, and lists what ends differently."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import attncheck

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "vllm_versions.py"


def run_of(version: str, path: Path, checks: list[str]) -> str:
    attncheck.examine("reference", suite="smoke", cases="decode.float32", checks=checks).save(path)
    text = re.sub(r'"backend_version":"[^"]*"', f'"backend_version":"{version}"', path.read_text())
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("checks", "ends"),
    [
        (["numerics", "lse"], "- smoke/decode.float32, lse: 0.31.0 not run, 0.32.0 passed"),
        (["numerics"], "Nothing."),
    ],
)
def test_versions_are_side_by_side(tmp_path, checks, ends):
    old, new = run_of("0.31.0", tmp_path / "a.jsonl", ["numerics"]), run_of("0.32.0", tmp_path / "b.jsonl", checks)
    done = subprocess.run([sys.executable, SCRIPT, new, old], capture_output=True, text=True, check=True)
    assert re.search(r"^\| check +\| 0\.31\.0 +\| 0\.32\.0 +\|$", done.stdout, re.MULTILINE)
    assert re.search(r"^\| `numerics` +\| 1 of 1 +\| 1 of 1 +\|$", done.stdout, re.MULTILINE)
    assert done.stdout.partition("## What ends differently")[2].strip() == ends
