"""Correct backends of other constructions pass every check: each takes a few cases of ``smoke``."""

from pathlib import Path

import pytest

from attncheck.backends.registry import load
from attncheck.cases.loader import load_suite, select
from attncheck.harness.run.evaluate import Examiner, RunPlan

FILE = Path(__file__).resolve().with_name("constructions.py")
CASES = {
    "LazyTables": ["alibi"],
    "PlanInBuilder": ["padded-mixed"],
    "OneMetadata": ["extend"],
    "NumpyMirrors": ["mixed.HND"],
    "HeadsFirst": ["sinks"],
    "SplitDecode": ["decode.float16"],
}


@pytest.mark.parametrize("name", CASES)
def test_a_correct_construction_passes(name):
    cases = select(load_suite("smoke").cases, CASES[name])
    records = list(Examiner(RunPlan(cases=cases, backends=(load(f"{FILE}:{name}"),))).run())
    assert {record.check: record.outcome for record in records if record.outcome != "passed"} == {}
    assert records
