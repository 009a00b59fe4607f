"""Faults that several calls of a path have in common are caught, and leaning on the contract's promises is no fault."""

import sys
from pathlib import Path

import pytest

from attncheck.backends.registry import load
from attncheck.cases.loader import load_suite
from attncheck.harness.run.evaluation import Examiner, RunPlan

HERE = Path(__file__).resolve().parent
ANSWERS = {"numerics", "lse"}

# Miniature: the suite and the case it is put to, the check that must catch it, those that may complain too.
CAUGHT_BY = {
    "TreeOfPaddedStride": ("spec_decode", "tree-odd", "numerics", ANSWERS),
    "DraftsPackedByEight": ("spec_decode", "odd-widths", "numerics", ANSWERS),
    "RowsOfTheLastBuild": ("micro_batch", "shorter-and-shorter", "numerics", {"numerics"}),
    "BuildersShareATable": ("micro_batch", "decode", "numerics", ANSWERS | {"containment"}),
    "CausalOfTheFirstBuild": ("split_kv", "extend", "numerics", ANSWERS),
    "LSEOfAnotherGrouping": ("split_kv", "decode", "numerics", ANSWERS),
    "LSETransposed": ("dcp", "interleave", "numerics", ANSWERS),
    "WithoutKeysNoNewTokens": ("kv_sharing", "mixed", "numerics", ANSWERS),
    "PaddedLogitsAreRows": ("kv_sharing", "fast-prefill-padding", "numerics", {"numerics"}),
}

RIGHT = {
    "CannotTakeZero": (("split_kv", "decode"), ("split_kv", "extend"), ("dcp", "extend"), ("dcp", "padding")),
    "FromTheFirstRow": (("micro_batch", "alibi"),),
}


def outcomes(name, suite, pattern):
    """(complaints, records) of the first case whose id begins with ``pattern``."""
    case = next(case for case in load_suite(suite).cases if case.id.startswith(pattern))
    examiner = Examiner(RunPlan(cases=(case,), backends=(load(f"{HERE / 'pieces.py'}:{name}"),)))
    records = list(examiner.run())
    assert not examiner.blind
    return {record.check for record in records if record.outcome in ("failed", "errored")}, records


@pytest.mark.parametrize("name", CAUGHT_BY)
def test_a_fault_is_caught_by_its_check(name):
    suite, pattern, check, tolerated = CAUGHT_BY[name]
    complaints, _ = outcomes(name, suite, pattern)
    assert check in complaints
    assert complaints <= tolerated


@pytest.mark.parametrize(
    ("name", "suite", "pattern"), [(name, *case) for name, cases in RIGHT.items() for case in cases]
)
def test_what_the_contract_promises_may_be_believed(name, suite, pattern):
    complaints, records = outcomes(name, suite, pattern)
    assert complaints == set()
    assert "passed" in {record.outcome for record in records if record.check == "numerics"}


def test_every_class_is_listed():
    module = load(f"{HERE / 'pieces.py'}:Miniature").backend.__module__
    found = {name for name, value in vars(sys.modules[module]).items() if hasattr(value, "get_kv_cache_shape")}
    assert found - {"ReferenceBackend"} == {"Miniature", *CAUGHT_BY, *RIGHT}
