"""Execution: the cases of every backend of a run, each backend in a process of its own, one backend after the other.

The check ``timing`` comes last, in rounds: while one process is asked for its times, the run has no other.

What a backend's process dies of costs the checks of one case that have no record yet: they are ``crashed``, but for
those that would have asked nothing, and a fresh process takes the cases that follow. A process that lost the device
names the check that lost it: a fresh one takes the remaining checks. Where attncheck itself fails in a process, a
fresh one is asked once more; if it fails again, the case is lost and told, the rest of the run is not.
"""

import contextlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace

import attncheck
from attncheck.cases.model import Case
from attncheck.errors import QuestionError
from attncheck.harness.driver.observation import Raised
from attncheck.harness.problem.memory_estimate import needed_bytes
from attncheck.harness.run.backend_description import BackendDescription
from attncheck.harness.run.outcomes import OURSELVES, Circumstances, crashed, record_of, unavailable
from attncheck.harness.run.plan import RunPlan
from attncheck.harness.run.timing_rounds import RoundQuestions, rotated, timed_questions, untimed_questions
from attncheck.harness.workers.protocol import (
    Begun,
    Described,
    DeviceChosen,
    DeviceLost,
    Done,
    Examine,
    HarnessFailure,
    Refused,
    format_message,
)
from attncheck.harness.workers.warming import WarmingAhead
from attncheck.harness.workers.worker_pool import WorkerError, WorkerPool
from attncheck.harness.workers.worker_process import ProcessEndedError, WorkerProcess
from attncheck.reports.run_file.graph_levels import CUDAGRAPH
from attncheck.reports.run_file.header import Environment
from attncheck.reports.run_file.records import EXAMINED, Errored, Failed, Record

_ROOM_FOR_REQUESTS = 2**15
"""Bytes of requests sent ahead: they fit into a pipe that nobody reads for long."""

_TRIES = 2
"""Processes in which attncheck may fail before the case is lost."""

_OUTPUT_BYTES = 4096
"""Bytes of output in a record of a failure; that of a crash has more, with the stack."""

_SMALL = 2**30
"""Bytes a case may need to be examined beside another."""


