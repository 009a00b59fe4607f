"""Examines providers of utilities in a fork of this process, so that a crash or hang costs one record.

This module joins the packages ``providers`` and ``workers``, which do not import each other.
"""

from collections.abc import Iterator, Sequence
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
from attncheck.harness.workers.pool import WorkerError, chosen_device_of
from attncheck.harness.workers.process import ProcessEndedError, Show, WorkerProcess, fork_worker
from attncheck.harness.workers.protocol import (
    Begun,
    ChooseDevice,
    Done,
    ExamineProviders,
    HarnessFailure,
    PlanProviders,
    ProvidersPlanned,
    Refused,
)
from attncheck.harness.workers.worker import WorkerPipes, next_request, serve
from attncheck.reports.run_file.header import Environment
from attncheck.reports.run_file.records import UTILITIES, Record


class ProviderExaminer:
    """Examines the providers of ``options`` on the batches of ``cases``, in a forked process; a context manager."""

    def __init__(self, options: RunOptions, cases: Sequence[Case], show: Show | None = None) -> None:
        self._options, self._cases, self._show = options, cases, show
        self._limits = worker_settings(options).limits
        self._process: WorkerProcess | None = None
        self._request: PlanProviders | None = None
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
        process = self._started()
        process.send(ChooseDevice(wanted=wanted, wishes=tuple(wishes)))
        chosen = chosen_device_of(process, self._limits.of_loading)
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
        self._request = PlanProviders(device=device, seed=self._options.seed)
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
            process.send(ExamineProviders(first=first, environment=circumstances.environment))
            try:
                while not isinstance(answer := process.receive(self._limits.of_function), Done):
                    match answer:
                        case Begun():
                            stage = answer.stage
                        case HarnessFailure():
                            raise WorkerError(process.ref, answer)
                        case _ if answer.kind == "record":
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
        if self._request is None:
            raise RuntimeError("plan() comes before run()")
        process.send(self._request)
        try:
            answer = process.receive(self._limits.of_loading)
        except ProcessEndedError as stopped:
            self._close()
            reason = f"its process ended while it was imported: {stopped.end.cause}"
            raise ProviderLoadError(refs, reason) from None
        match answer:
            case ProvidersPlanned():
                return PlannedProviders(answer.infos, answer.subjects, answer.known, answer.notes)
            case Refused():
                raise QuestionError(answer.reason)
            case HarnessFailure():
                raise WorkerError(refs, answer)
            case _:
                raise RuntimeError(f"the process of {refs} planned by {answer.kind!r}")

    def _started(self) -> WorkerProcess:
        if self._process is None:
            work = partial(_serve_providers, self._options, self._cases)
            self._process = WorkerProcess(show=self._show, start=lambda _: fork_worker(partial(serve, work=work)))
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


def _serve_providers(options: RunOptions, cases: Sequence[Case], pipes: WorkerPipes) -> None:
    """Import the providers and examine them, on request of the run; the main function of the process."""
    request = next_request(pipes)
    if not isinstance(request, PlanProviders):
        return
    seed = request.seed
    try:
        plan = plan_providers(options.providers, options.functions, cases, request.device, seed)
    except QuestionError as error:
        pipes.send(Refused(reason=str(error)))
        return
    described = describe_plan(plan)
    pipes.send(
        ProvidersPlanned(
            infos=described.infos, subjects=described.subjects, known=described.known, notes=described.notes
        )
    )
    request = pipes.receive()
    if not isinstance(request, ExamineProviders):
        return
    circumstances = Circumstances(seed, request.environment, attncheck.__version__)
    for record in examine_providers(plan, circumstances, request.first, lambda stage: pipes.send(Begun(stage=stage))):
        pipes.send(record)
    pipes.send(Done())
