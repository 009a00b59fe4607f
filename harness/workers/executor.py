"""Examine the backends of a run in processes: a schedule, and lanes of one process each."""

import contextlib
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import cycle, islice
from typing import Literal, TypeVar

import attncheck
from attncheck.cases.model import Case
from attncheck.errors import QuestionError
from attncheck.harness.driver.observation import Raised
from attncheck.harness.problem.sizes import needed_bytes
from attncheck.harness.run.outcomes import (
    OURSELVES,
    BackendDescription,
    Circumstances,
    ProcessEnd,
    absent,
    ended,
    identity_of,
    record_of,
)
from attncheck.harness.run.run import Costs
from attncheck.harness.run.selection import RoundQuestions, RunPlan, rotated, timed_questions, untimed_questions
from attncheck.harness.workers.limits import PREPARATION, Limit, TimeLimits
from attncheck.harness.workers.pool import SMALL_BYTES, WarmingAhead, WorkerPool
from attncheck.harness.workers.process import (
    ProcessEndedError,
    RefusedError,
    WorkerError,
    WorkerProcess,
    wait_for_answers,
)
from attncheck.harness.workers.worker import CaseServer, Examined, Stage
from attncheck.reports.run_file.causes import cause_of_end
from attncheck.reports.run_file.graph_levels import CUDAGRAPH
from attncheck.reports.run_file.header import Environment
from attncheck.reports.run_file.records import (
    EXAMINED,
    Crashed,
    Errored,
    Failed,
    Passed,
    Record,
    Unavailable,
    Unsupported,
)
from attncheck.reports.run_file.timings import TIMING

WAITING = "the wait for this case"
"""The stage before the process begins the first stage of the case."""

FIRST_STAGES = ("declarations", PREPARATION)
"""The stages of a case before its checks."""

T = TypeVar("T")
Waiting = Generator[WorkerProcess | None, None, T]
"""A generator that yields the process whose answer it waits for, or None after it has made progress."""

Work = Waiting[None]


@dataclass(frozen=True)
class Stopped:
    """The process ended during ``stage``."""

    stage: str
    end: ProcessEnd


def request_records(
    process: WorkerProcess,
    question: "BackendQuestion",
    circumstances: Circumstances,
    limit_of: Callable[[str, float], Limit],
    take: Callable[[Record], None],
) -> Waiting[Examined | WorkerError | Stopped]:
    """Send ``question``, call ``take`` with each record, and return the last answer, or how the process ended.

    ``limit_of``: returns the time limit of a stage, from its name and the seconds that the reference took for the case.
    The backend can write into the pipe, too: an answer out of order, or about something else, ends the process.
    """
    case, checks, backend = question.case, question.checks, question.backend
    drawn = case if question.is_drawn else None
    process.examined.append(question)
    process.send(CaseServer.examine, case.key, checks, circumstances.round, drawn)
    stage, limit = WAITING, limit_of(WAITING, 0.0)
    stages = [*FIRST_STAGES, *(f"check {check}" for check in checks)]
    due = {check: identity_of(circumstances, case, backend, check) for check in checks}
    try:
        while True:
            match answer := process.answer(limit):
                case None:
                    yield process
                case Stage(name=name) if name in stages:
                    stage, limit = name, limit_of(name, answer.reference_s)
                    del stages[: stages.index(name) + 1]  # a stage that begins again would renew its limit
                case Passed() | Failed() | Errored() | Unsupported() | Unavailable() if _is_about(answer, due):
                    del due[answer.check]
                    take(answer)
                    yield None
                case Examined(lost=Crashed() as record) if _is_about(record, due):
                    return answer
                case Examined(lost=None) if not due or (answer.blind is not None and stage in FIRST_STAGES):
                    return answer
                case _:
                    raise process.intruded()
    except ProcessEndedError as ended:
        return Stopped(stage, ended.end)
    except RefusedError:  # a case is never refused
        return Stopped(stage, process.intruded().end)
    except WorkerError as error:
        return error


def _is_about(record: Record, due: Mapping[str, Mapping[str, object]]) -> bool:
    fields = due.get(record.check)
    return fields is not None and all(getattr(record, name) == value for name, value in fields.items())


# A kernel may corrupt memory long before its process dies, so that a later case seems to be the cause.

