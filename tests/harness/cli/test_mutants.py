"""``attncheck mutants``: the matrix of made-up records, what is refused, and real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attncheck.backends.mutants.catalogue import Mutant, catalogue
from attncheck.harness.cli import app as cli
from attncheck.harness.cli.mutants import ExaminedGroup, as_json, as_text, examine_groups, groups_of, kill_matrix
from attncheck.harness.run.options import RunOptions
from attncheck.reports.run_file.store import read_run

CHECKS = ("numerics", "lse", "cudagraph")
PLAIN = "attncheck.backends.mutants.plain:PlainBackend"
FAULTS = Path(__file__).parents[2] / "miniatures" / "faults.py"


def mutant(name, cause=None):
    return Mutant.model_validate(
        {"name": name, "area": "own", "kind": "own", "fault": "It errs.", "class": "X", "cause": cause}
    )


@pytest.fixture
def matrix(make_record):
    """Of two mutants that are caught, one that survives, one that was not loaded, and one that no case suits."""

    def record(outcome, ref, check, **more):
        return make_record(outcome, backend=ref, backend_ref=ref, check=check, **more)

    mutants = [
        mutant("wide", "one key too long"),
        mutant("deaf", "sinks"),
        mutant("sly"),
        mutant("gone"),
        mutant("odd"),
    ]
    records = [
        record("failed", "mutants:wide", "numerics", meaning="the window is One Key too long"),
        record("failed", "mutants:wide", "lse"),
        record("failed", "mutants:deaf", "lse", meaning="the soft cap is ignored"),
        record("passed", "mutants:deaf", "numerics"),
        record("passed", "mutants:sly", "numerics"),
        record("unsupported", "mutants:odd", "numerics", reasons=("no windows",)),
        record("passed", "reference", "numerics"),
        record("failed", "torch_sdpa", "lse"),
    ]
    missing = {"mutants:gone": "needs triton"}
    return kill_matrix(records, mutants, ["reference", "torch_sdpa"], CHECKS, missing)


def test_a_mutant_is_caught_by_the_checks_that_fall_short(matrix):
    assert {each.mutant.name: each.checks for each in matrix.examined} == {
        "wide": ("numerics", "lse"),
        "deaf": ("lse",),
        "sly": (),
    }
    assert [each.mutant.name for each in matrix.survivors] == ["sly"]
    assert matrix.alone("lse") == ("deaf",)
    assert matrix.alone("numerics") == ()
    assert matrix.false_alarms == {"reference": (), "torch_sdpa": ("lse",)}
    assert not matrix.is_clean


def test_a_likely_cause_is_right_wrong_or_absent(matrix, make_record):
    assert [each.diagnosis for each in matrix.results] == ["right", "wrong", "", "", ""]
    silent = make_record(
        "failed",
        backend="x",
        backend_ref="mutants:mute",
        meaning=None,
        summary="7 of 40 rows are wrong, the first is row 3",
    )
    (result,) = kill_matrix([silent], [mutant("mute", "nowhere")], [], CHECKS, {}).results
    assert result.diagnosis == "absent"


def test_the_text_has_the_score_the_survivors_and_what_each_check_is_worth(matrix):
    lines = [" ".join(line.split()) for line in as_text(matrix).splitlines()]
    for line in (
        "x: the check catches the mutant; checks: 1 numerics, 2 lse, 3 cudagraph",
        "wide x x . right",
        "deaf . x . wrong",
        "caught: 2 of 3 mutants, 66.7 %",
        "sly own It errs.",
        "gone needs triton",
        "odd no check ran on it: no windows",
        "numerics 1 none that nothing else catches",
        "lse 2 1 that nothing else catches: deaf",
        "likely cause, of 2 caught: right 1, wrong 1, absent 0",
        "deaf wrong: the soft cap is ignored",
        "torch_sdpa: lse",
    ):
        assert line in lines


def test_json_has_the_same(matrix):
    found = as_json(matrix)
    assert (found["examined"], found["caught"], found["checks"]["lse"]) == (3, 2, {"catches": 2, "alone": ["deaf"]})
    assert [each["not_examined"] for each in found["mutants"]][2:4] == [None, "needs triton"]


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


def test_the_command_examines_and_reads_its_run_file_again(suite, capsys):
    words = ["mutants", "sinks-ignored", "mutates-query", "--suite", suite, "--jobs", "2"]
    assert cli.main([*words, "--output", "."]) == 2
    printed = capsys.readouterr().err
    assert "exists already" in printed
    assert "mutants\n" not in printed  # none was examined
    assert cli.main([*words, "--output", "run.jsonl"]) == 1  # no sinks there
    printed = capsys.readouterr().out
    assert "caught: 1 of 2 mutants, 50.0 %" in printed
    assert f"no false alarm of {PLAIN}" in printed
    assert read_run("run.jsonl").complete
    assert cli.main(["mutants", "--from", "run.jsonl", "--format", "json"]) == 1
    found = json.loads(capsys.readouterr().out)
    caught = {each["name"]: each["caught_by"] for each in found["mutants"]}
    assert caught == {"sinks-ignored": [], "mutates-query": ["cache_write"]}
    assert cli.main(["mutants", "mutates-*", "--from", "run.jsonl"]) == 0


@pytest.mark.slow
def test_a_backend_that_ends_its_process_costs_no_other_its_records(suite, tmp_path):
    groups = [ExaminedGroup((f"{FAULTS}:abort", "reference")), ExaminedGroup(("torch_sdpa",))]
    folder = tmp_path / "runs"
    folder.mkdir()
    found = examine_groups(groups, RunOptions(suites=(suite,), device="cpu"), 2, folder)
    outcomes = {}
    for record in (record for group in found for record in group.run.records):
        outcomes.setdefault(record.backend_ref, set()).add(record.outcome)
    assert "crashed" in outcomes.pop(f"{FAULTS}:abort")
    assert outcomes.keys() == {"reference", "torch_sdpa"}
    assert all("passed" in each for each in outcomes.values())


def test_a_signal_ends_the_processes_at_once(tmp_path, preloaded):
    command = [sys.executable, "-m", "attncheck", "mutants", "sdpa-*", "-j", "2"]  # groups of ten take a minute
    running = subprocess.Popen(
        command,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
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
