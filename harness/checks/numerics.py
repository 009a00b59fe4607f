"""The checks ``numerics`` and ``lse``: output and log-sum-exp against the float64 truth."""

import math
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from attncheck.backends.conventions import Conventions
from attncheck.cases.model import Case
from attncheck.harness.checks.findings import Broken, Finding, Holds, NotExamined
from attncheck.harness.checks.interface import Check, CheckedCase
from attncheck.harness.diagnosis.explain import concerned_features, explain, explain_lse, faults_tried
from attncheck.harness.diagnosis.patterns import places
from attncheck.harness.diagnosis.scores import lse_explanations
from attncheck.harness.driver.observation import Observation
from attncheck.harness.driver.outputs import still_unwritten
from attncheck.harness.driver.pool import same_bytes
from attncheck.harness.problem.problem import Problem
from attncheck.harness.problem.storage import output_error, output_values
from attncheck.harness.truth.truth import Truth, truth_notes
from attncheck.harness.truth.unpaged import share_of_budget
from attncheck.reports.run_file.causes import likely_causes, without_figures

# `numerics`: in the first step, each real output row of each head is within the error budget around the truth.
#
# Cannot see: errors below the rounding of the layer's dtype, keys whose weight is below it, and errors of later steps.


class NamesRows(Protocol):
    """A problem that can name its rows."""

    def row_name(self, row: int) -> str:
        """Return a readable name for a row, for use in messages."""


_ENOUGH = 2
"""Cases without a known cause that refute the faults tried on them."""


@dataclass
class EarlierCauses:
    """The causes of a backend's failures in this process, and the faults that fit none of its other failures.

    Most of the time of a failing run is spent on explanations. Therefore a cause that explained several cases is
    tried first. After several cases without a known cause, the faults that were tried on them are not tried again,
    unless a case has requests of another kind.
    """

    named: list[str] = field(default_factory=list)
    concerns: dict[str, tuple[str, ...]] = field(default_factory=dict)
    unexplained: int = 0
    kinds: set[tuple[bool, bool]] = field(default_factory=set)
    refuted: set[str] = field(default_factory=set)

    def explain(
        self, problem: Problem, truth: Truth, output: Tensor, shares: Tensor
    ) -> tuple[str | None, tuple[str, ...]]:
        """Return one line that explains a wrong output, or None, and the features that it concerns."""
        kinds = {(request.query_len == 1, request.cached > 0) for request in problem.requests}
        is_bounded = self.unexplained >= _ENOUGH and kinds <= self.kinds
        among = faults_tried(problem, truth) - self.refuted if is_bounded else None
        meaning = explain(problem, truth, output, shares, earlier=self.named, among=among)
        for cause in likely_causes(meaning)[:1]:
            self.named.append(cause)
            words = without_figures(cause)
            if words not in self.concerns:
                self.concerns[words] = concerned_features(problem, truth, meaning)
            return meaning, self.concerns[words]
        tried = faults_tried(problem, truth) if among is None else among
        if tried:  # none is tried on a large case
            self.unexplained += 1
            self.kinds |= kinds
            self.refuted |= tried
        return meaning, ()


class _CausesOfRun(dict[str, EarlierCauses]):
    """The earlier causes by the reference of the backend."""


def causes_of(case: CheckedCase) -> EarlierCauses:
    """Return the earlier causes of the backend of a case."""
    return case.shared.get(_CausesOfRun, _CausesOfRun).setdefault(case.loaded.ref, EarlierCauses())


