"""Examines providers of utilities in a fork of this process, so that a crash or hang costs one record.

This module joins the packages ``providers`` and ``workers``, which do not import each other.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Self

import attncheck
from attncheck.cases.model import Case
from attncheck.errors import ProviderLoadError, QuestionError
from attncheck.harness.providers.examine import (
    PlannedProviders,
    ProviderPlan,
    SubjectIdentity,
    describe_plan,
    examine_providers,
    plan_providers,
)
from attncheck.harness.run.options import RunOptions
from attncheck.harness.run.outcomes import BackendDescription, Circumstances, ended
from attncheck.harness.run.run import DeviceChooser
from attncheck.harness.workers.executor import WAITING
from attncheck.harness.workers.limits import worker_settings
from attncheck.harness.workers.process import ProcessEndedError, RefusedError, Show, WorkerProcess, fork_worker
from attncheck.harness.workers.worker import Server, Stage, serve
from attncheck.reports.run_file.header import Environment
from attncheck.reports.run_file.records import UTILITIES, Record


class ProviderExaminer:
    """Examines the providers of ``options`` on the batches of ``cases``, in a forked process; a context manager."""

    def __init__(self, options: RunOptions, cases: Sequence[Case], show: Show | None = None) -> None:
        self._options, self._cases, self._show = options, cases, show
        self._limits = worker_settings(options).limits
        self._process: WorkerProcess | None = None
        self._device = ""
        self._planned = PlannedProviders()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    @property
    def chooser(self) -> DeviceChooser | None:
        """The object that chooses the device of a run without backends: this one."""
        return self

    def choose_device(self, wishes: Sequence[str], wanted: str | None) -> tuple[str, tuple[str, ...], Environment]:
        """Return the device of the run, notes on the choice, and the environment on it.

        Raises:
            QuestionError: the device that the user named is not there.
            WorkerError: attncheck itself failed in the process.
        """
        chosen = self._started().call(self._limits.of_loading, ProviderServer.choose_device, wanted, tuple(wishes))
        return chosen.device, chosen.notes, chosen.environment

    def plan(self, cases: Sequence[Case], device: str) -> PlannedProviders:
        """Plan and return the functions to examine; ``cases``: those of the run.

        Raises:
            QuestionError: a provider cannot be imported, or a function is unknown.
            WorkerError: attncheck itself failed in the process.
        """
        if cases != self._cases:
            self._cases = cases
            self._close()
        self._device = device
        self._planned = self._plan()
        return self._planned

    def run(self, circumstances: Circumstances) -> Iterator[Record]:
        """Yield a record for each provider and function; start a fresh process after one that ended.

        Raises:
            QuestionError: a provider can no longer be imported.
            WorkerError: attncheck itself failed in the process.
        """
        pairs = [(info, subject) for info in self._planned.infos for subject in self._planned.subjects]
        first = 0
        while first < len(pairs):
            if self._process is None:
                self._plan()
            process, stage = self._started(), WAITING
            process.send(ProviderServer.examine, first, circumstances.environment)
            try:
                while not isinstance(answer := process.receive(self._limits.of_function), int):
                    if isinstance(answer, Stage):
                        stage = answer.name
                    else:
                        yield answer
                        first += 1
            except ProcessEndedError as stopped:
                info, subject = pairs[first]
                identity, backend = SubjectIdentity(subject), BackendDescription(info=info)
                yield ended(circumstances, identity, backend, UTILITIES, stage, stopped.end)
                first += 1
                self._close()

    def _plan(self) -> PlannedProviders:
        process, refs = self._started(), ", ".join(self._options.providers)
        try:
            return process.call(self._limits.of_loading, ProviderServer.plan, self._device, self._options.seed)
        except ProcessEndedError as stopped:
            self._close()
            reason = f"its process ended while it was imported: {stopped.end.cause}"
            raise ProviderLoadError(refs, reason) from None

    def _started(self) -> WorkerProcess:
        if self._process is None:
            server = ProviderServer(self._options, self._cases)
            make = partial(serve, make=lambda _: server)
            self._process = WorkerProcess(show=self._show, start=lambda _: fork_worker(make))
            self._process.ref = self._process.printed.label = ", ".join(self._options.providers)
        return self._process

    def _close(self) -> None:
        if self._process is not None:
            self._process.close(at_once=True)
            self._process = None


class InProcessProviders:
    """Examines the providers of ``options`` in this process, without the limits of :class:`ProviderExaminer`."""

    chooser: DeviceChooser | None = None

    def __init__(self, options: RunOptions) -> None:
        self._options = options
        self._plan = ProviderPlan()

    def plan(self, cases: Sequence[Case], device: str) -> PlannedProviders:
        """Plan and return the functions to examine; raises QuestionError like :meth:`ProviderExaminer.plan`."""
        self._plan = plan_providers(self._options.providers, self._options.functions, cases, device, self._options.seed)
        return describe_plan(self._plan)

    def run(self, circumstances: Circumstances) -> Iterator[Record]:
        """Yield a record for each provider and function."""
        return examine_providers(self._plan, circumstances)


def providers_of(
    options: RunOptions, cases: Sequence[Case], show: Show | None
) -> AbstractContextManager[ProviderExaminer | InProcessProviders]:
    """Return a context manager for the examiner of the providers in ``options``."""
    return nullcontext(InProcessProviders(options)) if options.in_process else ProviderExaminer(options, cases, show)


class ProviderServer(Server):
    """Imports the providers of ``options`` and examines them."""

    def __init__(self, options: RunOptions, cases: Sequence[Case]) -> None:
        self._options, self._cases = options, cases
        self._plan, self._seed = ProviderPlan(), 0

    def plan(self, device: str, seed: int) -> PlannedProviders:
        """Import the providers, to examine them on ``device``."""
        options = self._options
        try:
            self._plan = plan_providers(options.providers, options.functions, self._cases, device, seed)
        except QuestionError as error:
            raise RefusedError(str(error)) from error
        self._seed = seed
        return describe_plan(self._plan)

    def examine(self, first: int, environment: str, emit: Callable[[Stage | Record], None]) -> int:
        """Examine all functions of all providers, from index ``first`` on; return how many.

        ``environment``: the run's digest. The events are stages that begin, and records.
        """
        circumstances = Circumstances(self._seed, environment, attncheck.__version__)
        count = 0
        for record in examine_providers(self._plan, circumstances, first, lambda stage: emit(Stage(name=stage))):
            emit(record)
            count += 1
        return count
