"""Execution: the cases of every backend of a run, each backend in a process of its own, one backend after the other.

What a backend's process dies of costs the checks of one case that have no record yet: they are ``crashed``, but for
those that would have asked nothing, and a fresh process takes the cases that follow. Where attncheck itself fails in a
process, a fresh one is asked once more; if it fails again, the case is lost and told, the rest of the run is not. Must
not know: how a process is watched, files, terminals.
"""

from collections.abc import Generator, Iterator, Sequence

import attncheck
from attncheck.cases.model import Case
from attncheck.errors import QuestionError
from attncheck.harness.child import Child, ProcessEndedError
from attncheck.harness.crew import Crew, WorkerError
from attncheck.harness.desk import unasked
from attncheck.harness.engine import OURSELVES, Plan
from attncheck.harness.introduction import Introduction
from attncheck.harness.memory import needed_bytes
from attncheck.harness.messages import Begun, Done, Examine, Fault, Introduced, Refused, format_message
from attncheck.harness.observation import Raised
from attncheck.harness.outcomes import Circumstances, crashed, record_of, unavailable
from attncheck.reports.records import Environment, Record

_ROOM_FOR_REQUESTS = 2**15
"""Bytes of requests sent ahead: they fit into a pipe that nobody reads for long."""

_SMALL = 2**30
"""Bytes a case may need to be examined beside another."""


class Supervisor:
    """Examines a plan's cases through the processes of ``crew``, whose backends are ``introductions``.

    blind: cases that could not be put at all, each told once.
    """

    def __init__(
        self,
        plan: Plan,
        introductions: tuple[Introduction, ...],
        crew: Crew,
        environment: Environment,
        *,
        asks_ahead: bool = False,
    ) -> None:
        """``asks_ahead``: while one backend is examined, the process of the next is already at work on its cases."""
        self.blind: list[QuestionError] = []
        self._plan, self._introductions, self._crew = plan, introductions, crew
        self._circumstances = Circumstances(plan.seed, environment.digest, attncheck.__version__)
        self._faulty: set[str] = set()
        self._asks_ahead = asks_ahead
        self._asked: dict[Child, set[str]] = {}

    def run(self) -> Iterator[Record]:
        """Every record, grouped by backend, then by case.

        Raises:
            WorkerError: attncheck itself failed in a process that was to take the place of another.
        """
        self._crew.keep(backend.ref for backend in self._introductions)
        for index, backend in enumerate(self._introductions):
            if self._asks_ahead:
                self._ask_ahead(next((each for each in self._introductions[index + 1 :] if each.is_loaded), None))
            yield from self._examine_all(backend) if backend.is_loaded else self._miss_all(backend)
            self._crew.dismiss(backend.ref)

    def _ask_ahead(self, backend: Introduction | None) -> None:
        """Let the process of ``backend`` begin; its answers wait in its pipe, and it waits where that is full."""
        child = None if backend is None else self._crew.child(backend.ref)
        if backend is None or child is None or child in self._asked:
            return
        room, asked = _ROOM_FOR_REQUESTS, self._asked.setdefault(child, set())
        for case in self._plan.cases_of(backend.ref):
            request = Examine(case=case.key)
            room -= len(format_message(request))
            if room < 0 or needed_bytes(case) > _SMALL:
                return
            child.send(request)
            asked.add(case.key)

    def _miss_all(self, backend: Introduction) -> Iterator[Record]:
        for case in self._plan.cases_of(backend.ref):
            for check in self._plan.checks_of(case):
                yield unavailable(self._circumstances, case, backend, check, backend.unavailable_reasons)

    def _examine_all(self, backend: Introduction) -> Iterator[Record]:
        waiting = self._crew.child(backend.ref)
        # While others were examined. What it was asked before, it may have answered before it ended.
        if waiting is not None and waiting.has_ended and waiting not in self._asked:
            self._crew.discard(backend.ref)
        cases = self._plan.cases_of(backend.ref)
        for index, case in enumerate(cases):
            due = list(self._plan.checks_of(case))
            try:
                # A backend may spoil its process so that attncheck fails there: a fresh one tells whose fault it is.
                if (fault := (yield from self._examine(backend, case, due))) is not None:
                    fault = yield from self._examine(backend, case, due)
            except (QuestionError, OSError) as error:
                cause = f"its process has ended, and no other could be started: {error}"
                yield from self._crashed(backend, case, due, "the start", cause)
                for left in cases[index + 1 :]:
                    yield from self._crashed(backend, left, self._plan.checks_of(left), "the start", cause)
                return
            if fault is not None:  # of a case all of whose checks have a record, nothing is missing
                raised = Raised(OURSELVES, WorkerError(backend.ref, fault), fault.error, fault.traceback)
                for check in due:
                    yield record_of(self._circumstances, case, backend, check, raised, 0.0)

    def _examine(self, backend: Introduction, case: Case, due: list[str]) -> Generator[Record, None, Fault | None]:
        """The records of the checks that are ``due``, which those are no longer that have one; what of ours failed.

        Raises:
            QuestionError, OSError: a fresh process was needed, and could not be had.
        """
        child = self._crew.child(backend.ref) or self._crew.renew(backend.ref)
        stage = "the wait for this case"
        if case.key not in self._asked.get(child, ()):
            child.forget_output()
            child.send(Examine(case=case.key))
        try:
            while not isinstance(answer := child.receive(), Done):
                match answer:
                    case Begun():
                        stage = answer.stage
                    case Fault():
                        self._crew.discard(backend.ref)
                        return answer
                    case Introduced() | Refused():
                        raise RuntimeError(f"the process of {backend.ref} answered a case by {answer.kind!r}")
                    case record:
                        if record.check in due:  # and was not made before a fault
                            due.remove(record.check)
                            yield record
        except ProcessEndedError as ended:
            self._crew.discard(backend.ref)
            yield from self._crashed(backend, case, due, stage, ended.cause, ended.output)
            return None
        if answer.blind is not None and case.key not in self._faulty:
            self._faulty.add(case.key)
            self.blind.append(QuestionError(answer.blind))
        return None

    def _crashed(
        self, backend: Introduction, case: Case, checks: Sequence[str], stage: str, cause: str, output: str = ""
    ) -> Iterator[Record]:
        for check in checks:
            if (skipped := unasked(check, case, backend.features)) is not None:
                yield record_of(self._circumstances, case, backend, check, skipped, 0.0)
            else:
                yield crashed(self._circumstances, case, backend, check, stage, cause, output)
