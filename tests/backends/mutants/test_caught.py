"""Examining the examiner: every mutant is caught by the check, and at the case, that the catalogue names."""

import re
import sys
from collections import defaultdict
from contextlib import contextmanager

import pytest

from attncheck.backends.mutants.catalogue import PLAIN, PLAIN_REF, catalogue
from attncheck.backends.registry import load
from attncheck.cases.loader import load_suite, suite_names
from attncheck.errors import BackendUnavailableError
from attncheck.harness.checks import numerics
from attncheck.harness.run.evaluate import Examiner, RunPlan
from attncheck.reference.spec import DEFAULT_CHECKS
from attncheck.reports.run_file.causes import likely_causes

RIGHT_BY_NATURE = {
    "mean-of-v": {
        "smoke/window-prefill.1",
        "interpreted/window-prefill.1",
        "encoder/encoder-only-window.1",
        "sliding_window/decode-width.1",
        "sliding_window/prefill.1",
        "long_rows/window-rows.1",
        "tables/null-pages.1",
        "vllm_interpreted/encoder-only-window-of-one",
    }
}
"""Cases for which the mutant's constant answer is right: with a window of one key the mean is that key's value."""

SINGLE, UNIFORM = "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH"

MEASURED = {
    ("NEVER", "buckets"): {
        "graph-grows-for-uniform-steps",
        "graph-moves-for-more-requests",
        "graph-one-plan-for-all-buckets",
        "graph-pairs-requests",
        "graph-workspace-moves",
    },
    ("NEVER", "padded decode"): {"graph-scales-by-the-whole-query"},
    ("NEVER", "many requests"): {"graph-plans-many-on-the-host"},
    ("NEVER", "long decode"): {"graph-kernel-for-short-contexts"},
    ("NEVER", "drafting"): {"graph-drafts-with-old-lengths"},
    (SINGLE, "verify 2"): {
        "graph-claims-by-the-config",
        "graph-claims-uniform-batch",
        "graph-skips-fresh-prompts",
        "graph-tolist-for-prefill",
    },
    (SINGLE, "verify 5"): {"graph-packs-drafts-by-eight"},
    (SINGLE, "verify, many requests"): {"graph-verifies-many-on-the-host"},
    (SINGLE, "verify and draft"): {"graph-plans-by-batch-size", "graph-drafts-by-the-rows-before"},
    (UNIFORM, "mixed"): {"graph-claims-always", "graph-grid-of-the-dummies", "sdpa-claims-every-graph"},
    (UNIFORM, "tiles"): {"graph-counts-tiles-of-dummies"},
}
"""The level measured of mutants that break a CUDA graph, and the probe that breaks. Of all others: NEVER, decode."""


@contextmanager
def no_explanations():
    """Checks judge alone: to explain a failure takes five times as long, and ``harness/diagnosis/test_explain.py`` does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numerics, "explain", lambda *_, **__: None)
        patch.setattr(numerics, "explain_lse", lambda *_, **__: None)
        yield


def case_of(key):
    suite, _, name = key.partition("/")
    return next(case for case in load_suite(suite).cases if case.id == name)


def is_diagnosed(record, mutant):
    """Whether a broken graph has the cause in the catalogue. Those of other checks need all checks of a case."""
    if mutant.cause is None or record.outcome != "failed" or record.check != "cudagraph":
        return True
    words = record.meaning if likely_causes(record.meaning) else record.summary
    return bool(re.search(mutant.cause, words, re.IGNORECASE))


def broken_probe(record):
    return next((probe.name for probe in record.graph.probes if probe.outcome == "failed"), None)


def keys():
    """Each case that the catalogue names; those that start processes are slow tests."""
    for key in sorted({mutant.case for mutant in catalogue() if mutant.case}):
        is_slow = key.startswith("ranks/") or key == "smoke/ranks"
        yield pytest.param(key, marks=pytest.mark.slow if is_slow else ())


@pytest.mark.parametrize("key", list(keys()))
def test_mutants_are_caught_where_the_catalogue_expects_it(key):
    mutants = [mutant for mutant in catalogue() if mutant.case == key]
    case, missed, levels = case_of(key), [], set()
    examiner = Examiner(RunPlan((case,)))
    for check in {mutant.check for mutant in mutants if mutant.base == PLAIN}:
        (record,) = examiner.records(case, load(PLAIN_REF), checks=(check,))
        assert record.outcome in ("passed", "unsupported"), record
    if case.checks is not None:
        assert {mutant.check for mutant in mutants} <= set(case.checks)
    for mutant in mutants:
        try:
            backend = load(mutant.ref)
        except BackendUnavailableError:
            continue
        with no_explanations():
            (record,) = examiner.records(case, backend, checks=(mutant.check,))
        if record.outcome not in ("failed", "errored") or not is_diagnosed(record, mutant):
            missed.append((mutant.name, record))
        if mutant.kind == "graph":
            levels.add((mutant.name, record.graph.measured, broken_probe(record)))
    assert not examiner.blind
    assert missed == []
    expected = {name: where for where, names in MEASURED.items() for name in names}
    assert levels == {(name, *expected.get(name, ("NEVER", "decode"))) for name, _, _ in levels}


def test_every_check_has_mutants_that_it_must_catch():
    assert {mutant.check for mutant in catalogue()} >= set(DEFAULT_CHECKS)


def test_every_mutant_class_is_in_the_catalogue():
    """A class without subclasses that is a backend is a mutant, a right base, or forgotten."""
    listed = defaultdict(set)
    for mutant in catalogue():
        if mutant.class_name:
            listed[load(mutant.ref).backend.__module__].add(mutant.class_name)
    for module, names in listed.items():
        own = {name: each for name, each in vars(sys.modules[module]).items() if hasattr(each, "get_kv_cache_shape")}
        bases = {name for name, each in own.items() if each.__module__ != module or each.__subclasses__()}
        assert set(own) - bases <= names | {"RowByRow"}, module


def suites():
    """Each suite with cases that these mutants declare; all but `smoke` are slow tests."""
    for suite in (name for name in suite_names() if name not in ("ranks", "state", "vllm_state", "indexer")):
        yield pytest.param(suite, marks=() if suite == "smoke" else pytest.mark.slow)


@pytest.mark.parametrize("suite", list(suites()))
def test_answers_that_ignore_the_scores_fail_every_case(suite):
    prefix = "latent-" if suite in ("mla", "vllm_latent") else ""
    mutants = {f"mutants:{prefix}{name}": name for name in ("zeros", "constant", "mean" if prefix else "mean-of-v")}
    plan = RunPlan(cases=load_suite(suite).cases, backends=tuple(map(load, mutants)), checks=("numerics",))
    with no_explanations():
        examined = [record for record in Examiner(plan).run() if record.outcome != "unsupported"]
    assert examined
    passed = {(mutants[record.backend], record.case) for record in examined if record.outcome != "failed"}
    right = {(name, case) for name, cases in RIGHT_BY_NATURE.items() for case in cases}
    assert passed == {(name, case) for name, case in right if case.startswith(f"{suite}/")}
