"""benchmarks/causes.py: what counts as a right, partly right or false cause, and the faults that it judges by."""

from importlib import import_module
from pathlib import Path

import pytest

from attncheck import examine
from attncheck.cases.loader import load_suite

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def causes(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return import_module("causes")


def test_a_false_cause_beside_a_right_one_is_false_unless_one_of_them_is_the_fault_of_a_mutant(causes):
    one, two = ("mutants", ("window",)), ("pairs of faults", ("window", "sinks"))
    for (group, right), named, verdict in (
        (one, ["the window is ignored"], "right"),
        (one, ["the cap is lost", "the window is ignored"], "partly"),
        (one, ["the cap is lost"], "false"),
        (two, ["the window is ignored, and the sinks are"], "right"),
        (two, ["the window is ignored"], "partly"),
        (two, ["the window is ignored", "the cap is lost"], "false"),
    ):
        assert causes._verdict(causes.Subject("mutants:x", group, "", right, (), ()), named) == verdict


def test_each_of_sixty_faults_has_a_name_a_class_and_cases_of_smoke(causes):
    faults = import_module("causes_faults")
    known = {case.id for case in load_suite("smoke")}
    assert len({fault.name for fault in causes.FAULTS}) == len(causes.FAULTS) == 60
    for fault in causes.FAULTS:
        assert isinstance(getattr(faults, fault.name), type)
        assert set(fault.cases) <= known


def test_the_kernel_without_a_fault_passes_and_one_with_a_fault_does_not(causes):
    faults = import_module("causes_faults")
    fault = next(fault for fault in causes.FAULTS if fault.name == "value_pages_exchanged")
    checks = ["numerics", "lse", "cache_write"]
    assert examine(faults.RIGHT, cases=["smoke/decode.float16"], checks=checks).passed
    (judged,) = causes.measure([subject for subject in causes.subjects(1000) if subject.name == fault.name])
    assert judged.verdict != "not caught"
    assert judged.texts
