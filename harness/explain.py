"""Guesses at why an output is wrong: which wrong question has this answer, and which key does not belong.

Runs only after a failure, so it may be slow; says nothing rather than guess wildly. Must not know: backends.
"""

import torch
from torch import Tensor

from attncheck.harness.hypotheses import explanations
from attncheck.harness.problem import Problem
from attncheck.harness.tolerance import share_of_budget
from attncheck.harness.truth import Truth

_FEW_WORK = 2**31
"""Rows x keys x head size above which guessing would take longer than the run."""


def explain(problem: Problem, truth: Truth, output: Tensor, shares: Tensor) -> str | None:
    """One line that explains ``output`` (float64 ``[T, H, Dv]``), whose errors in budgets are ``shares``; or None."""
    if not bool(torch.isfinite(output).all()):
        return "NaN or Inf in the output: memory nobody owns was read, or a row without visible keys divided 0 by 0"
    if _too_much_work(truth):
        return None
    for hypothesis in explanations(truth.params, truth.rows, problem.cache.block_size):
        out, _ = hypothesis.ask()
        if bool((share_of_budget(output - out, truth.budget) <= _slack(out, truth)).all()):
            return f"{hypothesis.meaning}: its truth fits all rows"
    return _stranger(problem, truth, output, shares)


def explain_lse(problem: Problem, truth: Truth, got: Tensor) -> str | None:
    """One line that explains a natural log-sum-exp ``got`` (float64 ``[T, H]``), or None."""
    if _too_much_work(truth):
        return None
    for hypothesis in explanations(truth.params, truth.rows, problem.cache.block_size):
        _, lse = hypothesis.ask()
        if bool(((got == lse) | ((got - lse).abs() <= 4 * truth.budget.lse)).all()):
            return f"{hypothesis.meaning}: its truth fits all rows"
    return None


def _too_much_work(truth: Truth) -> bool:
    return len(truth.rows.query) * len(truth.rows.keys) * truth.rows.keys.shape[-1] > _FEW_WORK


def _slack(out: Tensor, truth: Truth) -> Tensor:
    """Budgets allowed around another answer: more where it is larger than the truth the budget was made for."""
    size, usual = torch.linalg.vector_norm(out, dim=-1), torch.linalg.vector_norm(truth.out, dim=-1)
    slack: Tensor = 2 * (size / usual.clamp(min=1e-30)).clamp(min=1.0)
    return slack


def _stranger(problem: Problem, truth: Truth, output: Tensor, shares: Tensor) -> str | None:
    """Which key's value stands out in the error of the worst row, if one does."""
    row, head = divmod(int(shares.argmax()), shares.shape[1])
    error = output[row, head] - truth.out[row, head]
    values = truth.rows.values[:, head // truth.params.group_size].double()
    lengths = torch.linalg.vector_norm(values, dim=-1) * torch.linalg.vector_norm(error)
    likeness = (values @ error) / lengths.clamp(min=1e-30)
    best = int(likeness.abs().argmax())
    if float(likeness[best].abs()) < 0.8:
        return None
    request = int(torch.searchsorted(truth.rows.cu_seqlens_k, best, right=True)) - 1
    place = f"request {request}, position {best - problem.requests[request].base}"
    weight = "too much" if float(likeness[best]) > 0 else "too little"
    return f"at row {row} ({problem.row_name(row)}), head {head}: the key of {place} weighs {weight}"
