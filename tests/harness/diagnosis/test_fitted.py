"""A number of the layer that is wrong by a factor is named with the factor, in every dtype."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from attncheck.reference import Precision
from attncheck.reports.run_file.causes import likely_causes

BATCH = (1, 130), (5, 37), (20, 20)


def causes_of(asked: Any, lost: torch.Tensor | None = None, **changes: Any) -> tuple[str, ...]:
    """The likely causes of an honest run under other parameters; ``lost``: rows and heads that are NaN besides."""
    problem, truth = asked
    out = truth.rows.attend(replace(truth.params, **changes), Precision.kernel(problem.dtype))[0].double()
    out = out.to(problem.dtype).double()
    if lost is not None:
        out[lost] = torch.nan
    return likely_causes(asked.explained(out))


@pytest.mark.parametrize(("dtype", "factor"), [("float16", 0.97), ("bfloat16", 1.02), ("float32", 3.1)])
def test_a_scale_wrong_by_a_factor(ask: Any, dtype: str, factor: float) -> None:
    (cause,) = causes_of(ask(*BATCH, dtype=dtype), scale=0.125 * factor)
    words = re.fullmatch(r"the scale is (\S+) times the layer's", cause)
    assert words is not None
    assert float(words[1]) == pytest.approx(factor, rel=2e-3)


def test_a_soft_cap_or_slopes_wrong_by_a_factor(ask: Any) -> None:
    capped, sloped = ask(*BATCH, logits_soft_cap=7.0, dtype="float32"), ask(*BATCH, alibi=True, dtype="float32")
    assert causes_of(capped, logits_soft_cap=6.3)[0] == "the soft cap is 0.9 times the layer's"
    slopes = tuple(1.3 * slope for slope in sloped.problem.layer.alibi_slopes)
    assert causes_of(sloped, alibi_slopes=slopes)[0] == "the ALiBi slopes are 1.3 times the layer's"


def test_beside_values_that_are_not_finite_the_finite_ones_are_explained(ask: Any) -> None:
    lost = torch.zeros(26, 8, dtype=torch.bool)
    lost[::3, 2] = True
    (cause,) = causes_of(ask(*BATCH, logits_soft_cap=7.0), lost, logits_soft_cap=7.0 * 1.2)
    assert cause.startswith("the soft cap is 1.2")


@pytest.mark.parametrize(("shift", "other"), [(1, "h - 1"), (-1, "h + 1")])
def test_queries_of_the_next_head(ask: Any, shift: int, other: str) -> None:
    asked = ask(*BATCH)
    rows = asked.truth.rows
    out, _ = replace(rows, query=rows.query.roll(shift, 1)).attend(asked.truth.params)
    assert likely_causes(asked.explained(out)) == (f"query head h has the query of head {other}",)


def test_overflow_under_a_cap_is_recognised_by_the_scores(ask: Any) -> None:
    asked = ask(*BATCH, logits_soft_cap=7.0)
    problem, truth = asked
    keys = problem.keys.double().repeat_interleave(4, dim=1)
    far = torch.zeros(truth.lse.shape, dtype=torch.bool)
    for request in problem.requests:
        for row in range(request.rows):
            seen = keys[request.base : request.base + request.first_position + row + 1]
            query = problem.query[request.first_row + row].double()
            scores = torch.einsum("hd,khd->hk", query, seen) / 8 / 7.0
            far[request.first_row + row] = scores.abs().amax(dim=1) > 88.7
    assert 0 < int(far.sum()) < far.numel() // 2
    out = truth.out.masked_fill(far[..., None], torch.nan)
    explanation = "NaN or Inf just where a score is "
    assert asked.explained(out).startswith(explanation)
    out[tuple((~far).nonzero()[0])] = torch.nan
    assert explanation not in asked.explained(out)
