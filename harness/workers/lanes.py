"""Lanes: processes that examine questions in parallel, while records are yielded in the order of the questions."""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice

from attncheck.errors import QuestionError
from attncheck.harness.workers.first_messages import WorkerError
from attncheck.harness.workers.requesting import Work
from attncheck.harness.workers.schedule import BackendQuestion, Costs, Schedule
from attncheck.harness.workers.worker_pool import WorkerPool
from attncheck.harness.workers.worker_process import WorkerProcess, wait_for_answers
from attncheck.reports.run_file.records import Record


@dataclass
class Place:
    """The state of one question; ``records`` holds those not yet yielded. ``due``: checks without a record.

    ``blind``: why the case could not be examined at all. ``began``: monotonic time at which its examination began.
    """

    question: BackendQuestion
    due: list[str]
    records: deque[Record] = field(default_factory=deque)
    blind: str | None = None
    is_over: bool = False
    began: float | None = None


@dataclass
class _Lane:
    """One process at a time. ``ref``: its backend. ``place``: its question; None while a process starts.

    ``twins``: a pool for backends that another lane has begun, or for all backends if the lane has a GPU of its own.
    """

    number: int
    workers: WorkerPool
    ref: str | None = None
    twins: WorkerPool | None = None
    place: Place | None = None
    work: Work | None = None


class Lanes:
    """Examines ``places`` with ``examine``, using up to ``count`` processes at once, from ``workers`` and its twins.

    If ``workers`` has several GPUs, lanes are distributed over them; the first uses ``workers`` itself. ``leave``:
    called when a lane is done with a backend, whose process then ends by itself. If None, all processes stay.
    """

    def __init__(
        self,
        places: Sequence[Place],
        count: int,
        workers: WorkerPool,
        examine: Callable[[Place, WorkerPool, Sequence[BackendQuestion]], Work],
        leave: Callable[[str], None] | None,
        costs: Costs | None = None,
    ) -> None:
        """``examine`` also gets the questions to the same backend that no lane has taken."""
        self._places, self._workers, self._examine, self._on_leaving = places, workers, examine, leave
        self._schedule = Schedule([place.question for place in places], costs=costs)
        gpus = islice(cycle(workers.gpus), 1, count)
        pools = [workers, *map(workers.twin, gpus)] if len(workers.gpus) > 1 else [None] * count
        self._lanes = [_Lane(number, workers, twins=pool) for number, pool in enumerate(pools)]

    def run(self) -> Iterator[tuple[Place, Record | None]]:
        """Yield every record with its place, and each place once more without a record when it is over.

        After an interrupt, the records that wait for an earlier place are yielded first.
        """
        try:
            for place in self._places:
                while place.records or not place.is_over:
                    while place.records:
                        yield place, place.records.popleft()
                    if not place.is_over:
                        self._go_on()
                yield place, None
        except KeyboardInterrupt:
            yield from ((place, record) for place in self._places for record in place.records)
            raise
        for lane in self._lanes:
            self._leave(lane)

    def _go_on(self) -> None:
        """Advance every lane as far as possible; if none can advance, wait for an answer."""
        waiting: list[WorkerProcess] = []
        has_moved = False
        for lane in self._lanes:
            if lane.work is None and not self._take(lane):
                continue
            try:
                process = next(lane.work) if lane.work is not None else None
            except StopIteration:
                lane.work = process = None
                if lane.place is not None:
                    lane.place.is_over = True
                    self._schedule.finish(lane.place.question)
            has_moved |= process is None
            waiting += [] if process is None else [process]
        if not has_moved:
            if not waiting:
                raise RuntimeError("questions are left, and no lane is at work")
            wait_for_answers(waiting)

    def _take(self, lane: _Lane) -> bool:
        """Give ``lane`` a question, or a process to start; return False if there is none for it now."""
        lane.place = None
        while lane.ref is None or (index := self._schedule.take(lane.ref, lane.number)) is None:
            if lane.ref is not None and self._schedule.has_left(lane.ref, lane.number):
                return False  # the remaining questions wait for memory
            self._leave(lane)
            ref = self._schedule.to_begin(lane.number)
            if ref is not None and lane.twins in (None, self._workers):
                self._begin(lane, ref)
                continue
            ref = ref or self._schedule.to_help(lane.number)
            if ref is None:
                return False
            lane.work = self._help(lane, ref)
            return True
        lane.place = self._places[index]
        lane.work = self._examine(lane.place, lane.workers, self._schedule.left(lane.ref))
        return True

    def _begin(self, lane: _Lane, ref: str) -> None:
        """Switch to a backend that no lane has begun, and prepare the process of the next one."""
        lane.ref, lane.workers = ref, self._workers
        self._schedule.begin(ref)
        process = self._workers.process(ref)
        if process is not None and process.has_ended:
            self._workers.discard(ref)  # it ended before its first case, so no case is lost
        if (following := self._schedule.to_begin(lane.number)) is not None:
            self._workers.prepare(following)

    def _help(self, lane: _Lane, ref: str) -> Work:
        """Start one more process of a backend. If that fails, other lanes examine the rest."""
        lane.twins = lane.twins or self._workers.twin()
        lane.ref, lane.workers = ref, lane.twins
        self._schedule.begin(ref)
        try:
            if lane.workers.process(ref) is None:
                yield from start(lane.workers, ref)
        except (QuestionError, WorkerError, OSError):
            lane.workers.discard(ref)
            self._schedule.refuse(ref, lane.number)
            lane.ref = None

    def _leave(self, lane: _Lane) -> None:
        if lane.ref is not None and self._on_leaving is not None:
            self._schedule.leave(lane.ref)
            lane.workers.finish(lane.ref)
            self._on_leaving(lane.ref)
        lane.ref = None


def start(workers: WorkerPool, ref: str) -> Generator[WorkerProcess | None, None, WorkerProcess]:
    """Start a process of ``ref``, wait until it has described the backend, and return it.

    Raises:
        QuestionError, OSError: it cannot be started, or does not load the backend as the first process did.
        WorkerError: attncheck itself failed in it.
    """
    process = workers.prepare(ref)
    while process is not None and not process.is_ready(workers.limits.of_loading):
        yield process
    return workers.restart(ref)
