"""``numerics``: every real output row of every head lies within the error budget of the truth.

A model runner keeps an impl and a builder, and gives them batch after batch; metadata padded for a captured graph has
maxima that are upper bounds. So a step after other batches must be as right as the first. Cannot see: errors below the
rounding of the layer's dtype, keys whose weight lies below it, and state that returns to what it was.
"""

from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from attncheck.cases.model import Case
from attncheck.cases.paths import implied_path
from attncheck.harness.checks.findings import Broken, Finding, Holds
from attncheck.harness.checks.interface import Check, CheckedCase
from attncheck.harness.driver.foreign_code import declared_reasons
from attncheck.harness.driver.observation import Observation, Raised
from attncheck.harness.driver.session import Fill, Session
from attncheck.harness.problem.output_quantisation import output_error
from attncheck.harness.problem.problem import Problem, build_problem
from attncheck.harness.truth.explain import concerned_features, explain
from attncheck.harness.truth.tolerance import share_of_budget
from attncheck.harness.truth.truth import Truth
from attncheck.harness.truth.truth_device import truth_notes
from attncheck.reference.spec import PaddingSpec, RequestSpec

_FIXED_ROWS = ("spec_decode", "tree", "fast_prefill")
_CUT_BATCHES = ("cascade", "split_kv", "dcp", "micro_batch")


class NamesRows(Protocol):
    """A problem whose rows have names."""

    def row_name(self, row: int) -> str:
        """How a person would name a row."""


def check_numerics(problem: Problem, truth: Truth, seen: Observation, *, explains: bool = True) -> Finding:
    """Judge the output of one step. ``explains``: whether a wrong one is explained, which takes most of the time."""
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
    summary, figures = summarize(problem, shares), figures | {"rows_wrong": int((shares > 1).any(dim=1).sum())}
    if not explains:
        return Broken(summary, figures, details=seen.protocol)
    meaning = explain(problem, truth, seen.output[: len(shares)], shares)
    return Broken(
        summary,
        figures,
        meaning,
        seen.protocol,
        concerns=concerned_features(problem, truth, meaning),
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


def check_next_step(problem: Problem, truth: Truth, session: Session, first: Finding) -> Finding:
    """``first`` if the next step is right as well, else what is wrong with it.

    A new impl and builder see other batches first, so that what they keep of them is not what they need. The answers to
    those are not judged, so their rows are drawn among the problem's.
    """
    others = [
        build_problem(other, problem.seed + 1 + number, rows_of=problem)
        for number, other in enumerate(other_batches(problem.case))
        if not declared_reasons(partial(session.backend.unsupported_reasons, other.layer, other.cache, other.batch))
    ]
    later = session
    if others:
        following = (*others[1:], problem)
        later = Session(session.backend, others[0], session.device, following, pool=session.pool)
    for number, other in enumerate(others):
        later = later.beside(other) if number else later
        moved_on = later.advance()
        if moved_on is not None:
            return replace(moved_on, stage=f"{moved_on.stage} of another batch")
    later = later.beside(problem) if others else session
    wrong = _check_again(problem, truth, later, Fill(loose_bounds=True))
    if wrong is None:
        return first
    if isinstance(wrong, Raised):
        return replace(wrong, stage=f"{wrong.stage} of a second step")
    exact = _check_again(problem, truth, later, Fill())
    if exact is None:
        return Broken(
            f"with max_query_len and max_seq_len above the batch's: {wrong.summary}",
            wrong.figures,
            "the maxima of the metadata may be upper bounds; lengths are in query_start_loc and seq_lens",
            wrong.details,
        )
    return Broken(
        f"right as the first batch, wrong after others: {wrong.summary}",
        wrong.figures,
        "something is kept from an earlier call, or the backend is not deterministic",
        wrong.details,
    )


def other_batches(case: Case) -> tuple[Case, Case]:
    """Batches for the same layer: one of the same shape with other pages and lengths, and one of half the lengths.

    A path that fixes the number of rows keeps it; where a path is a way of cutting the batch, an ordinary step comes
    between, as in a model runner.
    """
    path = case.batch.path
    requests = list(case.batch)
    alike = [_resized(r, r.query_len, r.context_len - 1) for r in requests]
    rows = [r.query_len if path.name in _FIXED_ROWS else -(-r.query_len // 2) for r in requests]
    halves = zip(reversed(requests), reversed(rows), strict=True)
    smaller = [_resized(r, query_len, r.context_len // 2, encoder_share=2) for r, query_len in halves]
    cache = replace(case.cache, num_blocks=None)
    if path.name in _CUT_BATCHES:
        path = implied_path(case.layer)

    def variant(name: str, others: list[RequestSpec], padding: PaddingSpec) -> Case:
        batch = replace(case.batch, requests=tuple(others), padding=padding, path=path)
        return replace(case, id=f"{case.id}.{name}", batch=batch, cache=cache, tolerance=None)

    return variant("alike", alike, case.batch.padding), variant("smaller", smaller, PaddingSpec())


def _resized(request: RequestSpec, query_len: int, context_len: int, encoder_share: int = 1) -> RequestSpec:
    """One such request, of other lengths, without a shared prefix; a context there was does not vanish.

    ``encoder_share``: by which an encoder's length is divided.
    """
    least = 1 if request.context_len > 0 else 0
    seq_len = query_len + max(least, context_len)
    encoder_len = None if request.encoder_len is None else request.encoder_len // encoder_share
    return RequestSpec(query_len=query_len, seq_len=seq_len, encoder_len=encoder_len)


def _check_again(problem: Problem, truth: Truth, session: Session, fill: Fill) -> Broken | Raised | None:
    """What is wrong with one more step; None: nothing."""
    seen = session.run(fill, images=False)
    if isinstance(seen, Raised):
        return seen
    finding = check_numerics(problem, truth, seen, explains=False)
    return finding if isinstance(finding, Broken) else None


def _check(case: CheckedCase) -> Finding:
    session, seen = case.first_step()
    finding = check_numerics(case.problem, case.truth, seen)
    if isinstance(finding, Holds):
        finding = check_next_step(case.problem, case.truth, session, finding)
    notes = truth_notes(case.problem.case, case.device)
    match finding:
        case Raised():
            return finding
        case Holds():
            finding = replace(finding, notes=(*finding.notes, *notes))
        case Broken():
            finding = replace(finding, details=(*finding.details, *notes))
    return replace(finding, chosen_kernels=session.chosen_kernels)


CHECK = Check(_check)
