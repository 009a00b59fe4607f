"""Examines providers of utilities in a fork of this process, so that a crash or hang costs one record.

This module joins the packages ``providers`` and ``workers``, which do not import each other.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from attncheck.cases.model import Case
from attncheck.errors import ProviderLoadError, QuestionError
from attncheck.harness.providers.examine import Function, Providers
from attncheck.harness.run.options import RunOptions
from attncheck.harness.run.outcomes import BackendDescription, Circumstances, ended, identity_of
from attncheck.harness.run.run import Run
from attncheck.harness.workers.limits import worker_settings
from attncheck.harness.workers.printed import Show
from attncheck.harness.workers.process import ProcessEndedError, RefusedError, WorkerProcess
from attncheck.harness.workers.starting import fork_worker
from attncheck.harness.workers.worker import Server, serve
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
        self._given: tuple[tuple[Case, ...], str, Circumstances] | None = None
        self.infos: tuple[BackendInfo, ...] = ()
        self.notes: tuple[str, ...] = ()

    def choose_device(self, wishes: Sequence[str], wanted: str | None) -> tuple[str, tuple[str, ...], Environment]:
        """Return the device of the run, notes on the choice, and the environment on it.

        Raises:
            QuestionError: the device that the user named is not there.
            WorkerError: attncheck itself failed in the process.
        """
        chosen = self._started().call(self._limits.of_loading, ProviderServer.choose_device, wanted, tuple(wishes))
        return chosen.device, chosen.notes, chosen.environment

    def load(self, cases: Sequence[Case], device: str, circumstances: Circumstances) -> None:
        """Import the providers; they are examined on ``device``, with the batches of ``cases``.

        Raises:
            QuestionError: a provider cannot be imported.
            WorkerError: attncheck itself failed in the process.
        """
        self._given = tuple(cases), device, circumstances
        self.infos, self.notes = self._loaded(*self._given)

    def examine(self, provider: BackendInfo, function: Function) -> Record:
        """Return the record of one function of a provider; call :meth:`load` before.

        Raises:
            QuestionError: a provider can no longer be imported.
            WorkerError: attncheck itself failed in the process.
        """
        assert self._given is not None
        if self._process is None:
            self._loaded(*self._given)
        circumstances = self._given[-1]
        backend = BackendDescription(info=provider)
        process, due = self._started(), identity_of(circumstances, function, backend, UTILITIES)
        try:
            record = process.call(self._limits.of_function, ProviderServer.examine, provider, function.id)
            if any(getattr(record, name) != value for name, value in due.items()):
                raise process.intruded()
        except ProcessEndedError as stopped:
            self.close()
            record = ended(circumstances, function, backend, UTILITIES, f"function {function.id}", stopped.end)
        return record

    def close(self) -> None:
        """End the process at once."""
        if self._process is not None:
            self._process.close(at_once=True)
            self._process = None

    def _started(self) -> WorkerProcess:
        if self._process is None:
            make = partial(serve, make=lambda _: ProviderServer())
            self._process = WorkerProcess(show=self._show, start=lambda _: fork_worker(make))
            self._process.ref = self._process.printed.label = ", ".join(self._refs)
        return self._process

    def _loaded(self, cases: tuple[Case, ...], device: str, circumstances: Circumstances) -> "LoadedProviders":
        process = self._started()
        try:
            limit = self._limits.of_loading
            return process.call(limit, ProviderServer.load, self._refs, cases, device, circumstances)
        except ProcessEndedError as stopped:
            self.close()
            reason = f"its process ended while it was imported: {stopped.end.cause}"
            raise ProviderLoadError(process.ref, reason) from None


def load_providers(run: Run, process: ProviderProcess | None) -> Providers | ProviderProcess:
    """Import the providers of ``run`` in ``process``, or in this process if it is None.

    Raises:
        QuestionError, WorkerError: as :meth:`ProviderProcess.load`.
    """
    plan = run.plan
    circumstances = Circumstances(run.options.seed, run.environment.digest, run.environment.attncheck)
    if process is None:
        return Providers(run.options.providers, plan.cases, plan.device, circumstances)
    process.load(plan.cases, plan.device, circumstances)
    return process


class LoadedProviders(NamedTuple):
    """The providers that were imported. ``infos``, ``notes``: for the header of the run."""

    infos: tuple[BackendInfo, ...]
    notes: tuple[str, ...]


class ProviderServer(Server):
    """Imports and examines providers."""

    _providers: Providers

    def load(
        self, refs: tuple[str, ...], cases: tuple[Case, ...], device: str, circumstances: Circumstances
    ) -> LoadedProviders:
        """Import the providers ``refs``, to examine them on ``device`` with the batches of ``cases``."""
        try:
            self._providers = Providers(refs, cases, device, circumstances)
        except QuestionError as error:
            raise RefusedError(str(error)) from error
        return LoadedProviders(self._providers.infos, self._providers.notes)

    def examine(self, provider: BackendInfo, function: str) -> Record:
        """Return the record of one function of a provider."""
        return self._providers.examine(provider, Function(function))
