"""``lse``: the log-sum-exp is right, natural, and -inf exactly where a row sees nothing.

Cannot see: whether the backend uses the same LSE when it merges partial results itself. A pure function of problem,
truth and observation, and of the backend's declared conventions.
"""

import math

import torch
from torch import Tensor

from attncheck.backends.conventions import Conventions
from attncheck.harness.checks.numerics import summarize
from attncheck.harness.explain import explain_lse
from attncheck.harness.findings import Broken, Finding, Holds, NotExamined
from attncheck.harness.observation import Observation, still_unwritten
from attncheck.harness.problem import Problem
from attncheck.harness.truth import Truth


def examine(problem: Problem, truth: Truth, seen: Observation, conventions: Conventions) -> Finding:
    """Judge the LSE of one step."""
    if seen.lse is None:
        return NotExamined(("lse is not declared",))
    shifted = conventions.alibi_reference != "query" and problem.layer.alibi_slopes is not None
    if shifted and problem.layer.sink_logits is not None:
        return NotExamined(("ALiBi measured from elsewhere together with sinks: the LSE has no common meaning",))
    raw = seen.lse[: len(truth.lse)]
    missing = still_unwritten(raw).any(dim=1)
    got = raw.double() * (math.log(2) if conventions.lse_base == "2" else 1.0)
    if shifted:
        got = got - _alibi_shift(problem, conventions).to(got.device)
    shares = lse_shares(got, truth)
    worst = float(shares.max()) if shares.numel() else 0.0
    figures = {"rows": shares.shape[0], "heads": shares.shape[1], "budget_share": worst}
    if bool(missing.any()):
        rows = missing.nonzero().flatten().tolist()
        return Broken(
            f"{len(rows)} of {len(shares)} rows were never written, first: row {rows[0]} ({problem.row_name(rows[0])})",
            figures,
        )
    if not bool((shares > 1).any()):
        return Holds(figures)
    meaning = _meaning(got, truth) or explain_lse(problem, truth, got)
    return Broken(summarize(problem, shares), figures, meaning)


def lse_shares(got: Tensor, truth: Truth) -> Tensor:
    """The error in budgets, float64 ``[T, H]``; infinite where exactly one of the two is -inf, or ``got`` is NaN."""
    empty = torch.isneginf(truth.lse)
    error = torch.where(empty, torch.zeros_like(got), got - truth.lse).abs()
    shares = torch.where(error == 0, torch.zeros_like(error), error / truth.budget.lse)
    shares = torch.where(empty & ~torch.isneginf(got), torch.full_like(shares, math.inf), shares)
    return torch.nan_to_num(shares, nan=math.inf, posinf=math.inf)


def _alibi_shift(problem: Problem, conventions: Conventions) -> Tensor:
    """How much larger the LSE is when the bias is measured from position 0, or from the request's first new one."""
    slopes = torch.tensor(problem.layer.alibi_slopes, dtype=torch.float64)
    distance = []
    for r in problem.requests:
        rows = torch.arange(r.rows)
        distance.append(rows if conventions.alibi_reference == "context" else rows + r.first_position)
    return torch.cat(distance).double()[:, None] * slopes


def _meaning(got: Tensor, truth: Truth) -> str | None:
    """The usual ways to be wrong."""
    finite = torch.isfinite(truth.lse)
    if bool((~torch.isneginf(got) & ~finite).any()):
        return "a row that sees nothing must have -inf"
    for factor, base in ((1 / math.log(2), "2"), (1 / math.log(10), "10")):
        if bool(((got / factor - truth.lse).abs()[finite] <= 4 * truth.budget.lse[finite]).all()):
            return f"the logarithm is to base {base}; declare lse_base, or multiply by ln {base}"
    params = truth.params
    if params.sinks is not None:
        sinks = torch.tensor(params.sinks, dtype=torch.float64, device=got.device)
        bare = truth.lse + torch.log1p(-torch.exp(sinks - truth.lse))
        if bool(((got - bare).abs()[finite] <= 1e-3 * bare.abs().clamp(min=1)[finite]).all()):
            return "the sinks are in the output but not in the LSE"
    return None
