"""Checks are found by their names, one at a time; a new one takes one module and one row, and nothing else."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import attncheck
from attncheck.harness.checks.case_checks import find_check
from attncheck.harness.checks.interface import Check
from attncheck.reference.spec import BACKEND_CHECKS

ROW = """
    "repeats": CheckInfo(
        "the same step a second time gives the same bits",
        "randomness that is the same in both steps",
    ),"""

MODULE = '''"""``repeats``: the same step a second time gives the same bits."""

from attncheck.harness.checks.findings import Broken, Finding, Holds
from attncheck.harness.checks.interface import Check, CheckedCase


def _check(case: CheckedCase) -> Finding:
    session, seen = case.first_step()
    again = session.run()
    moved = int((seen.output != again.output).sum())
    return Broken(f"{moved} elements differ in a second step") if moved else Holds({"elements": seen.output.numel()})


CHECKS = {"repeats": Check(_check)}
'''

CANDIDATES = """
import itertools

from attncheck import kernel_backend

CALLS = itertools.count()


def constant(query, key_cache, value_cache, metadata, params, out):
    out.zero_()


def drifting(query, key_cache, value_cache, metadata, params, out):
    out.fill_(next(CALLS))


Constant = kernel_backend(constant, name="constant")
Drifting = kernel_backend(drifting, name="drifting")
"""


@pytest.mark.parametrize("name", BACKEND_CHECKS)
def test_every_row_has_its_module(name: str) -> None:
    assert isinstance(find_check(name), Check)


@pytest.mark.parametrize("name", ["utilities", "interface", "findings"])
def test_what_is_no_check_of_backends_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"check '{name}' has no examiner; known: numerics, lse"):
        find_check(name)


def test_one_check_loads_no_other(preloaded: None) -> None:
    code = (
        "import sys; from attncheck.harness.checks.case_checks import find_check; find_check('lse'); "
        "rooms = [f'attncheck.harness.checks.{name}' for name in ('timing', 'cudagraph', 'containment')]; "
        "sys.exit([room for room in rooms if room in sys.modules] or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def extended(tmp_path: Path) -> Path:
    """A folder with a copy of the package that has one check more: one module is added, one row inserted."""
    package = tmp_path / "with_check" / "attncheck"
    shutil.copytree(Path(attncheck.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "harness" / "checks" / "repeats.py").write_text(MODULE)
    words = package / "reference" / "spec.py"
    head, brace, tail = words.read_text().partition("CHECKS: Mapping[str, CheckInfo] = {")
    assert brace
    words.write_text(head + brace + ROW + tail)
    return package.parent


def test_a_new_check_is_one_module_and_one_row(extended: Path, tmp_path: Path, preloaded: None) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "attncheck", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(extended), "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    status, listed = run("list", "checks")
    assert status == 0, listed
    assert listed.splitlines()[0].split(maxsplit=1) == ["repeats", "the same step a second time gives the same bits"]

    (tmp_path / "mine.py").write_text(CANDIDATES)
    (tmp_path / "small.yaml").write_text(
        "suite: small\n"
        "defaults: {layer: {num_heads: 4, num_kv_heads: 2, head_size: 32, dtype: float32}}\n"
        "cases:\n"
        "  - {id: decode, batch: 2q1s20}\n"
        "  - {id: named, batch: 2q1s20, checks: [repeats]}\n"
    )
    candidates = ("--backend", "mine.py:Constant", "--backend", "mine.py:Drifting")
    options = ("--suite", "small.yaml", "--check", "repeats", "--device", "cpu", "--output", "run.jsonl")
    status, printed = run("run", *candidates, *options, "--in-process")
    assert status == 1, printed
    assert "repeats" in printed
    assert "elements differ in a second step" in printed

    header, *records, _footer = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert header["checks"] == ["repeats"]
    assert {(each["backend"], each["case_id"], each["check"], each["outcome"]) for each in records} == {
        (backend, case, "repeats", outcome)
        for backend, outcome in (("Constant", "passed"), ("Drifting", "failed"))
        for case in ("decode", "named")
    }
