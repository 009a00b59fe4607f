"""Examine one question through the process of a backend, and settle how that process ended."""

import contextlib
import queue
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from attncheck.cases.model import Case
from attncheck.errors import QuestionError
from attncheck.harness.driver.observation import Raised
from attncheck.harness.run.outcomes import (
    OURSELVES,
    Circumstances,
    ProcessEnd,
    ended,
    identity_of,
    record_of,
)
from attncheck.harness.workers.limits import PREPARATION, Limit, TimeLimits
from attncheck.harness.workers.pool import WorkerPool
from attncheck.harness.workers.process import ProcessEndedError, RefusedError, StoppedError, WorkerError, WorkerProcess
from attncheck.harness.workers.schedule import LOOK_EVERY_S, BackendQuestion
from attncheck.harness.workers.sharing import SharedDevice, Turn, is_client
from attncheck.harness.workers.worker import CaseServer, Examined, Stage
from attncheck.reports.run_file.causes import cause_of_end, cause_of_error
from attncheck.reports.run_file.graph_levels import CUDAGRAPH
from attncheck.reports.run_file.records import (
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
) -> Examined | WorkerError | Stopped:
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
            match answer := process.receive(limit):
                case Stage(name=name) if name in stages:
                    stage, limit = name, limit_of(name, answer.reference_s)
                    del stages[: stages.index(name) + 1]  # a stage that begins again would renew its limit
                case Passed() | Failed() | Errored() | Unsupported() | Unavailable() if _is_about(answer, due):
                    del due[answer.check]
                    take(answer)
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


def started(workers: WorkerPool, ref: str, turn: Turn) -> WorkerProcess:
    """Return the process of ``ref``; start it if it is missing, once more if it may start without MPS only.

    Raises:
        QuestionError, WorkerError, OSError, StoppedError: see :meth:`WorkerPool.restart`.
    """
    device = workers.device
    while (process := workers.process(ref)) is None:
        was_client = device.is_client(ref)
        try:
            return workers.restart(ref)
        except (QuestionError, WorkerError, OSError):
            workers.discard(ref)
            if workers.is_stopped:
                raise
            has_given_up = device.give_up_mps(turn) or (was_client and not device.is_client(ref))
            if was_client:
                device.count_end()
            if not has_given_up:
                raise
    return process


def _is_about(record: Record, due: Mapping[str, Mapping[str, object]]) -> bool:
    fields = due.get(record.check)
    return fields is not None and all(getattr(record, name) == value for name, value in fields.items())


# A kernel may corrupt memory long before its process dies, so that a later case seems to be the cause.

_BUDGET_S, _BUDGET_ALONE_S = 600.0, 60.0
"""Seconds after which the search among the earlier cases stops; fewer on a shared GPU, where all other slots wait."""


Replay = Callable[[Sequence["BackendQuestion"]], tuple[Record, ...] | None]
"""Sends questions to a new process, one by one; returns the records of the last one, or None if it ended the process.

If another one ended it, there are no records.
"""


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
    budget_s: float = _BUDGET_S,
) -> Recurrence:
    """Try the case again, first alone in a new process; if that succeeds, after the earlier cases.

    ``earlier``: the known questions to the process that ended before ``question``. If all together make a process
    end again, a bisection searches for the single one that does so, for up to ``budget_s`` seconds.

    Raises:
        QuestionError, WorkerError, OSError: from ``replay``, if no process can be started.
    """
    deadline = clock() + budget_s
    first = replay([question])
    if first is None:
        return Recurrence("always")
    suspects = list(earlier)
    if not suspects or replay([*suspects, question]) is not None:
        return Recurrence("flaky", records=first)
    is_shown = True
    while len(suspects) > 1 and clock() < deadline:
        middle = len(suspects) // 2
        is_shown = replay([*suspects[middle:], question]) is None
        suspects = suspects[middle:] if is_shown else suspects[:middle]
    if len(suspects) == 1 and not is_shown:  # the other half caused no end, which does not prove that this case does
        is_shown = replay([*suspects, question]) is None
    after = suspects[0].case.key if len(suspects) == 1 and is_shown else ""
    return Recurrence("after", after, first)


