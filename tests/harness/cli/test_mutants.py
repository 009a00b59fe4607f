"""``attncheck mutants``: the matrix of made-up records, and real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attncheck.backends.mutants.catalogue import Mutant, catalogue
from attncheck.harness.cli.mutants import as_json, as_text, groups_of, kill_matrix
from attncheck.reports.run_file.store import read_run

PLAIN = "attncheck.backends.mutants.plain:PlainBackend"


def mutant(name, cause=None):
    return Mutant.model_validate(
        {"name": name, "area": "own", "kind": "own", "fault": "It errs.", "class": "X", "cause": cause}
    )


def test_the_matrix_has_the_score_the_survivors_and_what_each_check_and_cause_is_worth(make_record):
    """Of three mutants that are caught, one that survives, one that was not loaded, and one that no case suits."""

    def record(outcome, ref, check, **more):
        return make_record(outcome, backend=ref, backend_ref=ref, check=check, **more)

    causes = {"wide": "one key too long", "deaf": "sinks", "mute": "nowhere", "sly": None, "gone": None, "odd": None}
    mutants = [mutant(name, cause) for name, cause in causes.items()]
    records = [
        record("failed", "mutants:wide", "numerics", meaning="the window is One Key too long"),
        record("failed", "mutants:wide", "lse"),
        record("failed", "mutants:deaf", "lse", meaning="the soft cap is ignored"),
        record("passed", "mutants:deaf", "numerics"),
        record(
            "failed", "mutants:mute", "numerics", meaning=None, summary="7 of 40 rows are wrong, the first is row 3"
        ),
        record("passed", "mutants:sly", "numerics"),
        record("unsupported", "mutants:odd", "numerics", reasons=("no windows",)),
        record("passed", "reference", "numerics"),
        record("failed", "torch_sdpa", "lse"),
    ]
    right = ["reference", "torch_sdpa"]
    matrix = kill_matrix(records, mutants, right, ("numerics", "lse", "cudagraph"), {"mutants:gone": "needs triton"})
    assert [each.mutant.name for each in matrix.survivors] == ["sly"]
    assert matrix.false_alarms == {"reference": (), "torch_sdpa": ("lse",)}
    assert not matrix.is_clean
    lines = [" ".join(line.split()) for line in as_text(matrix).splitlines()]
    for line in (
        "x: the check catches the mutant; checks: 1 numerics, 2 lse, 3 cudagraph",
        "wide x x . right",
        "deaf . x . wrong",
        "mute x . . absent",
        "caught: 3 of 4 mutants, 75.0 %",
        "sly own It errs.",
        "gone needs triton",
        "odd no check ran on it: no windows",
        "numerics 2 1 that nothing else catches: mute",
        "lse 2 1 that nothing else catches: deaf",
        "likely cause, of 3 caught: right 1, wrong 1, absent 1",
        "deaf wrong: the soft cap is ignored",
        "torch_sdpa: lse",
    ):
        assert line in lines
    found = as_json(matrix)
    assert (found["examined"], found["caught"], found["checks"]["lse"]) == (4, 3, {"catches": 2, "alone": ["deaf"]})
    assert [each["not_examined"] for each in found["mutants"]][3:5] == [None, "needs triton"]


def test_groups_hold_mutants_of_one_base_and_each_base_is_a_group():
    groups = groups_of(catalogue())
    refs = [ref for group in groups if not group.are_right for ref in group.refs]
    assert sorted(refs) == sorted(each.ref for each in catalogue())
    assert {group.refs for group in groups if group.are_right} >= {("reference",), (PLAIN,), ("attncheck.reference",)}
    assert max(len(group.refs) for group in groups) <= 10


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """A file of one small question; the current folder is its own."""
    monkeypatch.chdir(tmp_path)
    layer = "{num_heads: 2, num_kv_heads: 1, head_size: 32, dtype: float32}"
    Path("small.yaml").write_text(f"suite: small\ncases:\n  - {{id: decode, batch: q1s9_q1s20, layer: {layer}}}\n")
    return "small.yaml"


def test_the_command_examines_and_reads_its_run_file_again(suite, typed):
    words = f"mutants sinks-ignored mutates-query --suite {suite} --jobs 2"
    done = typed(f"{words} --output .")
    assert done.code == 2
    assert "exists already" in done.err
    assert "mutants\n" not in done.err  # none was examined
    done = typed(f"{words} --output run.jsonl")
    assert done.code == 1  # no sinks there
    assert "caught: 1 of 2 mutants, 50.0 %" in done.out
    assert f"no false alarm of {PLAIN}" in done.out
    assert read_run("run.jsonl").complete
    done = typed("mutants --from run.jsonl --format json")
    assert done.code == 1
    caught = {each["name"]: each["caught_by"] for each in json.loads(done.out)["mutants"]}
    assert caught == {"sinks-ignored": [], "mutates-query": ["cache_write"]}
    assert typed("mutants mutates-* --from run.jsonl").code == 0


def test_a_signal_ends_the_processes_at_once(tmp_path, preloaded):
    command = [sys.executable, "-m", "attncheck", "mutants", "sdpa-*", "-j", "2"]  # groups of ten take a minute
    env = os.environ | {"TMPDIR": str(tmp_path)}
    running = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not list(tmp_path.glob("attncheck-mutants-*/*/run.jsonl")):
        time.sleep(0.05)
    running.send_signal(signal.SIGTERM)
    try:
        _, err = running.communicate(timeout=20)
    finally:
        running.kill()
    assert running.returncode == 143, err
    assert not list(tmp_path.glob("attncheck-mutants-*"))