class Supervisor:
    """Examines a plan's cases through the processes of ``workers``, whose backends are ``descriptions``.

    blind: cases that could not be put at all, each told once.
    """

    def __init__(
        self,
        plan: RunPlan,
        descriptions: tuple[BackendDescription, ...],
        workers: WorkerPool,
        environment: Environment,
        *,
        asks_ahead: bool = False,
        limit_s: float | None = None,
        warms: bool = False,
    ) -> None:
        """``asks_ahead``: while one backend is examined, the process of the next is already at work on its cases.

        Of the check ``timing``, nothing is asked ahead. ``limit_s``: seconds that a process may send nothing.
        ``warms``: other processes compile kernels ahead of the run.
        """
        self.blind: list[QuestionError] = []
        self._plan, self._descriptions, self._workers = plan, descriptions, workers
        self._circumstances = Circumstances(plan.seed, environment.digest, attncheck.__version__)
        self._faulty: set[str] = set()
        self._at_work: str | None = None
        self._unexamined: dict[str, set[str]] = {}
        self._asks_ahead, self._limit_s = asks_ahead, limit_s
        self._asked: dict[WorkerProcess, set[str]] = {}
        self._warming = WarmingAhead(plan, workers, is_on=warms)

    def run(self) -> Generator[Record, None, None]:
        """Every record, grouped by round, by backend, then by case; those without times come before the first round.

        Raises:
            WorkerError: attncheck itself failed in a process that was to take the place of another.
        """
        self._workers.keep_only(backend.ref for backend in self._descriptions)
        with contextlib.closing(self._warming):
            yield from self._run_untimed()
        for number in range(self._plan.rounds):
            yield from self._run_round(number)

    def examine_case(self, backend: BackendDescription, case: Case, checks: tuple[str, ...]) -> Iterator[Record]:
        """Yield the records of these checks of one case; a process that works for another backend ends first.

        Raises:
            WorkerError: attncheck itself failed in a process that was to take the place of another.
        """
        if self._at_work not in (None, backend.ref):
            self._workers.finish(self._at_work)
        self._at_work = backend.ref
        return self._examine_round(backend, RoundQuestions(((case, checks),)))

    def _run_untimed(self) -> Iterator[Record]:
        by_backend = {backend.ref: untimed_questions(self._plan, backend.ref) for backend in self._descriptions}
        if not any(part.questions for part in by_backend.values()):
            self._warming.before_times(each.ref for each in self._descriptions if not each.unavailable_reasons)
            return  # and the processes are still fresh
        for index, backend in enumerate(self._descriptions):
            following = next((each for each in self._descriptions[index + 1 :] if each.is_loaded), None)
            if following is not None:
                self._workers.prepare(following.ref)
                if self._asks_ahead:
                    self._ask_ahead(following)
            yield from self._examine_round(backend, by_backend[backend.ref])
            self._workers.finish(backend.ref)
            self._warming.finish()

    def _run_round(self, number: int) -> Iterator[Record]:
        """What the first round did not examine, or could not even ask, is not asked again: it would be no news."""
        asked: list[tuple[BackendDescription, RoundQuestions]] = []
        for backend in self._descriptions:
            left_out = self._unexamined.get(backend.ref, set()) | self._faulty
            part = timed_questions(self._plan, backend.ref, number, left_out)
            if part.questions:
                asked.append((backend, part))
        for backend, part in rotated(asked, number):
            if backend.is_loaded:
                self._workers.isolate(backend.ref)
            for record in self._examine_round(backend, part):
                if number == 0 and record.outcome not in EXAMINED:
                    self._unexamined.setdefault(backend.ref, set()).add(record.case)
                yield record
            self._workers.finish(backend.ref)

    def _examine_round(self, backend: BackendDescription, part: RoundQuestions) -> Iterator[Record]:
        self._circumstances = replace(self._circumstances, round=part.round)
        return self._examine_all(backend, part) if backend.is_loaded else self._miss_all(backend, part)

    def _ask_ahead(self, backend: BackendDescription) -> None:
        """Let the process of ``backend`` begin; its answers wait in its pipe, and it waits where that is full."""
        process = self._workers.process(backend.ref)
        if process is None or process in self._asked:
            return
        room, asked = _ROOM_FOR_REQUESTS, self._asked.setdefault(process, set())
        for case, checks in untimed_questions(self._plan, backend.ref).questions:
            request = Examine(case=case.key, checks=checks)
            room -= len(format_message(request))
            if room < 0 or needed_bytes(case) > _SMALL:
                return
            process.send(request)
            asked.add(case.key)

    def _miss_all(self, backend: BackendDescription, part: RoundQuestions) -> Iterator[Record]:
        for case, checks in part.questions:
            for check in checks:
                yield unavailable(self._circumstances, case, backend, check, backend.unavailable_reasons)

    def _examine_all(self, backend: BackendDescription, part: RoundQuestions) -> Iterator[Record]:
        waiting = self._workers.process(backend.ref)
        # While others were examined. What it was asked before, it may have answered before it ended.
        if waiting is not None and waiting.has_ended and waiting not in self._asked:
            self._workers.discard(backend.ref)
        for index, (case, checks) in enumerate(part.questions):
            self._warming.before(backend.ref, part.questions[index:])
            due = list(checks)
            try:
                fault = yield from self._examine(backend, case, due, part.round)
            except (QuestionError, OSError) as error:
                cause = f"its process has ended, and no other could be started: {error}"
                yield from self._crashed(backend, case, due, "the start", cause)
                for left, lost in part.questions[index + 1 :]:
                    yield from self._crashed(backend, left, lost, "the start", cause)
                return
            if fault is not None:
                raised = Raised(OURSELVES, WorkerError(backend.ref, fault), fault.error, fault.traceback)
                for check in due:
                    yield record_of(self._circumstances, case, backend, check, raised, 0.0)

    def _examine(
        self, backend: BackendDescription, case: Case, due: list[str], number: int
    ) -> Generator[Record, None, HarnessFailure | None]:
        """Yield the records of the checks that are ``due``; return what of attncheck failed in two processes.

        A process that lost the device is replaced for the checks behind. One in which attncheck failed is replaced
        once: the backend may have spoilt it.

        Raises:
            QuestionError, OSError: a fresh process was needed, and could not be had.
        """
        faults: list[HarnessFailure] = []
        while due and len(faults) < _TRIES:
            request = Examine(case=case.key, checks=tuple(due), round=number)
            end = yield from self._examine_once(backend, case, due, request)
            if end is None:
                return None
            if isinstance(end, HarnessFailure):
                faults.append(end)
        return faults[-1] if due else None

    def _examine_once(
        self, backend: BackendDescription, case: Case, due: list[str], request: Examine
    ) -> Generator[Record, None, HarnessFailure | DeviceLost | None]:
        """Yield the records of the checks that are ``due``, and remove these; return what ended the process, if told.

        Raises:
            QuestionError, OSError: a fresh process was needed, and could not be had.
        """
        process = self._workers.process(backend.ref) or self._workers.restart(backend.ref)
        stage = "the wait for this case"
        if case.key not in self._asked.get(process, ()):
            process.send(request)
        try:
            while not isinstance(answer := process.receive(self._limit_s), Done):
                match answer:
                    case Begun():
                        stage = answer.stage
                    case HarnessFailure():
                        self._workers.discard(backend.ref)
                        return answer
                    case DeviceLost(record=record):
                        output = record.output + process.output(case.key)
                        if record.check == CUDAGRAPH:
                            self._workers.stop_sharing_probes(backend.ref)
                        self._workers.discard(backend.ref)
                        due.remove(record.check)
                        yield record.model_copy(update={"output": output})
                        return answer
                    case DeviceChosen() | Described() | Refused():
                        raise RuntimeError(f"the process of {backend.ref} answered a case by {answer.kind!r}")
                    case record:
                        if record.check in due:  # and was not made before a fault
                            due.remove(record.check)
                            yield _with_output(record, process, case)
        except ProcessEndedError as ended:
            if stage == f"check {CUDAGRAPH}":
                self._workers.stop_sharing_probes(backend.ref)
            self._workers.discard(backend.ref)
            yield from self._crashed(backend, case, due, stage, ended.cause, ended.output)
            return None
        if answer.blind is not None and case.key not in self._faulty:
            self._faulty.add(case.key)
            self.blind.append(QuestionError(answer.blind))
        return None

    def _crashed(
        self, backend: BackendDescription, case: Case, checks: Sequence[str], stage: str, cause: str, output: str = ""
    ) -> Iterator[Record]:
        from attncheck.harness.checks.case_checks import not_applicable  # loads torch, for what is rare

        for check in checks:
            if (skipped := not_applicable(check, case, backend.features)) is not None:
                yield record_of(self._circumstances, case, backend, check, skipped, 0.0)
            else:
                yield crashed(self._circumstances, case, backend, check, stage, cause, output)


def _with_output(record: Record, process: WorkerProcess, case: Case) -> Record:
    """Return a record of a failure or an error with the end of what its process printed during the case so far."""
    if not isinstance(record, Failed | Errored):
        return record
    return record.model_copy(update={"output": process.output(case.key, _OUTPUT_BYTES)})
