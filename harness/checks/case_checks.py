"""The checks of one case of one backend, made on one problem and what was first seen of it.

Must not know: plans, records.
"""

from pathlib import Path

import torch

from attncheck.backends.registry import LoadedBackend
from attncheck.cases.model import Case
from attncheck.harness.checks import cache_write, claims, containment, lse, next_step, numerics
from attncheck.harness.checks.cudagraph.check import GraphLevelCheck, unexamined_reasons
from attncheck.harness.checks.dump import dump_case
from attncheck.harness.checks.findings import Finding, Holds, NotExamined
from attncheck.harness.checks.functions.check import FUNCTION_PATHS
from attncheck.harness.checks.timing.check import TimingCheck, unasked_reasons
from attncheck.harness.driver.foreign_code import StageError
from attncheck.harness.driver.observation import Observation, Raised
from attncheck.harness.driver.session import Session
from attncheck.harness.problem.problem import Problem
from attncheck.harness.truth.truth import Truth
from attncheck.reference.spec import BACKEND_CHECKS


def not_applicable(check: str, case: Case, features: frozenset[str]) -> NotExamined | None:
    """Why ``check`` asks a backend of these features nothing, as far as can be told without it; None: it asks."""
    if case.batch.path.name in FUNCTION_PATHS:
        return None
    if check == "lse" and "lse" not in features:
        return NotExamined(("feature 'lse' is not declared",))
    if check == "cudagraph" and (reasons := unexamined_reasons(case)):
        return NotExamined(reasons, "attncheck")
    if check == "timing" and (reasons := unasked_reasons(case, features)):
        return NotExamined(reasons, "attncheck")
    return None


class CaseChecks:
    """One case of one backend: the session and the first observation are shared by the checks that need them."""

    def __init__(
        self,
        backend: LoadedBackend,
        problem: Problem,
        truth: Truth,
        device: torch.device,
        reasons: tuple[str, ...],
        graphs: GraphLevelCheck,
        clocks: TimingCheck,
    ) -> None:
        self._loaded, self._backend, self._problem, self._truth = backend, backend.backend, problem, truth
        self._device, self._reasons, self._graphs, self._clocks = device, reasons, graphs, clocks
        self._session: Session | Raised | None = None
        self._seen: Observation | Raised | None = None

    def dump(self, folder: Path, backend: str) -> None:
        """The case as a file, with the first observation if the backend was driven at all."""
        dump_case(folder, self._problem, self._truth, backend, self._seen)

    def examine(self, check: str) -> Finding:
        """The finding of one check."""
        if self._reasons:
            return self._undeclared(check)
        if (skipped := not_applicable(check, self._problem.case, self._backend.features)) is not None:
            return skipped
        if check == "cudagraph":
            return self._graphs.examine(self._backend, self._problem.case)
        if check == "timing":
            return self._clocks.examine(self._loaded, self._problem, self._truth)
        session, seen = self._observe()
        if check == "claims":
            if isinstance(session, Raised):
                return claims.broken_promise(session)
            return claims.check_declared(session, seen)
        if isinstance(session, Raised):
            return session
        if isinstance(seen, Raised):
            return seen
        match check:
            case "numerics":
                first = numerics.check_numerics(self._problem, self._truth, seen)
                if not isinstance(first, Holds):
                    return first
                return next_step.check_next_step(self._problem, self._truth, session, first)
            case "lse":
                return lse.check_lse(self._problem, self._truth, seen, self._backend.conventions)
            case "cache_write":
                return cache_write.check_cache_write(self._problem, session, seen)
            case "containment":
                return containment.check_containment(self._problem, self._truth, session, seen)
            case _:
                raise ValueError(f"check {check!r} has no examiner; known: {', '.join(BACKEND_CHECKS)}")

    def _undeclared(self, check: str) -> Finding:
        if check != "claims":
            return NotExamined(self._reasons)
        skipped = claims.not_tried(self._problem, self._backend.features)
        if skipped is not None:
            return skipped
        session, seen = self._observe()
        attempt = session if isinstance(session, Raised) else seen
        return claims.check_undeclared(self._problem, self._truth, attempt, self._reasons)

    def _observe(self) -> tuple[Session | Raised, Observation | Raised]:
        if self._session is None:
            try:
                self._session = Session(self._backend, self._problem, self._device)
            except StageError as failure:
                self._session = failure.raised
        if self._seen is None:
            self._seen = self._session if isinstance(self._session, Raised) else self._session.run()
        return self._session, self._seen
