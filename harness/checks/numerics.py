"""``numerics``: every real output row of every head lies within the error budget of the truth.

Cannot see: errors below the rounding of the layer's dtype, or keys whose weight lies below it. A pure function of
problem, truth and observation.
"""

from typing import Protocol

import torch
from torch import Tensor

from attncheck.harness.checks.findings import Broken, Finding, Holds
from attncheck.harness.driver.observation import Observation
from attncheck.harness.problem.output_quantisation import output_error
from attncheck.harness.problem.problem import Problem
from attncheck.harness.truth.explain import explain
from attncheck.harness.truth.tolerance import share_of_budget
from attncheck.harness.truth.truth import Truth


class NamesRows(Protocol):
    """A question whose rows have names."""

    def row_name(self, row: int) -> str:
        """How a person would name a row."""


def check_numerics(problem: Problem, truth: Truth, seen: Observation) -> Finding:
    """Judge the output of one step."""
    shares = output_shares(truth, seen)
    worst = float(shares.max()) if shares.numel() else 0.0
    figures = {"rows": shares.shape[0], "heads": shares.shape[1], "budget_share": worst}
    unwritten = seen.unwritten.nonzero().flatten().tolist()
    if unwritten:
        # A byte has no NaN that no computation produces.
        what = "were never written" if truth.codes is None else "were never written, or hold NaN"
        return Broken(
            f"{len(unwritten)} of {shares.shape[0]} rows {what}, first: row {unwritten[0]} "
            f"({problem.row_name(unwritten[0])})",
            figures,
            _unsaturated(truth, seen),
            seen.protocol,
        )
    if not bool((shares > 1).any()):
        broken = seen.protocol
        return Broken(broken[0], figures, details=broken[1:]) if broken else Holds(figures)
    return Broken(
        summarize(problem, shares),
        figures | {"rows_wrong": int((shares > 1).any(dim=1).sum())},
        explain(problem, truth, seen.output[: len(shares)], shares),
        seen.protocol,
    )


def _unsaturated(truth: Truth, seen: Observation) -> str | None:
    """Whether just the outputs beyond the range of their codes are NaN."""
    if truth.codes is None:
        return None
    missing = torch.isnan(seen.output[: len(truth.out)].double())
    beyond = truth.out.abs() > float(torch.finfo(truth.codes.dtype).max) * truth.codes.scale
    explained = bool(missing.any()) and bool(beyond[missing].all())
    return "outputs beyond the range of the format become NaN; they have to saturate" if explained else None


def output_shares(truth: Truth, seen: Observation) -> Tensor:
    """The error of every real row and head in budgets, float64 ``[T, H]``."""
    return share_of_budget(output_error(seen.output[: len(truth.out)], truth.out, truth.codes), truth.budget)


def summarize(problem: NamesRows, shares: Tensor) -> str:
    """Where and how much, in a line; ``shares [T, H]`` in budgets."""
    wrong = shares > 1
    rows = wrong.any(dim=1).nonzero().flatten().tolist()
    heads = wrong.any(dim=0).nonzero().flatten().tolist()
    which = "all heads" if len(heads) == shares.shape[1] else f"heads {_abridged(heads)}"
    worst = int(shares.argmax())
    row, head = divmod(worst, shares.shape[1])
    size = float(shares[row, head])
    amount = "not a number" if size == float("inf") else f"{size:.3g} budgets"
    return (
        f"{len(rows)} of {shares.shape[0]} rows, first: row {rows[0]} ({problem.row_name(rows[0])}), {which}; "
        f"worst {amount} at row {row}, head {head}"
    )


def _abridged(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:4]))
    return shown if len(numbers) <= 4 else f"{shown}, ... ({len(numbers)} in all)"
