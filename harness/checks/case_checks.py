"""Run the checks of one case on one backend, each by name.

The module of a check is imported on first use, or by :func:`import_checks`.
"""

from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Protocol

from attncheck.backends.declarations import OTHER_PATHS
from attncheck.cases.model import Case
from attncheck.harness.checks.findings import Finding, FindingError, NotExamined
from attncheck.harness.checks.interface import Check, CheckedCase, dump_case
from attncheck.reference.spec import BACKEND_CHECKS

_PLACES = {
    "cudagraph": "cudagraph.check",
    "determinism": "invariance",
    "features": "refusals",
    "lse": "numerics",
    "timing": "timing.check",
}
"""By check: its module in ``harness/checks``, if that has another name than the check."""


def find_check(name: str) -> Check:
    """Return ``CHECKS[name]`` from the module of the check. Raise ValueError if no check has that name."""
    if name not in BACKEND_CHECKS:
        raise ValueError(f"check {name!r} has no examiner; known: {', '.join(BACKEND_CHECKS)}")
    module = import_module(f"attncheck.harness.checks.{_PLACES.get(name, name)}")
    check: Check = module.CHECKS[name]
    return check


def import_checks(checks: Iterable[str] = BACKEND_CHECKS, *, functions: bool = True) -> None:
    """Import the modules of these checks and, if ``functions``, those of paths that do not call attention.

    Call this before loading a backend, because a backend may replace what these modules import from torch or Python.
    """
    for check in checks:
        find_check(check)
    for name in ("functions", "recurrence") if functions else ():
        import_module(f"attncheck.harness.checks.{name}")


def not_applicable(check: str, case: Case, features: frozenset[str]) -> NotExamined | None:
    """Return why ``check`` does not apply to a backend with these features, or None if it applies."""
    if case.batch.path.name in OTHER_PATHS:
        return None
    return find_check(check).not_applicable(case, features)


class CaseChecks(Protocol):
    """What the checks of one case examine: attention, a layer with a state, a function, or a builder alone."""

    def find(self, check: str) -> Callable[[], Finding] | NotExamined:
        """Return the function that runs a check, or why it examines nothing."""

    def dump(self, folder: Path, backend: str) -> None:
        """Write the tensors of the case to a file in ``folder``."""


def finding_of(examination: CaseChecks, check: str) -> Finding:
    """Return the finding of one check. Raise StageError if the backend raised."""
    run = examination.find(check)
    if isinstance(run, NotExamined):
        return run
    try:
        return run()
    except FindingError as ended:
        return ended.finding


class AttentionChecks:
    """The checks of attention. ``case``: the case on one backend."""

    def __init__(self, case: CheckedCase) -> None:
        self._case = case

    def find(self, check: str) -> Callable[[], Finding] | NotExamined:
        """Return the function that runs a check, or why it examines nothing."""
        case, found = self._case, find_check(check)
        if case.undeclared:
            return partial(found.run, case) if found.tries_undeclared else NotExamined(case.undeclared)
        return not_applicable(check, case.problem.case, case.backend.features) or partial(found.run, case)

    def dump(self, folder: Path, backend: str) -> None:
        """Write the case to a file in ``folder``, including the first step if a check needed it."""
        dump_case(folder, self._case.problem, self._case.truth, backend, self._case.seen)
