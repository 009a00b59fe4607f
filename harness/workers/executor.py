"""Examine the backends of a run in slots: threads that take questions from a schedule."""

import contextlib
import math
import threading
import time
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from typing import Protocol

import attncheck
from attncheck.cases.model import Case
from attncheck.errors import ClusterError, QuestionError
from attncheck.harness.problem.sizes import needed_bytes
from attncheck.harness.run.outcomes import BackendDescription, Circumstances, absent
from attncheck.harness.run.preparation import Gpu
from attncheck.harness.run.run import Costs
from attncheck.harness.run.selection import RoundQuestions, RunPlan, rotated, timed_questions
from attncheck.harness.workers.examination import Place, ProcessExaminer, started
from attncheck.harness.workers.pool import SMALL_BYTES, WorkerPool
from attncheck.harness.workers.process import WorkerError
from attncheck.harness.workers.schedule import LOOK_EVERY_S, BackendQuestion, Chosen, Schedule, untimed
from attncheck.harness.workers.sharing import Mps, SharedDevice
from attncheck.reports.analysis.phrases import plural
from attncheck.reports.run_file.header import Environment
from attncheck.reports.run_file.records import EXAMINED, Record

_ENDING_S = 30.0
"""The most seconds to wait for the threads of all slots to end."""


class Slot(Protocol):
    """Examines questions one after another. All methods are called in one thread, except :meth:`stop`."""

    def begin(self, chosen: Chosen) -> bool:
        """Prepare for the questions to a backend; return whether it can be examined here."""

    def examine(self, place: Place) -> bool:
        """Put the records of a question into its place; return False if another slot must examine it.

        Raises:
            ClusterError: this slot is lost.
        """

    def leave(self, ref: str) -> None:
        """End the work for a backend."""

    def stop(self) -> None:
        """End the process or actor, so that a waiting method returns or raises."""


class Slots:
    """Examines the questions of ``places``, each slot in a thread."""

    def __init__(self, places: Sequence[Place], slots: Sequence[Slot], schedule: Schedule) -> None:
        self._places, self._schedule = places, schedule
        self._slots: dict[threading.Thread, Slot] = {}
        for number, slot in enumerate(slots):
            thread = threading.Thread(target=self._work, args=(number, slot), name=f"slot {number}", daemon=True)
            self._slots[thread] = slot
        self._beginning: set[Slot] = set()
        self._lost: list[ClusterError] = []

    def run(self) -> Generator[Record, None, None]:
        """Yield the records in the order of the places.

        After an interrupt, the records that wait for an earlier place are yielded first.
        """
        try:
            for thread in self._slots:
                thread.start()
            for place in self._places:
                while (record := place.next()) is not None:
                    if isinstance(record, Exception):
                        raise record
                    yield record
            self._end(self._beginning)  # a process that is to help is no longer needed
        except KeyboardInterrupt:
            # before the slots are stopped, since the ends of their processes are no findings
            yield from [record for place in self._places for record in place.waiting()]
            raise
        finally:
            self._end(self._slots.values())

    def _end(self, stopped: Collection[Slot]) -> None:
        """Stop the slots in ``stopped``, and wait until all threads have ended.

        After ``_ENDING_S``, a thread is abandoned: its process may be stuck in a driver call.
        """
        self._schedule.close()
        deadline = time.monotonic() + _ENDING_S
        while (left := [each for each in self._slots if each.is_alive()]) and time.monotonic() < deadline:
            for thread in left:
                if self._slots[thread] in stopped:
                    self._slots[thread].stop()
            left[0].join(LOOK_EVERY_S)

    def _work(self, number: int, slot: Slot) -> None:
        """Examine questions until none is left."""
        try:
            while (chosen := self._schedule.choose(number)) is not None:
                self._work_for(chosen, number, slot)
        except ClusterError as lost:
            self._lost.append(lost)
            if len(self._lost) == len(self._slots):
                self._fail(lost)
        except Exception as error:  # noqa: BLE001 (the main thread raises it, unless it has stopped this slot)
            self._fail(error)

    def _work_for(self, chosen: Chosen, number: int, slot: Slot) -> None:
        can_begin, ref = True, chosen.ref
        try:
            self._beginning.add(slot)
            can_begin = slot.begin(chosen)
            self._beginning.discard(slot)
            while can_begin and (index := self._schedule.take(ref, number)) is not None:
                if not self._examine(index, slot):
                    return
            if can_begin:
                slot.leave(ref)
        finally:
            self._schedule.leave(ref, number, is_refused=not can_begin)

    def _examine(self, index: int, slot: Slot) -> bool:
        is_over, place = False, self._places[index]
        try:
            is_over = slot.examine(place)
        finally:
            self._schedule.finish(index, is_over=is_over)
        if is_over:
            place.records.put(None)
        return is_over

    def _fail(self, error: Exception) -> None:
        for place in self._places:
            place.records.put(error)


