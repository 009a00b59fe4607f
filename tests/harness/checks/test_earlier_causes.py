"""Failures after the first ones cost little: causes of earlier cases are tried first, and unknown ones are bounded."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from attncheck.harness.checks.numerics import EarlierCauses
from attncheck.harness.diagnosis import explain as explaining
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.truth.truth import truth_of
from attncheck.harness.truth.unpaged import share_of_budget
from attncheck.reports.run_file.causes import ON_EARLIER, likely_causes

BATCHES = [((1, 40), (5, 37)), ((1, 33), (7, 50)), ((1, 61), (4, 44))]


@pytest.fixture
def small(make_case):
    """Return a function to cases of few heads."""
    return partial(make_case, num_heads=2, num_kv_heads=1, head_size=32)


def meaning(causes, case, noise=0.0, **changes):
    """What is found for an honest run under other parameters; ``noise``: a random part of the output besides."""
    problem = build_problem(case, 0)
    truth = truth_of(problem, torch.device("cpu"))
    out = truth.rows.attend(replace(truth.params, **changes))[0]
    out += noise * torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    return str(causes.explain(problem, truth, out, share_of_budget(out - truth.out, truth.budget))[0])


def refuse(*_):
    raise AssertionError("all faults are tried")


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"logits_soft_cap": None}, "the soft cap is ignored"),
        ({"scale": 32**-0.5 * 1.137}, "the scale is 1.137 times the layer's"),
    ],
)
def test_a_cause_of_two_cases_is_tried_first(small, monkeypatch, changes, cause):
    cases = [small(*batch, logits_soft_cap=5.0) for batch in BATCHES]
    causes = EarlierCauses()
    for case in cases[:2]:
        assert likely_causes(meaning(causes, case, **changes))[0] == cause
    other = small((1, 40), (6, 30), sliding_window=8)
    assert likely_causes(meaning(causes, other, window=(-1, 0)))[0] == "the window is ignored"
    monkeypatch.setattr(explaining, "_standing", refuse)
    assert likely_causes(meaning(causes, cases[2], **changes)) == (cause,)


def test_a_cause_with_other_figures_is_tried_first_after_four_cases(small, monkeypatch):
    causes = EarlierCauses()

    def found(lens, window):
        return meaning(causes, small(*lens, sliding_window=window), window=(window, 0))

    for window, lens in zip((5, 6, 7, 8), (*BATCHES, BATCHES[0]), strict=True):
        assert likely_causes(found(lens, window))[0] == f"the window is one key too long (sliding_window={window + 1})"
    monkeypatch.setattr(explaining, "_standing", refuse)
    assert likely_causes(found(BATCHES[1], 9)) == ("the window is one key too long (sliding_window=10)",)


def test_after_two_cases_without_a_known_cause_only_new_faults_and_kinds_are_tried(small):
    causes = EarlierCauses()
    first, second, third = (small(*batch) for batch in BATCHES)
    assert ON_EARLIER not in meaning(causes, first, noise=0.3) + meaning(causes, second, noise=0.3)
    assert meaning(causes, third, scale=0.0).endswith(ON_EARLIER)
    windowed = small((1, 40), (6, 30), sliding_window=8)
    assert likely_causes(meaning(causes, windowed, window=(-1, 0)))[0] == "the window is ignored"
    without_context = small((1, 40), (30, 30))
    assert likely_causes(meaning(causes, without_context, scale=0.0))[0].startswith("all visible keys weigh the same")


def test_large_cases_on_which_nothing_is_tried_refute_nothing(small, monkeypatch):
    causes = EarlierCauses()
    monkeypatch.setattr(explaining, "_FEW_WORK", 0)
    for batch in BATCHES:
        meaning(causes, small(*batch), noise=0.3)
    monkeypatch.undo()
    assert ON_EARLIER not in meaning(causes, small(*BATCHES[0]), noise=0.3)
