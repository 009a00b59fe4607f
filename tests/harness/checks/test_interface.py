"""What checks share: they are found by their names, have one first step of a case, and write one file about it.

A new check takes one module and one row, and nothing else.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import attncheck
from attncheck.backends.candidates.reference import ReferenceImpl
from attncheck.harness.checks.case_checks import find_check
from attncheck.harness.checks.interface import Check, dump_tensors
from attncheck.harness.driver.foreign_code import StageError
from attncheck.reference.spec import BACKEND_CHECKS


def test_the_first_step_is_made_once_and_when_it_is_needed(checked, backend_of, make_case):
    calls = []

    class Counting(ReferenceImpl):
        def forward(self, *args, **keywords):
            calls.append(1)
            return super().forward(*args, **keywords)

    case = checked(backend_of(Counting), make_case())
    assert (case.seen, calls) == (None, [])
    session, seen = case.first_step()
    assert case.first_step() == (session, seen)
    assert case.seen is seen
    assert calls == [1]


@pytest.mark.parametrize("stage", ["__init__", "forward"])
def test_what_the_backend_raises_ends_a_check_that_needs_the_step(checked, backend_of, make_case, stage):
    def broken(*_args, **_keywords):
        raise RuntimeError("no such kernel")

    case = checked(backend_of(type("Broken", (ReferenceImpl,), {stage: broken})), make_case())
    raised = []
    for _ in range(2):
        with pytest.raises(StageError) as failure:
            case.first_step()
        raised.append(failure.value.raised)
    assert raised[0] is raised[1]  # the backend is not entered again
    assert raised[0].message == "no such kernel"
    assert case.seen is None


def test_a_dump_is_named_by_case_and_backend_and_holds_no_more_than_its_tensors(make_case, tmp_path):
    whole = torch.arange(1000)
    path = dump_tensors(tmp_path / "new", make_case(), 3, "vllm:./a b.py:C", {"part": whole[:2]})
    assert path == tmp_path / "new" / "made.case.vllm:._a_b.py:C.seed3.pt"
    content = torch.load(path, weights_only=True)
    assert content["part"].untyped_storage().nbytes() == 16
    assert content["seed"] == 3


def test_checks_of_backends_are_found_and_others_refused():
    assert all(isinstance(find_check(name), Check) for name in BACKEND_CHECKS)
    for name in ("utilities", "interface"):
        with pytest.raises(ValueError, match=f"check '{name}' has no examiner; known: numerics, lse"):
            find_check(name)


def test_one_check_loads_no_other(preloaded):
    code = (
        "import sys; from attncheck.harness.checks.case_checks import find_check; find_check('lse'); "
        "rooms = [f'attncheck.harness.checks.{name}' for name in ('timing', 'cudagraph', 'containment')]; "
        "sys.exit([room for room in rooms if room in sys.modules] or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


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

SUITE = """
suite: small
defaults: {layer: {num_heads: 4, num_kv_heads: 2, head_size: 32, dtype: float32}}
cases:
  - {id: named, batch: 2q1s20, checks: [repeats]}
"""


def test_a_new_check_is_one_module_and_one_row(tmp_path, preloaded):
    package = tmp_path / "with_check" / "attncheck"
    shutil.copytree(Path(attncheck.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "harness" / "checks" / "repeats.py").write_text(MODULE)
    words = package / "reference" / "spec.py"
    head, brace, tail = words.read_text().partition("CHECKS: Mapping[str, CheckInfo] = {")
    words.write_text(head + brace + ROW + tail)
    (tmp_path / "mine.py").write_text(CANDIDATES)
    (tmp_path / "small.yaml").write_text(SUITE)

    candidates = ("--backend", "mine.py:Constant", "--backend", "mine.py:Drifting")
    options = ("--suite", "small.yaml", "--check", "repeats", "--device", "cpu", "--output", "run.jsonl")
    done = subprocess.run(
        [sys.executable, "-m", "attncheck", "run", *candidates, *options, "--in-process"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(package.parent), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "elements differ in a second step" in done.stdout
    header, *records, _footer = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert header["checks"] == ["repeats"]
    assert [(each["backend"], each["check"], each["outcome"]) for each in records] == [
        ("Constant", "repeats", "passed"),
        ("Drifting", "repeats", "failed"),
    ]
