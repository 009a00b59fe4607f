"""benchmarks/other_tests.py: the rules of other projects' tests, over right backends and wrong ones."""

from importlib import import_module
from pathlib import Path

import pytest
import torch

from attncheck.backends.registry import load

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def other_tests(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return import_module("other_tests")


def test_a_wrong_window_is_found_and_a_right_backend_is_not(other_tests):
    questions = list(other_tests.other_tests())[::6]
    refs = {"right": "torch_sdpa", "wrong": "mutants:window-off-by-one", "poison": "mutants:reads-past-the-end"}
    found = {name: {test.project for test in questions if test.finds(load(ref).backend)} for name, ref in refs.items()}
    # A cache of zeros hides what is read past the end.
    assert found == {"right": set(), "wrong": {"vLLM", "FlashAttention"}, "poison": set()}


def test_rules_on_one_element(other_tests):
    right = torch.tensor([1.0])
    for answer, is_close, matches in ((1.005, True, True), (1.015, True, False), (1.05, False, False)):
        given = torch.tensor([answer])
        assert (other_tests.is_close(given, right, right), other_tests.matches(given, right, right)) == (
            is_close,
            matches,
        )
    for answer, is_allowed in ((1.019, True), (1.021, False)):  # twice the error of plain torch
        assert other_tests.is_near_plain(torch.tensor([answer]), right, torch.tensor([1.01])) is is_allowed
    nan = torch.tensor([float("nan")])
    assert not any(rule(nan, right, right) for rule in (other_tests.is_close, other_tests.matches))
    assert not other_tests.is_near_plain(nan, right, right)
