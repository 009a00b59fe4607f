"""The pool of worker processes, their first messages, and processes that compile kernels in advance."""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from attncheck.backends.declarations import FUNCTION_PATHS
from attncheck.cases.model import Case
from attncheck.errors import BackendLoadError, QuestionError
from attncheck.harness.device import accelerator_of
from attncheck.harness.driver.observation import Raised
from attncheck.harness.host import free_host_bytes, kernel_count, usable_cores
from attncheck.harness.problem.sizes import needed_bytes
from attncheck.harness.run.outcomes import IMPORT, OURSELVES, BackendDescription, missing_variables, not_loaded
from attncheck.harness.run.preparation import Gpu
from attncheck.harness.run.selection import Question, RunPlan, timed_questions, untimed_questions
from attncheck.harness.workers.limits import Limit, MemoryWatch, WorkerSettings, passed_environment, room_on_host
from attncheck.harness.workers.process import (
    ProcessEndedError,
    RefusedError,
    Show,
    Starter,
    StartWorker,
    StoppedError,
    WorkerError,
    WorkerProcess,
    start_worker,
)
from attncheck.harness.workers.protocol import HarnessFailure
from attncheck.harness.workers.worker import Assignment, CaseServer, Examined, Imports
from attncheck.reports.run_file.header import BackendInfo, Environment

if TYPE_CHECKING:
    from attncheck.harness.run.run import Costs, Run
    from attncheck.harness.run.selection import Selection
    from attncheck.harness.workers.executor import Supervisor


def imports_of(selection: "Selection") -> Imports:
    """Return what a backend's process imports before the backend."""
    functions = any(case.batch.path.name in FUNCTION_PATHS for case in selection.cases)
    return Imports(checks=selection.selected_checks, functions=functions)


def assignment_of(selection: "Selection", plan: "RunPlan", environment: Environment) -> Assignment:
    """Return what describes the run to a process."""
    return Assignment(
        suites=selection.refs,
        cases=None if selection.cases == selection.all_cases else tuple(case.key for case in selection.cases),
        by_default=selection.by_default,
        is_short=selection.is_short,
        digests=tuple(suite.hash for suite in selection.suites),
        device=plan.device,
        seed=plan.seed,
        dump=plan.dump and plan.dump.absolute(),
        truths=plan.truths and plan.truths.absolute(),
        environment=environment,
        timing=plan.timing,
    )


def description_of(process: WorkerProcess, limit: Limit) -> BackendDescription | QuestionError:
    """Return the description of the backend of ``process``, which was called for it, or the error that prevents one.

    If the process ends while it loads the backend, or attncheck itself fails in it, the description contains the
    failure.
    """
    try:
        found: BackendDescription = process.receive(limit)
    except ProcessEndedError as ended:
        return not_loaded(process.ref, ended.end)
    except WorkerError as error:
        fault = error.fault
        return not_loaded(process.ref, Raised(OURSELVES, WorkerError.__name__, fault.error, fault.traceback))
    except RefusedError as refused:
        if refused.raised:
            return not_loaded(process.ref, Raised(IMPORT, refused.raised, str(refused)))
        return refused
    process.printed.label = found.name
    return found


def loaded(found: BackendDescription | QuestionError) -> BackendDescription:
    """Return ``found`` if it describes a backend that was loaded.

    Raises:
        QuestionError: the backend was not loaded.
        WorkerError: attncheck itself failed while it was loaded.
    """
    if isinstance(found, QuestionError):
        raise found
    raised = found.failure
    if isinstance(raised, Raised) and raised.stage == OURSELVES:
        raise WorkerError(found.ref, HarnessFailure(error=raised.message, traceback=raised.trace))
    if not found.is_loaded:
        raise QuestionError(found.reason)
    return found


# If the host has memory for all of them, they start together, and import torch while the run does. Otherwise only a few
# exist at a time: a process ends once it has described its backend, and starts again while the previous one is at work.


