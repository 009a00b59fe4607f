"""benchmarks/cost.py: costs are divided by their yardsticks, and those of docs/cost.jsonl are shown."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def cost(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return import_module("cost")


def cells(table):
    """The cells of the last row."""
    return [cell.strip() for cell in table.splitlines()[-1].split("|")[1:-1]]


def test_each_cost_is_divided_by_its_yardstick(cost, monkeypatch, tmp_path):
    monkeypatch.setattr(cost, "yardsticks", lambda _checkout: {"import torch": 2.0})
    monkeypatch.setitem(cost.FIGURES, "smoke", lambda _checkout: {"smoke": cost.Cost(5.0, "import torch")})
    found = cost.measure(tmp_path, ["smoke"])
    assert found["costs"] == {"smoke": {"seconds": 5.0, "yardstick": "import torch", "ratio": 2.5}}
    without = {"commit": "a", "date": "d", "yardsticks": {"import torch": 2.0}, "costs": {}}
    assert cells(cost.table([without, found])) == ["smoke", "import torch", "", "2.5 (5 s)"]
    with pytest.raises(SystemExit, match="no such command"):
        cost.Checkout(ROOT, tmp_path).attncheck("nothing")


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
