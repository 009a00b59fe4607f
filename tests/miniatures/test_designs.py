"""Correct kernels of unusual designs pass every check: each takes a part of ``smoke``, together they take all of it."""

from pathlib import Path

import pytest

from attncheck.backends.registry import load
from attncheck.cases.loader import load_suite, select
from attncheck.harness.run.evaluate import Examiner, RunPlan
from attncheck.reference.spec import DEFAULT_CHECKS

FILE = Path(__file__).resolve().with_name("designs.py")
DESIGNS = (
    "InPlace",
    "Reordering",
    "DecodesFirst",
    "DrawnOrder",
    "RoundedWeights",
    "BaseTwo",
    "BatchVariant",
    "FixedSplits",
    "PaddedRows",
    "WholeTable",
)


@pytest.mark.parametrize("number", range(len(DESIGNS)), ids=DESIGNS)
def test_a_correct_design_passes(number):
    cases = load_suite("smoke").cases[number :: len(DESIGNS)]
    examiner = Examiner(RunPlan(cases=cases, backends=(load(f"{FILE}:{DESIGNS[number]}"),)))
    outcomes = [record.outcome for record in examiner.run()]
    assert set(outcomes) == {"passed", "unsupported"}
    assert outcomes.count("passed") > outcomes.count("unsupported")


def test_latent_candidates_pass():
    """The latent cases of smoke, and one with a cache of codes."""
    cases = tuple(case for case in load_suite("smoke").cases if case.layer.mla is not None)
    cases += select(load_suite("mla").cases, ["codes.fp8_e4m3"])
    examiner = Examiner(RunPlan(cases=cases, backends=(load("reference_mla"), load("torch_mla"))))
    found = {(record.backend, record.check, record.outcome) for record in examiner.run()}
    assert not examiner.blind
    assert found == {(name, check, "passed") for name in ("reference_mla", "torch_mla") for check in DEFAULT_CHECKS}


RIGHT = {
    "CannotTakeZero": (("split_kv", "extend"), ("dcp", "padding")),
    "FromTheFirstRow": (("micro_batch", "alibi"),),
    "Merged": (("cascade", "extend"), ("local", "prefill"), ("dcp", "extend")),
}


@pytest.mark.parametrize(
    ("name", "suite", "pattern"), [(name, *case) for name, cases in RIGHT.items() for case in cases]
)
def test_what_the_contract_promises_may_be_believed(name, suite, pattern):
    case = next(case for case in load_suite(suite).cases if case.id.startswith(pattern))
    examiner = Examiner(RunPlan(cases=(case,), backends=(load(f"{FILE}:{name}"),)))
    outcomes = {record.check: record.outcome for record in examiner.run()}
    assert not examiner.blind
    assert outcomes["numerics"] == "passed"
    assert set(outcomes.values()) <= {"passed", "unsupported"}