@dataclass
class Place:
    """The state of one question. ``due``: checks without a record.

    ``records``: those not yet yielded; None follows the last one, or an error that ends the run. ``blind``: why the
    case could not be examined at all. ``began``: monotonic time at which its examination began.
    ``losses``: why nodes were lost at it. ``unsettled``: how its process ended, without a record yet. ``doubted``: how
    it ended beside other processes, before it was examined again alone.
    """

    question: BackendQuestion
    circumstances: Circumstances
    due: list[str]
    records: "queue.SimpleQueue[Record | Exception | None]" = field(default_factory=queue.SimpleQueue)
    blind: str | None = None
    began: float | None = None
    losses: list[str] = field(default_factory=list)
    unsettled: "Unsettled | None" = None
    doubted: "Unsettled | None" = None

    def end(self, stopped: Stopped, checks: Iterable[str]) -> None:
        """Put a record for each of ``checks``, which ``stopped`` prevented, or that does not apply."""
        from attncheck.harness.checks.case_checks import not_applicable  # here, since it imports torch

        backend, case = self.question.backend, self.question.case
        for check in tuple(checks):
            self.due.remove(check)
            if (skipped := not_applicable(check, case, backend.features)) is not None:
                self.records.put(record_of(self.circumstances, case, backend, check, skipped, 0.0))
            else:
                self.records.put(ended(self.circumstances, case, backend, check, stopped.stage, stopped.end))

    def next(self) -> Record | Exception | None:
        """Wait for the next one of ``records``, and return it."""
        while True:
            # A signal that arrives just before the wait does not end it, so the wait is short.
            with contextlib.suppress(queue.Empty):
                return self.records.get(timeout=LOOK_EVERY_S)

    def waiting(self) -> Iterator[Record]:
        """Yield the records that are there."""
        with contextlib.suppress(queue.Empty):
            while not isinstance(record := self.records.get_nowait(), Exception | None):
                yield record


# If the process ends, the checks of the case without a record are `crashed` or `timed_out`, unless they do not apply,
# and a new process takes the following cases. First, the case is tried again, to find out what caused the end. After
# the loss of the device, a new process makes the remaining checks. If attncheck itself fails in a process, a new one is
# tried once; if it fails again, only that case is lost.

_TRIES = 2
"""Processes in which attncheck may fail before the case is lost."""

_MOST_TRIED = 8
"""Maximum number of findings in a run whose cases are tried again."""

_MOST_DOUBTED = 2
"""Ends of a backend's processes for which the other clients of MPS may be the cause."""

_OUTPUT_BYTES = 4096
"""Bytes of output in the record of a failure; that of a crash has more, with the stack."""


@dataclass(frozen=True)
class Unsettled:
    """How a process ended during a case.

    ``earlier``: its questions before. ``goes_on``: it lost the device, and other checks are still due. ``was_client``:
    it used MPS.
    """

    stopped: Stopped
    earlier: tuple[BackendQuestion, ...]
    goes_on: bool
    was_client: bool


