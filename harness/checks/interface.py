"""What a check is, and what it receives. Start here to add a check.

A check is one row of ``CHECKS`` in ``reference/spec.py`` plus one module here with the row's name. The row sits
there because case files, the schema and ``list`` need it without importing the harness. Everything that only the
harness needs is in the module's ``CHECK``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, cast

import torch

from attncheck.backends.contract import AttentionBackend
from attncheck.backends.registry import LoadedBackend
from attncheck.cases.model import Case
from attncheck.harness.checks.findings import Finding, NotExamined
from attncheck.harness.driver.foreign_code import StageError
from attncheck.harness.driver.observation import Observation, Raised
from attncheck.harness.driver.session import Session
from attncheck.harness.problem.problem import Problem
from attncheck.harness.truth.truth import Truth

T = TypeVar("T")


class SharedByChecks:
    """Objects shared by all checks of a run, such as measurements that many cases use. Holds at most one per class."""

    def __init__(self, *given: object) -> None:
        self._objects: dict[type, object] = {type(each): each for each in given}

    def get(self, kind: type[T], make: Callable[[], T]) -> T:
        """Return the run's object of class ``kind``; the first call creates it with ``make``."""
        if kind not in self._objects:
            self._objects[kind] = make()
        return cast(T, self._objects[kind])


@dataclass(frozen=True)
class SelectedCases:
    """The cases of a run. ``cases_with(ref, check)`` returns those that run ``check`` on backend ``ref``, in order."""

    cases_with: Callable[[str, str], tuple[Case, ...]] = lambda _ref, _check: ()


class CheckedCase:
    """One case on one backend. The session and the first step are created on first use and shared by all checks.

    ``undeclared``: why the backend's declarations exclude the case. Empty if they include it.
    ``is_output_explained``: whether ``numerics`` named the fault of a wrong output, or tried all on several cases.
    """

    def __init__(
        self,
        loaded: LoadedBackend,
        problem: Problem,
        truth: Truth,
        device: torch.device,
        undeclared: tuple[str, ...],
        shared: SharedByChecks,
    ) -> None:
        self.loaded, self.problem, self.truth, self.device = loaded, problem, truth, device
        self.undeclared, self.shared = undeclared, shared
        self.is_output_explained = False
        self._session: Session | Raised | None = None
        self._seen: Observation | Raised | None = None

    @property
    def backend(self) -> type[AttentionBackend]:
        """The class under test."""
        return self.loaded.backend

    @property
    def seen(self) -> Observation | Raised | None:
        """The first step, or what the backend raised. None if no check has needed it so far."""
        return self._seen

    def first_step(self) -> tuple[Session, Observation]:
        """Return the session and the observation of its first step. Raise StageError if the backend raised."""
        session, seen = self.try_first_step()
        if isinstance(session, Raised):
            raise StageError(session)
        if isinstance(seen, Raised):
            raise StageError(seen)
        return session, seen

    def try_first_step(self) -> tuple[Session | Raised, Observation | Raised]:
        """Return the session and its first step; instead of either, return what the backend raised."""
        if self._session is None:
            try:
                self._session = Session(self.backend, self.problem, self.device)
            except StageError as failure:
                self._session = failure.raised
        if self._seen is None:
            self._seen = self._session if isinstance(self._session, Raised) else self._session.run()
        return self._session, self._seen


def _always_applies(_case: Case, _features: frozenset[str]) -> NotExamined | None:
    return None


@dataclass(frozen=True)
class Check:
    """How a check runs.

    ``run`` returns the finding for a case, or raises StageError. ``not_applicable`` returns why the check has nothing
    to examine, based only on the case and the backend's features. ``tries_undeclared`` selects whether the check also
    runs on cases that the backend does not declare.
    """

    run: Callable[[CheckedCase], Finding]
    not_applicable: Callable[[Case, frozenset[str]], NotExamined | None] = _always_applies
    tries_undeclared: bool = False
