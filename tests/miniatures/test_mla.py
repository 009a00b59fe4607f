"""Faults that only latent layers know are named; right kernels of them are not accused."""

import pytest

from attncheck.backends.mutants.catalogue import mutant_of
from attncheck.backends.registry import load
from attncheck.cases.loader import load_suite, select
from attncheck.harness.run.evaluate import Examiner, RunPlan
from attncheck.reference.spec import DEFAULT_CHECKS

NAMED = {
    "latent-scale-of-the-cache-row": "the scale follows from the size of a cache row",
    "latent-cuts-all-keys-first": "the rows of kv_b_proj are taken for all keys, then all values",
    "latent-reads-by-v-scale": "v_scale is used for the latent cache",
    "latent-drafts-see-each-other": (
        "the causal mask is missing: a reference with this fault gives the same output in the 3 wrong rows, all of request 1"
    ),
}


def test_honest_bases_pass_everything():
    """The latent cases of smoke, and one with a cache of codes."""
    cases = tuple(case for case in load_suite("smoke").cases if case.layer.mla is not None)
    cases += select(load_suite("mla").cases, ["codes.fp8_e4m3"])
    examiner = Examiner(RunPlan(cases=cases, backends=(load("reference_mla"), load("torch_mla"))))
    found = {(record.backend, record.check, record.outcome) for record in examiner.run()}
    assert not examiner.blind
    assert found == {(name, check, "passed") for name in ("reference_mla", "torch_mla") for check in DEFAULT_CHECKS}


@pytest.mark.parametrize("name", NAMED)
def test_faults_of_latent_layers_alone_are_named(name):
    suite, _, case_id = mutant_of(name).case.partition("/")
    (case,) = select(load_suite(suite).cases, [case_id])
    (record,) = Examiner(RunPlan((case,))).records(case, load(f"mutants:{name}"), checks=("numerics",))
    assert record.outcome == "failed"
    assert NAMED[name] in record.meaning
