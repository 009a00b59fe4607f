"""The processes of a run's backends, one each: start them, describe the backends, restart them.

If the host has memory for all of them, they start together, and import torch while the run does. Otherwise only a few
exist at a time: a process ends once it has described its backend, and starts again while the previous one is at work.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self

from attncheck.errors import BackendLoadError, QuestionError
from attncheck.harness.run.backend_description import BackendDescription, missing_variables
from attncheck.harness.run.gpus import Gpu
from attncheck.harness.workers.first_messages import assignment_of, description_of, device_chosen_by, loaded
from attncheck.harness.workers.memory_limits import room_on_host
from attncheck.harness.workers.memory_watch import MemoryWatch
from attncheck.harness.workers.passed_environment import passed_environment
from attncheck.harness.workers.printed_output import Show
from attncheck.harness.workers.process_control import start_worker
from attncheck.harness.workers.protocol import Assignment, ChooseDevice, Prepare
from attncheck.harness.workers.worker_process import StartWorker, WorkerProcess
from attncheck.harness.workers.worker_settings import WorkerSettings
from attncheck.reports.run_file.header import BackendInfo, Environment

if TYPE_CHECKING:
    from attncheck.harness.run.plan import RunPlan
    from attncheck.harness.run.selection import Selection


class WorkerPool:
    """The backends' processes by reference; a context manager that ends all of them on exit."""

    def __init__(
        self,
        show: Show | None = None,
        spare: WorkerProcess | None = None,
        prepare: Prepare | None = None,
        settings: WorkerSettings | None = None,
        start: StartWorker = start_worker,
    ) -> None:
        """``show``: gets what the processes print, line by line, with the name of the backend.

        ``spare``: a process started ahead, without a backend; the pool closes it. ``prepare``: what the processes
        import before their backend; None for all checks. ``settings``: None for the default ones. ``start``: starts a
        process.
        """
        self._settings = settings or WorkerSettings()
        self.limits = self._settings.limits
        self.gpus: tuple[Gpu, ...] = ()
        self._gpu: Gpu | None = None
        self._inherited = passed_environment(os.environ, self._settings.pass_env)
        self._show, self._spare, self._start_worker = show, spare, start
        self._prepare = prepare or Prepare()
        self._watch = MemoryWatch(self._settings.memory.host)
        if spare is not None:
            spare.prepare(self._prepare)
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
        twin = WorkerPool(self._show, settings=self._settings, start=self._start_worker)
        alone = gpu.variables if gpu else {}
        twin._environments = {ref: {**each, **alone} for ref, each in self._environments.items()}
        twin._gpu, twin._infos, twin._assignment = gpu, self._infos, self._assignment
        twin._prepare, twin._unshared = self._prepare, self._unshared
        twin._watch = self._watch
        self._twins.append(twin)
        return twin

    def with_settings(self, settings: WorkerSettings) -> "WorkerPool":
        """Return a pool that replaces this one, which has only chosen a device so far."""
        spare, self._spare = self._spare, None
        return WorkerPool(self._show, spare, self._prepare, settings, self._start_worker)

    def start(self, refs: Iterable[str]) -> None:
        """Start the missing processes of ``refs``, as many as there is memory for; they load their backends."""
        for ref in refs:
            if len(self._processes) < self._room:
                self._start(ref)

    def prepare(self, ref: str) -> WorkerProcess | None:
        """Start the process of ``ref`` if it is missing, so that :meth:`restart` returns soon.

        Return the process, which may still be loading the backend, or None if it cannot be started.
        """
        if ref not in self._processes and self._assignment is not None:
            with suppress(OSError):  # restart() raises it when it matters
                self._start(ref)
                self._processes[ref].send(self._assignment_of(ref))
                self._prepared.add(ref)
        return self._processes.get(ref)

    def choose_device(self, wishes: Sequence[str], wanted: str | None) -> tuple[str, tuple[str, ...], Environment]:
        """Return the device of the run, notes on the choice, and the environment there, from one of the processes.

        ``wanted``: by the user; ``wishes``: of the suites. Skips processes that ended, or in which attncheck failed.
        Sets ``gpus`` to the GPUs that processes may use in parallel.

        Raises:
            QuestionError: the device that the user wants does not exist, or no process lives long enough to answer.
            WorkerError: attncheck itself failed in the process without a backend.
        """
        request = ChooseDevice(wanted=wanted, wishes=tuple(wishes))
        chosen, spoilt = device_chosen_by(self._to_choose(), request, self.limits.of_loading)
        for ref in spoilt:
            self.discard(ref)  # a new process reports the failure when it describes the backend
        self.gpus = chosen.gpus
        return chosen.device, chosen.notes, chosen.environment

    def _to_choose(self) -> Iterator[WorkerProcess]:
        """Yield the processes that may choose the device; the last one has no backend."""
        yield from self._processes.values()
        self._spare = self._spare or self._new()
        yield self._spare

    def begin(self, selection: "Selection", plan: "RunPlan", environment: Environment) -> None:
        """Assign the run of ``plan`` to the processes."""
        self.assign(assignment_of(selection, plan, environment))

    def assign(self, assignment: Assignment) -> None:
        """Set the run that the processes work for; call it before :meth:`describe`, and again if its suites change."""
        self._assignment = assignment
        for ref in self._infos.keys() & self._processes.keys():
            self._processes[ref].send(self._assignment_of(ref))

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

    def process(self, ref: str) -> WorkerProcess | None:
        """Return the process of a backend, or None if it has ended, or has only been prepared."""
        return None if ref in self._prepared else self._processes.get(ref)

    def restart(self, ref: str) -> WorkerProcess:
        """Return a new process of ``ref``: the prepared one, or another.

        Raises:
            QuestionError: it does not load the backend as the first one did, or describes it differently.
            WorkerError: attncheck itself failed in it.
        """
        if ref not in self._prepared:
            self.discard(ref)
        (found,) = self._described([ref])
        if loaded(found).info != self._infos[ref]:
            raise QuestionError(f"{ref} has changed since the run began")
        return self._processes[ref]

    def start_extra(self, ref: str) -> WorkerProcess:
        """Start one more process of ``ref`` and assign the run to it; the caller closes it. It writes no dump."""
        process = self._new(self._environments.get(ref), is_shown=False)
        process.load(ref)
        process.send(self._assignment_of(ref).model_copy(update={"dump": None}))
        return process

    def discard(self, ref: str) -> None:
        """End the process of ``ref`` at once."""
        self._prepared.discard(ref)
        if (process := self._processes.pop(ref, None)) is not None:
            process.close()

    def finish(self, ref: str) -> None:
        """Let the process of ``ref`` end by itself, and close those that were finishing before.

        If the run uses a GPU, wait for the process: in compute mode EXCLUSIVE_PROCESS, the next one gets no context
        before.
        """
        self._await_finishing()
        if (process := self._processes.pop(ref, None)) is not None:
            process.finish()
            self._finishing.append(process)
        if self._assignment is not None and self._assignment.device != "cpu":
            self._await_finishing()

    def isolate(self, ref: str) -> None:
        """End all processes except that of ``ref``; on return no other process of the run is at work, or ending."""
        self.keep_only([ref])
        self._await_finishing()
        while self._twins:
            self._twins.pop().close()

    def keep_only(self, refs: Iterable[str]) -> None:
        """End all processes except those of ``refs``."""
        for ref in set(self._processes) - set(refs):
            self.discard(ref)

    def _await_finishing(self) -> None:
        while self._finishing:
            self._finishing.pop().close()

    def _described(self, refs: Sequence[str]) -> list[BackendDescription | QuestionError]:
        assigned, self._prepared = self._prepared & set(refs), self._prepared - set(refs)
        found = []
        for index, ref in enumerate(refs):
            due = [each for each in refs[index:] if each not in self._processes]
            if due and index > 1 and len(self._processes) >= self._room:
                self.discard(refs[index - 1])  # the first one stays, because the run begins with it
            self._start(ref)
            self.start(refs[index:])
            for each in refs[index:]:
                if each in self._processes and each not in assigned:
                    self._processes[each].send(self._assignment_of(each))
                    assigned.add(each)
            found.append(description_of(self._processes[ref], self.limits.of_loading))
        return found

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
        process.load(ref)

    def _new(self, environment: Mapping[str, str] | None = None, *, is_shown: bool = True) -> WorkerProcess:
        process = WorkerProcess(
            environment, self._show if is_shown else None, self._settings.pass_env, self._start_worker
        )
        process.prepare(self._prepare)
        self._watch.add(process)
        return process

    def _missing(self, ref: str, found: BackendDescription | QuestionError) -> dict[str, str]:
        if isinstance(found, QuestionError):
            return {}
        return missing_variables(found.info.required_environment, self._inherited | self._environments.get(ref, {}))
