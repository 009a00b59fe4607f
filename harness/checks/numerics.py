"""``numerics``: in the first step, each real output row of each head is within the error budget around the truth.

Cannot see: errors below the rounding of the layer's dtype, keys whose weight is below it, and errors of later steps.
"""

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from attncheck.harness.checks.findings import Broken, Finding, Holds
from attncheck.harness.checks.interface import Check, CheckedCase
from attncheck.harness.driver.kv_pool import same_bytes
from attncheck.harness.driver.observation import Observation
from attncheck.harness.driver.output_buffers import still_unwritten
from attncheck.harness.problem.output_quantisation import output_error, output_values
from attncheck.harness.problem.problem import Problem
from attncheck.harness.truth.explain import concerned_features, explain, faults_tried
from attncheck.harness.truth.tolerance import share_of_budget
from attncheck.harness.truth.truth import Truth
from attncheck.harness.truth.truth_device import truth_notes
from attncheck.harness.truth.wrong_rows import places
from attncheck.reports.run_file.causes import likely_causes, without_figures


class NamesRows(Protocol):
    """A problem that can name its rows."""

    def row_name(self, row: int) -> str:
        """Return a readable name for a row, for use in messages."""


_SEVERAL, _ENOUGH = 2, 2
"""Cases that a cause must explain to be tried first, and cases without a known cause that refute what was tried."""


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
        counts = Counter(map(without_figures, self.named))
        first = [cause for cause in self.named if counts[without_figures(cause)] >= _SEVERAL]
        kinds = {(request.query_len == 1, request.cached > 0) for request in problem.requests}
        is_bounded = self.unexplained >= _ENOUGH and kinds <= self.kinds
        among = faults_tried(problem, truth) - self.refuted if is_bounded else None
        meaning = explain(problem, truth, output, shares, first=first, among=among)
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
    shares = output_shares(truth, seen)
    values = output_values(seen.output[: len(shares)], truth.codes)
    figures = {"rows": shares.shape[0], "heads": shares.shape[1]} | wrong_figures(shares, values, seen.unwritten)
    unwritten = seen.unwritten.nonzero().flatten().tolist()
    if unwritten:
        # A byte has no NaN that no computation produces. The NaN of other dtypes is kept by a sum.
        what = "only added to" if truth.codes is None else "hold NaN"
        written = shares.masked_fill(seen.unwritten.to(shares.device)[:, None], 0.0)
        others = f"; among the others: {summarize(problem, written)}" if bool((written > 1).any()) else ""
        return Broken(
            f"{len(unwritten)} of {shares.shape[0]} rows were never written{_unwritten_part(seen)}, or {what}, "
            f"the first is row {unwritten[0]} ({problem.row_name(unwritten[0])}){others}",
            figures,
            _unsaturated(truth, seen),
            seen.protocol,
        )
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
    return share_of_budget(output_error(seen.output[: len(truth.out)], truth.out, truth.codes), truth.budget)


def differing_rows(was: Tensor, now: Tensor) -> Tensor:
    """Return bool ``[T]``: True for rows that differ in any bit. Two NaN count as equal."""
    if same_bytes(was, now):
        return torch.zeros(len(was), dtype=torch.bool, device=was.device)
    was, now = was.double(), now.double()
    return ((was != now) & ~(torch.isnan(was) & torch.isnan(now))).flatten(1).any(dim=1)


def summarize(problem: NamesRows, shares: Tensor) -> str:
    """Return one line that states which rows and heads are wrong and by how much; ``shares [T, H]`` in budgets.

    At least one share must be above 1.
    """
    wrong = shares > 1
    rows = wrong.any(dim=1).nonzero().flatten().tolist()
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
        others = f"; among the finite values: {summarize(problem, finite)}"
    elif size == math.inf and bool(torch.isfinite(shares).any()):
        others = "; all finite values are right"
    are = "is" if len(rows) == 1 else "are"
    return (
        f"{len(rows)} of {shares.shape[0]} rows {are} wrong, the first is row {rows[0]} "
        f"({problem.row_name(rows[0])}), in {which}; {amount} at row {row}, head {head}{others}"
    )


def wrong_figures(shares: Tensor, values: Tensor, unwritten: Tensor) -> dict[str, float | int]:
    """Return the figures that an expectation may bound: the error, the wrong rows and heads, and their kinds of value.

    ``shares``: ``[T, H]``, in budgets, of ``values [T, H, Dv]``. ``unwritten``: bool ``[T]``.
    """
    wrong, written = shares > 1, ~unwritten.to(shares.device)[:, None]
    finite = shares.masked_fill(torch.isinf(shares), 0.0)
    sorts = {
        "rows_unwritten": ~written,
        "rows_nan": torch.isnan(values).any(dim=-1) & wrong & written,
        "rows_inf": torch.isinf(values).any(dim=-1) & wrong & written,
        "rows_finite_wrong": finite > 1,
    }
    figures: dict[str, float | int] = {"budget_share": float(shares.max()) if shares.numel() else 0.0}
    if not bool(wrong.any()):
        return figures
    figures |= {"rows_wrong": int(wrong.any(dim=1).sum()), "heads_wrong": int(wrong.any(dim=0).sum())}
    counts = {name: int(where.any(dim=1).sum()) for name, where in sorts.items()}
    return figures | {"finite_budget_share": float(finite.max())} | {name: n for name, n in counts.items() if n}


def _abridged(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:4]))
    return shown if len(numbers) <= 4 else f"{shown}, ... ({len(numbers)} in all)"


def _check(case: CheckedCase) -> Finding:
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


CHECK = Check(_check)
