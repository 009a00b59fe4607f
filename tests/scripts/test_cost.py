"""benchmarks/cost.py: costs are divided by their yardsticks, and those of docs/cost.jsonl are shown."""

import json
import math
import os
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from attncheck.cases import loader
from attncheck.cases.loader import load_suite

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def cost(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return import_module("cost")


def cells(table):
    """The cells of the last row."""
    return [cell.strip() for cell in table.splitlines()[-1].split("|")[1:-1]]


def test_each_cost_is_divided_by_its_yardstick(cost, monkeypatch, tmp_path):
    monkeypatch.setattr(cost, "yardsticks", lambda _checkout, _repeats: {"import torch": 2.0})
    monkeypatch.setitem(cost.FIGURES, "smoke", lambda _checkout: {"smoke": cost.Cost(5.0, "import torch")})
    found = cost.measure(tmp_path, ["smoke"])
    assert found["costs"] == {"smoke": {"seconds": 5.0, "yardstick": "import torch", "ratio": 2.5}}
    without = {"commit": "a", "date": "d", "yardsticks": {"import torch": 2.0}, "costs": {}}
    assert cells(cost.table([without, found])) == ["smoke", "import torch", "", "2.5 (5 s)"]
    with pytest.raises(SystemExit, match="no such command"):
        cost.Checkout(ROOT, tmp_path).attncheck("nothing")


def test_costs_of_a_gpu_are_those_of_commands_that_a_limit_stops(cost, monkeypatch, tmp_path, capsys):
    sampler = tmp_path / "nvidia-smi"
    sampler.write_text("#!/bin/sh\nwhile echo 25; do sleep 0.1; done\n")
    sampler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "pretend"))
    monkeypatch.setenv("ATTNCHECK_PRETEND_CUDA", "{}")
    words = ("torch_sdpa", "--suite", "smoke", "--case", "prefill", "--check", "numerics")
    checkout = cost.Checkout(ROOT, tmp_path, works=[("one case, cold", "own", words, 60.0)])
    found = cost.smoke_on_gpu(checkout)
    assert list(found) == ["one case, cold", "one case, cold: GPU busy"]
    assert found["one case, cold: GPU busy"].seconds == pytest.approx(found["one case, cold"].seconds / 4)
    run_file = tmp_path / "one-case-cold.jsonl"
    header, record, _footer = map(json.loads, run_file.read_text().splitlines())
    assert (header["environment"]["device_name"], record["outcome"]) == ("Pretend GPU", "passed")
    assert cost.num_cases(run_file) == 1
    run_file.write_text(run_file.read_text() + '{"kind": "rec')  # as a killed command leaves it
    assert cost.num_cases(run_file) == 1
    run_file.unlink()
    checkout.works = [(f"one case, {when}", "own", words, 60.0) for when in ("cold", "warm")]
    checkout.deadline = time.monotonic()
    assert cost.smoke_on_gpu(checkout) == {}
    assert "one case, cold: not begun\n" in capsys.readouterr().err
    monkeypatch.setattr(cost, "_LEAST_S", 0.0)
    for ending_s in (cost._ENDING_S, 0.0):  # the second command is killed, since it does not stop at once
        monkeypatch.setattr(cost, "_ENDING_S", ending_s)
        checkout.deadline = time.monotonic() + 1.0
        first, *others = cost.smoke_on_gpu(checkout)
        assert (first, others) == ("one case, cold, stopped after 0 cases", [f"{first}: GPU busy"])
        assert "one case, warm: not begun\n" in capsys.readouterr().err
    checkout.deadline = math.inf
    monkeypatch.setattr(cost, "_on_gpu", lambda _, what, *_others: {what: 1.0})
    assert list(cost.smoke_on_gpu(checkout)) == ["one case, cold", "one case, warm"]


def test_works_on_a_gpu_are_smoke_alone_cold_and_warm_and_whole_runs(cost):
    names = [f"{name}, {when}" for name in (*cost.ON_GPU, *cost.OF_VLLM) for when in ("cold", "warm")]
    works = [what for what, *_ in cost.works_on_gpu(has_vllm=True)]
    assert works[:-2] == [f"smoke of {name.replace(', ', ' on a GPU, ')}" for name in names]
    assert works[-2:] == ["default run on a GPU, cold", "smoke of vllm:* on a GPU, cold"]
    assert not any("vllm" in what for what, *_ in cost.works_on_gpu(has_vllm=False))


@pytest.mark.parametrize("words", [("--rows", "warm"), ("--folder", "used")])
def test_unknown_rows_and_used_folders_are_refused(cost, monkeypatch, tmp_path, capsys, words):
    (tmp_path / "used" / "caches").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cost.py", *words])
    with pytest.raises(SystemExit, match="2"):
        cost.main()
    assert f"error: {words[0]} {words[-1]}: " in capsys.readouterr().err


def test_the_kept_measurements_are_shown():
    words = [sys.executable, "benchmarks/cost.py", "--show", "docs/cost.jsonl"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    kept = [json.loads(line) for line in (ROOT / "docs" / "cost.jsonl").read_text().splitlines()]
    heading = done.stdout.partition("\n")[0]
    assert all(measured["costs"] and f"{measured['commit']}, {measured['date']}" in heading for measured in kept)


def test_parts_of_one_process_measure_something(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    inside = import_module("cost_inside")
    monkeypatch.setattr(inside, "CASES", {"decode": ("single-short",)})
    monkeypatch.setattr(inside, "best", lambda work, _repeats=1, **_: (work() and 0.0) or 1.0)
    assert inside.examination().keys() == {
        "ten cases in full",
        "ten cases, no CUDA graphs",
        "a test in vLLM's style of the same batches",
    }


def test_cpu_seconds_of_smoke_are_divided_among_its_parts(cost, monkeypatch):
    inside = import_module("cost_inside")
    case, *_ = load_suite("smoke").cases
    monkeypatch.setattr(cost, "ON_CPU", ("reference",))
    monkeypatch.setattr(loader, "load_suite", lambda _: SimpleNamespace(cases=(case,)))
    began = time.process_time()
    found = inside.smoke_parts()
    assert 0 < sum(found.values()) <= time.process_time() - began
    assert "smoke of five: checks and the driver" in found
    assert "smoke of five: calls of the backend" in found
