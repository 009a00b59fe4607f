"""``lse``: the log-sum-exp of each row is right, in natural logarithm, and -inf exactly for rows that see no key.

Cannot see: whether the backend uses the same LSE when it merges partial results itself. The finding depends only on
the problem, the truth, the observation and the backend's declared conventions.
"""

import math

import torch
from torch import Tensor

from attncheck.backends.conventions import Conventions
from attncheck.cases.model import Case
from attncheck.harness.checks.findings import Broken, Finding, Holds, NotExamined
from attncheck.harness.checks.interface import Check, CheckedCase
from attncheck.harness.checks.numerics import output_shares, summarize
from attncheck.harness.driver.observation import Observation
from attncheck.harness.problem.problem import Problem
from attncheck.harness.truth.explain import explain_lse
from attncheck.harness.truth.lse_hypotheses import lse_explanations
from attncheck.harness.truth.truth import Truth


def check_lse(
    problem: Problem,
    truth: Truth,
    seen: Observation,
    conventions: Conventions,
    *,
    is_output_explained: bool = False,
) -> Finding:
    """Judge the LSE of one step. ``is_output_explained``: as in :class:`CheckedCase`."""
    if seen.lse is None:
        return NotExamined(("lse is not declared",))
    got = comparable_lse(problem, seen, conventions)
    if got is None:
        return NotExamined(("ALiBi measured from elsewhere together with sinks: the LSE has no common meaning",))
    shares = lse_shares(got, truth.lse, truth.budget.lse)
    worst = float(shares.max()) if shares.numel() else 0.0
    figures = {"rows": shares.shape[0], "heads": shares.shape[1], "budget_share": worst}
    rows = [] if seen.lse_unwritten is None else seen.lse_unwritten.nonzero().flatten().tolist()
    if rows:
        return Broken(
            f"{len(rows)} of {len(shares)} rows were never written, or only added to, the first is row {rows[0]} "
            f"({problem.row_name(rows[0])})",
            figures,
        )
    if not bool((shares > 1).any()):
        return Holds(figures)
    return Broken(summarize(problem, shares), figures, _meaning(problem, truth, seen, got, is_output_explained))


def comparable_lse(problem: Problem, seen: Observation, conventions: Conventions) -> Tensor | None:
    """Return the LSE of a step's real rows, converted to the truth's conventions, float64 ``[T, H]``.

    Return None if the backend returns no LSE, or one that cannot be converted: sinks together with an ALiBi bias that
    is not measured from the query.
    """
    shifted = conventions.alibi_reference != "query" and problem.layer.alibi_slopes is not None
    if seen.lse is None or (shifted and problem.layer.sink_logits is not None):
        return None
    got = seen.lse[: len(seen.position)].double() * (math.log(2) if conventions.lse_base == "2" else 1.0)
    return got - _alibi_shift(problem, conventions, seen).to(got.device) if shifted else got


def lse_shares(got: Tensor, lse: Tensor, allowed: Tensor) -> Tensor:
    """Return the error in budgets, float64 ``[T, H]``. Infinite where one of the two is -inf alone, or ``got`` is NaN.

    ``lse``: the right values. ``allowed``: the budget around them.
    """
    empty = torch.isneginf(lse)
    error = torch.where(empty, torch.zeros_like(got), got - lse).abs()
    shares = torch.where(error == 0, torch.zeros_like(error), error / allowed)
    shares = torch.where(empty & ~torch.isneginf(got), torch.full_like(shares, math.inf), shares)
    return torch.nan_to_num(shares, nan=math.inf, posinf=math.inf)


def _alibi_shift(problem: Problem, conventions: Conventions, seen: Observation) -> Tensor:
    """Return how much larger the LSE is if the bias is measured from position 0 or the request's first new row."""
    slopes = torch.tensor(problem.layer.alibi_slopes, dtype=torch.float64)
    distance = seen.nth if conventions.alibi_reference == "context" else seen.position
    return distance.double()[:, None] * slopes


def _meaning(problem: Problem, truth: Truth, seen: Observation, got: Tensor, is_output_explained: bool) -> str | None:
    wrong = lse_shares(got, truth.lse, truth.budget.lse) > 1
    if bool((torch.isneginf(truth.lse) & ~torch.isneginf(got))[wrong].all()):
        return "a row that sees nothing must have -inf"
    output_holds = not bool((output_shares(truth, seen) > 1).any())
    others = lse_explanations(truth, got, output_holds=output_holds)
    tries_faults = output_holds or not is_output_explained
    return explain_lse(problem, truth, got, others, output_holds=output_holds, tries_faults=tries_faults)


def _check(case: CheckedCase) -> Finding:
    _, seen = case.first_step()
    conventions, is_output_explained = case.backend.conventions, case.is_output_explained
    return check_lse(case.problem, case.truth, seen, conventions, is_output_explained=is_output_explained)


def _not_applicable(_case: Case, features: frozenset[str]) -> NotExamined | None:
    return None if "lse" in features else NotExamined(("feature 'lse' is not declared",))


CHECK = Check(_check, _not_applicable)
