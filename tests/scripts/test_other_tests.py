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
    questions = list(other_tests.other_tests())[::3]
    refs = {"right": "torch_sdpa", "wrong": "mutants:window-off-by-one", "poison": "mutants:reads-past-the-end"}
    found = {name: {test.project for test in questions if test.finds(load(ref).backend)} for name, ref in refs.items()}
    # A cache of zeros hides what is read past the end.
    assert found == {"right": set(), "wrong": {"vLLM", "FlashAttention"}, "poison": set()}


@pytest.mark.parametrize(
    ("answer", "is_close", "matches"),
    [(1.005, True, True), (1.015, True, False), (1.05, False, False), (float("nan"), False, False)],
)
def test_rules_on_one_element(other_tests, answer, is_close, matches):
    given, right = torch.tensor([answer]), torch.tensor([1.0])
    assert other_tests.is_close(given, right, right) is is_close
    assert other_tests.matches(given, right, right) is matches


def test_twice_the_error_of_plain_torch_is_allowed(other_tests):
    right, plain = torch.tensor([1.0]), torch.tensor([1.01])
    for answer, is_allowed in ((1.019, True), (1.021, False), (float("nan"), False)):
        assert other_tests.is_near_plain(torch.tensor([answer]), right, plain) is is_allowed
