"""Warmers: processes that examine cases ahead of the run, so that their kernels are compiled when it comes to them.

Kernels that are compiled at their first call take seconds each, on one core, while the GPU waits. A warmer is one more
process of the backend that is being examined. It is asked what the run will ask, so that it compiles the same kernels,
and leaves them in the caches on disk. Its records are dropped: nothing that happens in it is a finding.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from attncheck.cases.model import Case
from attncheck.harness.problem.host_memory import free_host_bytes
from attncheck.harness.problem.memory_estimate import needed_bytes
from attncheck.harness.run.environment import device_memory, gpu_modes, usable_cores
from attncheck.harness.run.kernel_caches import kernel_count
from attncheck.harness.run.plan import RunPlan
from attncheck.harness.run.timing_rounds import Question, timed_questions, untimed_questions
from attncheck.harness.workers.protocol import Described, Done, Examine
from attncheck.harness.workers.time_limits import Limit
from attncheck.harness.workers.worker_pool import WorkerPool
from attncheck.harness.workers.worker_process import ProcessEndedError, WorkerProcess

_MOST = 8
_HOST_BYTES = 3 * 2**29
"""Memory that one process takes of the host: torch for CUDA, a compiler, and a small case."""

_DEVICE_BYTES = 2**32
"""Memory that one process takes of the GPU: its context, what torch keeps between cases, and captured graphs."""

_SMALL = 2**30
"""Bytes that a case may need to be examined beside another."""

_SLOW_S = 1.0
"""A case that takes less has compiled nothing worth a process of its own."""

_CASE_LIMIT_S = 600.0
"""Seconds after which a warmer that is still at one case is ended."""


def most_processes(device: str) -> int:
    """Return how many processes may examine cases on ``device`` at once; at least 1.

    Limits are the cores, the free memory of the host, half the memory of the GPU, and its exclusive mode.
    """
    limits = [_MOST, usable_cores()]
    if (free := free_host_bytes()) is not None:
        limits.append(free // _HOST_BYTES)
    if (memory := device_memory(device)) is not None:
        limits.append(memory // 2 // _DEVICE_BYTES)
    if (modes := gpu_modes(device)) is not None and not modes.is_shared:
        limits.append(1)
    return max(1, min(limits))


def questions_to_warm(plan: RunPlan, ref: str) -> tuple[Question, ...]:
    """Return the untimed checks of the backend's cases, or ``numerics`` of those that are only timed."""
    untimed = untimed_questions(plan, ref).questions
    return untimed or tuple((case, ("numerics",)) for case, _ in timed_questions(plan, ref).questions)


class Warmers:
    """Processes that examine ``questions`` of one backend from the last to the first, and drop what they find.

    A process that ends, or is still at one case after ``limit_s`` seconds, is replaced; the case is not asked again.
    ``loading``: the limit for a process to load the backend.
    """

    def __init__(
        self,
        start: Callable[[], WorkerProcess],
        questions: Sequence[Question],
        count: int,
        *,
        limit_s: float = _CASE_LIMIT_S,
        loading: Limit | None = None,
    ) -> None:
        self.examined: list[str] = []
        self.lost: list[str] = []
        self._start, self._limit_s, self._loading = start, limit_s, loading
        self._waiting = [question for question in questions if needed_bytes(question[0]) <= _SMALL]
        self._at_work: set[WorkerProcess] = set()
        self._is_closed = False
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._work, name=f"warmer {number}", daemon=True)
            for number in range(min(count, len(self._waiting)))
        ]
        for thread in self._threads:
            thread.start()

    def skip(self, case: Case) -> None:
        """Leave ``case`` out if no warmer has begun it."""
        with self._lock:
            self._waiting = [question for question in self._waiting if question[0].key != case.key]

    def wait(self) -> None:
        """Wait until every case was examined, or lost."""
        for thread in self._threads:
            thread.join()

    def close(self) -> None:
        """End the processes at once; may be repeated."""
        with self._lock:
            self._is_closed = True
            self._waiting.clear()
            for process in self._at_work:
                process.kill()
        self.wait()

    def _work(self) -> None:
        """Examine cases until none is left. The thread that started a process closes it."""
        process = None
        try:
            while (question := self._next()) is not None:
                if process is None and (process := self._described()) is None:
                    return
                if not self._examine(process, question):
                    self._end(process)
                    process = None
        finally:
            if process is not None:
                self._end(process)

    def _next(self) -> Question | None:
        with self._lock:
            return self._waiting.pop() if self._waiting else None

    def _described(self) -> WorkerProcess | None:
        """Return a process that has loaded the backend; None where it cannot, or these warmers are closed."""
        with self._lock:
            if self._is_closed:
                return None
            try:
                process = self._start()
            except OSError:
                return None
            self._at_work.add(process)
        try:
            if isinstance(process.receive(self._loading), Described):
                return process
        except ProcessEndedError:
            pass
        self._end(process)
        return None

    def _examine(self, process: WorkerProcess, question: Question) -> bool:
        """Return whether ``process`` came to the end of the case."""
        case, checks = question
        watch = threading.Timer(self._limit_s, process.kill)
        watch.start()
        try:
            process.send(Examine(case=case.key, checks=checks))
            while not isinstance(process.receive(), Done):
                pass
        except ProcessEndedError:
            self.lost.append(case.key)
            return False
        finally:
            watch.cancel()
        self.examined.append(case.key)
        return True

    def _end(self, process: WorkerProcess) -> None:
        with self._lock:
            self._at_work.discard(process)
        process.close()


class WarmingAhead:
    """Starts warmers for the backend that a run is examining, once it was seen to compile kernels.

    Kernels that are compiled already cost nothing: no case adds one, and no warmer is started.
    """

    def __init__(self, plan: RunPlan, workers: WorkerPool, *, is_on: bool) -> None:
        self._plan, self._workers, self._is_on = plan, workers, is_on
        self._warmers: Warmers | None = None
        self._kernels: int | None = None
        self._began = 0.0

    def before(self, ref: str, left: Sequence[Question]) -> None:
        """Take note that the run comes to the first of ``left``, all that ``ref`` has not been asked yet."""
        if not self._is_on:
            return
        if self._warmers is not None:
            self._warmers.skip(left[0][0])
        elif self._kernels is None:
            self._kernels = kernel_count()
        elif time.monotonic() - self._began > _SLOW_S and kernel_count() > self._kernels:
            self._warmers = self._start(ref, left[1:])
        self._began = time.monotonic()

    def finish(self) -> None:
        """End the warmers of the backend that was examined; comes before the next one."""
        if self._warmers is not None:
            self._warmers.close()
        self._warmers = self._kernels = None

    def before_times(self, refs: Iterable[str]) -> None:
        """Examine what is only timed, backend after backend, and return when the warmers have ended."""
        for ref in refs if self._is_on else ():
            self._warmers = self._start(ref, questions_to_warm(self._plan, ref))
            self._warmers.wait()
            self.finish()

    def close(self) -> None:
        """End the warmers; no others are started, since times are taken next."""
        self._is_on = False
        self.finish()

    def _start(self, ref: str, questions: Sequence[Question]) -> Warmers:
        """Start as many warmers as have room beside the run's own process."""
        count = most_processes(self._plan.device) - 1
        loading = self._workers.limits.of_loading
        return Warmers(lambda: self._workers.start_extra(ref), questions, count, loading=loading)
