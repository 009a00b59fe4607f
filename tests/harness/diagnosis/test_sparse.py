"""Faults of chosen keys that are tried: each with one answer, and none that equals the truth on a telling batch."""

import torch
from made_cases import make_case

from attncheck.harness.diagnosis.sparse import sparse_explanations
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.truth.truth import truth_of


def test_each_fault_moves_the_truth_and_has_one_answer():
    problem = build_problem(make_case((40, 40), (1, 64), (20, 90), (1, 33), index_topk=16), 0)
    truth = truth_of(problem, torch.device("cpu"))
    answers = {}
    for fault in sparse_explanations(problem, truth):
        answers.setdefault(fault.meaning, []).append(fault.compute()[0])
    assert len(answers) > 15
    for meaning, outs in answers.items():
        assert all(not torch.allclose(out, truth.out) for out in outs), meaning
        assert len(outs) == 1 or not torch.allclose(*outs), meaning


def test_other_layers_have_no_such_faults():
    problem = build_problem(make_case(), 0)
    assert list(sparse_explanations(problem, truth_of(problem, torch.device("cpu")))) == []