def check_numerics(
    problem: Problem,
    truth: Truth,
    seen: Observation,
    causes: EarlierCauses | None = None,
    *,
    explains: bool = True,
) -> Holds | Broken:
    """Judge the output of one step. ``explains``: also search for the cause of an error; takes most of the time."""
    seen = seen.judged_on(truth.out.device)
    shares = output_shares(truth, seen)
    values = output_values(seen.output[: len(shares)], truth.codes)
    figures = {"rows": shares.shape[0], "heads": shares.shape[1]} | wrong_figures(shares, values, seen.unwritten)
    if bool(seen.unwritten.any()):
        # A byte has no NaN that no computation produces. The NaN of other dtypes is kept by a sum.
        what = "only added to" if truth.codes is None else "hold NaN"
        written = shares.masked_fill(seen.unwritten.to(shares.device)[:, None], 0.0)
        others = f"; among the others: {summarize(problem, written)}" if bool((written > 1).any()) else ""
        rows = rows_in_words(problem, seen.unwritten, f" were never written{_unwritten_part(seen)}, or {what}")
        return Broken(f"{rows}{others}", figures, _unsaturated(truth, seen), seen.protocol)
    if not bool((shares > 1).any()):
        broken = seen.protocol
        return Broken(broken[0], figures, details=broken[1:]) if broken else Holds(figures)
    summary = summarize(problem, shares)
    if not explains:
        return Broken(summary, figures, details=seen.protocol)
    meaning, concerns = (causes or EarlierCauses()).explain(problem, truth, seen.output[: len(shares)], shares)
    return Broken(summary, figures, meaning, seen.protocol, concerns=concerns)


def _unwritten_part(seen: Observation) -> str:
    """Return in which heads and channels the unwritten rows are not written, in words; "" if in all, or if unknown."""
    output = seen.output[: len(seen.unwritten)][seen.unwritten]
    if output.dtype == torch.float64:
        return ""  # the results of parts, merged: the pattern is lost
    heads_and_channels = still_unwritten(output).any(dim=0)
    parts = []
    for name, missing in (("channel", heads_and_channels.any(dim=0)), ("head", heads_and_channels.any(dim=1))):
        if not bool(missing.all()):
            parts.append(places(name, missing.nonzero().flatten().tolist()))
    return f" in {' of '.join(parts)}" if parts else ""


def _unsaturated(truth: Truth, seen: Observation) -> str | None:
    """Return the saturation message if NaN appears only where the truth exceeds the range of the output format."""
    if truth.codes is None:
        return None
    missing = torch.isnan(seen.output[: len(truth.out)].double())
    beyond = truth.out.abs() > float(torch.finfo(truth.codes.dtype).max) * truth.codes.scale
    explained = bool(missing.any()) and bool(beyond[missing].all())
    return "outputs beyond the range of the format become NaN; they have to saturate" if explained else None


def output_shares(truth: Truth, seen: Observation) -> Tensor:
    """Return the error of each real row and head as a multiple of its budget, float64 ``[T, H]``."""
    output = seen.output[: len(truth.out)].to(truth.out.device)
    return share_of_budget(output_error(output, truth.out, truth.codes), truth.budget)


def differing_rows(was: Tensor, now: Tensor) -> Tensor:
    """Return bool ``[T]``: True for rows that differ in any bit. Two NaN count as equal."""
    if same_bytes(was, now):
        return torch.zeros(len(was), dtype=torch.bool, device=was.device)
    was, now = was.double(), now.double()
    return ((was != now) & ~(torch.isnan(was) & torch.isnan(now))).flatten(1).any(dim=1)


def rows_in_words(problem: NamesRows, rows: Tensor, what: str = "") -> str:
    """Return how many ``rows``, bool ``[T]``, are True, ``what`` they are, and which is the first; one must be True."""
    first = int(rows.nonzero()[0])
    return f"{int(rows.sum())} of {len(rows)} rows{what}, the first is row {first} ({problem.row_name(first)})"


def summarize(problem: NamesRows, shares: Tensor, *, has_heads: bool = True) -> str:
    """Return one line that states which rows and heads are wrong and by how much; ``shares [T, H]`` in budgets.

    At least one share must be above 1. ``has_heads``: whether the line names heads.
    """
    wrong = shares > 1
    rows = wrong.any(dim=1)
    heads = wrong.any(dim=0).nonzero().flatten().tolist()
    named = f"{'head' if len(heads) == 1 else 'heads'} {_abridged(heads)}"
    which = "all heads" if len(heads) == shares.shape[1] else named
    worst = int(shares.argmax())
    row, head = divmod(worst, shares.shape[1])
    size = float(shares[row, head])
    amount = (
        "the error is NaN or infinite"
        if size == math.inf
        else f"the largest error is {size:.3g} times the allowed error,"
    )
    finite = shares.masked_fill(torch.isinf(shares), 0.0)
    others = ""
    if size == math.inf and bool((finite > 1).any()):
        others = f"; among the finite values: {summarize(problem, finite, has_heads=has_heads)}"
    elif size == math.inf and bool(torch.isfinite(shares).any()):
        others = "; all finite values are right"
    are = "is" if int(rows.sum()) == 1 else "are"
    named_rows = rows_in_words(problem, rows, f" {are} wrong")
    in_heads, of_head = (f", in {which}", f", head {head}") if has_heads else ("", "")
    return f"{named_rows}{in_heads}; {amount} at row {row}{of_head}{others}"