class WorkerPool:
    """The backends' processes by reference; a context manager that ends all of them on exit."""

    fits_pages = True

    def __init__(
        self,
        show: Show | None = None,
        spare: WorkerProcess | None = None,
        imports: Imports | None = None,
        settings: WorkerSettings | None = None,
        start: StartWorker = start_worker,
    ) -> None:
        """``show``: gets what the processes print, line by line, with the name of the backend.

        ``spare``: a process started ahead, without a backend; the pool closes it. ``imports``: what the processes
        import before their backend; None for all checks. ``settings``: None for the default ones. ``start``: starts a
        process.
        """
        self._settings = settings or WorkerSettings()
        self.limits = self._settings.limits
        self.gpus: tuple[Gpu, ...] = ()
        self._gpu: Gpu | None = None
        self._inherited = passed_environment(os.environ, self._settings.pass_env)
        self._show, self._spare, self._start_worker = show, spare, Starter(start)
        self._imports = imports or Imports()
        self._watch = MemoryWatch(self._settings.memory.host)
        if spare is not None:
            spare.send(CaseServer.prepare, self._imports)
            self._watch.add(spare)
        self._room = room_on_host()
        self._prepared: set[str] = set()
        self._processes: dict[str, WorkerProcess] = {}
        self._environments: dict[str, dict[str, str]] = {}
        self._infos: dict[str, BackendInfo] = {}
        self._finishing: list[WorkerProcess] = []
        self._assignment: Assignment | None = None
        self._unshared: set[str] = set()
        self._twins: list[WorkerPool] = []
        self._lock = threading.RLock()  # for the processes, which several threads start and end
        self._is_stopped = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(at_once=kind is not None)

    def close(self, *, at_once: bool = False) -> None:
        """End all processes; finishing ones get a moment to end, unless ``at_once``. May be called repeatedly."""
        spare = () if self._spare is None else (self._spare,)
        for process in (*spare, *self._processes.values(), *self._finishing):
            process.close(at_once=at_once)
        for twin in self._twins:
            twin.close(at_once=at_once)

    def twin(self, gpu: Gpu | None = None) -> "WorkerPool":
        """Return a pool for one more process of each backend described here; it is closed with this one.

        ``gpu``: the one that its processes see; None if they see the same as those of this pool.
        """
        twin = WorkerPool(self._show, settings=self._settings)
        twin._start_worker = self._start_worker
        alone = gpu.variables if gpu else {}
        twin._environments = {ref: {**each, **alone} for ref, each in self._environments.items()}
        twin._gpu, twin._infos, twin._assignment = gpu, self._infos, self._assignment
        twin._imports, twin._unshared = self._imports, self._unshared
        twin._watch = self._watch
        self._twins.append(twin)
        return twin

    def with_settings(self, settings: WorkerSettings) -> "WorkerPool":
        """Return a pool that replaces this one, which has only chosen a device so far."""
        spare, self._spare = self._spare, None
        pool = WorkerPool(self._show, spare, self._imports, settings)
        pool._start_worker = self._start_worker
        return pool

    def start(self, refs: Iterable[str]) -> None:
        """Start the missing processes of ``refs``, as many as there is memory for; they load their backends."""
        for ref in refs:
            if len(self._processes) < self._room:
                self._start(ref)

    def prepare(self, ref: str) -> None:
        """Start the process of ``ref`` if it is missing, so that :meth:`restart` returns soon.

        Raises:
            OSError: it cannot be started.
        """
        with self._lock:
            if ref not in self._processes:
                self._start(ref)
                self._call_for_description(ref)
                self._prepared.add(ref)

    def stop(self) -> None:
        """End the processes at once, and start no others; a thread that waits for one gets an error."""
        with self._lock:
            self._is_stopped = True
            processes = tuple(self._processes.values())
        for process in processes:
            process.kill()

    def choose_device(self, wishes: Sequence[str], wanted: str | None) -> tuple[str, tuple[str, ...], Environment]:
        """Return the device of the run, notes on the choice, and the environment there, from one of the processes.

        ``wanted``: by the user; ``wishes``: of the suites. Skips processes that ended, or in which attncheck failed.
        Sets ``gpus`` to the GPUs that processes may use in parallel.

        Raises:
            QuestionError: the device that the user wants does not exist, or no process lives long enough to answer.
            WorkerError: attncheck itself failed in the process without a backend.
        """
        cause = ""
        for process in self._to_choose():
            limit = self.limits.of_description if process.ref else self.limits.of_loading  # it loads its backend before
            try:
                chosen = process.call(limit, CaseServer.choose_device, wanted, tuple(wishes))
            except ProcessEndedError as ended:
                cause = ended.end.cause
            except WorkerError:
                if not process.ref:
                    raise
                self.discard(process.ref)  # a new process reports the failure when it describes the backend
            else:
                self.gpus = chosen.gpus
                return chosen.device, chosen.notes, chosen.environment
        raise QuestionError(f"a process without a backend ended before it named the device: {cause}")

    def _to_choose(self) -> Iterator[WorkerProcess]:
        """Yield the processes that may choose the device; the last one has no backend."""
        yield from tuple(self._processes.values())
        self._spare = self._spare or self._new()
        yield self._spare

    def begin(self, selection: "Selection", plan: "RunPlan", environment: Environment) -> None:
        """Assign the run of ``plan`` to the processes."""
        self.assign(assignment_of(selection, plan, environment))

    def assign(self, assignment: Assignment) -> None:
        """Set the run that the processes work for; call it before :meth:`describe`, and again if its suites change."""
        self._assignment = assignment
        for ref in self._infos.keys() & self._processes.keys():
            self._processes[ref].send(CaseServer.assign, self._assignment_of(ref))

    def stop_sharing_probes(self, ref: str) -> None:
        """Make the next processes of ``ref`` run every probe of CUDA graphs on every layer.

        Use it for a backend that died in a probe: only the layers with the fault die again, not every process.
        """
        self._unshared.add(ref)

    def describe(self, refs: Sequence[str]) -> list[BackendDescription | QuestionError]:
        """Return the description of each backend, or why it cannot be loaded.

        A backend that requires environment variables its process lacks is restarted with them.
        """
        found = dict(zip(refs, self._described(refs), strict=True))
        again = {ref: needs for ref, each in found.items() if (needs := self._missing(ref, each))}
        for ref, needs in again.items():
            self.discard(ref)
            self._environments[ref] = self._environments.get(ref, {}) | needs
            try:
                self._start(ref)
            except OSError as error:  # for instance, a variable is longer than the system permits
                reason = f"its process cannot be started with the environment it requires: {error.strerror}"
                found[ref] = BackendLoadError(ref, reason)
        started = tuple(ref for ref in again if ref in self._processes)
        found |= zip(started, self._described(started), strict=True)
        for ref, given in again.items():
            if needs := self._missing(ref, found[ref]):
                found[ref] = BackendLoadError(ref, f"started with {given}, it now requires {needs}")
        self._infos |= {ref: each.info for ref, each in found.items() if isinstance(each, BackendDescription)}
        return list(found.values())

    def examiner(self, run: "Run", costs: "Callable[[], Costs]" = dict) -> "Supervisor":
        """Return what examines the questions of ``run`` in these processes.

        Without ``jobs``, as many work at once as cores and memory allow, but one per GPU. With a ``deadline``, the
        backends share time and GPUs. With ``warm``, other processes compile kernels ahead of the run on a GPU.
        """
        from attncheck.harness.workers.executor import Supervisor

        options, device = run.options, run.plan.device
        is_gpu, is_shared = device != "cpu", options.deadline is not None
        gpus = max(len(self.gpus), 1)
        room = gpus * most_processes(device, gpus) if is_shared else most_processes("cpu")
        jobs = options.jobs or (min(room, gpus) if is_gpu and not is_shared else room)
        if options.deadline is not None:
            loaded = sum(each.is_loaded for each in run.backends)
            self.limits = self.limits.shared(options.deadline - time.monotonic(), loaded, jobs)
        warms = options.warm and is_gpu and jobs <= gpus  # where several processes share a GPU, warmers have no room
        known = costs() if jobs > 1 else None
        return Supervisor(run.plan, run.backends, self, run.environment, jobs=jobs, warms=warms, costs=known)

    def process(self, ref: str) -> WorkerProcess | None:
        """Return the process of a backend, or None if it has ended, or has only been prepared."""
        return None if ref in self._prepared else self._processes.get(ref)

    def restart(self, ref: str) -> WorkerProcess:
        """Return a new process of ``ref``: the prepared one, or another.

        Raises:
            QuestionError: it does not load the backend as the first one did, or describes it differently.
            OSError: it cannot be started.
            StoppedError: the pool was stopped.
            WorkerError: attncheck itself failed in it.
        """
        if ref not in self._prepared:
            self.discard(ref)
        with self._lock:
            if self._is_stopped:
                raise StoppedError
            self.prepare(ref)
            self._prepared.discard(ref)
            process = self._processes[ref]
        found = description_of(process, self.limits.of_description)
        if loaded(found).info != self._infos[ref]:
            raise QuestionError(f"{ref} has changed since the run began")
        return process

    def start_extra(self, ref: str) -> WorkerProcess:
        """Start one more process of ``ref`` and assign the run to it; the caller closes it. It writes no dump."""
        process = self._new(self._environments.get(ref), is_shown=False)
        _load(process, ref)
        process.send(CaseServer.assign, self._assignment_of(ref).model_copy(update={"dump": None}))
        return process

    def discard(self, ref: str) -> None:
        """End the process of ``ref`` at once."""
        with self._lock:
            self._prepared.discard(ref)
            process = self._processes.pop(ref, None)
        if process is not None:
            process.close()

    def finish(self, ref: str) -> None:
        """Let the process of ``ref`` end by itself, and close those that were finishing before.

        If the run uses a GPU, wait for the process: in compute mode EXCLUSIVE_PROCESS, the next one gets no context
        before.
        """
        self._await_finishing()
        with self._lock:
            if (process := self._processes.pop(ref, None)) is not None:
                process.finish()
                self._finishing.append(process)
        if self._assignment is not None and self._assignment.device != "cpu":
            self._await_finishing()

    def isolate(self, ref: str) -> None:
        """End all processes except that of ``ref``; on return no other process of the run is at work, or ending.

        Later, processes may be started again after :meth:`stop`.
        """
        self._is_stopped = False
        self.keep_only([ref])
        self._await_finishing()
        while self._twins:
            self._twins.pop().close()

    def keep_only(self, refs: Iterable[str]) -> None:
        """End all processes except those of ``refs``."""
        for ref in set(self._processes) - set(refs):
            self.discard(ref)

    def _await_finishing(self) -> None:
        with self._lock:
            finishing, self._finishing = self._finishing, []
        for process in finishing:
            process.close()

    def _described(self, refs: Sequence[str]) -> list[BackendDescription | QuestionError]:
        assigned: set[str] = set()
        found = []
        for index, ref in enumerate(refs):
            due = [each for each in refs[index:] if each not in self._processes]
            if due and index > 1 and len(self._processes) >= self._room:
                self.discard(refs[index - 1])  # the first one stays, because the run begins with it
            self._start(ref)
            self.start(refs[index:])
            for each in refs[index:]:
                if each in self._processes and each not in assigned:
                    self._call_for_description(each)
                    assigned.add(each)
            found.append(description_of(self._processes[ref], self.limits.of_description))
        return found

    def _call_for_description(self, ref: str) -> None:
        self._processes[ref].send(CaseServer.assign, self._assignment_of(ref))
        self._processes[ref].send(CaseServer.describe)

    def _assignment_of(self, ref: str) -> Assignment:
        if self._assignment is None:
            raise RuntimeError("assign() comes before the first process is used")
        update = {"shares_probes": ref not in self._unshared, "memory": self._settings.memory}
        return self._assignment.model_copy(update={**update, "gpu": self._gpu and self._gpu.uuid})

    def _start(self, ref: str) -> None:
        if ref in self._processes:
            return
        process, self._spare = self._spare, None
        needed = self._inherited | self._environments.get(ref, {})
        if process is None or not needed.items() <= (process.inherited | process.environment).items():
            self._spare = process
            process = self._new(self._environments.get(ref))
        self._environments[ref] = process.environment
        self._processes[ref] = process
        _load(process, ref)

    def _new(self, environment: Mapping[str, str] | None = None, *, is_shown: bool = True) -> WorkerProcess:
        process = WorkerProcess(
            environment, self._show if is_shown else None, self._settings.pass_env, self._start_worker
        )
        process.send(CaseServer.prepare, self._imports)
        self._watch.add(process)
        return process

    def _missing(self, ref: str, found: BackendDescription | QuestionError) -> dict[str, str]:
        if isinstance(found, QuestionError):
            return {}
        return missing_variables(found.info.required_environment, self._inherited | self._environments.get(ref, {}))