class ProcessSlot:
    """Examines in one process at a time, of ``workers`` or of a twin for backends that another slot has begun.

    ``own``: the pool for all backends, of a slot with a GPU of its own, or whose processes use MPS. ``is_first``: it
    begins each backend, even one whose process does not start.
    """

    def __init__(
        self,
        examiner: "ProcessExaminer",
        workers: WorkerPool,
        own: WorkerPool | None = None,
        *,
        is_first: bool = False,
    ) -> None:
        self._examiner, self._workers, self._own, self._is_first = examiner, workers, own, is_first
        self._twin: WorkerPool | None = None
        self._at_work: WorkerPool | None = None

    def begin(self, chosen: Chosen) -> bool:
        """Start the process, unless the first one of the backend is there. If that fails, other slots examine."""
        ref = chosen.ref
        if chosen.is_first and self._own in (None, self._workers):
            process = self._workers.process(ref)
            if process is not None and process.has_ended:
                self._workers.discard(ref)  # it ended before its first case, so no case is lost
            self._at_work = self._workers
            return True
        if self._own is None:
            self._twin = self._twin or self._workers.twin()
        self._at_work = workers = self._own or self._twin
        assert workers is not None
        with workers.device.turn() as turn:
            try:
                started(workers, ref, turn)
            except (QuestionError, WorkerError, OSError):
                return self._is_first
        return True

    def examine(self, place: Place) -> bool:
        """Examine one question through the process of its backend."""
        assert self._at_work is not None
        self._examiner.examine(place, self._at_work)
        return True

    def leave(self, ref: str) -> None:
        """Let the process end by itself."""
        assert self._at_work is not None
        with self._at_work.device.turn():
            self._at_work.finish(ref)
        self._at_work = None

    def stop(self) -> None:
        """End the process."""
        if (workers := self._at_work) is not None:
            workers.stop()


# Records are yielded in the order of a run with a single process. The check `timing` comes last, in rounds: while one
# process takes its times, the run has no other process.


