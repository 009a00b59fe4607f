"""``determinism``: the same input gives the same bits of output, LSE and cache, on the same impl and on a new one.

A backend that declares ``deterministic=False`` must stay within the budget instead. Cannot see: differences between
processes or machines, and randomness that happens to repeat in these steps.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from attncheck.backends.conventions import Conventions
from attncheck.harness.checks.findings import Broken, Finding, Holds
from attncheck.harness.checks.interface import Check, CheckedCase
from attncheck.harness.checks.lse import lse_shares
from attncheck.harness.checks.numerics import differing_rows, output_shares
from attncheck.harness.driver.kv_pool import same_bytes
from attncheck.harness.driver.observation import Observation, Raised
from attncheck.harness.driver.session import Session
from attncheck.harness.problem.output_quantisation import output_values
from attncheck.harness.problem.problem import Problem
from attncheck.harness.truth.tolerance import share_of_budget
from attncheck.harness.truth.truth import Truth

_ROUNDING = (
    "equal inputs give different bits: probably the order of sums varies; a race, or memory that is read before it is "
    "written, can do the same; declare deterministic=False only if the difference is intended"
)
_BEYOND_ROUNDING = (
    "equal inputs give different outputs: memory is read before it is written, a call leaves state behind, or threads "
    "race"
)


def check_determinism(problem: Problem, truth: Truth, session: Session, first: Observation) -> Finding:
    """Compare two more steps of the same problem with ``first``: one on the same impl, one on a new impl."""
    conventions = session.backend.conventions
    exact = conventions.deterministic
    right = (output_shares(truth, first) <= 1).all(dim=1)
    for how, again in _repeats(problem, session):
        if isinstance(again, Raised):
            return again
        for name, moved, sizes in _moved_rows(truth, first, again, right, conventions):
            if bool(moved.any()):
                row, count, size = int(moved.nonzero()[0]), int(moved.sum()), float(sizes[moved].max())
                kind, what = ("have other bits", "difference") if exact else ("exceed the allowed error", "error")
                place = f"the first is row {row} ({problem.row_name(row)})"
                amount = "NaN or infinite" if size == math.inf else f"{size:.3g} times the allowed error"
                summary = (
                    f"{count} of {len(moved)} rows of the {name} {kind}, {place}, {how}; the largest {what} is {amount}"
                )
                return Broken(summary, {"rows_moved": count}, _BEYOND_ROUNDING if size > 1 else _ROUNDING)
        was, now = first.pool_after, again.pool_after
        if was is not None and now is not None and not same_bytes(was, now):
            return Broken(f"the cache holds other bytes, {how}", meaning=_BEYOND_ROUNDING)
    notes = () if exact else ("compared within the allowed error: the backend declares deterministic=False",)
    return Holds({"rows": len(right), "repeats": 2, "bitwise": int(exact)}, notes)


def _repeats(problem: Problem, session: Session) -> Iterator[tuple[str, Observation | Raised]]:
    yield "when the step is repeated on the same impl", session.run()
    new = Session(session.backend, problem, session.device, pool=session.pool)
    yield "when the step is repeated on a new impl and builder", new.run()


def _moved_rows(
    truth: Truth, first: Observation, again: Observation, right: Tensor, conventions: Conventions
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (name, changed rows bool ``[T]``, changes ``[T, H]`` in budgets) of output and LSE.

    If the backend is not deterministic: of the output only, with the errors instead of the changes.
    """
    if not conventions.deterministic:
        shares = output_shares(truth, again)
        yield "output", right & (shares > 1).any(dim=1), shares
        return
    was, now = (output_values(seen.output[: len(right)], truth.codes) for seen in (first, again))
    moved = differing_rows(first.output[: len(right)], again.output[: len(right)])
    yield "output", moved, share_of_budget(_change(was, now), truth.budget)
    if first.lse is not None and again.lse is not None:
        was, now = first.lse[: len(right)].double(), again.lse[: len(right)].double()
        change = _change(was, now) * (math.log(2) if conventions.lse_base == "2" else 1.0)
        yield "LSE", differing_rows(was, now), lse_shares(change, torch.zeros_like(change), truth.budget.lse)


def _change(was: Tensor, now: Tensor) -> Tensor:
    """Return ``now`` minus ``was``, with 0 where both are the same infinity or NaN."""
    return (now - was).masked_fill((now == was) | (torch.isnan(now) & torch.isnan(was)), 0.0)


def _check(case: CheckedCase) -> Finding:
    return check_determinism(case.problem, case.truth, *case.first_step())


CHECK = Check(_check)
