"""``determinism``: the same input gives the same bits of output, LSE and cache, on the same impl and on a new one.

A backend that declares ``deterministic=False`` must stay within the budget instead. Cannot see: differences between
processes or machines, and randomness that happens to repeat in these steps.
"""

from collections.abc import Iterator

from torch import Tensor

from attncheck.harness.checks.findings import Broken, Finding, Holds
from attncheck.harness.checks.interface import Check, CheckedCase
from attncheck.harness.checks.numerics import differing_rows, output_shares
from attncheck.harness.driver.kv_pool import same_bytes
from attncheck.harness.driver.observation import Observation, Raised
from attncheck.harness.driver.session import Session
from attncheck.harness.problem.problem import Problem
from attncheck.harness.truth.truth import Truth

_MEANING = (
    "equal inputs give different bits: the order of sums varies, memory is read before it is written, or a call leaves "
    "state behind; a backend may declare deterministic=False"
)


def check_determinism(problem: Problem, truth: Truth, session: Session, first: Observation) -> Finding:
    """Compare two more steps of the same problem with ``first``: one on the same impl, one on a new impl."""
    exact = session.backend.conventions.deterministic
    right = (output_shares(truth, first) <= 1).all(dim=1)
    for how, again in _repeats(problem, session):
        if isinstance(again, Raised):
            return again
        for name, moved in _moved_rows(truth, first, again, right, exact=exact):
            if bool(moved.any()):
                row, count = int(moved.nonzero()[0]), int(moved.sum())
                kind = "have other bits" if exact else "exceed the allowed error"
                place = f"the first is row {row} ({problem.row_name(row)})"
                summary = f"{count} of {len(moved)} rows of the {name} {kind}, {place}, {how}"
                return Broken(summary, {"rows_moved": count}, _MEANING)
        was, now = first.pool_after, again.pool_after
        if was is not None and now is not None and not same_bytes(was, now):
            return Broken(f"the cache holds other bytes, {how}", meaning=_MEANING)
    notes = () if exact else ("compared within the allowed error: the backend declares deterministic=False",)
    return Holds({"rows": len(right), "repeats": 2, "bitwise": int(exact)}, notes)


def _repeats(problem: Problem, session: Session) -> Iterator[tuple[str, Observation | Raised]]:
    yield "when the step is repeated on the same impl", session.run()
    new = Session(session.backend, problem, session.device, pool=session.pool)
    yield "when the step is repeated on a new impl and builder", new.run()


def _moved_rows(
    truth: Truth, first: Observation, again: Observation, right: Tensor, *, exact: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, bool ``[T]``) of the changed rows of output and LSE. If not ``exact``: of the output only."""
    if not exact:
        yield "output", right & (output_shares(truth, again) > 1).any(dim=1)
        return
    yield "output", differing_rows(first.output[: len(right)], again.output[: len(right)])
    if first.lse is not None and again.lse is not None:
        yield "LSE", differing_rows(first.lse[: len(right)], again.lse[: len(right)])


def _check(case: CheckedCase) -> Finding:
    return check_determinism(case.problem, case.truth, *case.first_step())


CHECK = Check(_check)