class ProcessExaminer:
    """Examines questions within ``limits``, in several threads.

    ``repeated``: how many cases of each backend, by its name, were examined again alone, since another process may have
    been the cause.
    """

    def __init__(self, limits: TimeLimits) -> None:
        self._limits = limits
        self.repeated: Counter[str] = Counter()
        self._num_doubted: Counter[str] = Counter()
        self._unstartable: dict[str, str] = {}
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._tried: set[tuple[str, str]] = set()
        self._confirmed: set[tuple[str, str]] = set()
        self._lock = threading.Lock()  # for what the slots of a backend share

    def begin_round(self) -> None:
        """Allow another attempt for processes that could not be started."""
        self._unstartable.clear()

    def examine(self, place: Place, workers: WorkerPool) -> None:
        """Examine one question through the process of its backend in ``workers``; what is doubtful, again alone."""
        device = workers.device
        with self._lock:
            self._spent[place.question.backend.ref] += 0.0  # counts it as begun
        with device.turn() as turn:
            self._examine_in(turn, place, workers)
        if not place.due:
            return
        with device.alone() as alone:
            if place.unsettled is None or _is_doubtful(place.unsettled, turn, device):
                place.doubted, place.unsettled = place.unsettled, None
                with self._lock:
                    self.repeated[place.question.backend.info.name] += 1
            self._examine_in(alone, place, workers)
            if place.doubted is not None and place.doubted.was_client:
                self._count_doubted(place.question.backend.ref, device)

    def _count_doubted(self, ref: str, device: SharedDevice) -> None:
        """Count an end of a client of MPS that was doubtful. After two, the next end is due to the backend itself."""
        with self._lock:
            self._num_doubted[ref] += 1
            if self._num_doubted[ref] >= _MOST_DOUBTED:
                device.separate(ref)

    def _examine_in(self, turn: Turn, place: Place, workers: WorkerPool) -> None:
        """Make the checks that are due; after a turn with others, those that must be made alone are left."""
        backend, case = place.question.backend, place.question.case
        rest = self._left(place)
        if rest.seconds <= 0 and place.unsettled is None:
            used = "earlier cases used up" if self._spent[backend.ref] else "the start of the run left nothing of"
            if turn.is_alone:
                cause = f"beside other processes the case had no certain result, and {rest.words} is used up"
            else:
                cause = f"the case did not run, because {used} {rest.words}"
            cause += "; give more time, or select fewer cases"
            place.end(Stopped("", ProcessEnd(cause, limit_s=self._limits.backend_s)), place.due)
            return
        if backend.ref in self._unstartable and workers.process(backend.ref) is None:
            place.end(Stopped("the start", ProcessEnd(self._unstartable[backend.ref])), place.due)
            return
        place.began = time.monotonic()
        try:
            fault = self._examine(turn, place, workers)
        except (QuestionError, WorkerError, OSError) as refused:
            turn.is_over = workers.device.is_shared_gpu and not turn.is_alone
            if not turn.is_over:
                if isinstance(refused, WorkerError):
                    raise
                cause = f"its process has ended, and no other could be started: {refused}"
                self._unstartable[backend.ref] = cause
                place.end(Stopped("the start", ProcessEnd(cause)), place.due)
        else:
            if fault is not None:
                raised = Raised(OURSELVES, WorkerError.__name__, fault.fault.error, fault.fault.traceback)
                for check in place.due:
                    place.records.put(record_of(place.circumstances, case, backend, check, raised, 0.0))
                place.due.clear()
        finally:
            with self._lock:
                self._spent[backend.ref] += time.monotonic() - place.began
            place.began = None

    def _examine(self, turn: Turn, place: Place, workers: WorkerPool) -> WorkerError | None:
        """Make the checks that are due; return the failure of attncheck if it failed in two processes.

        A process that lost the device is replaced for the remaining checks. A process in which attncheck failed is
        replaced once, since the backend may have corrupted it.

        Raises:
            QuestionError, WorkerError, OSError: a new process is needed and cannot be started.
        """
        faults: list[WorkerError] = []
        if place.unsettled is not None:
            self._settle(place, workers, place.unsettled)
        while place.due and len(faults) < _TRIES:
            fault = self._examine_once(turn, place, workers)
            if turn.is_over:
                return None
            if fault is not None:
                faults.append(fault)
        return faults[-1] if place.due else None

    def _examine_once(self, turn: Turn, place: Place, workers: WorkerPool) -> WorkerError | None:
        """Add the records of the checks that are due; return how attncheck failed in the process, if it did.

        Raises:
            QuestionError, WorkerError, OSError: a new process is needed and cannot be started.
            StoppedError: the pool was stopped.
        """
        ref = place.question.backend.ref
        case = place.question.case
        due, device = place.due, workers.device
        process = started(workers, ref, turn)
        was_client = is_client(process.inherited | process.environment)
        earlier = tuple(process.examined)
        can_repeat = device.is_shared_gpu and not turn.is_alone

        def take(record: Record) -> None:
            error = _error_of_device(record)
            if can_repeat and not turn.is_over:
                lacks_memory = _MEMORY.search(record.model_dump_json(exclude={"figures"})) is not None
                turn.is_over = lacks_memory or bool(error and (ref, error) not in self._confirmed)
            elif turn.is_alone and error:
                self._confirmed.add((ref, error))
            if record.check in due and not turn.is_over:  # not if it was already made before a fault
                due.remove(record.check)
                place.records.put(_with_output(record, process, case))

        question = replace(place.question, checks=tuple(due))
        end = request_records(process, question, place.circumstances, partial(self._limit, place), take)
        if workers.is_stopped:
            raise StoppedError
        goes_on = False
        if isinstance(end, Examined):
            if (record := end.lost) is None:
                if not turn.is_over:
                    place.blind = end.blind
                    due.clear()
                return None
            goes_on = True  # a new process makes the remaining checks
            end = Stopped(record.stage, ProcessEnd(record.cause, record.output + process.output(case.key)))
        workers.discard(ref)
        if was_client:
            device.count_end()
        if isinstance(end, WorkerError):
            error = end.fault.error
            if can_repeat and (_MEMORY.search(error) or _DEVICE.search(error)):
                turn.is_over = True
            return end
        left = Unsettled(end, earlier, goes_on, was_client)
        if turn.is_over:
            place.unsettled = None
        elif self._is_left(left, turn, place, device):
            place.unsettled, turn.is_over = left, True
        else:
            self._settle(place, workers, left)
        return None

    def _is_left(self, left: Unsettled, turn: Turn, place: Place, device: SharedDevice) -> bool:
        """Return whether the end of a process is settled in a turn alone.

        That is so for all processes of a shared GPU. A finding of the backend that recurred alone is settled at once.
        """
        ref = place.question.backend.ref
        if turn.is_alone or (left.stopped.end.limit_s is not None and self._left(place).seconds <= 0):
            return False
        if (ref, _cause_of(left.stopped)) in self._confirmed and not left.was_client:
            return False
        return device.is_shared_gpu or _is_doubtful(left, turn, device)

    def _settle(self, place: Place, workers: WorkerPool, left: Unsettled) -> None:
        """Add the record of the check that ended the process, and of the remaining ones unless the case goes on.

        Each new finding of a backend is tried again, unless only timings were due. If the case then succeeds, the
        remaining checks get the records of that try.
        """
        ref, stopped = place.question.backend.ref, left.stopped
        place.unsettled = None
        workers.device.separate(ref)
        if stopped.stage.startswith(f"check {CUDAGRAPH}"):
            workers.stop_sharing_probes(ref)
        found = self._recurrence(place, workers, left)
        if place.doubted is not None or (found is not None and found.word == "always"):
            self._confirmed.add((ref, _cause_of(stopped)))
        made: dict[str, Record] = {}
        if found is not None:
            stopped = replace(stopped, end=replace(stopped.end, recurrence=found.word, after=found.after))
            made = {record.check: record for record in found.records}
        for index, check in enumerate(tuple(place.due)):
            if index and check in made:
                place.due.remove(check)
                place.records.put(made[check])
            elif index == 0 or not left.goes_on:
                place.end(stopped, [check])

    def _recurrence(self, place: Place, workers: WorkerPool, left: Unsettled) -> Recurrence | None:
        """Try the case again; return None if it is not tried, or no process can be started."""
        ref = place.question.backend.ref
        finding = (ref, _cause_of(left.stopped))
        if place.question.checks == (TIMING,) or self._left(place).seconds <= 0:
            return None
        with self._lock:
            if finding in self._tried or len(self._tried) >= _MOST_TRIED:
                return None
            self._tried.add(finding)
        if not left.earlier and place.doubted is not None and _cause_of(place.doubted.stopped) == finding[1]:
            return Recurrence("always")  # this was the second try
        replay = partial(self._replay, place, workers)
        try:
            budget_s = _BUDGET_ALONE_S if workers.device.is_shared_gpu else _BUDGET_S
            return find_recurrence(replay, place.question, left.earlier, budget_s=budget_s)
        except (QuestionError, WorkerError, OSError):  # the next case reports it, or no time is left
            workers.discard(ref)
            return None

    def _replay(
        self, place: Place, workers: WorkerPool, questions: Sequence[BackendQuestion]
    ) -> tuple[Record, ...] | None:
        """Send ``questions`` to a new process, as a :data:`Replay` does.

        Raises:
            TimeoutError: the time of the backend is used up, so that the end of the process shows nothing.
        """
        ref = place.question.backend.ref
        workers.discard(ref)
        process = workers.restart(ref)
        records: list[Record] = []
        limit_of = partial(self._limit, place)
        for question in questions:
            records.clear()
            end = request_records(process, question, place.circumstances, limit_of, records.append)
            if not isinstance(end, Examined) or end.lost is not None:
                workers.discard(ref)
                if self._left(place).seconds <= 0:
                    raise TimeoutError
                is_shown = question is questions[-1] and not isinstance(end, WorkerError)
                return None if is_shown else ()
        return tuple(_with_output(record, process, place.question.case) for record in records)

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


