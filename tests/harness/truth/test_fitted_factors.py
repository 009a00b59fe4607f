"""A number of the layer that is wrong by a factor is named with the factor, in every dtype."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from attncheck.harness.diagnosis.explain import explain
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.truth.truth import Truth, truth_of
from attncheck.harness.truth.unpaged import share_of_budget
from attncheck.reference import Precision
from attncheck.reports.run_file.causes import likely_causes

BATCH = (1, 130), (5, 37), (20, 20)


def causes_of(case: Any, lost: torch.Tensor | None = None, **changes: Any) -> tuple[str, ...]:
    """The likely causes of an honest run under other parameters; ``lost``: rows and heads that are NaN besides."""
    problem = build_problem(case, 0)
    truth: Truth = truth_of(problem, torch.device("cpu"))
    out = truth.rows.attend(replace(truth.params, **changes), Precision.kernel(problem.dtype))[0].double()
    out = out.to(problem.dtype).double()
    if lost is not None:
        out[lost] = torch.nan
    shares = share_of_budget(out - truth.out, truth.budget)
    assert bool((shares > 1).any())
    return likely_causes(explain(problem, truth, out, shares))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("factor", [0.97, 1.02, 3.1])
def test_a_scale_wrong_by_a_factor(make_case: Any, dtype: str, factor: float) -> None:
    (cause,) = causes_of(make_case(*BATCH, dtype=dtype), scale=0.125 * factor)
    words, _, rest = cause.partition(" times")
    assert words.startswith("the scale is ")
    assert rest == " the layer's"
    assert float(words.removeprefix("the scale is ")) == pytest.approx(factor, rel=2e-3)


@pytest.mark.parametrize(("factor", "printed"), [(1.05, "1.05"), (0.9, "0.9"), (2.5, "2.5")])
def test_a_soft_cap_wrong_by_a_factor(make_case: Any, factor: float, printed: str) -> None:
    causes = causes_of(make_case(*BATCH, logits_soft_cap=7.0, dtype="float32"), logits_soft_cap=7.0 * factor)
    assert causes[0] == f"the soft cap is {printed} times the layer's"


def test_slopes_wrong_by_a_factor(make_case: Any) -> None:
    case = make_case(*BATCH, alibi=True, dtype="float32")
    slopes = tuple(1.3 * slope for slope in case.layer.alibi_slopes)
    assert causes_of(case, alibi_slopes=slopes)[0] == "the ALiBi slopes are 1.3 times the layer's"


def test_beside_values_that_are_not_finite_the_finite_ones_are_explained(make_case: Any) -> None:
    lost = torch.zeros(26, 8, dtype=torch.bool)
    lost[::3, 2] = True
    causes = causes_of(make_case(*BATCH, logits_soft_cap=7.0), lost, logits_soft_cap=7.0 * 1.2)
    assert len(causes) == 1
    assert causes[0].startswith("the soft cap is 1.2")


@pytest.mark.parametrize("shift", [1, -1])
def test_queries_of_the_next_head(make_case: Any, shift: int) -> None:
    problem = build_problem(make_case(*BATCH), 0)
    truth = truth_of(problem, torch.device("cpu"))
    out, _ = replace(truth.rows, query=truth.rows.query.roll(shift, 1)).attend(truth.params)
    shares = share_of_budget(out - truth.out, truth.budget)
    sign = "-" if shift > 0 else "+"
    assert likely_causes(explain(problem, truth, out, shares)) == (f"query head h has the query of head h {sign} 1",)


def test_overflow_under_a_cap_is_recognised_by_the_scores(make_case: Any) -> None:
    problem = build_problem(make_case(*BATCH, logits_soft_cap=7.0), 0)
    truth = truth_of(problem, torch.device("cpu"))
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
    assert str(explain(problem, truth, out, share_of_budget(out - truth.out, truth.budget))).startswith(explanation)
    elsewhere = (~far).nonzero()[0]
    out[tuple(elsewhere)] = torch.nan
    assert explanation not in str(explain(problem, truth, out, share_of_budget(out - truth.out, truth.budget)))
