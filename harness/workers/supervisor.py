"""Execution: the cases of every backend of a run, each backend in processes of its own, several of them side by side.

Records come in the order of a run with one process at work. The check ``timing`` comes last, in rounds: while one
process is asked for its times, the run has no other.

What a backend's process dies of costs the checks of one case that have no record yet: they are ``crashed``, but for
those that would have asked nothing, and a fresh process takes the cases that follow. A process that lost the device
names the check that lost it: a fresh one takes the remaining checks. Where attncheck itself fails in a process, a
fresh one is asked once more; if it fails again, the case is lost and told, the rest of the run is not.
"""

import contextlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace

import attncheck
from attncheck.cases.model import Case
from attncheck.errors import QuestionError
from attncheck.harness.driver.observation import Raised
from attncheck.harness.run.backend_description import BackendDescription
from attncheck.harness.run.outcomes import OURSELVES, Circumstances, crashed, record_of, unavailable
from attncheck.harness.run.plan import RunPlan
from attncheck.harness.run.timing_rounds import RoundQuestions, rotated, timed_questions
from attncheck.harness.workers.first_messages import WorkerError
from attncheck.harness.workers.lanes import Lanes, Place, Work, start
from attncheck.harness.workers.protocol import (
    Begun,
    Described,
    DeviceChosen,
    DeviceLost,
    Done,
    Examine,
    HarnessFailure,
    Refused,
)
from attncheck.harness.workers.schedule import Asked, untimed
from attncheck.harness.workers.warming import WarmingAhead
from attncheck.harness.workers.worker_pool import WorkerPool
from attncheck.harness.workers.worker_process import ProcessEndedError, WorkerProcess
from attncheck.reports.run_file.graph_levels import CUDAGRAPH
from attncheck.reports.run_file.header import Environment
from attncheck.reports.run_file.records import EXAMINED, Errored, Failed, Record

_TRIES = 2
"""Processes in which attncheck may fail before the case is lost."""