def _load(process: WorkerProcess, ref: str) -> None:
    process.ref = process.printed.label = ref
    process.send(CaseServer.load, ref)


# Compiling a kernel at its first call takes seconds on one core, while the GPU waits. A warmer is one more process of
# the backend under examination. It gets the next questions of the run, so that it compiles the same kernels, and leaves
# them in the caches on disk. Its records are dropped: nothing that happens in it is a finding.

_MOST = 8
_HOST_BYTES = 3 * 2**29
"""Host memory of one process: torch for CUDA, a compiler, and a small case."""

_DEVICE_BYTES = 2**32
"""GPU memory of one process: its context, what torch keeps between cases, and captured graphs."""

SMALL_BYTES = 2**30
"""Bytes up to which a case may run beside any other one."""

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
    accelerator = accelerator_of(device)
    if accelerator is not None:
        limits.append(accelerator.facts().memory // 2 // _DEVICE_BYTES)
        if (modes := accelerator.modes()) is not None and not modes.is_shared:
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
        self._waiting = [question for question in questions if needed_bytes(question[0]) <= SMALL_BYTES]
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
            process.call(self._loading, CaseServer.describe)
        except (ProcessEndedError, RefusedError, WorkerError):
            self._end(process)
            return None
        return process

    def _examine(self, process: WorkerProcess, question: Question) -> bool:
        case, checks = question
        watch = threading.Timer(self._limit_s, process.kill)
        watch.start()
        try:
            process.send(CaseServer.examine, case.key, checks, 0, None)
            while not isinstance(answer := process.receive(), Examined):
                pass
            is_lost = answer.lost is not None  # the process can no longer use the device
        except (ProcessEndedError, RefusedError, WorkerError):
            is_lost = True
        finally:
            watch.cancel()
        (self.lost if is_lost else self.examined).append(case.key)
        return not is_lost

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
        self._plan = plan
        self._workers = workers
        self._gpus = gpus
        self._is_on = is_on
        self._seen: dict[str, _Seen] = {}
        self._lock = threading.Lock()

    def before(self, ref: str, left: Sequence[Question], workers: WorkerPool) -> None:
        """Record that the run reaches the first of ``left``, the questions that remain for ``ref``; may start warmers.

        They are started in ``workers``, and so use its GPU.
        """
        if not self._is_on:
            return
        now = time.monotonic()
        with self._lock:
            seen = self._seen.get(ref)
            if seen is None:
                seen = self._seen[ref] = _Seen(kernel_count(), now)
            elif seen.warmers is not None:
                seen.warmers.skip(left[0][0])
            elif now - seen.began > _SLOW_S and kernel_count() > seen.kernels:
                seen.warmers = self._start(workers, ref, left[1:], self._gpus)
            seen.began = now

    def finish(self, ref: str) -> None:
        """End the warmers of the backend ``ref``, which is examined; call it before the next one."""
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
