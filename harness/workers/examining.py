"""Examine questions one after another, each through the process of its backend.

If the process ends, the checks of the case without a record are ``crashed`` or ``timed_out``, unless they do not apply,
and a new process takes the following cases. First, the case is tried again, to find out what caused the end. After the
loss of the device, a new process makes the remaining checks. If attncheck itself fails in a process, a new one is tried
once; if it fails again, only that case is lost.
"""

import time
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from attncheck.cases.model import Case
from attncheck.errors import QuestionError
from attncheck.harness.driver.observation import Raised
from attncheck.harness.run.outcomes import OURSELVES, Circumstances, ProcessEnd, ended, record_of
from attncheck.harness.workers.first_messages import WorkerError
from attncheck.harness.workers.lanes import Place, start
from attncheck.harness.workers.protocol import DeviceLost, Done, Examine, HarnessFailure
from attncheck.harness.workers.recurrence import Recurrence, Replayed, find_recurrence
from attncheck.harness.workers.requesting import Stopped, Work, request_records
from attncheck.harness.workers.schedule import BackendQuestion
from attncheck.harness.workers.time_limits import Limit, TimeLimits
from attncheck.harness.workers.warming import WarmingAhead
from attncheck.harness.workers.worker_pool import WorkerPool
from attncheck.harness.workers.worker_process import WorkerProcess
from attncheck.reports.run_file.causes import cause_of_end
from attncheck.reports.run_file.graph_levels import CUDAGRAPH
from attncheck.reports.run_file.records import Errored, Failed, Record
from attncheck.reports.run_file.timings import TIMING

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
            used = f"earlier cases used up {rest.words}"
            cause = f"the case did not run, because {used}; give more time, or select fewer cases"
            self._end(place, Stopped("", ProcessEnd(cause, limit_s=self._limits.backend_s)), place.due)
            return
        place.began = time.monotonic()
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
                        place.records.append(record_of(self.circumstances, case, backend, check, raised, 0.0))
                    place.due.clear()
        if place.due:
            self._end(place, Stopped("the start", ProcessEnd(self._unstartable[backend.ref])), place.due)
        self._spent[backend.ref] += time.monotonic() - place.began

    def _examine(
        self, place: Place, workers: WorkerPool
    ) -> Generator[WorkerProcess | None, None, HarnessFailure | None]:
        """Make the checks that are due; return the failure of attncheck if it failed in two processes.

        A process that lost the device is replaced for the remaining checks. A process in which attncheck failed is
        replaced once, since the backend may have corrupted it.

        Raises:
            QuestionError, OSError: a new process is needed and cannot be started.
        """
        faults: list[HarnessFailure] = []
        while place.due and len(faults) < _TRIES:
            fault = yield from self._examine_once(place, workers)
            if fault is not None:
                faults.append(fault)
        return faults[-1] if place.due else None

    def _examine_once(
        self, place: Place, workers: WorkerPool
    ) -> Generator[WorkerProcess | None, None, HarnessFailure | None]:
        """Add the records of the checks that are due; return how attncheck failed in the process, if it did.

        Raises:
            QuestionError, OSError: a new process is needed and cannot be started.
        """
        ref, case, due = place.question.backend.ref, place.question.case, place.due
        process = workers.process(ref) or (yield from start(workers, ref))
        earlier = tuple(process.examined)

        def take(record: Record) -> None:
            if record.check in due:  # not if it was already made before a fault
                due.remove(record.check)
                place.records.append(_with_output(record, process, case))

        end = yield from request_records(process, self._request(place, due), partial(self._limit, place), take)
        if isinstance(end, Done):
            place.blind = end.blind
            due.clear()
            return None
        goes_on = isinstance(end, DeviceLost)  # a new process makes the remaining checks
        if isinstance(end, DeviceLost):
            record = end.record
            end = Stopped(record.stage, ProcessEnd(record.cause, record.output + process.output(case.key)))
        workers.discard(ref)
        if isinstance(end, HarnessFailure):
            return end
        if end.stage.startswith(f"check {CUDAGRAPH}"):
            workers.stop_sharing_probes(ref)
        yield from self._settle(place, workers, end, earlier, goes_on=goes_on)
        yield None  # the records are written before a process is started
        return None

    def _settle(
        self, place: Place, workers: WorkerPool, stopped: Stopped, earlier: Sequence[Examine], *, goes_on: bool
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
        self, place: Place, workers: WorkerPool, stopped: Stopped, earlier: Sequence[Examine]
    ) -> Generator[WorkerProcess | None, None, Recurrence | None]:
        """Try the case again; return None if it is not tried, or no process can be started."""
        ref, end = place.question.backend.ref, stopped.end
        finding = (ref, cause_of_end(end.cause, stopped.stage, end.output))
        is_known = finding in self._tried or len(self._tried) >= _MOST_TRIED
        if is_known or place.question.checks == (TIMING,) or self._left(place).seconds <= 0:
            return None
        self._tried.add(finding)
        replay = partial(self._replay, place, workers)
        with suppress(QuestionError, OSError):  # the next case reports it
            return (yield from find_recurrence(replay, self._request(place, place.question.checks), earlier))
        return None

    def _replay(
        self, place: Place, workers: WorkerPool, requests: Sequence[Examine]
    ) -> Generator[WorkerProcess | None, None, Replayed]:
        """Send ``requests`` to a new process; see :mod:`attncheck.harness.workers.recurrence`."""
        ref = place.question.backend.ref
        workers.discard(ref)
        process = yield from start(workers, ref)
        records: list[Record] = []
        for request in requests:
            records.clear()
            end = yield from request_records(process, request, partial(self._limit, place), records.append)
            if not isinstance(end, Done):
                workers.discard(ref)
                return Replayed(request is requests[-1] and not isinstance(end, HarnessFailure))
        return Replayed(False, tuple(_with_output(record, process, place.question.case) for record in records))

    def _request(self, place: Place, checks: Sequence[str]) -> Examine:
        question, number = place.question, self.circumstances.round
        return Examine(
            case=question.case.key,
            checks=tuple(checks),
            round=number,
            drawn=question.case if question.is_drawn else None,
        )

    def _left(self, place: Place) -> Limit:
        """Return what is left of the time of the backend."""
        at_work_s = 0.0 if place.began is None else time.monotonic() - place.began
        return self._limits.of_backend(self._spent[place.question.backend.ref] + at_work_s, len(self._spent))

    def _limit(self, place: Place, stage: str, reference_s: float) -> Limit:
        limit, left = self._limits.of_stage(stage, place.question.case, reference_s), self._left(place)
        if limit.seconds <= left.seconds:
            return limit
        words = f"what was left of {left.words}, less than the usual limit; the backend may only be slow"
        return Limit(max(left.seconds, 0.0), words)

    def _end(self, place: Place, stopped: Stopped, checks: Sequence[str]) -> None:
        """Add records for ``checks``, which ``stopped`` prevented."""
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
