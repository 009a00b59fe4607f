"""Faults that only latent layers know are named; right kernels of them are not accused."""

from collections import defaultdict
from functools import cache

import pytest

from attncheck.backends.registry import load
from attncheck.cases.loader import load_suite, select
from attncheck.harness.run.evaluation import Examiner, RunPlan
from attncheck.reference.spec import DEFAULT_CHECKS

pytestmark = pytest.mark.xdist_group("mla.py")  # they share records

BASES = ("reference_mla", "torch_mla")

NAMED = {
    "mutants:latent-scale-of-the-cache-row": "the scale follows from the size of a cache row",
    "mutants:latent-cuts-all-keys-first": "the rows of kv_b_proj are taken for all keys, then all values",
    "mutants:latent-reads-by-v-scale": "v_scale is used for the latent cache",
    "mutants:latent-drafts-see-each-other": (
        "the causal mask is missing: a reference with this fault gives the same output in the 3 wrong rows, all of request 1"
    ),
}


@cache
def records():
    """Of every backend over the latent cases of smoke, and one with a cache of codes, by name."""
    cases = tuple(case for case in load_suite("smoke").cases if case.layer.mla is not None)
    cases += select(load_suite("mla").cases, ["codes.fp8_e4m3"])
    backends = tuple(load(name) for name in (*BASES, *NAMED))
    examiner = Examiner(RunPlan(cases=cases, backends=backends))
    found = defaultdict(list)
    for record in examiner.run():
        found[record.backend].append(record)
    assert not examiner.blind
    return found


@pytest.mark.parametrize("name", BASES)
def test_honest_bases_pass_everything(name):
    assert {(r.check, r.outcome) for r in records()[name]} == {(check, "passed") for check in DEFAULT_CHECKS}


@pytest.mark.parametrize("name", NAMED)
def test_faults_of_latent_layers_alone_are_named(name):
    meanings = [r.meaning for r in records()[name] if r.outcome == "failed" and r.check == "numerics"]
    assert any(meaning and NAMED[name] in meaning for meaning in meanings)
