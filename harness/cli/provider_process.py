"""Examines providers of utilities in a fork of this process, so that a crash or hang costs one record.

This module joins the packages ``providers`` and ``workers``, which do not import each other.
"""

from collections.abc import Sequence
from functools import partial

from attncheck.cases.model import Case
from attncheck.errors import ProviderLoadError, QuestionError
from attncheck.harness.providers.examine import Function, Providers
from attncheck.harness.run.options import RunOptions
from attncheck.harness.run.outcomes import BackendDescription, Circumstances, ended
from attncheck.harness.run.run import Run
from attncheck.harness.workers.limits import Limit, worker_settings
from attncheck.harness.workers.pool import WorkerError, chosen_device_of
from attncheck.harness.workers.process import ProcessEndedError, Show, WorkerProcess, fork_worker
from attncheck.harness.workers.protocol import (
    Answer,
    ChooseDevice,
    ExamineFunction,
    HarnessFailure,
    LoadProviders,
    ProvidersLoaded,
    Refused,
)
from attncheck.harness.workers.worker import WorkerPipes, next_request, serve
from attncheck.reports.run_file.header import BackendInfo, Environment
from attncheck.reports.run_file.records import UTILITIES, Record


class ProviderProcess:
    """Imports and examines providers as :class:`Providers` does, in a fork of this process that :meth:`close` ends.

    After the fork has ended, the next function gets another one.
    """

    def __init__(self, options: RunOptions, show: Show | None = None) -> None:
        self._refs, self._show = options.providers, show
        self._limits = worker_settings(options).limits
        self._process: WorkerProcess | None = None
        self._load: LoadProviders | None = None
        self.infos: tuple[BackendInfo, ...] = ()
        self.notes: tuple[str, ...] = ()

    def choose_device(self, wishes: Sequence[str], wanted: str | None) -> tuple[str, tuple[str, ...], Environment]:
        """Return the device of the run, notes on the choice, and the environment on it.

        Raises:
            QuestionError: the device that the user named is not there.
            WorkerError: attncheck itself failed in the process.
        """
        process = self._started()
        process.send(ChooseDevice(wanted=wanted, wishes=tuple(wishes)))
        chosen = chosen_device_of(process, self._limits.of_loading)
        return chosen.device, chosen.notes, chosen.environment

    def load(self, cases: Sequence[Case], device: str, circumstances: Circumstances) -> None:
        """Import the providers; they are examined on ``device``, with the batches of ``cases``.

        Raises:
            QuestionError: a provider cannot be imported.
            WorkerError: attncheck itself failed in the process.
        """
        self._load = LoadProviders(refs=self._refs, cases=tuple(cases), device=device, circumstances=circumstances)
        loaded = self._loaded(self._started(), self._load)
        self.infos, self.notes = loaded.infos, loaded.notes

    def examine(self, provider: BackendInfo, function: Function) -> Record:
        """Return the record of one function of a provider; call :meth:`load` before.

        Raises:
            QuestionError: a provider can no longer be imported.
            WorkerError: attncheck itself failed in the process.
        """
        assert self._load is not None
        if self._process is None:
            self._loaded(self._started(), self._load)
        process = self._started()
        process.send(ExamineFunction(provider=provider, function=function.id))
        try:
            answer = _answer(process, self._limits.of_function)
        except ProcessEndedError as stopped:
            self.close()
            backend, stage = BackendDescription(info=provider), f"function {function.id}"
            return ended(self._load.circumstances, function, backend, UTILITIES, stage, stopped.end)
        if answer.kind != "record":
            raise _unexpected(process, answer)
        return answer

    def close(self) -> None:
        """End the process at once."""
        if self._process is not None:
            self._process.close(at_once=True)
            self._process = None

    def _started(self) -> WorkerProcess:
        if self._process is None:
            work = partial(serve, work=_serve_providers)
            self._process = WorkerProcess(show=self._show, start=lambda _: fork_worker(work))
            self._process.ref = self._process.printed.label = ", ".join(self._refs)
        return self._process

    def _loaded(self, process: WorkerProcess, load: LoadProviders) -> ProvidersLoaded:
        process.send(load)
        try:
            answer = _answer(process, self._limits.of_loading)
        except ProcessEndedError as stopped:
            self.close()
            reason = f"its process ended while it was imported: {stopped.end.cause}"
            raise ProviderLoadError(process.ref, reason) from None
        if not isinstance(answer, ProvidersLoaded):
            raise _unexpected(process, answer)
        return answer


def load_providers(run: Run, process: ProviderProcess | None) -> Providers | ProviderProcess:
    """Import the providers of ``run`` in ``process``, or in this process if it is None.

    Raises:
        QuestionError, WorkerError: as :meth:`ProviderProcess.load`.
    """
    plan, circumstances = run.plan, Circumstances(run.options.seed, run.environment.digest, run.environment.attncheck)
    if process is None:
        return Providers(run.options.providers, plan.cases, plan.device, circumstances)
    process.load(plan.cases, plan.device, circumstances)
    return process


def _answer(process: WorkerProcess, limit: Limit) -> Answer:
    match answer := process.receive(limit):
        case Refused():
            raise QuestionError(answer.reason)
        case HarnessFailure():
            raise WorkerError(process.ref, answer)
        case _:
            return answer


def _unexpected(process: WorkerProcess, answer: Answer) -> RuntimeError:
    return RuntimeError(f"the process of {process.ref} answered by {answer.kind!r}")


def _serve_providers(pipes: WorkerPipes) -> None:
    """Import and examine providers on request of the run; the main function of the process."""
    load = next_request(pipes)
    if not isinstance(load, LoadProviders):
        return
    try:
        providers = Providers(load.refs, load.cases, load.device, load.circumstances)
    except QuestionError as error:
        pipes.send(Refused(reason=str(error)))
        return
    pipes.send(ProvidersLoaded(infos=providers.infos, notes=providers.notes))
    while isinstance(request := pipes.receive(), ExamineFunction):
        pipes.send(providers.examine(request.provider, Function(request.function)))
