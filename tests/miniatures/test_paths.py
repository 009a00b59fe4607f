"""Faults that show only on a path are caught there, and an honest backend that plays by parts is not accused."""

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
    "TreeIgnored": ("spec_decode", "tree.", "numerics", ANSWERS),
    "TreeTransposed": ("spec_decode", "tree.", "numerics", ANSWERS),
    "TreeWithoutContext": ("spec_decode", "tree.", "numerics", ANSWERS),
    "TreeByDepth": ("spec_decode", "tree-window", "numerics", ANSWERS),
    "DraftsSeeEachOther": ("spec_decode", "chain", "numerics", ANSWERS),
    "ChunkAsWindow": ("local", "by-the-mask", "numerics", ANSWERS | {"containment"}),
    "ChunksFromTheFirstRow": ("local", "by-the-mask", "numerics", ANSWERS),
    "WritesASharedCache": ("kv_sharing", "mixed", "cache_write", {"cache_write", "containment"}),
    "PrefixTwice": ("cascade", "extend", "numerics", ANSWERS),
    "SinksInBothParts": ("cascade", "sinks", "numerics", ANSWERS),
    "WindowDroppedInThePrefix": ("cascade", "window", "numerics", ANSWERS),
    "AveragesThePrefix": ("cascade", "decode", "numerics", {"numerics"}),
    "EmptyPartsWeigh": ("split_kv", "mixed", "numerics", ANSWERS),
    "MergesInBaseTwo": ("split_kv", "decode", "numerics", ANSWERS),
    "PartsAreCausal": ("split_kv", "extend", "numerics", ANSWERS),
    "IgnoresVirtualTables": ("local", "prefill", "numerics", ANSWERS),
    "BuildsOncePerShape": ("micro_batch", "decode", "numerics", ANSWERS | {"containment", "cache_write"}),
    "LengthsOfTheWholeStep": ("micro_batch", "inside-a-request", "numerics", ANSWERS),
}


def outcomes(name, suite, pattern):
    """The checks that complain about the first case whose id begins with ``pattern``."""
    case = next(case for case in load_suite(suite).cases if case.id.startswith(pattern))
    examiner = Examiner(RunPlan(cases=(case,), backends=(load(f"{HERE / 'paths.py'}:{name}"),)))
    records = list(examiner.run())
    assert not examiner.blind
    assert records
    return {record.check for record in records if record.outcome in ("failed", "errored")}


@pytest.mark.parametrize("name", CAUGHT_BY)
def test_a_fault_of_a_path_is_caught_by_its_check(name):
    suite, pattern, check, tolerated = CAUGHT_BY[name]
    complaints = outcomes(name, suite, pattern)
    assert check in complaints
    assert complaints <= tolerated


@pytest.mark.parametrize(
    ("suite", "pattern"), [("cascade", "extend"), ("split_kv", "mixed"), ("local", "prefill"), ("dcp", "extend")]
)
def test_a_right_backend_that_is_played_by_parts_is_not_accused(suite, pattern):
    assert outcomes("Merged", suite, pattern) == set()


def test_every_fault_is_listed():
    listed = {"Miniature", "Merged", *CAUGHT_BY}
    module = load(f"{HERE / 'paths.py'}:Merged").backend.__module__
    found = {name for name, value in vars(sys.modules[module]).items() if hasattr(value, "get_kv_cache_shape")}
    assert found - {"ReferenceBackend"} == listed
