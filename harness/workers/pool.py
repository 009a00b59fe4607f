"""The pool of worker processes, and their first messages."""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

from attncheck.backends.declarations import OTHER_PATHS
from attncheck.errors import BackendLoadError, QuestionError
from attncheck.harness.driver.observation import Raised
from attncheck.harness.host import free_host_bytes, usable_cores
from attncheck.harness.run.outcomes import IMPORT, OURSELVES, BackendDescription, missing_variables, not_loaded
from attncheck.harness.run.preparation import Gpu
from attncheck.harness.run.selection import RunPlan
from attncheck.harness.workers.limits import Limit, MemoryWatch, WorkerSettings, passed_environment, room_on_host
from attncheck.harness.workers.printed import Show
from attncheck.harness.workers.process import ProcessEndedError, RefusedError, StoppedError, WorkerError, WorkerProcess
from attncheck.harness.workers.protocol import HarnessFailure
from attncheck.harness.workers.sharing import SharedDevice
from attncheck.harness.workers.starting import ForkServer, Starter, StartWorker, modules_of
from attncheck.harness.workers.worker import Assignment, CaseServer, DeviceChosen, Imports
from attncheck.reports.run_file.header import BackendInfo, Environment

if TYPE_CHECKING:
    from attncheck.harness.run.run import Costs, Run
    from attncheck.harness.run.selection import Selection
    from attncheck.harness.workers.executor import Supervisor


def imports_of(selection: "Selection") -> Imports:
    """Return what a backend's process imports before the backend."""
    functions = any(case.batch.path.name in OTHER_PATHS for case in selection.cases)
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


# If the host has memory for all of them, they start together. Otherwise only a few exist at a time: a process ends once
# it has described its backend, and starts again when the backend is examined.


