"""Who is examined in a run, and where: each backend in a process of its own, or all of them in this one.

Must not know: run files, terminals.
"""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from attncheck.errors import QuestionError
from attncheck.harness.checks.timing.settings import TimingSettings
from attncheck.harness.run.backend_choice import choose_backends, refuse_unavailable, suite_device
from attncheck.harness.run.backend_description import BackendDescription, Introduce
from attncheck.harness.run.backend_loading import Loader
from attncheck.harness.run.evaluation import Examiner, RunPlan, environment_of
from attncheck.harness.run.selection import DEFAULT_SUITES, Selection
from attncheck.harness.workers.protocol import Assignment
from attncheck.harness.workers.supervisor import Supervisor
from attncheck.harness.workers.worker_pool import WorkerPool
from attncheck.reports.run_file.header import Environment
from attncheck.reports.run_file.records import Record

_ONE_PROCESS = "timed in this one process: how far times of different processes lie apart is not known"


class RunResult(Protocol):
    """What comes of a plan, wherever it is examined."""

    @property
    def blind(self) -> list[QuestionError]:
        """Cases that could not be put at all."""

    def run(self) -> Iterator[Record]:
        """Every record, as it is found."""


@dataclass(frozen=True)
class PreparedRun:
    """The plan of a run, its circumstances, its backends, and what to tell about how these were chosen.

    selection: what is left of the question, once it is known which suites suit the backends.
    """

    selection: Selection
    plan: RunPlan
    environment: Environment
    backends: tuple[BackendDescription, ...]
    notes: tuple[str, ...]
    examination: RunResult


def prepare_run(
    selection: Selection,
    refs: Sequence[str] | None,
    *,
    device: str | None,
    seed: int,
    dump: Path | None,
    patterns: Sequence[str] = (),
    workers: WorkerPool | None = None,
    timing: TimingSettings | None = None,
    rounds: int = 1,
) -> PreparedRun:
    """The backends of ``refs`` (empty: the default ones; None: nobody), in processes of ``workers``; without one, here.

    There the cases are selected once more, by the ``patterns`` that have led to ``selection``. ``rounds``: in how many
    processes of each backend it is timed; 1 without a workers.

    Raises:
        QuestionError: the device is not there, a backend cannot be loaded, or one asked for cannot run here.
        WorkerError: attncheck itself failed in one of the processes.
    """
    chosen, notes = suite_device(selection.suites, device)
    plan = RunPlan(
        cases=selection.cases,
        checks=selection.checks,
        device=chosen,
        seed=seed,
        dump=dump,
        timing=timing or TimingSettings(),
        rounds=rounds,
    )
    environment = environment_of(chosen)
    if refs is None:
        return PreparedRun(selection, plan, environment, (), notes, Examiner(plan, environment))
    loader = Loader(chosen)
    introduce: Introduce = loader.introduce
    if workers is not None:
        workers.assign(_assignment(selection, plan, environment, patterns))
        introduce = workers.introduce
    backends, more = choose_backends(refs, selection.suites, selection.cases, introduce)
    if refs:
        refuse_unavailable(backends)
    if selection.by_default:
        suites = default_suites(selection, backends)
        selection = selection.of_suites(suites.values())
        plan = replace(plan, cases=selection.cases, suites=suites)
        notes = (*notes, *suite_notes(suites, {case.suite for case in selection.cases}))
    examination: RunResult
    if workers is None:
        if selection.is_timed:
            notes = (*notes, _ONE_PROCESS)
        examination = Examiner(replace(plan, backends=loader.backends(backends)), environment)
    else:
        # On a GPU two processes would share its memory, and one core is busy with one.
        asks_ahead = chosen == "cpu" and _usable_cores() > 1
        examination = Supervisor(plan, backends, workers, environment, asks_ahead=asks_ahead)
    return PreparedRun(selection, plan, environment, backends, (*notes, *more), examination)


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_suites(selection: Selection, backends: Sequence[BackendDescription]) -> dict[str, str]:
    """By the references of ``backends``, the name of the suite each is asked of ``selection``, which was by default."""
    names = dict(zip(DEFAULT_SUITES, (suite.name for suite in selection.suites), strict=True))
    return {each.ref: names[each.default_suite] for each in backends}


def suite_notes(suites: Mapping[str, str], selected: Collection[str]) -> tuple[str, ...]:
    """What to tell where backends are asked different suites; ``selected``: those of which a case is left."""
    if len(set(suites.values())) < 2:
        return ()
    asked = {name: [ref for ref, suite in suites.items() if suite == name] for name in dict.fromkeys(suites.values())}
    told = (
        f"{', '.join(refs)}: suite {name}{'' if name in selected else ', of which no case is selected'}"
        for name, refs in asked.items()
    )
    return ("; ".join(told),)


def _assignment(selection: Selection, plan: RunPlan, environment: Environment, patterns: Sequence[str]) -> Assignment:
    return Assignment(
        suites=selection.refs,
        patterns=tuple(patterns),
        checks=selection.checks or (),
        digests=tuple(suite.hash for suite in selection.suites),
        device=plan.device,
        seed=plan.seed,
        dump=None if plan.dump is None else str(plan.dump.absolute()),
        environment=environment,
        timing=plan.timing,
    )