def wrong_figures(shares: Tensor, values: Tensor, unwritten: Tensor) -> dict[str, float | int]:
    """Return the figures that an expectation may bound: the error, the wrong rows and heads, and their kinds of value.

    ``shares``: ``[T, H]``, in budgets, of ``values [T, H, Dv]``. ``unwritten``: bool ``[T]``.
    """
    wrong = shares > 1
    figures: dict[str, float | int] = {"budget_share": float(shares.max()) if shares.numel() else 0.0}
    if not bool(wrong.any()):
        return figures
    written = ~unwritten.to(shares.device)[:, None]
    finite = shares.masked_fill(torch.isinf(shares), 0.0)
    sorts = {
        "rows_unwritten": ~written,
        "rows_nan": torch.isnan(values).any(dim=-1) & wrong & written,
        "rows_inf": torch.isinf(values).any(dim=-1) & wrong & written,
        "rows_finite_wrong": finite > 1,
    }
    figures |= {"rows_wrong": int(wrong.any(dim=1).sum()), "heads_wrong": int(wrong.any(dim=0).sum())}
    counts = {name: int(where.any(dim=1).sum()) for name, where in sorts.items()}
    return figures | {"finite_budget_share": float(finite.max())} | {name: n for name, n in counts.items() if n}


def _abridged(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:4]))
    return shown if len(numbers) <= 4 else f"{shown}, ... ({len(numbers)} in all)"


def _check_numerics(case: CheckedCase) -> Finding:
    session, seen = case.first_step()
    causes = causes_of(case)
    finding = check_numerics(case.problem, case.truth, seen, causes)
    notes = truth_notes(case.problem.case, case.device)
    if isinstance(finding, Broken):
        case.is_output_explained = bool(likely_causes(finding.meaning)) or causes.unexplained > _ENOUGH
        finding = replace(finding, details=(*finding.details, *notes))
    else:
        finding = replace(finding, notes=(*finding.notes, *notes))
    return replace(finding, chosen_kernels=session.chosen_kernels)


# `lse`: the log-sum-exp of each row is right, in natural logarithm, and -inf exactly for rows that see no key.
#
# Cannot see: whether the backend uses the same LSE when it merges partial results itself. The finding depends only on
# the problem, the truth, the observation and the backend's declared conventions.


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
    seen = seen.judged_on(truth.lse.device)
    got = comparable_lse(problem, seen, conventions)
    if got is None:
        return NotExamined(("ALiBi measured from elsewhere together with sinks: the LSE has no common meaning",))
    shares = lse_shares(got, truth.lse, truth.budget.lse)
    worst = float(shares.max()) if shares.numel() else 0.0
    figures = {"rows": shares.shape[0], "heads": shares.shape[1], "budget_share": worst}
    if seen.lse_unwritten is not None and bool(seen.lse_unwritten.any()):
        return Broken(rows_in_words(problem, seen.lse_unwritten, " were never written, or only added to"), figures)
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


def _check_lse(case: CheckedCase) -> Finding:
    _, seen = case.first_step()
    conventions, is_output_explained = case.backend.conventions, case.is_output_explained
    return check_lse(case.problem, case.truth, seen, conventions, is_output_explained=is_output_explained)


def _not_applicable(_case: Case, features: frozenset[str]) -> NotExamined | None:
    return None if "lse" in features else NotExamined(("feature 'lse' is not declared",))


CHECKS = {
    "numerics": Check(_check_numerics),
    "lse": Check(_check_lse, _not_applicable),
}
