"""Faults of latent attention are caught on smoke and one case more; honest kernels of it are not accused."""

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from attncheck.backends.registry import load
from attncheck.cases.loader import load_suite, select
from attncheck.harness.run.evaluation import Examiner, RunPlan
from attncheck.reference.spec import DEFAULT_CHECKS

pytestmark = pytest.mark.xdist_group("mla.py")  # they share records

MINIATURES = Path(__file__).resolve().parent / "mla.py"
BASES = ("Miniature", "PlainTorch")
ANSWERS = {"numerics", "lse"}

# Miniature: the check that must catch it, and those that may also complain, since the fault shows there too.
CAUGHT_BY = {
    "LatentZeros": ("numerics", {"numerics"}),
    "LatentConstant": ("numerics", {"numerics"}),
    "LatentMean": ("numerics", ANSWERS),
    "ScaleOfTheCacheRow": ("numerics", ANSWERS),
    "CutsAllKeysFirst": ("numerics", ANSWERS),
    "RotatedPartFirst": ("cache_write", {"cache_write"} | ANSWERS),
    "RotatedPartPerHead": ("numerics", ANSWERS),
    "ReadsByVScale": ("numerics", ANSWERS),
    "DraftsSeeEachOther": ("numerics", ANSWERS),
    "DropsTheLastPiece": ("numerics", ANSWERS),
    "MasksContextByLocalIndex": ("numerics", ANSWERS),
    "CountsEmptyPieces": ("numerics", ANSWERS),
}

NAMED = {
    "ScaleOfTheCacheRow": "the scale is made of the size of a cache row",
    "CutsAllKeysFirst": "the rows of kv_b_proj are taken for all keys, then all values",
    "ReadsByVScale": "v_scale is used for the latent cache",
    "DraftsSeeEachOther": "the causal mask is missing: its truth fits the 3 wrong rows, all of request 1",
}


@cache
def records():
    """Of every miniature over the latent cases of smoke, and one with a cache of codes, by name."""
    cases = tuple(case for case in load_suite("smoke").cases if case.layer.mla is not None)
    cases += select(load_suite("mla").cases, ["codes.fp8_e4m3"])
    backends = tuple(load(f"{MINIATURES}:{name}") for name in (*BASES, *CAUGHT_BY))
    examiner = Examiner(RunPlan(cases=cases, backends=backends))
    found = defaultdict(list)
    for record in examiner.run():
        found[record.backend].append(record)
    assert not examiner.blind
    return found


@pytest.mark.parametrize("name", CAUGHT_BY)
def test_a_fault_is_caught_by_its_check(name):
    check, may_complain = CAUGHT_BY[name]
    short = {r.check for r in records()[name] if r.outcome in ("failed", "errored")}
    assert check in short
    assert short <= may_complain


@pytest.mark.parametrize("name", BASES)
def test_honest_bases_pass_everything(name):
    assert {(r.check, r.outcome) for r in records()[name]} == {(check, "passed") for check in DEFAULT_CHECKS}


@pytest.mark.parametrize("name", NAMED)
def test_faults_that_only_latent_layers_know_are_named(name):
    meanings = [r.meaning for r in records()[name] if r.outcome == "failed" and r.check == "numerics"]
    assert any(meaning and NAMED[name] in meaning for meaning in meanings)


def test_every_miniature_is_expected_somewhere():
    tree = ast.parse(MINIATURES.read_text(encoding="utf-8"))
    assert {node.name for node in tree.body if isinstance(node, ast.ClassDef)} == {*BASES, *CAUGHT_BY}
