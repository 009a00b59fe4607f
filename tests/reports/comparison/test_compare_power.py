"""The benchmark of false alarms and power: its simulation keeps its promise, and real rounds can be split."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from attncheck.reports.run_file.records import Record
from attncheck.reports.run_file.store import Run

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "compare_power.py"


def _printed(*words: str) -> dict[str, list[str]]:
    """The rows of its tables, by their first cell."""
    done = subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line.split("  ") for line in done.stdout.splitlines()]
    return {row[0].strip(): [cell.strip() for cell in row[1:] if cell.strip()] for row in rows}


def test_simulated_processes_are_found_slow_and_not_named_for_nothing() -> None:
    rows = _printed("--comparisons", "50")
    found, named, _ = (float(cell.rstrip("%")) for cell in rows["spread of 1 %"])
    assert found >= 95
    assert named <= 1
    drift = float(rows["drift of 10 %, one run"][0].rstrip("%"))
    assert drift > 50  # compared side by side, which Welch's interval alone could not resolve


def test_rounds_of_a_run_are_split_into_halves_that_differ_in_nothing(
    run_of: Callable[..., Run], timed: Callable[..., list[Record]], around: Callable[..., list[float]]
) -> None:
    records = [
        record for index in range(6) for record in timed(around(1e6, rounds=20, seed=index), case_id=f"c{index}")
    ]
    path = run_of(records, name="aa.jsonl").path
    rows = _printed("--aa", path, "--pairs", "60")
    assert rows[f"{path}: even and odd rounds"][:4] == ["1", "6", "0", "0.00%"]
    assert rows[f"{path}: random halves"][:4] == ["9", "54", "0", "0.00%"]
    assert rows["forward"][0] == "6"