class SlotExecutor:
    """Examines questions of a plan through slots. ``blind``: cases that could not be examined at all, each once."""

    def __init__(self, plan: RunPlan, descriptions: Sequence[BackendDescription], environment: Environment) -> None:
        self._plan, self._descriptions, self._environment = plan, descriptions, environment
        self._circumstances = Circumstances(plan.seed, environment.digest, attncheck.__version__)
        self.blind: list[QuestionError] = []
        self._faulty: set[str] = set()

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on how the run was examined, for the end of its report."""
        return ()

    def examine_all(
        self,
        questions: Sequence[BackendQuestion],
        slots: Sequence[Slot],
        number: int = 0,
        costs: Costs | None = None,
        *,
        shares_machine: bool = True,
    ) -> Generator[Record, None, None]:
        """Yield the records of ``questions`` in round ``number``, in their order.

        Raises:
            WorkerError: attncheck itself failed in a process that was to replace another.
            ClusterError: all slots are lost.
        """
        places = [self._place(each, number) for each in questions]
        schedule = Schedule(questions, costs=costs, shares_machine=shares_machine)
        try:
            yield from Slots(places, slots, schedule).run()
        finally:
            for place in places:
                self._note(place)

    def _place(self, question: BackendQuestion, number: int = 0) -> Place:
        """Return the place of a question; if its backend is not loaded, it holds all its records."""
        place = Place(question, replace(self._circumstances, round=number), list(question.checks))
        if not question.backend.is_loaded:
            for check in place.due:
                place.records.put(absent(place.circumstances, question.case, question.backend, check))
            place.records.put(None)
        return place

    def _note(self, place: Place) -> None:
        key = place.question.case.key
        if place.blind is not None and key not in self._faulty:
            self._faulty.add(key)
            self.blind.append(QuestionError(place.blind))


_LEAST_FOR_MPS = 20
"""Fewest questions for which MPS is started: their processes start again as its clients."""


class Supervisor(SlotExecutor):
    """Examines a plan's cases through the processes of ``workers``, whose backends are ``descriptions``."""

    def __init__(
        self,
        plan: RunPlan,
        descriptions: Sequence[BackendDescription],
        workers: WorkerPool,
        environment: Environment,
        *,
        jobs: int = 1,
        costs: Costs | None = None,
    ) -> None:
        """``jobs``: processes at work at once, except for the check ``timing``.

        ``costs``: what checks took in earlier runs.
        """
        super().__init__(plan, descriptions, environment)
        self.jobs = jobs
        self._workers, self._costs = workers, costs
        self._at_work: str | None = None
        self._unexamined: dict[str, set[str]] = {}
        self._examiner = ProcessExaminer(workers.limits)
        self._notes: dict[str, None] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """See :class:`SlotExecutor`."""
        repeated = self._examiner.repeated
        names = ", ".join(f"{num} of {name}" for name, num in sorted(repeated.items()))
        words = (
            f"{plural(repeated.total(), 'case')} examined again alone, since other processes used the device "
            f"meanwhile: {names}"
        )
        return (*self._notes, *([words] if repeated else []))

    def run(self) -> Generator[Record, None, None]:
        """Yield every record, by round, backend and case; records of checks other than ``timing`` come first.

        Raises:
            WorkerError: attncheck itself failed in a process that was to replace another.
        """
        self._workers.keep_only(backend.ref for backend in self._descriptions)
        yield from self._run_untimed()
        for number in range(self._plan.rounds):
            yield from self._run_round(number)

    def examine_case(
        self, backend: BackendDescription, case: Case, checks: tuple[str, ...], *, is_drawn: bool = False
    ) -> list[Record]:
        """Return the records of these checks of one case; a process that works for another backend ends first.

        ``is_drawn``: no suite of the run contains the case.

        Raises:
            WorkerError: attncheck itself failed in a process that was to replace another.
        """
        if self._at_work not in (None, backend.ref):
            self._workers.finish(self._at_work)
        self._at_work = backend.ref
        self._examiner.begin_round()
        place = self._place(BackendQuestion(backend, case, checks, is_drawn))
        if backend.is_loaded:
            self._examiner.examine(place, self._workers)
        self._note(place)
        return list(place.waiting())

    def compile(self) -> Generator[Record, None, None]:
        """Examine the cases so that kernels are compiled, and yield records that are none of the run.

        The checks are those of the run except ``timing``, or ``numerics`` if there are no others. Cases that need much
        memory are left out.
        """
        given = untimed(self._plan, self._descriptions) or [
            BackendQuestion(backend, case, ("numerics",))
            for backend in self._descriptions
            for case, _ in timed_questions(self._plan, backend.ref).questions
        ]
        questions = [each for each in given if each.backend.is_loaded and needed_bytes(each.case) <= SMALL_BYTES]
        apart = SlotExecutor(self._plan, self._descriptions, self._environment)
        limits = replace(self._workers.limits, backend_s=math.inf, deadline=None)
        with self._slots(ProcessExaminer(limits), len(questions)) as slots:
            # All slots begin at once: compiling takes longer than the start of a process.
            yield from apart.examine_all(questions, slots, shares_machine=False)

    def _run_untimed(self) -> Iterator[Record]:
        questions = untimed(self._plan, self._descriptions)
        if questions:
            with self._slots(self._examiner, len(questions)) as slots:
                yield from self.examine_all(questions, slots, costs=self._costs)
        elif self._plan.device != "cpu":
            for _ in self.compile():  # ahead of the times
                pass

    @contextmanager
    def _slots(self, examiner: ProcessExaminer, num_questions: int) -> Iterator[list[ProcessSlot]]:
        """Yield the slots for ``num_questions``; the slots of each GPU share it, with MPS if it is worth its start."""
        workers = self._workers
        jobs = max(min(self.jobs, num_questions), 1)
        chosen = workers.chosen
        gpus: Sequence[Gpu | None] = (chosen.gpus[:jobs] if chosen else ()) or (None,)
        has_mps = chosen is not None and chosen.has_mps
        with contextlib.ExitStack() as opened:
            devices = []
            for index, gpu in enumerate(gpus):
                num_slots = len(range(index, jobs, len(gpus)))
                is_served = has_mps and num_slots > 1 and num_questions >= _LEAST_FOR_MPS
                devices.append(
                    SharedDevice(
                        is_shared_gpu=self._plan.device != "cpu" and num_slots > 1,
                        start_mps=partial(Mps.start, gpu.variables if gpu else {}) if is_served else None,
                        note=lambda words: self._notes.update({words: None}),
                    )
                )
                opened.callback(devices[-1].close)
            own: list[WorkerPool | None] = [None] * jobs
            opened.callback(workers.share, workers.device)
            workers.share(devices[0])
            ours = list(islice(cycle(zip(gpus, devices, strict=True)), jobs))
            if devices[0].uses_mps:
                workers.keep_only(())
                own = [workers.twin(gpu, device) for gpu, device in ours]
            elif len(gpus) > 1:
                own = [workers, *(workers.twin(gpu, device) for gpu, device in ours[1:])]
            yield [ProcessSlot(examiner, workers, each, is_first=not index) for index, each in enumerate(own)]

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
            self._examiner.begin_round()
            timed = [BackendQuestion(backend, case, checks) for case, checks in part.questions]
            for record in self.examine_all(timed, [ProcessSlot(self._examiner, self._workers)], part.round):
                if number == 0 and record.outcome not in EXAMINED:
                    self._unexamined.setdefault(backend.ref, set()).add(record.case)
                yield record
