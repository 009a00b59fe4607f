"""Faults of chosen keys that are tried: each with one answer, and none that equals the truth on a telling batch."""

from dataclasses import replace

import pytest
import torch
from made_cases import make_case

from attncheck.harness.diagnosis.sparse import sparse_explanations
from attncheck.harness.problem.chosen_keys import loose_form
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.truth.truth import truth_of


@pytest.mark.parametrize("form", ["front", "any"])
def test_each_fault_moves_the_truth_and_has_one_answer(form):
    problem = build_problem(make_case((40, 40), (1, 64), (20, 90), (1, 33), index_topk=16), 0)
    truth = truth_of(problem, torch.device("cpu"))
    if form == "any":
        truth = replace(truth, rows=replace(truth.rows, topk_indices=loose_form(problem.topk_indices)))
    answers = {}
    for fault in sparse_explanations(problem, truth):
        answers.setdefault(fault.meaning, []).append(fault.compute()[0])
    assert len(answers) > 15
    for meaning, outs in answers.items():
        assert all(not torch.allclose(out, truth.out) for out in outs), meaning
        assert len(outs) == 1, meaning
    is_any = form == "any"
    assert ("indices behind the first -1 are not read" in answers) == is_any
    assert ("the first indices are read, as many as the row names keys" in answers) == is_any


def test_other_layers_have_no_such_faults():
    problem = build_problem(make_case(), 0)
    assert list(sparse_explanations(problem, truth_of(problem, torch.device("cpu")))) == []