def _cause_of(stopped: Stopped) -> str:
    return cause_of_end(stopped.end.cause, stopped.stage, stopped.end.output)


def _is_doubtful(left: Unsettled, turn: Turn, device: SharedDevice) -> bool:
    """Return whether another process of the device may be why one ended in ``turn``; call it when the others are over.

    Others may slow it down, or take the host's memory. If one client of MPS loses the GPU, others lose it or die.
    """
    end = left.stopped.end
    if left.was_client and device.have_others_ended(turn):
        return True
    if device.is_shared_gpu and _MEMORY.search(end.cause):
        return True
    return turn.is_shared and (end.limit_s is not None or (left.was_client and left.goes_on))


_MEMORY = re.compile(r"out of memory|OutOfMemory|the case needs about", re.IGNORECASE)
_DEVICE = re.compile(
    r"(?:CUDA|HIP) error|\[(?:CUDA|HIP)\]|No CUDA GPUs|(?:CUDA|HIP)_?ERROR|(?:CUBLAS|CUDNN)_STATUS", re.IGNORECASE
)
"""Words of messages about errors of the GPU."""


def _error_of_device(record: Record) -> str:
    """Return the cause of a record by an error of the GPU; empty for every other record."""
    if not isinstance(record, Errored) or not _DEVICE.search(record.message):
        return ""
    return cause_of_error(record.error_type, record.stage, record.message, record.traceback)


def _with_output(record: Record, process: WorkerProcess, case: Case) -> Record:
    """Return the record of a failure or error with the end of what its process printed during the case so far."""
    if not isinstance(record, Failed | Errored):
        return record
    return record.model_copy(update={"output": process.output(case.key, _OUTPUT_BYTES)})
