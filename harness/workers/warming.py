"""Warmers: processes that examine cases ahead of the run, so that kernels are already compiled when it reaches them.

Compiling a kernel at its first call takes seconds on one core, while the GPU waits. A warmer is one more process of the
backend under examination. It gets the next questions of the run, so that it compiles the same kernels, and leaves
them in the caches on disk. Its records are dropped: nothing that happens in it is a finding.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass

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
"""Host memory of one process: torch for CUDA, a compiler, and a small case."""

_DEVICE_BYTES = 2**32
"""GPU memory of one process: its context, what torch keeps between cases, and captured graphs."""

_SMALL = 2**30
"""Bytes up to which a case may run beside another one."""

_SLOW_S = 1.0
"""Seconds below which a case has compiled nothing that justifies a process of its own."""

_CASE_LIMIT_S = 600.0
"""Seconds after which a warmer that is still at one case is ended."""


def most_processes(device: str, gpus: int = 1) -> int:
    """Return how many processes may examine cases at once on ``device``, one of ``gpus`` GPUs at work; at least 1.

    The limits are the cores, the free memory of the host, half the memory of the GPU, and its exclusive mode.
    """
    limits = [_MOST, usable_cores() // gpus]
    if (free := free_host_bytes()) is not None:
        limits.append(free // _HOST_BYTES // gpus)
    if (memory := device_memory(device)) is not None:
        limits.append(memory // 2 // _DEVICE_BYTES)
    if (modes := gpu_modes(device)) is not None and not modes.is_shared:
        limits.append(1)
    return max(1, min(limits))


def questions_to_warm(plan: RunPlan, ref: str) -> tuple[Question, ...]:
    """Return the untimed checks of the backend's cases; if there are none, ``numerics`` of the timed cases."""
    untimed = untimed_questions(plan, ref).questions
    return untimed or tuple((case, ("numerics",)) for case, _ in timed_questions(plan, ref).questions)


class Warmers:
    """Processes that examine ``questions`` of one backend from the last to the first, and drop the results.

    A process that ends, or is still at one case after ``limit_s`` seconds, is replaced, and the case is not repeated.
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
        """End the processes at once. May be called repeatedly."""
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
        """Return a process that has loaded the backend; None if it cannot, or these warmers are closed."""
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
        """Return whether ``process`` completed the case."""
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


@dataclass
class _Seen:
    """The number of ``kernels`` when a backend's first case began, and when its latest case ``began``."""

    kernels: int
    began: float
    warmers: Warmers | None = None


class WarmingAhead:
    """Starts warmers for a backend that a run is examining, once the backend has compiled a kernel.

    If all kernels are already compiled, no case adds one, and no warmer is started.
    """

    def __init__(self, plan: RunPlan, workers: WorkerPool, gpus: int = 1, *, is_on: bool) -> None:
        """``gpus``: how many are at work at once."""
        self._plan, self._workers, self._gpus, self._is_on = plan, workers, gpus, is_on
        self._seen: dict[str, _Seen] = {}

    def before(self, ref: str, left: Sequence[Question], workers: WorkerPool) -> None:
        """Record that the run reaches the first of ``left``, the questions that remain for ``ref``; may start warmers.

        They are started in ``workers``, and so use its GPU.
        """
        if not self._is_on:
            return
        now = time.monotonic()
        seen = self._seen.get(ref)
        if seen is None:
            seen = self._seen[ref] = _Seen(kernel_count(), now)
        elif seen.warmers is not None:
            seen.warmers.skip(left[0][0])
        elif now - seen.began > _SLOW_S and kernel_count() > seen.kernels:
            seen.warmers = self._start(workers, ref, left[1:], self._gpus)
        seen.began = now

    def finish(self, ref: str) -> None:
        """End the warmers of the backend ``ref``, which a lane has examined; call it before the lane's next backend."""
        seen = self._seen.pop(ref, None)
        if seen is not None and seen.warmers is not None:
            seen.warmers.close()

    def before_times(self, refs: Iterable[str]) -> None:
        """Examine the cases that are only timed, one backend after another, and return when the warmers have ended."""
        for ref in refs if self._is_on else ():
            with closing(self._start(self._workers, ref, questions_to_warm(self._plan, ref))) as warmers:
                warmers.wait()

    def close(self) -> None:
        """End the warmers, and start no others, since timings follow."""
        self._is_on = False
        for ref in tuple(self._seen):
            self.finish(ref)

    def _start(self, workers: WorkerPool, ref: str, questions: Sequence[Question], gpus: int = 1) -> Warmers:
        """Start as many warmers as have room beside the run's own processes."""
        count = most_processes(self._plan.device, gpus) - 1
        return Warmers(lambda: workers.start_extra(ref), questions, count, loading=workers.limits.of_loading)
