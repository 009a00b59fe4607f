"""benchmarks/many_records.py: it counts what it feeds, and refuses a run that is too slow."""

import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def many_records(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return import_module("many_records")


def test_every_record_is_taken_and_reported(many_records, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(many_records, "LEAST", 0)
    many_records.measure(1000, tmp_path)
    assert re.match(r"1000 records in .* a second, \d+ bytes each\nreport: ", capsys.readouterr().out)
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    assert len(lines) == 1002
    assert '"counts":{"passed":999,"xpassed":1}' in lines[-1]  # one is expected to fail


def test_a_slow_run_is_a_failure(many_records, monkeypatch, tmp_path):
    monkeypatch.setattr(many_records, "LEAST", float("inf"))
    with pytest.raises(AssertionError, match="fewer than inf records a second"):
        many_records.measure(100, tmp_path)