_BUDGET_S = 600.0
"""Seconds after which the search among the earlier cases stops."""


@dataclass(frozen=True)
class Replayed:
    """The result of sending questions to a new process.

    ``has_ended``: the last one ended it. ``records``: of the last one.
    """

    has_ended: bool
    records: tuple[Record, ...] = ()


Replay = Callable[[Sequence["BackendQuestion"]], Waiting[Replayed]]
"""Sends questions to a new process, one by one; yields as :data:`Waiting` does."""


@dataclass(frozen=True)
class Recurrence:
    """``word`` and ``after``: as in records. ``records``: of the first try; empty if it ended the process, too."""

    word: Literal["always", "after", "flaky"]
    after: str = ""
    records: tuple[Record, ...] = ()


def find_recurrence(
    replay: Replay,
    question: "BackendQuestion",
    earlier: Sequence["BackendQuestion"],
    clock: Callable[[], float] = time.monotonic,
) -> Waiting[Recurrence]:
    """Try the case again, first alone in a new process; if that succeeds, after the earlier cases.

    ``earlier``: the known questions to the process that ended before ``question``. If all together make a process
    end again, a bisection searches for the single one that does so.

    Raises:
        QuestionError, WorkerError, OSError: from ``replay``, if no process can be started.
    """
    deadline = clock() + _BUDGET_S
    first = yield from replay([question])
    if first.has_ended:
        return Recurrence("always")
    suspects = list(earlier)
    is_behind = bool(suspects) and (yield from replay([*suspects, question])).has_ended
    if not is_behind:
        return Recurrence("flaky", records=first.records)
    is_shown = True
    while len(suspects) > 1 and clock() < deadline:
        middle = len(suspects) // 2
        is_shown = (yield from replay([*suspects[middle:], question])).has_ended
        suspects = suspects[middle:] if is_shown else suspects[:middle]
    if len(suspects) == 1 and not is_shown:  # the other half caused no end, which does not prove that this case does
        is_shown = (yield from replay([*suspects, question])).has_ended
    after = suspects[0].case.key if len(suspects) == 1 and is_shown else ""
    return Recurrence("after", after, first.records)


_START_S = 5.0
"""Estimated seconds that one more process of a backend needs until its first case."""

_SAMPLE = 5
"""Number of cases of a backend from whose times those of the others are estimated."""


@dataclass(frozen=True)
class BackendQuestion:
    """A question to a backend: ``checks`` of ``case``. ``is_drawn``: the case is in no suite."""

    backend: BackendDescription
    case: Case
    checks: tuple[str, ...]
    is_drawn: bool = False

    @cached_property
    def group(self) -> Hashable | None:
        """Key that questions share if they share a CUDA-graph level; None if no level is measured."""
        if "cudagraph" not in self.checks:
            return None
        return (self.backend.ref, self.case.layer, self.case.cache.unplaced)

    def cost(self, costs: Costs) -> float | None:
        """Return the seconds that the checks took in earlier runs, or None if one of them was not made."""
        each = [costs.get((self.backend.ref, self.case.hash, check)) for check in self.checks]
        return None if None in each else sum(filter(None, each))


def untimed(plan: RunPlan, backends: Iterable[BackendDescription]) -> list[BackendQuestion]:
    """Return the questions of ``plan`` except timings, by backend, then by case."""
    return [
        BackendQuestion(backend, case, checks)
        for backend in backends
        for case, checks in untimed_questions(plan, backend.ref).questions
    ]


