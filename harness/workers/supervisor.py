"""Examine the cases of every backend of a run, each backend in processes of its own, several of them in parallel.

Records are yielded in the order of a run with a single process. The check ``timing`` comes last, in rounds: while one
process takes its times, the run has no other process.
"""

import contextlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict

import attncheck
from attncheck.cases.model import Case
from attncheck.errors import QuestionError
from attncheck.harness.run.backend_description import BackendDescription, LoadError
from attncheck.harness.run.outcomes import IMPORT, Circumstances, ProcessEnd, ended, load_error, unavailable
from attncheck.harness.run.plan import RunPlan
from attncheck.harness.run.timing_rounds import RoundQuestions, rotated, timed_questions
from attncheck.harness.workers.examining import ProcessExaminer
from attncheck.harness.workers.lanes import Lanes, Place
from attncheck.harness.workers.schedule import BackendQuestion, Costs, untimed
from attncheck.harness.workers.warming import WarmingAhead
from attncheck.harness.workers.worker_pool import WorkerPool
from attncheck.reports.run_file.header import Environment
from attncheck.reports.run_file.records import EXAMINED, Record


class Supervisor:
    """Examines a plan's cases through the processes of ``workers``, whose backends are ``descriptions``.

    ``blind``: cases that could not be examined at all, each once.
    """

    def __init__(
        self,
        plan: RunPlan,
        descriptions: tuple[BackendDescription, ...],
        workers: WorkerPool,
        environment: Environment,
        *,
        jobs: int = 1,
        warms: bool = False,
        costs: Costs | None = None,
    ) -> None:
        """``jobs``: processes at work at once, except for the check ``timing``.

        ``costs``: what checks took in earlier runs.

        ``warms``: whether other processes compile kernels ahead of the run.
        """
        self.blind: list[QuestionError] = []
        self._plan, self._descriptions, self._workers = plan, descriptions, workers
        self._faulty: set[str] = set()
        self._at_work: str | None = None
        self._unexamined: dict[str, set[str]] = {}
        self._jobs, self._costs = jobs, costs
        self._warming = WarmingAhead(plan, workers, min(jobs, len(workers.gpus) or 1), is_on=warms)
        circumstances = Circumstances(plan.seed, environment.digest, attncheck.__version__)
        self._examiner = ProcessExaminer(circumstances, workers.limits, self._warming)

    def run(self) -> Generator[Record, None, None]:
        """Yield every record, by round, backend and case; records of checks other than ``timing`` come first.

        Raises:
            WorkerError: attncheck itself failed in a process that was to replace another.
        """
        self._workers.keep_only(backend.ref for backend in self._descriptions)
        with contextlib.closing(self._warming):
            yield from self._run_untimed()
        for number in range(self._plan.rounds):
            yield from self._run_round(number)

    def examine_case(
        self, backend: BackendDescription, case: Case, checks: tuple[str, ...], *, is_drawn: bool = False
    ) -> Iterator[Record]:
        """Yield the records of these checks of one case; a process that works for another backend ends first.

        ``is_drawn``: no suite of the run contains the case.

        Raises:
            WorkerError: attncheck itself failed in a process that was to replace another.
        """
        if self._at_work not in (None, backend.ref):
            self._workers.finish(self._at_work)
        self._at_work = backend.ref
        return self._examine_all([BackendQuestion(backend, case, checks, is_drawn)], keeps_process=True)

    def _run_untimed(self) -> Iterator[Record]:
        questions = untimed(self._plan, self._descriptions)
        if not questions:
            self._warming.before_times(each.ref for each in self._descriptions if each.is_loaded)
            return  # the processes have not run a case yet
        yield from self._examine_all(questions, jobs=self._jobs)

    def _run_round(self, number: int) -> Iterator[Record]:
        """Yield the records of one round of timings.

        Cases that the first round did not examine, or that are blind, are left out of later rounds.
        """
        parts: list[tuple[BackendDescription, RoundQuestions]] = []
        for backend in self._descriptions:
            left_out = self._unexamined.get(backend.ref, set()) | self._faulty
            part = timed_questions(self._plan, backend.ref, number, left_out)
            if part.questions:
                parts.append((backend, part))
        for backend, part in rotated(parts, number):
            if backend.is_loaded:
                self._workers.isolate(backend.ref)
            timed = [BackendQuestion(backend, case, checks) for case, checks in part.questions]
            for record in self._examine_all(timed, part.round):
                if number == 0 and record.outcome not in EXAMINED:
                    self._unexamined.setdefault(backend.ref, set()).add(record.case)
                yield record

    def _examine_all(
        self, questions: Sequence[BackendQuestion], number: int = 0, *, jobs: int = 1, keeps_process: bool = False
    ) -> Iterator[Record]:
        """Yield the records of round ``number`` in the order of ``questions``, with ``jobs`` processes at work at once.

        ``keeps_process``: the process of the backend does not end.
        """
        self._examiner.begin_round(number)
        places = [Place(each, list(each.checks)) for each in questions]
        for place in places:
            if not place.question.backend.is_loaded:
                self._miss(place)
        leave = None if keeps_process else self._warming.finish
        lanes = Lanes(places, jobs, self._workers, self._examiner.work, leave, self._costs)
        for place, record in lanes.run():
            if record is not None:
                yield record
            elif place.blind is not None and place.question.case.key not in self._faulty:
                self._faulty.add(place.question.case.key)
                self.blind.append(QuestionError(place.blind))

    def _miss(self, place: Place) -> None:
        """Add the records of a backend that was not loaded."""
        backend, case, circumstances = place.question.backend, place.question.case, self._examiner.circumstances
        for check in place.due:
            match backend.failure:
                case ProcessEnd() as end:
                    record: Record = ended(circumstances, case, backend, check, IMPORT, end)
                case LoadError() as error:
                    record = load_error(circumstances, case, backend, check, asdict(error))
                case None:
                    record = unavailable(circumstances, case, backend, check, backend.unavailable_reasons)
            place.records.append(record)
        place.is_over = True
