"""Which changes a case must notice, and how many keys a row sees, counted key by key."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from attncheck.harness.problem.problem import build_problem
from attncheck.harness.truth.faults import keys_seen, toggles
from attncheck.harness.truth.truth import params_of, rows_of
from attncheck.harness.truth.unpaged import UnpagedAttention
from attncheck.reference import AttentionParams, visible
from attncheck.reference.spec import MODIFIERS

CPU = torch.device("cpu")


def params_and_rows(case: Any) -> tuple[AttentionParams, UnpagedAttention]:
    problem = build_problem(case, 0)
    return params_of(problem), rows_of(problem, CPU)


@pytest.mark.parametrize("name", MODIFIERS)
def test_a_case_must_notice_each_of_its_modifiers(make_case: Any, name: str) -> None:
    params, rows = params_and_rows(make_case((3, 20), **{name: MODIFIERS[name].ordinary}))
    found = list(toggles(params, rows))
    assert found[0].subject in (name, MODIFIERS[name].feature)
    out, _ = rows.attend(params)
    assert all(bool((toggle.hypothesis.compute()[0] != out).any()) for toggle in found)


def test_a_plain_layer_has_nothing_to_notice(make_case: Any) -> None:
    assert list(toggles(*params_and_rows(make_case((3, 20))))) == []


@pytest.mark.parametrize("modifiers", [{}, {"sliding_window": 5}, {"attn_chunk_size": 7}, {"causal": False}])
@pytest.mark.parametrize("tree", [False, True])
def test_seen_keys_are_counted(make_case: Any, modifiers: dict[str, Any], tree: bool) -> None:
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
