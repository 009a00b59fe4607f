"""Correct backends that look wrong pass every check, at cases that would show what they look like."""

from pathlib import Path

import pytest

from attncheck.backends.registry import load
from attncheck.cases.loader import load_suite, select
from attncheck.harness.run.evaluate import Examiner, RunPlan

FILE = Path(__file__).resolve().with_name("right_designs.py")


DESIGNS = [
    ("MovedByDevice", "smoke/decode.float16", "cudagraph"),
    ("MovedByDeviceType", "smoke/decode.float16", "cudagraph"),
    ("MovedByDeviceIndex", "smoke/decode.float16", "cudagraph"),
    ("MovedOnce", "smoke/decode.float16", "cudagraph"),
    ("MovedForEachDevice", "smoke/decode.float16", "cudagraph"),
    ("LseHeadsFirst", "strides/output.transposed", "lse"),
    ("LseByStrides", "strides/output.transposed", "lse"),
    ("LseContiguous", "strides/output.offset", "lse"),
    ("DeclaresMultiples", "smoke/decode.float16", "refusals"),
    ("RefusesScalesOfHeads", "smoke/fp8-cache", "refusals"),
    ("RefusesScalesOfHeads", "smoke/fp8-cache-per-head", "refusals"),
]


@pytest.mark.parametrize(("name", "key", "check"), DESIGNS)
def test_a_correct_backend_passes(name, key, check):
    suite, _, case = key.partition("/")
    plan = RunPlan(select(load_suite(suite).cases, [case]), (load(f"{FILE}:{name}"),), (check,))
    (record,) = Examiner(plan).run()
    assert record.outcome in ("passed", "unsupported"), record