_OUTPUT_BYTES = 4096
"""Bytes of output in a record of a failure; that of a crash has more, with the stack."""


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
        jobs: int = 1,
        limit_s: float | None = None,
        warms: bool = False,
    ) -> None:
        """``jobs``: processes at work at once, but for the check ``timing``. ``limit_s``: seconds without an answer.

        ``warms``: other processes compile kernels ahead of the run.
        """
        self.blind: list[QuestionError] = []
        self._plan, self._descriptions, self._workers = plan, descriptions, workers
        self._circumstances = Circumstances(plan.seed, environment.digest, attncheck.__version__)
        self._faulty: set[str] = set()
        self._at_work: str | None = None
        self._unexamined: dict[str, set[str]] = {}
        self._unstartable: dict[str, str] = {}
        self._jobs, self._limit_s = jobs, limit_s
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
        return self._examine_all([Asked(backend, case, checks)], keeps_process=True)

    def _run_untimed(self) -> Iterator[Record]:
        asked = untimed(self._plan, self._descriptions)
        if not asked:
            self._warming.before_times(each.ref for each in self._descriptions if not each.unavailable_reasons)
            return  # and the processes are still fresh
        yield from self._examine_all(asked, jobs=self._jobs)

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
            timed = [Asked(backend, case, checks) for case, checks in part.questions]
            for record in self._examine_all(timed, part.round):
                if number == 0 and record.outcome not in EXAMINED:
                    self._unexamined.setdefault(backend.ref, set()).add(record.case)
                yield record

    def _examine_all(
        self, asked: Sequence[Asked], number: int = 0, *, jobs: int = 1, keeps_process: bool = False
    ) -> Iterator[Record]:
        """Yield the records of round ``number`` in the order of ``asked``, with ``jobs`` processes at work at once.

        ``keeps_process``: the process of the backend does not end.
        """
        self._circumstances = replace(self._circumstances, round=number)
        self._unstartable.clear()
        places = [Place(each, list(each.checks)) for each in asked]
        for place in places:
            if not place.asked.backend.is_loaded:
                self._miss(place)
        lanes = Lanes(places, jobs, self._workers, self._work, None if keeps_process else self._warming.finish)
        for place, record in lanes.run():
            if record is not None:
                yield record
            elif place.blind is not None and place.asked.case.key not in self._faulty:
                self._faulty.add(place.asked.case.key)
                self.blind.append(QuestionError(place.blind))

    def _miss(self, place: Place) -> None:
        backend, case = place.asked.backend, place.asked.case
        for check in place.due:
            place.records.append(unavailable(self._circumstances, case, backend, check, backend.unavailable_reasons))
        place.is_over = True

    def _work(self, place: Place, workers: WorkerPool, left: Sequence[Asked]) -> Work:
        """Examine one question through the process of its backend in ``workers``; ``left``: those behind it."""
        backend, case = place.asked.backend, place.asked.case
        self._warming.before(backend.ref, [(each.case, each.checks) for each in (place.asked, *left)])
        if backend.ref not in self._unstartable:
            try:
                fault = yield from self._examine(place, workers)
            except (QuestionError, OSError) as error:
                cause = f"its process has ended, and no other could be started: {error}"
                self._unstartable[backend.ref] = cause
            else:
                if fault is not None:
                    raised = Raised(OURSELVES, WorkerError(backend.ref, fault), fault.error, fault.traceback)
                    for check in place.due:
                        place.records.append(record_of(self._circumstances, case, backend, check, raised, 0.0))
                return
        self._crash(place, "the start", self._unstartable[backend.ref])

    def _examine(
        self, place: Place, workers: WorkerPool
    ) -> Generator[WorkerProcess | None, None, HarnessFailure | None]:
        """Make the checks that are due; return what of attncheck failed in two processes.

        A process that lost the device is replaced for the checks behind. One in which attncheck failed is replaced
        once: the backend may have spoilt it.

        Raises:
            QuestionError, OSError: a fresh process was needed, and could not be had.
        """
        faults: list[HarnessFailure] = []
        while place.due and len(faults) < _TRIES:
            end = yield from self._examine_once(place, workers)
            if end is None:
                return None
            if isinstance(end, HarnessFailure):
                faults.append(end)
        return faults[-1] if place.due else None

    def _examine_once(
        self, place: Place, workers: WorkerPool
    ) -> Generator[WorkerProcess | None, None, HarnessFailure | DeviceLost | None]:
        """Add the records of the checks that are due; return what ended the process, where it sent that.

        Raises:
            QuestionError, OSError: a fresh process was needed, and could not be had.
        """
        ref, case, due = place.asked.backend.ref, place.asked.case, place.due
        process = workers.process(ref) or (yield from start(workers, ref))
        process.send(Examine(case=case.key, checks=tuple(due), round=self._circumstances.round))
        stage = "the wait for this case"
        try:
            while not isinstance(answer := process.answer(self._limit_s), Done):
                match answer:
                    case None:
                        yield process
                    case Begun():
                        stage = answer.stage
                    case HarnessFailure():
                        workers.discard(ref)
                        return answer
                    case DeviceLost(record=record):
                        output = record.output + process.output(case.key)
                        if record.check == CUDAGRAPH:
                            workers.stop_sharing_probes(ref)
                        workers.discard(ref)
                        due.remove(record.check)
                        place.records.append(record.model_copy(update={"output": output}))
                        yield None
                        return answer
                    case DeviceChosen() | Described() | Refused():
                        raise RuntimeError(f"the process of {ref} answered a case by {answer.kind!r}")
                    case record:
                        if record.check in due:  # and was not made before a fault
                            due.remove(record.check)
                            place.records.append(_with_output(record, process, case))
                            yield None
        except ProcessEndedError as ended:
            if stage == f"check {CUDAGRAPH}":
                workers.stop_sharing_probes(ref)
            workers.discard(ref)
            self._crash(place, stage, ended.cause, ended.output)
            return None
        place.blind = answer.blind
        return None

    def _crash(self, place: Place, stage: str, cause: str, output: str = "") -> None:
        """Add the records of the checks that are due, and were not made."""
        place.records += crash_records(self._circumstances, place.asked, place.due, stage, cause, output)


def crash_records(
    circumstances: Circumstances, asked: Asked, due: Iterable[str], stage: str, cause: str, output: str = ""
) -> Iterator[Record]:
    """Yield a record of each check in ``due``, none of which was made: ``crashed``, unless it asks nothing."""
    from attncheck.harness.checks.case_checks import not_applicable  # loads torch, for what is rare

    backend, case = asked.backend, asked.case
    for check in due:
        if (skipped := not_applicable(check, case, backend.features)) is not None:
            yield record_of(circumstances, case, backend, check, skipped, 0.0)
        else:
            yield crashed(circumstances, case, backend, check, stage, cause, output)


def _with_output(record: Record, process: WorkerProcess, case: Case) -> Record:
    """Return a record of a failure or an error with the end of what its process printed during the case so far."""
    if not isinstance(record, Failed | Errored):
        return record
    return record.model_copy(update={"output": process.output(case.key, _OUTPUT_BYTES)})