class WorkerPool:
    """The backends' processes by reference; a context manager that ends all of them on exit."""

    fits_pages = True

    def __init__(
        self,
        show: Show | None = None,
        server: ForkServer | None = None,
        imports: Imports | None = None,
        settings: WorkerSettings | None = None,
        start: StartWorker | None = None,
    ) -> None:
        """``show``: gets what the processes print, line by line, with the name of the backend.

        ``server``: forks the processes, and has begun ahead; the pool closes it. ``imports``: what the processes
        import before their backend; None for all checks. ``settings``: None for the default ones. ``start``: starts a
        process; None for the server.
        """
        self._settings = settings or WorkerSettings()
        self.limits = self._settings.limits
        self.chosen: DeviceChosen | None = None
        self.device = SharedDevice()
        self._gpu: Gpu | None = None
        self._inherited = passed_environment(os.environ, self._settings.pass_env)
        self._show = show
        self._imports = imports or Imports()
        self._server: ForkServer | None = None
        if start is None:
            if server is None or server.environment != self._inherited:
                if server is not None:
                    server.close()
                server = ForkServer(self._inherited)
            server.imports = self._imports.model_dump_json()
            start = self._server = server
        self._start_worker = start if isinstance(start, Starter) else Starter(start)
        self._watch = MemoryWatch(self._settings.memory.host)
        self._room = room_on_host()
        self._processes: dict[str, WorkerProcess] = {}
        self._environments: dict[str, dict[str, str]] = {}
        self._infos: dict[str, BackendInfo] = {}
        self._finishing: list[WorkerProcess] = []
        self._assignment: Assignment | None = None
        self._unshared: set[str] = set()
        self._twins: list[WorkerPool] = []
        self._lock = threading.RLock()  # for the processes, which several threads start and end
        self.is_stopped = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(at_once=kind is not None)

    def close(self, *, at_once: bool = False) -> None:
        """End all processes; finishing ones get a moment to end, unless ``at_once``. May be called repeatedly."""
        if self._server is not None:
            self._server.close()
        for process in (*self._processes.values(), *self._finishing):
            process.close(at_once=at_once)
        for twin in self._twins:
            twin.close(at_once=at_once)

    def share(self, device: SharedDevice) -> None:
        """Start processes on ``device`` from now on, which others use, too."""
        self.device = device
        device.add(self.end_all)

    def twin(self, gpu: Gpu | None = None, device: SharedDevice | None = None) -> "WorkerPool":
        """Return a pool for one more process of each backend described here; it is closed with this one.

        ``gpu``: the one that its processes see; None if they see the same as those of this pool. ``device``: None for
        the one of this pool.
        """
        twin = WorkerPool(self._show, settings=self._settings, start=self._start_worker)
        alone = gpu.variables if gpu else {}
        twin._environments = {ref: {**each, **alone} for ref, each in self._environments.items()}
        twin._gpu, twin._infos, twin._assignment = gpu, self._infos, self._assignment
        twin._imports, twin._unshared = self._imports, self._unshared
        twin._watch = self._watch
        twin.share(device or self.device)
        self._twins.append(twin)
        return twin

    def with_settings(self, settings: WorkerSettings) -> "WorkerPool":
        """Return a pool that replaces this one, which has only chosen a device so far."""
        pool = WorkerPool(self._show, self._server, self._imports, settings)
        if pool._server is self._server:  # it ends with the thread that began it
            pool._start_worker = self._start_worker
        return pool

    def start(self, refs: Iterable[str]) -> None:
        """Start the missing processes of ``refs``, as many as there is memory for; they load their backends."""
        for ref in sorted(refs, key=lambda ref: bool(modules_of(ref))):  # others need not wait for these imports
            if len(self._processes) < self._room:
                self._start(ref)

    def stop(self) -> None:
        """End the processes at once, and start no others; a thread that waits for one gets an error."""
        with self._lock:
            self.is_stopped = True
            processes = tuple(self._processes.values())
        for process in processes:
            process.kill()

    def choose_device(self, wishes: Sequence[str], wanted: str | None) -> tuple[str, tuple[str, ...], Environment]:
        """Return the device of the run, notes on the choice, and the environment there, from one of the processes.

        ``wanted``: by the user; ``wishes``: of the suites. Skips processes that ended, or in which attncheck failed.
        Sets ``chosen`` to the whole answer.

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
                self.chosen = chosen
                return chosen.device, chosen.notes, chosen.environment
        raise QuestionError(f"a process without a backend ended before it named the device: {cause}")

    def _to_choose(self) -> Iterator[WorkerProcess]:
        """Yield the processes that may choose the device; the last one has no backend."""
        yield from tuple(self._processes.values())
        with self._new() as process:
            yield process

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

        Without ``jobs``, as many work at once as cores and memory allow. With a ``deadline``, the backends share time.
        """
        from attncheck.harness.workers.executor import Supervisor

        options = run.options
        chosen = self.chosen
        if chosen is None or chosen.device == "cpu":
            jobs = options.jobs or default_jobs()
        else:
            jobs = options.jobs or default_jobs(len(chosen.gpus) or 1, chosen.processes)
        if options.deadline is not None:
            loaded = sum(each.is_loaded for each in run.backends)
            self.limits = self.limits.shared(options.deadline - time.monotonic(), loaded, jobs)
        known = costs() if jobs > 1 else None
        return Supervisor(run.plan, run.backends, self, run.environment, jobs=jobs, costs=known)

    def process(self, ref: str) -> WorkerProcess | None:
        """Return the process of a backend, or None if it has ended."""
        return self._processes.get(ref)

    def restart(self, ref: str) -> WorkerProcess:
        """Return a new process of ``ref``.

        Raises:
            QuestionError: it does not load the backend as the first one did, or describes it differently.
            OSError: it cannot be started.
            StoppedError: the pool was stopped.
            WorkerError: attncheck itself failed in it.
        """
        self.discard(ref)
        with self._lock:
            if self.is_stopped:
                raise StoppedError
            self._start(ref)
            self._call_for_description(ref)
            process = self._processes[ref]
        found = description_of(process, self.limits.of_description)
        if loaded(found).info != self._infos[ref]:
            raise QuestionError(f"{ref} has changed since the run began")
        return process

    def discard(self, ref: str) -> None:
        """End the process of ``ref`` at once."""
        with self._lock:
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
        self.is_stopped = False
        self.keep_only([ref])
        self._await_finishing()
        while self._twins:
            self._twins.pop().close()

    def end_all(self) -> None:
        """End all processes, and return when they have ended."""
        self.keep_only(())
        self._await_finishing()

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
        environment = {**self._environments.setdefault(ref, {}), **self.device.variables(ref)}
        self._processes[ref] = process = self._new(environment, ref)
        process.ref = process.printed.label = ref
        process.send(CaseServer.load, ref)

    def _new(self, environment: Mapping[str, str] | None = None, ref: str = "") -> WorkerProcess:
        start = partial(self._start_worker, ref=ref)
        process = WorkerProcess(environment, self._show, self._settings.pass_env, start)
        process.send(CaseServer.prepare, self._imports)
        self._watch.add(process)
        return process

    def _missing(self, ref: str, found: BackendDescription | QuestionError) -> dict[str, str]:
        if isinstance(found, QuestionError):
            return {}
        return missing_variables(found.info.required_environment, self._inherited | self._environments.get(ref, {}))


_MOST = 8
"""The most processes on one GPU, or on the CPU."""

_HOST_BYTES = 3 * 2**29
"""Host memory of one process: torch for CUDA, a compiler, and a small case."""

SMALL_BYTES = 2**30
"""Bytes up to which a case may run beside any other one."""


def default_jobs(gpus: int = 1, on_each: int = _MOST) -> int:
    """Return how many processes may examine cases at once on a CPU or on ``gpus`` GPUs; at least 1.

    The limits are the cores, and the free memory of the host. ``on_each``: how many each GPU has memory for.
    """
    limits = [gpus * min(on_each, _MOST), usable_cores()]
    if (free := free_host_bytes()) is not None:
        limits.append(free // _HOST_BYTES)
    return max(1, min(limits))
