"""What wrong rows, heads, channels and keys share is described in words; the rows are counted by hand here."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from attncheck.harness.diagnosis.patterns import pattern, shared_by, which_heads
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.truth.unpaged import share_of_budget

BATCH = (1, 37), (5, 40), (33, 33), (1, 130)
"""Positions 36; 35 to 39; 0 to 32; 129. Rows 0; 1 to 5; 6 to 38; 39. Pages of 16."""


def mask(size: int, *places: int) -> torch.Tensor:
    return torch.isin(torch.arange(size), torch.tensor(places))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ((0, 39), "with query_len 1"),
        (range(6, 39), "without context"),
        (range(1, 6), "with query_len > 1 and context"),
        (range(1, 40), "of requests other than request 0"),
        ((0, 5, 38, 39), "last of their requests"),
        ((6, 22, 38), "whose position is a multiple of 16"),
        ((21, 37), "whose position is 15 modulo 16"),
        ((0, 1, 6, 14, 22, 30, 38, 39), "whose number in the request is a multiple of 8"),
        ((6, 14, 22, 30, 38), "whose position is a multiple of 8"),
        ((38,), "with row of the request 32"),
        ((0, 1, 2, 3, 4, 5, 39), "with context"),
        ((0, 2, 3, 4, 5, 39), "with position >= 36"),
        (range(9), "with number in the batch <= 8"),
        ((0, 9, 23), None),
    ],
)
def test_rows_are_described_by_what_the_others_do_not_have(make_case: Any, rows: Any, words: str | None) -> None:
    wrong = mask(40, *rows)
    shared = shared_by(build_problem(make_case(*BATCH), 0), wrong, ~wrong)
    assert shared == words


@pytest.mark.parametrize(
    ("heads", "words"),
    [
        ((4, 5, 6, 7), "only heads 4 to 7 (those of KV head 1)"),
        ((0, 4), "only heads 0, 4 (the first of each KV head)"),
        ((3, 7), "only heads 3, 7 (the last of each KV head)"),
        ((6,), "only head 6"),
    ],
)
def test_heads_are_described_by_their_group(make_case: Any, heads: tuple[int, ...], words: str) -> None:
    assert which_heads(build_problem(make_case(*BATCH), 0), mask(8, *heads)) == words


def test_rows_heads_and_channels_are_described_together(ask: Any) -> None:
    problem, truth = ask(*BATCH)
    error = torch.zeros_like(truth.out)
    error[6:39, 2, 48:] = 1.0
    shares = share_of_budget(error, truth.budget)
    assert pattern(problem, truth, error, shares) == (
        "wrong are rows without context, only head 2, only channels 48 to 63"
    )
    assert pattern(problem, truth, torch.ones_like(error), shares + 2) is None


@pytest.mark.parametrize(("factor", "amount"), [(0.6, "too little"), (1.6, "too much")])
def test_keys_of_other_weights_are_named(ask: Any, factor: float, amount: str) -> None:
    asked = ask((1, 120), (20, 150), (1, 140))
    problem, truth = asked
    keys = truth.rows.keys.clone()
    for request in problem.requests:
        keys[request.base + 64 : request.base + request.num_keys] *= factor
    output, _ = replace(truth.rows, keys=keys).attend(truth.params)
    assert asked.explained(output).startswith(f"not known; the heaviest keys weigh {amount}")


@pytest.mark.parametrize(("size", "words"), [(3.0, "wrong are rows with position 38, only head 1"), (1.1, None)])
def test_errors_near_the_budget_name_no_place(ask: Any, size: float, words: str | None) -> None:
    """Of errors that hardly exceed the budget, chance chooses the row and the head."""
    problem, truth = ask(*BATCH)
    shares = torch.zeros(truth.out.shape[:2], dtype=torch.float64)
    shares[4, 1] = size
    error = size * shares.sign()[..., None] * truth.budget.peak[..., None].expand_as(truth.out)
    assert pattern(problem, truth, error, shares) == words
