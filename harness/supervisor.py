"""Execution: the cases of every backend of a run, each backend in a process of its own, one backend after the other.

What a backend's process dies of costs the checks of one case that have no record yet: they are ``crashed``, but for
those that would have asked nothing, and a fresh process takes the cases that follow. Must not know: how a process is
watched, files, terminals.
"""

from collections.abc import Iterator

import attncheck
from attncheck.cases.model import Case
from attncheck.errors import QuestionError
from attncheck.harness.child import Child, ProcessEndedError
from attncheck.harness.crew import Crew, WorkerError
from attncheck.harness.desk import unasked
from attncheck.harness.engine import Plan
from attncheck.harness.introduction import Introduction
from attncheck.harness.messages import Begun, Done, Examine, Fault, Introduced, Refused
from attncheck.harness.outcomes import Circumstances, crashed, record_of, unavailable
from attncheck.reports.records import Environment, Record


class Supervisor:
    """Examines a plan's cases through the processes of ``crew``, whose backends are ``introductions``.

    blind: cases that could not be put at all, each told once.
    """

    def __init__(
        self, plan: Plan, introductions: tuple[Introduction, ...], crew: Crew, environment: Environment
    ) -> None:
        self.blind: list[QuestionError] = []
        self._plan, self._introductions, self._crew = plan, introductions, crew
        self._circumstances = Circumstances(plan.seed, environment.digest, attncheck.__version__)
        self._faulty: set[int] = set()

    def run(self) -> Iterator[Record]:
        """Every record, grouped by backend, then by case.

        Raises:
            WorkerError: attncheck itself failed in a process.
        """
        self._crew.keep(backend.ref for backend in self._introductions)
        for backend in self._introductions:
            yield from self._examine_all(backend) if backend.is_loaded else self._miss_all(backend)
            self._crew.dismiss(backend.ref)

    def _miss_all(self, backend: Introduction) -> Iterator[Record]:
        for case in self._plan.cases:
            for check in self._plan.checks_of(case):
                yield unavailable(self._circumstances, case, backend, check, backend.unavailable_reasons)

    def _examine_all(self, backend: Introduction) -> Iterator[Record]:
        waiting = self._crew.child(backend.ref)
        if waiting is not None and waiting.has_ended:  # while others were examined: it was asked nothing yet
            self._crew.discard(backend.ref)
        for index, case in enumerate(self._plan.cases):
            child = self._crew.child(backend.ref)
            if child is None:
                try:
                    child = self._crew.renew(backend.ref)
                except (QuestionError, OSError) as error:
                    cause = f"its process has ended, and no other could be started: {error}"
                    for left in self._plan.cases[index:]:
                        yield from self._crashed(backend, left, self._plan.checks_of(left), "the start", cause)
                    return
            yield from self._examine(child, backend, index, case)

    def _examine(self, child: Child, backend: Introduction, index: int, case: Case) -> Iterator[Record]:
        checks = list(self._plan.checks_of(case))
        stage = "the wait for this case"
        child.forget_output()
        child.send(Examine(index=index))
        try:
            while not isinstance(answer := child.receive(), Done):
                match answer:
                    case Begun():
                        stage = answer.stage
                    case Fault():
                        raise WorkerError(backend.ref, answer)
                    case Introduced() | Refused():
                        raise RuntimeError(f"the process of {backend.ref} answered a case by {answer.kind!r}")
                    case record:
                        checks.remove(record.check)
                        yield record
        except ProcessEndedError as ended:
            self._crew.discard(backend.ref)
            yield from self._crashed(backend, case, tuple(checks), stage, ended.cause, ended.output)
            return
        if answer.blind is not None and index not in self._faulty:
            self._faulty.add(index)
            self.blind.append(QuestionError(answer.blind))

    def _crashed(
        self, backend: Introduction, case: Case, checks: tuple[str, ...], stage: str, cause: str, output: str = ""
    ) -> Iterator[Record]:
        for check in checks:
            if (skipped := unasked(check, case, backend.features)) is not None:
                yield record_of(self._circumstances, case, backend, check, skipped, 0.0)
            else:
                yield crashed(self._circumstances, case, backend, check, stage, cause, output)
