"""``refusals``: what is declared runs; what is not declared is refused, or answered right.

A feature quietly ignored is the worst bug of all: accepted, undeclared and wrong fails here. Wrong answers to declared
cases are the business of ``numerics``. Cannot see: declarations no case of the run asks about.
"""

import torch

from attncheck.backends.declarations import is_merged, required_features
from attncheck.harness.checks.findings import Broken, Finding, Holds, NotExamined
from attncheck.harness.checks.interface import Check, CheckedCase
from attncheck.harness.checks.numerics import output_shares, summarize
from attncheck.harness.driver.kv_pool import same_bytes
from attncheck.harness.driver.observation import Observation, Raised
from attncheck.harness.driver.session import Session
from attncheck.harness.problem.problem import Problem
from attncheck.harness.truth.explain import explain
from attncheck.harness.truth.truth import Truth
from attncheck.reports.analysis.support import ANSWERED, REFUSED, UNCLEAR
from attncheck.reports.run_file.causes import cause_of_error

NOT_REFUSABLE = frozenset({"short_keys"})
"""Features whose absence cannot be noticed without reading lengths on the host: compared only where declared."""


def check_declared(session: Session, seen: Observation | Raised) -> Finding:
    """A case the declarations accept: it must run, and so must the profiling call without metadata."""
    if isinstance(seen, Raised):
        return broken_promise(seen)
    pool_before = None if session.pool is None else session.pool.bytes().clone()
    idle = session.run_without_metadata()
    if isinstance(idle, Raised):
        return Broken(
            f"forward without metadata (the profiling call) raised {type(idle.error).__name__}: {idle.message}",
            details=(idle.trace,),
        )
    if not bool(torch.isfinite(idle.double()).all()):
        return Broken("forward without metadata (the profiling call) left NaN or Inf in the output")
    if session.pool is not None and pool_before is not None and not same_bytes(pool_before, session.pool.bytes()):
        return Broken("forward without metadata (the profiling call) changed a cache it was not given")
    return Holds()


def broken_promise(raised: Raised) -> Broken:
    """A declared case that was refused, or broke."""
    verb = "refused" if raised.is_refusal else "raised"
    return Broken(
        f"declared, but {verb} at {raised.stage}: {type(raised.error).__name__}: {raised.message}",
        details=(raised.trace,),
        finding=_cause(raised),  # of the checks that raised as well
    )


def _cause(raised: Raised) -> str:
    return cause_of_error(type(raised.error).__name__, raised.stage, raised.message, raised.trace)


def check_undeclared(
    problem: Problem, truth: Truth, attempt: Observation | Raised, reasons: tuple[str, ...]
) -> Finding:
    """A case the declarations leave out, tried all the same: refusing is right, answering right is fine."""
    if isinstance(attempt, Raised):
        if attempt.is_refusal:
            return Holds(notes=(f"{REFUSED} {attempt.stage}: {attempt.message}",))
        after = f" after changing {' and '.join(attempt.touched)}" if attempt.touched else ""
        return Broken(
            f"{UNCLEAR}: {type(attempt.error).__name__} at {attempt.stage}{after}: {attempt.message}",
            meaning="a case the backend cannot do must be refused with ValueError, NotImplementedError or TypeError",
            details=(*reasons, attempt.trace),
            finding=f"{UNCLEAR}: {_cause(attempt)}",
        )
    shares = output_shares(truth, attempt)
    if bool(attempt.unwritten.any()) or bool((shares > 1).any()):
        return Broken(
            f"not declared ({'; '.join(reasons)}), accepted, and wrong: {summarize(problem, shares)}",
            {"budget_share": float(shares.max())},
            explain(problem, truth, attempt.output[: len(shares)], shares),
        )
    return Holds(notes=(f"{ANSWERED}: {'; '.join(reasons)}",))


def not_tried(problem: Problem, features: frozenset[str]) -> NotExamined | None:
    """Undeclared cases that are not tried at all, and why."""
    case = problem.case
    needs = required_features(case.layer, case.cache, case.batch, features) - features
    if is_merged(case.batch, features) and needs & {"lse", "cascade"}:
        name = case.batch.path.name
        return NotExamined(
            (f"path {name}: the backend is not asked itself, and the path cannot be played over forward",)
        )
    missing = needs & NOT_REFUSABLE
    if not missing:
        return None
    names = ", ".join(sorted(missing))
    return NotExamined((f"{names}: compared only where declared, since refusing it needs the lengths on the host",))


def _check(case: CheckedCase) -> Finding:
    if case.undeclared:
        return _check_undeclared_case(case)
    session, seen = case.try_first_step()
    return broken_promise(session) if isinstance(session, Raised) else check_declared(session, seen)


def _check_undeclared_case(case: CheckedCase) -> Finding:
    skipped = not_tried(case.problem, case.backend.features)
    if skipped is not None:
        return skipped
    session, seen = case.try_first_step()
    attempt = session if isinstance(session, Raised) else seen
    return check_undeclared(case.problem, case.truth, attempt, case.undeclared)


CHECK = Check(_check, tries_undeclared=True)