class Schedule:
    """Hands out ``questions`` by index, the first ones first.

    One lane begins a backend. Once all are begun, other lanes help where enough questions are left. A process measures
    a CUDA-graph level once, so the cases that share one stay in one lane. Only one case that needs much memory runs at
    a time.
    """

    def __init__(
        self,
        questions: Sequence[BackendQuestion],
        clock: Callable[[], float] = time.monotonic,
        costs: Costs | None = None,
    ) -> None:
        self._questions, self._clock = questions, clock
        self._cost_s = [each.cost(costs) if costs else None for each in questions]
        self._waiting: dict[str, list[int]] = {}
        for index, each in enumerate(questions):
            if each.backend.is_loaded:
                self._waiting.setdefault(each.backend.ref, []).append(index)
        self._began: dict[str, float] = {}
        self._lanes: Counter[str] = Counter()
        self._over: Counter[str] = Counter()
        self._owners: dict[Hashable, int] = {}
        self._refused: set[tuple[str, int]] = set()
        self._large: BackendQuestion | None = None

    def to_begin(self, lane: int) -> str | None:
        """Return the first backend that no lane has begun and ``lane`` may begin, or None."""
        waiting = (ref for ref, left in self._waiting.items() if left and (ref, lane) not in self._refused)
        return next((ref for ref in waiting if ref not in self._began), None)

    def begin(self, ref: str) -> None:
        """Count one more lane as at work for the backend ``ref``."""
        self._began.setdefault(ref, self._clock())
        self._lanes[ref] += 1

    def leave(self, ref: str) -> None:
        """Count one lane less as at work for the backend ``ref``."""
        self._lanes[ref] -= 1

    def to_help(self, lane: int) -> str | None:
        """Return a backend with enough questions left to justify starting one more process, or None."""
        for ref, began in self._began.items():
            took = self._clock() - began
            over = self._over[ref]
            lanes = self._lanes[ref]
            if (ref, lane) in self._refused or not lanes:
                continue
            left = self._open(ref, lane)
            known = [cost for index in left if (cost := self._cost_s[index]) is not None]
            if len(known) >= _SAMPLE:
                each_s = sum(known) / len(known)
            elif over >= _SAMPLE or took >= 2 * _START_S:
                each_s = took * lanes / (over + 1)
            else:
                continue
            if each_s * len(left) / (lanes + 1) > _START_S:
                return ref
        return None

    def has_left(self, ref: str, lane: int) -> bool:
        """Return whether ``lane`` may take one more question of the backend ``ref``, now or later."""
        return bool(self._open(ref, lane))

    def left(self, ref: str) -> list[BackendQuestion]:
        """Return the questions to the backend ``ref`` that no lane has taken."""
        return [self._questions[index] for index in self._waiting.get(ref, ())]

    def take(self, ref: str, lane: int) -> int | None:
        """Take the next question to the backend ``ref``; return None if there is none, or it must wait for memory."""
        for index in self._open(ref, lane):
            question = self._questions[index]
            is_large = needed_bytes(question.case) > SMALL_BYTES
            if is_large and self._large is not None:
                continue
            self._waiting[ref].remove(index)
            if is_large:
                self._large = question
            if (group := question.group) is not None:
                self._owners[group] = lane
            return index
        return None

    def finish(self, question: BackendQuestion) -> None:
        """Count a question that was taken as examined."""
        self._over[question.backend.ref] += 1
        if self._large is question:
            self._large = None

    def refuse(self, ref: str, lane: int) -> None:
        """Exclude ``lane`` from the backend ``ref``; if no other lane is at work for it, another one may begin it."""
        self._refused.add((ref, lane))
        self.leave(ref)
        if not self._lanes[ref]:
            del self._began[ref]

    def _open(self, ref: str, lane: int) -> list[int]:
        waiting = self._waiting.get(ref, ())
        return [index for index in waiting if self._owners.get(self._questions[index].group, lane) == lane]


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
        self._places = places
        self._workers = workers
        self._examine = examine
        self._on_leaving = leave
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


def start(workers: WorkerPool, ref: str) -> Waiting[WorkerProcess]:
    """Start a process of ``ref``, wait until it has described the backend, and return it.

    Raises:
        QuestionError, OSError: it cannot be started, or does not load the backend as the first process did.
        WorkerError: attncheck itself failed in it.
    """
    process = workers.prepare(ref)
    while process is not None and not process.is_ready(workers.limits.of_description):
        yield process
    return workers.restart(ref)


# If the process ends, the checks of the case without a record are `crashed` or `timed_out`, unless they do not apply,
# and a new process takes the following cases. First, the case is tried again, to find out what caused the end. After
# the loss of the device, a new process makes the remaining checks. If attncheck itself fails in a process, a new one is
# tried once; if it fails again, only that case is lost.

_TRIES = 2
"""Processes in which attncheck may fail before the case is lost."""

_MOST_TRIED = 8
"""Maximum number of findings in a run whose cases are tried again."""

_OUTPUT_BYTES = 4096
"""Bytes of output in the record of a failure; that of a crash has more, with the stack."""


