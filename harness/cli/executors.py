"""Where the cases of a run are examined: in processes on this machine, on a Ray cluster, or in this process."""

import time
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import typer

from attncheck.errors import QuestionError, SelectionError
from attncheck.harness.cli.output import show_printed
from attncheck.harness.cli.run_files import measured_costs
from attncheck.harness.cli.run_options import RunOptions
from attncheck.harness.run.backend_choice import first_refs
from attncheck.harness.run.selection import Selection
from attncheck.harness.workers.first_messages import preparation_of
from attncheck.harness.workers.ray_cluster import RayCluster
from attncheck.harness.workers.worker_pool import WorkerPool
from attncheck.harness.workers.worker_process import WorkerProcess
from attncheck.reports.run_file.records import Record
from attncheck.reports.run_file.timings import TIMING

if TYPE_CHECKING:
    from attncheck.harness.cli.provider_process import InProcessProviders, ProviderExaminer
    from attncheck.harness.run.preparation import PreparedRun

Processes = WorkerPool | RayCluster
"""Processes that load and describe the backends of a run."""


class CaseExaminer(Protocol):
    """Examines the cases of a plan, in this process or in others."""

    @property
    def blind(self) -> list[QuestionError]:
        """Errors of cases that could not be examined at all."""

    def run(self) -> Generator[Record, None, None]:
        """Yield each record as it is found."""


def open_providers(
    options: RunOptions, selection: Selection
) -> "AbstractContextManager[ProviderExaminer | InProcessProviders | None]":
    """Return a context manager whose value is the examiner of the providers in ``options``, or None without any."""
    if not options.providers:
        return nullcontext()
    from attncheck.harness.cli.provider_process import providers_of

    return providers_of(options, selection.cases, show_printed if options.show_output else None)


@contextmanager
def open_processes(
    options: RunOptions, selection: Selection, spare: WorkerProcess | None, sampling_s: float
) -> Iterator[Processes]:
    """Yield the processes that examine the backends of ``options``; end all of them on leaving.

    ``spare``: a process started in advance. It is used for the first backend, then closed. ``sampling_s``: seconds for
    which the check ``timing`` samples a part of a step.

    Raises:
        SelectionError: timing is requested on a Ray cluster.
        ClusterError, MissingExtraError: the Ray cluster cannot be used.
    """
    prepare, settings = preparation_of(selection), options.worker_settings
    settings = replace(settings, limits=replace(settings.limits, sampling_s=sampling_s))
    if options.ray is not None:
        if selection.is_timed:
            reason = f"the check {TIMING} compares times of one device, and a cluster has many"
            raise SelectionError(f"--executor ray: {reason}; take times by a run on one machine")
        with RayCluster(
            options.ray, prepare, _note, device=options.device, jobs=options.jobs, workers=settings
        ) as cluster:
            yield cluster
        return
    with WorkerPool(show_printed if options.show_output else None, spare, prepare, settings) as pool:
        if options.backend_refs is not None and not options.in_process:
            pool.start(first_refs(options.backend_refs, selection.suites))
        yield pool


def case_examiner(
    prepared: "PreparedRun",
    processes: Processes | None,
    *,
    warms: bool = True,
    jobs: int | None = None,
    folder: Path | None = None,
    deadline: float | None = None,
) -> CaseExaminer:
    """Return the examiner of the plan: in ``processes``, or in this process if there are none.

    ``warms``: whether, on a GPU, other processes compile kernels ahead of the run.
    ``jobs``: processes that work at once. If it is None, as many as cores and memory allow, but one per GPU.
    ``deadline``: the ``time.monotonic()`` until which the backends share time and GPUs; None if they share neither.
    ``folder``: the folder of kept runs; the durations of checks in them are used to divide the work.
    """
    from attncheck.harness.workers.ray_executor import RayExecutor
    from attncheck.harness.workers.supervisor import Supervisor
    from attncheck.harness.workers.warming import most_processes

    plan, environment = prepared.plan, prepared.environment
    if isinstance(processes, RayCluster):
        return RayExecutor(plan, prepared.backends, processes, environment)
    if processes is None or not prepared.backends:
        from attncheck.harness.run.evaluation import Examiner

        return Examiner(plan, environment)
    is_gpu = plan.device != "cpu"
    gpus = max(len(processes.gpus), 1)
    room = most_processes("cpu") if deadline is None else gpus * most_processes(plan.device, gpus)
    jobs = jobs or (min(room, gpus) if is_gpu and deadline is None else room)
    costs = measured_costs(folder, environment.device_name) if jobs > 1 else None
    if deadline is not None:
        loaded = sum(each.is_loaded for each in prepared.backends)
        processes.limits = processes.limits.shared(deadline - time.monotonic(), loaded, jobs)
    warms = warms and is_gpu and jobs <= gpus  # where several processes share a GPU, warmers have no room
    return Supervisor(plan, prepared.backends, processes, environment, jobs=jobs, warms=warms, costs=costs)


def _note(line: str) -> None:
    typer.echo(f"note: {line}", err=True)
