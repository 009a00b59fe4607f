"""Blind cases are refused, by name and number."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from attncheck.cases.model import Tolerance
from attncheck.errors import BlindCaseError
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.truth.truth import truth_of


def truth(case: Any, seed: int = 0) -> Any:
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
def test_ordinary_cases_bite_whatever_the_seed(make_case: Any, layer: dict[str, Any], dtype: str) -> None:
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
def test_a_modifier_without_effect_is_blind(make_case: Any, layer: dict[str, Any], message: str) -> None:
    with pytest.raises(BlindCaseError, match=message):
        truth(make_case(**layer))


def test_single_rows_are_blind_to_causality(make_case: Any) -> None:
    with pytest.raises(BlindCaseError, match="blind to causal: no row of the batch has a key it could act on"):
        truth(make_case((1, 40), causal=False))
    truth(make_case((1, 40), (2, 33), causal=False))


def test_plain_inputs_take_what_they_get(make_case: Any) -> None:
    truth(make_case(logits_soft_cap=5000.0, inputs=("views",)))


def test_a_case_of_its_own_tolerance_gets_it(make_case: Any) -> None:
    case = make_case()
    wider = replace(case, tolerance=Tolerance(factor=3.0, reason="to be seen here"))
    assert wider.hash == case.hash
    assert torch.equal(truth(wider).budget.norm, 3 * truth(case).budget.norm)