class ProcessExaminer:
    """Examines questions within ``limits``. ``circumstances``: those of the records that it makes itself."""

    def __init__(self, circumstances: Circumstances, limits: TimeLimits, warming: WarmingAhead) -> None:
        self.circumstances = circumstances
        self._limits, self._warming = limits, warming
        self._unstartable: dict[str, str] = {}
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._tried: set[tuple[str, str]] = set()

    def begin_round(self, number: int) -> None:
        """Set the round of the following records, and allow another attempt for processes that could not be started."""
        self.circumstances = replace(self.circumstances, round=number)
        self._unstartable.clear()

    def work(self, place: Place, workers: WorkerPool, left: Sequence[BackendQuestion]) -> Work:
        """Examine one question through the process of its backend in ``workers``. ``left``: the following questions."""
        backend, case = place.question.backend, place.question.case
        self._warming.before(backend.ref, [(each.case, each.checks) for each in (place.question, *left)], workers)
        self._spent[backend.ref] += 0.0  # counts it as begun
        rest = self._left(place)
        if rest.seconds <= 0:
            used = "earlier cases used up" if self._spent[backend.ref] else "the start of the run left nothing of"
            cause = f"the case did not run, because {used} {rest.words}; give more time, or select fewer cases"
            self._end(place, Stopped("", ProcessEnd(cause, limit_s=self._limits.backend_s)), place.due)
            return
        place.began = time.monotonic()
        if backend.ref not in self._unstartable:
            try:
                error = yield from self._examine(place, workers)
            except (QuestionError, OSError) as refused:
                cause = f"its process has ended, and no other could be started: {refused}"
                self._unstartable[backend.ref] = cause
            else:
                if error is not None:
                    raised = Raised(OURSELVES, WorkerError.__name__, error.fault.error, error.fault.traceback)
                    for check in place.due:
                        place.records.append(record_of(self.circumstances, case, backend, check, raised, 0.0))
                    place.due.clear()
        if place.due:
            self._end(place, Stopped("the start", ProcessEnd(self._unstartable[backend.ref])), place.due)
        self._spent[backend.ref] += time.monotonic() - place.began

    def _examine(self, place: Place, workers: WorkerPool) -> Waiting[WorkerError | None]:
        """Make the checks that are due; return the failure of attncheck if it failed in two processes.

        A process that lost the device is replaced for the remaining checks. A process in which attncheck failed is
        replaced once, since the backend may have corrupted it.

        Raises:
            QuestionError, OSError: a new process is needed and cannot be started.
        """
        faults: list[WorkerError] = []
        while place.due and len(faults) < _TRIES:
            fault = yield from self._examine_once(place, workers)
            if fault is not None:
                faults.append(fault)
        return faults[-1] if place.due else None

    def _examine_once(self, place: Place, workers: WorkerPool) -> Waiting[WorkerError | None]:
        """Add the records of the checks that are due; return how attncheck failed in the process, if it did.

        Raises:
            QuestionError, OSError: a new process is needed and cannot be started.
        """
        ref = place.question.backend.ref
        case = place.question.case
        due = place.due
        process = workers.process(ref) or (yield from start(workers, ref))
        earlier = tuple(process.examined)

        def take(record: Record) -> None:
            if record.check in due:  # not if it was already made before a fault
                due.remove(record.check)
                place.records.append(_with_output(record, process, case))

        question = replace(place.question, checks=tuple(due))
        end = yield from request_records(process, question, self.circumstances, partial(self._limit, place), take)
        goes_on = False
        if isinstance(end, Examined):
            if (record := end.lost) is None:
                place.blind = end.blind
                due.clear()
                return None
            goes_on = True  # a new process makes the remaining checks
            end = Stopped(record.stage, ProcessEnd(record.cause, record.output + process.output(case.key)))
        workers.discard(ref)
        if isinstance(end, WorkerError):
            return end
        if end.stage.startswith(f"check {CUDAGRAPH}"):
            workers.stop_sharing_probes(ref)
        yield from self._settle(place, workers, end, earlier, goes_on=goes_on)
        yield None  # the records are written before a process is started
        return None

    def _settle(
        self, place: Place, workers: WorkerPool, stopped: Stopped, earlier: Sequence[BackendQuestion], *, goes_on: bool
    ) -> Work:
        """Add the record of the check that ended the process, and of the remaining ones unless the case ``goes_on``.

        Each new finding of a backend is tried again, unless only timings were due. If the case then succeeds, the
        remaining checks get the records of that try.
        """
        found = yield from self._recurrence(place, workers, stopped, earlier)
        made: dict[str, Record] = {}
        if found is not None:
            stopped = replace(stopped, end=replace(stopped.end, recurrence=found.word, after=found.after))
            made = {record.check: record for record in found.records}
        for index, check in enumerate(tuple(place.due)):
            if index and check in made:
                place.due.remove(check)
                place.records.append(made[check])
            elif index == 0 or not goes_on:
                self._end(place, stopped, [check])

    def _recurrence(
        self, place: Place, workers: WorkerPool, stopped: Stopped, earlier: Sequence[BackendQuestion]
    ) -> Waiting[Recurrence | None]:
        """Try the case again; return None if it is not tried, or no process can be started."""
        ref, end = place.question.backend.ref, stopped.end
        finding = (ref, cause_of_end(end.cause, stopped.stage, end.output))
        is_known = finding in self._tried or len(self._tried) >= _MOST_TRIED
        if is_known or place.question.checks == (TIMING,) or self._left(place).seconds <= 0:
            return None
        self._tried.add(finding)
        replay = partial(self._replay, place, workers)
        try:
            return (yield from find_recurrence(replay, place.question, earlier))
        except (QuestionError, WorkerError, OSError):  # the next case reports it
            workers.discard(ref)
            return None

    def _replay(self, place: Place, workers: WorkerPool, questions: Sequence[BackendQuestion]) -> Waiting[Replayed]:
        """Send ``questions`` to a new process; see :mod:`attncheck.harness.workers.executor`."""
        ref = place.question.backend.ref
        workers.discard(ref)
        process = yield from start(workers, ref)
        records: list[Record] = []
        limit_of = partial(self._limit, place)
        for question in questions:
            records.clear()
            end = yield from request_records(process, question, self.circumstances, limit_of, records.append)
            if not isinstance(end, Examined) or end.lost is not None:
                workers.discard(ref)
                return Replayed(question is questions[-1] and not isinstance(end, WorkerError))
        return Replayed(False, tuple(_with_output(record, process, place.question.case) for record in records))

    def _left(self, place: Place) -> Limit:
        at_work_s = 0.0 if place.began is None else time.monotonic() - place.began
        return self._limits.of_backend(self._spent[place.question.backend.ref] + at_work_s, len(self._spent))

    def _limit(self, place: Place, stage: str, reference_s: float) -> Limit:
        limit = self._limits.of_stage(stage, place.question.case, reference_s)
        left = self._left(place)
        if limit.seconds <= left.seconds:
            return limit
        words = f"what was left of {left.words}, less than the usual limit; the backend may only be slow"
        return Limit(max(left.seconds, 0.0), words)

    def _end(self, place: Place, stopped: Stopped, checks: Sequence[str]) -> None:
        place.records += ended_records(self.circumstances, place.question, tuple(checks), stopped)
        place.due[:] = [check for check in place.due if check not in checks]


def ended_records(
    circumstances: Circumstances, question: BackendQuestion, checks: Iterable[str], stopped: Stopped
) -> Iterator[Record]:
    """Yield a record for each of ``checks``, which ``stopped`` prevented, or that does not apply."""
    from attncheck.harness.checks.case_checks import not_applicable  # here, since it imports torch and is rarely needed

    backend, case = question.backend, question.case
    for check in checks:
        if (skipped := not_applicable(check, case, backend.features)) is not None:
            yield record_of(circumstances, case, backend, check, skipped, 0.0)
        else:
            yield ended(circumstances, case, backend, check, stopped.stage, stopped.end)


def _with_output(record: Record, process: WorkerProcess, case: Case) -> Record:
    """Return the record of a failure or error with the end of what its process printed during the case so far."""
    if not isinstance(record, Failed | Errored):
        return record
    return record.model_copy(update={"output": process.output(case.key, _OUTPUT_BYTES)})


# Records are yielded in the order of a run with a single process. The check `timing` comes last, in rounds: while one
# process takes its times, the run has no other process.


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
        backend = place.question.backend
        case = place.question.case
        circumstances = self._examiner.circumstances
        for check in place.due:
            place.records.append(absent(circumstances, case, backend, check))
        place.is_over = True
