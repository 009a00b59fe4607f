"""What the reference says about a problem, how far from it a correct kernel may be, and whether the case can see.

The truth is taken from the keys as they stand behind one another, without pages: a second formulation beside the paged
one that candidates are driven through. Must not know: backends, observations.
"""

from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from attncheck.errors import BlindCaseError
from attncheck.harness.problem.output_quantisation import OutputCodes, output_codes, output_error
from attncheck.harness.problem.problem import Problem
from attncheck.harness.truth.formulations import honest_answers, other_forms, params_of, roundings_of, rows_of
from attncheck.harness.truth.hypotheses import causal_toggle, toggles
from attncheck.harness.truth.scale_hypotheses import scale_toggles
from attncheck.harness.truth.tolerance import Budget, budget_of, share_of_budget
from attncheck.harness.truth.unpaged import UnpagedAttention
from attncheck.reference import AttentionParams
from attncheck.reference.spec import AttentionType

BITE = 10.0
"""A change counts as noticed where it moves the truth by this many budgets."""


@dataclass(frozen=True)
class Truth:
    """The right answer: ``out`` float64 ``[T, H, Dv]``, ``lse`` float64 ``[T, H]``, and the budget around them."""

    params: AttentionParams
    rows: UnpagedAttention
    out: Tensor
    lse: Tensor
    budget: Budget
    codes: OutputCodes | None = None
    """How the output is quantised; the truth itself never is."""


def truth_of(problem: Problem, device: torch.device, *, refuse_blindness: bool = True) -> Truth:
    """The truth of ``problem``, computed on ``device``.

    With ``refuse_blindness``, raises BlindCaseError where turning off a modifier of the layer, or moving a window's
    edge by one, hardly moves the truth: then a pass would say nothing about it. Likewise in any case where a good
    kernel overflows, so that nothing is expected of any.
    """
    params, rows = params_of(problem), rows_of(problem, device)
    out, lse, weighted = rows.attend_weighted(params)
    honest, forms = honest_answers(problem, rows, params), other_forms(problem, rows)
    budget = budget_of(rows, params, problem.dtype, out, lse, weighted, honest, forms, roundings_of(problem))
    if problem.case.tolerance is not None:
        budget = budget.scaled(problem.case.tolerance.factor)
    if not all(bool(torch.isfinite(allowed).all()) for allowed in (budget.norm, budget.peak, budget.lse)):
        raise BlindCaseError(
            problem.case.key,
            "any error",
            f"what a good kernel keeps in {problem.layer.dtype} overflows; raise layer.scale, which makes the queries "
            "smaller, or change layer.dtype",
        )
    truth = Truth(params, rows, out, lse, budget, output_codes(problem.layer))
    if refuse_blindness:
        _refuse_blindness(problem, truth)
    return truth


def _refuse_blindness(problem: Problem, truth: Truth) -> None:
    if "needles" not in problem.inputs:
        return  # the case asks for plain inputs, and has to live with what they cannot show
    _refuse_equal_codes(problem, truth)
    layer = problem.layer
    asked = [toggles(truth.params, truth.rows), scale_toggles(problem, truth.params, truth.rows)]
    if layer.attn_type == AttentionType.DECODER and not layer.is_causal:
        asked.append(iter([causal_toggle(truth.params, truth.rows)]))
    for toggle in chain.from_iterable(asked):
        able = int(toggle.acts.sum())
        if not able:
            if toggle.mostly:
                raise BlindCaseError(
                    problem.case.key,
                    toggle.subject,
                    "no row of the batch has a key it could act on; lengthen a request",
                )
            continue
        out, _ = toggle.hypothesis.ask()
        seen = out if truth.codes is None else truth.codes.of(out)
        moved = share_of_budget(output_error(seen, truth.out, truth.codes), truth.budget).amax(dim=1)
        noticed = int(((moved >= BITE) & toggle.acts).sum())
        if noticed < (able // 2 + 1 if toggle.mostly else 1):
            raise BlindCaseError(
                problem.case.key,
                toggle.subject,
                f"only {noticed} of {able} rows move by {BITE:g} budgets when it changes (largest: "
                f"{float(moved.max()):.3g}); use longer requests, larger scores, or a stronger modifier",
            )


def _refuse_equal_codes(problem: Problem, truth: Truth) -> None:
    if truth.codes is None or not bool(truth.out.any()):
        return
    twice = output_error(truth.codes.of(2 * truth.out), truth.out, truth.codes)
    if not bool((share_of_budget(twice, truth.budget) >= BITE).any()):
        raise BlindCaseError(
            problem.case.key,
            "output_quant",
            "an answer twice as large has the same codes; give a scale that leaves outputs between the smallest code "
            "and the largest",
        )
