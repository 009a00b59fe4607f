"""benchmarks/detection.py: what it counts."""

from concurrent.futures.process import BrokenProcessPool
from importlib import import_module
from pathlib import Path

import pytest

from attncheck.backends.mutants.catalogue import catalogue
from attncheck.harness.run.options import RunOptions

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def detection(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return import_module("detection")


def test_all_suites_run_for_what_smoke_misses(detection, monkeypatch):
    calls = []

    def caught(mutants, suites, _jobs):
        names = [mutant.name for mutant in mutants]
        calls.append((names, bool(suites)))
        return set(names[:-1]) if not suites else set(names)

    monkeypatch.setattr(detection, "_caught", caught)
    monkeypatch.setattr(detection, "_found_by_others", lambda refs, _jobs: {name: set() for name in detection.OTHERS})
    measured = detection.measure(1)
    names = measured["mutants"]
    assert calls == [(names, False), (names[-1:], True)]
    assert len(measured["caught"]["smoke"]) == len(names) - 1
    assert set(measured["caught"]["every suite"]) == set(names)
    assert not {mutant.name for mutant in catalogue() if mutant.is_provider} & set(names)
    assert "triton-lse-base-two" not in names


def test_a_mutant_is_examined_first_as_its_entry_names(detection):
    by_name = {mutant.name: mutant for mutant in catalogue()}
    mutants = [by_name["window-off-by-one"], by_name["positions-in-fifteen-bits"], by_name["graph-claims-always"]]
    assert [mutant.case.partition("/")[0] for mutant in mutants] == ["smoke", "limits", "interpreted"]

    def first(suites):
        groups = detection._groups_of_entries(mutants, RunOptions(suites=suites, device="cpu"))
        return {(group.refs, group.checks, group.keys) for group in groups}

    def entry(mutant):
        return (mutant.ref,), (mutant.check,), () if mutant.check == "cudagraph" else (mutant.case,)

    assert first(("smoke",)) == {entry(mutants[0]), entry(mutants[2])}
    assert first(("limits",)) == {entry(mutants[1]), entry(mutants[2])}


def test_a_backend_that_ends_its_process_is_found_by_the_tests_that_it_ends(detection, monkeypatch):
    def try_others(refs, projects):
        if "mutants:dies" in refs and "vLLM" in projects:
            raise BrokenProcessPool
        return {ref: {"FlashAttention"} & set(projects) for ref in refs}

    monkeypatch.setattr(detection, "_in_a_process", try_others)
    assert detection._found_by_others(["mutants:dies", "mutants:lives"], 2) == {
        "vLLM": {"dies"},
        "FlashInfer-Bench": set(),
        "FlashAttention": {"dies", "lives"},
    }
