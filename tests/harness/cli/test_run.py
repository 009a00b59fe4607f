"""``attncheck run`` as a person uses it: what is printed where, what the run file holds, what options do."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from inline_snapshot import snapshot

from attncheck.reference.spec import DEFAULT_CHECKS
from attncheck.reports.run_file.store import read_run

Attncheck = Callable[..., int]
TheRun = Callable[[Path], Path]


def test_a_right_backend_is_exit_code_0_with_a_table_and_a_run_file(
    the_run: TheRun, run: Attncheck, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--backend", "reference") == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("attncheck ")
    assert out[0].endswith("suite small: 2 cases, seed 0")
    cells = [line.split() for line in out]
    assert ["backend", "reference"] in cells
    assert all([check, "2/2" if check == "numerics" else "1/1"] in cells for check in DEFAULT_CHECKS)
    assert str(the_run(folder).relative_to(folder)) in out[-1]
    stored = read_run(the_run(folder))
    assert stored.complete
    assert len(stored.records) == len(DEFAULT_CHECKS) + 1  # the second case asks for numerics alone
    assert stored.header.command[:4] == ("attncheck", "run", "--suite", "small.yaml")


def test_a_wrong_answer_is_exit_code_1_and_its_repro_line_works(
    run: Attncheck, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--backend", "./wrong.py:Wrong", "--seed", "5") == 1
    printed = capsys.readouterr().out
    line = next(line.strip() for line in printed.splitlines() if line.strip().startswith("repeat: "))
    words = line.removeprefix("repeat: ").split()
    assert words[:4] == ["attncheck", "run", "--backend", "./wrong.py:Wrong"]
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 1
    assert "finding 1 of 1, Wrong: " in done.stdout
    assert f"case: small/{words[words.index('--case') + 1]}, check " in done.stdout
    assert "seed 5" in done.stdout.splitlines()[0]


def test_an_exception_of_a_backend_is_a_record(
    the_run: TheRun, here: Attncheck, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert here("--backend", "./wrong.py:Raising") == 1
    printed = capsys.readouterr()
    assert "RuntimeError in forward: no such kernel" in printed.out
    assert "Traceback" not in printed.err
    assert {record.outcome for record in read_run(the_run(folder)).records} == {"errored", "failed"}


def test_defaults_of_the_suites_can_be_set(here: Attncheck, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--backend", "reference", "--suite", "small.yaml", "--set", "layer.head_size=64", "--set"]
    assert here(*words, "cache.block_size=8", "--output", "set.jsonl") == 0
    run = read_run(folder / "set.jsonl")
    needs = {need for record in run.records for need in record.needs}
    assert {"head_size=64", "block_size=8"} <= needs
    assert "head_size=32" not in needs
    (suite,) = run.header.suites
    assert suite.ref == "small.yaml{layer.head_size: 64, cache.block_size: 8}"
    assert here(*words, "cache.block_size") == 2
    assert "KEY=VALUE" in capsys.readouterr().err


def test_without_a_backend_all_built_in_ones_run(the_run: TheRun, here: Attncheck, folder: Path) -> None:
    assert here("--check", "numerics") == 0
    names = {record.backend for record in read_run(the_run(folder)).records}
    assert {"reference", "torch_sdpa", "flex_attention"} <= names


def test_expected_failures(here: Attncheck, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry = {"backend": "Wrong", "case": "small/*", "check": "numerics", "outcome": "failed", "reason": "issue 17"}
    (folder / "expect.yaml").write_text(json.dumps([entry]))
    assert here("--backend", "./wrong.py:Wrong", "--check", "numerics", "--expect", "expect.yaml") == 0
    assert "PASSED WITH 1 KNOWN FAULT: 2 cases failed as expected" in capsys.readouterr().out
    stale = entry | {"case": "small/dekode"}
    (folder / "expect.yaml").write_text(json.dumps([entry, stale]))
    assert here("--backend", "./wrong.py:Wrong", "--check", "numerics", "--expect", "expect.yaml") == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "error: expect.yaml:1: Wrong, small/dekode, numerics: failed expected, but " in printed
    (folder / "expect.yaml").write_text(json.dumps([entry | {"backend": "reference"}]))
    assert here("--backend", "reference", "--check", "numerics", "--expect", "expect.yaml") == 1
    assert "2 right against expectation" in capsys.readouterr().out


def test_dump_writes_tensors_that_load_as_data(run: Attncheck, folder: Path) -> None:
    import torch

    assert run("--backend", "./wrong.py:Wrong", "--case", "decode", "--dump", "dumps") == 1
    (path,) = (folder / "dumps").iterdir()
    content = torch.load(path, weights_only=True)
    # A quarter more than the truth was put out, up to float32's rounding.
    assert torch.allclose(content["output"].double(), 1.25 * content["truth"], rtol=1e-4)


def test_lines_for_ci_go_to_stderr(
    plain: Callable[[str], str], run: Attncheck, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--backend", "./wrong.py:Wrong", "--check", "numerics") == 1
    printed = capsys.readouterr()
    message = printed.err.splitlines()[0]
    assert "small/decode" in message
    assert plain(message) == snapshot(
        "failed  Wrong  small/decode  numerics: 2 of 2 rows are wrong, the first is row 0 (request 0, position 19), in all heads; the largest error is ..."
    )
    assert "\033" not in printed.out + printed.err


def test_what_is_printed_fits_100_columns(here: Attncheck, capsys: pytest.CaptureFixture[str]) -> None:
    here("--backend", "./wrong.py:Wrong", "--backend", "torch_sdpa", "--backend", "reference")
    for line in capsys.readouterr().out.splitlines():
        assert len(line) <= 100 or line.strip().startswith("repeat: ")
