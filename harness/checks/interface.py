"""What a check is, and what it gets of a case. The place to begin for a new check.

A check is one row of ``CHECKS`` in ``reference/spec_names.py``, and one module here, found by the row's name.
The row lies among the shared words, since case files, the schema and ``list`` need it and must not load the harness.
All that only the harness needs lies in the module, as its ``CHECK``; so there is no second list to keep.
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
    """Objects that last for a run, such as measurements that many cases share: at most one of each class."""

    def __init__(self, *given: object) -> None:
        self._objects: dict[type, object] = {type(each): each for each in given}

    def get(self, kind: type[T], make: Callable[[], T]) -> T:
        """Return the run's object of class ``kind``, which ``make`` creates at the first call."""
        if kind not in self._objects:
            self._objects[kind] = make()
        return cast(T, self._objects[kind])


@dataclass(frozen=True)
class SelectedCases:
    """The cases of a run. ``asking(ref, check)``: those that ask the backend of a reference for a check, in order."""

    asking: Callable[[str, str], tuple[Case, ...]] = lambda _ref, _check: ()


class CheckedCase:
    """One case of one backend. The session and the first step are made at the first use, and shared by the checks.

    ``undeclared``: why the backend does not support the case, by its own declarations; empty: it does.
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
        self._session: Session | Raised | None = None
        self._seen: Observation | Raised | None = None

    @property
    def backend(self) -> type[AttentionBackend]:
        """The class under test."""
        return self.loaded.backend

    @property
    def seen(self) -> Observation | Raised | None:
        """The first step; None where no check has needed it so far."""
        return self._seen

    def first_step(self) -> tuple[Session, Observation]:
        """Return the session and what its first step did. Raises StageError for what the backend raised."""
        session, seen = self.try_first_step()
        if isinstance(session, Raised):
            raise StageError(session)
        if isinstance(seen, Raised):
            raise StageError(seen)
        return session, seen

    def try_first_step(self) -> tuple[Session | Raised, Observation | Raised]:
        """Return the same, with what the backend raised in place of what could not be made."""
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
    """How a check is made.

    ``run`` returns the finding for a case, and takes from the case what it needs. It may raise StageError.
    ``not_applicable`` returns why the check has nothing to examine, from the case and the backend's features alone.
    ``tries_undeclared``: the check is also made of cases that the backend does not declare.
    """

    run: Callable[[CheckedCase], Finding]
    not_applicable: Callable[[Case, frozenset[str]], NotExamined | None] = _always_applies
    tries_undeclared: bool = False
