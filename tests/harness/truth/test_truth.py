"""Blind cases are refused, by name and number; which changes a case must notice."""

from dataclasses import replace

import pytest
import torch

from attncheck.cases.model import Tolerance
from attncheck.errors import BlindCaseError
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.truth.faults import keys_seen, toggles
from attncheck.harness.truth.truth import params_of, rows_of, truth_of
from attncheck.reference import visible
from attncheck.reference.spec import MODIFIERS


def truth(case, seed=0):
    return truth_of(build_problem(case, seed), torch.device("cpu"))


@pytest.mark.parametrize(
    "layer",
    [
        {"sliding_window": 16},
        {"sliding_window": 1},
        {"logits_soft_cap": 50.0},
        {"logits_soft_cap": 2.0},
        {"alibi": True},
        {"sinks": True},
        {"sliding_window": 9, "logits_soft_cap": 20.0, "sinks": True},
        {"causal": False, "sliding_window": 4},
    ],
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_ordinary_cases_bite_whatever_the_seed(make_case, layer, dtype):
    for seed in range(3):
        truth(make_case(dtype=dtype, **layer), seed)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"sliding_window": 1000}, r"made/case: blind to sliding_window: no row .* could act on"),
        ({"sinks": (-30.0,) * 8}, r"blind to sinks: only 0 of 40 rows move by 10 times the allowed error"),
        ({"alibi": (1e-6,) * 8}, "blind to alibi"),
    ],
)
def test_a_modifier_without_effect_is_blind(make_case, layer, message):
    with pytest.raises(BlindCaseError, match=message):
        truth(make_case(**layer))


def test_single_rows_are_blind_to_causality(make_case):
    with pytest.raises(BlindCaseError, match="blind to causal: no row of the batch has a key it could act on"):
        truth(make_case((1, 40), causal=False))
    truth(make_case((1, 40), (2, 33), causal=False))


def test_plain_inputs_take_what_they_get(make_case):
    truth(make_case(logits_soft_cap=5000.0, inputs=("views",)))


def test_a_case_of_its_own_tolerance_gets_it(make_case):
    case = make_case()
    wider = replace(case, tolerance=Tolerance(factor=3.0, reason="to be seen here"))
    assert wider.hash == case.hash
    assert torch.equal(truth(wider).budget.norm, 3 * truth(case).budget.norm)


CPU = torch.device("cpu")


def params_and_rows(case):
    problem = build_problem(case, 0)
    return params_of(problem), rows_of(problem, CPU)


@pytest.mark.parametrize("name", MODIFIERS)
def test_a_case_must_notice_each_of_its_modifiers(make_case, name):
    params, rows = params_and_rows(make_case((3, 20), **{name: MODIFIERS[name].ordinary}))
    found = list(toggles(params, rows))
    assert found[0].subject in (name, MODIFIERS[name].feature)
    out, _ = rows.attend(params)
    assert all(bool((toggle.hypothesis.compute()[0] != out).any()) for toggle in found)


def test_a_plain_layer_has_nothing_to_notice(make_case):
    assert list(toggles(*params_and_rows(make_case((3, 20))))) == []


@pytest.mark.parametrize("modifiers", [{}, {"sliding_window": 5}, {"attn_chunk_size": 7}, {"causal": False}])
@pytest.mark.parametrize("tree", [False, True])
def test_seen_keys_are_counted(make_case, modifiers, tree):
    params, rows = params_and_rows(make_case((3, 20), (3, 3), (3, 2), **modifiers))
    branches = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    if tree:
        rows = replace(rows, tree=branches)
    expected = []
    for num_keys in (20, 3, 2):
        for row in range(3):
            sees = visible(params, torch.tensor([num_keys - 3 + row]), torch.arange(num_keys)).tolist()
            hidden = [node for node in range(3) if tree and not branches[row, node]]
            expected.append(sum(sees) - sum(sees[num_keys - 3 + n] for n in hidden if num_keys - 3 + n >= 0))
    assert keys_seen(rows, params).tolist() == expected
