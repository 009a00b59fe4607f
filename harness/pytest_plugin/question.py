"""Examines the backends of a set of pytest items.

The first item of a case and a backend to run produces the records for all its selected checks. Each backend is examined
in a process of its own. It is examined in this process with ``--attncheck-in-process``, or if the check ``timing`` is
selected, since pytest-benchmark takes the timings here.
"""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import pytest
import torch

from attncheck.cases.model import Case
from attncheck.errors import QuestionError, SelectionError
from attncheck.harness.checks.timing.check import TimingCheck
from attncheck.harness.cli.run_files import make_dump_folder
from attncheck.harness.cli.run_options import RunOptions
from attncheck.harness.run.backend_choice import suite_device
from attncheck.harness.run.backend_description import BackendDescription
from attncheck.harness.run.evaluation import Examiner
from attncheck.harness.run.lost_device import DeviceLostError
from attncheck.harness.run.plan import RunPlan
from attncheck.harness.run.preparation import PreparedRun, RunSettings, make_header, prepare_run
from attncheck.harness.run.selection import Selection, select_cases
from attncheck.harness.truth.shared_folder import truths_folder
from attncheck.harness.workers.supervisor import Supervisor
from attncheck.harness.workers.worker_pool import WorkerPool
from attncheck.reference.spec import BACKEND_CHECKS
from attncheck.reports.run_file.header import Environment, RunHeader
from attncheck.reports.run_file.records import Record
from attncheck.reports.run_file.timings import TIMING

if TYPE_CHECKING:
    from attncheck.harness.pytest_plugin.benchmark import Benchmarks


class ExaminedItem(Protocol):
    """An item: one check of one case of the backend at ``index``."""

    session: pytest.Session
    case: Case
    index: int
    check: str


@dataclass(frozen=True)
class _Opened:
    """A question with loaded backends. ``pool``: their processes, or None if they are loaded in this process."""

    prepared: PreparedRun
    pool: WorkerPool | None


class Question:
    """The suites, cases, checks and backends of ``options``. Reading :attr:`prepared` loads the backends.

    ``collected``: the collected items, as case, index of the backend, check. ``answered``: those that ran.
    ``backends``: the loaded backends, whether or not their processes have ended since.

    Raises:
        QuestionError: an unknown suite, case or check.
    """

    def __init__(self, config: pytest.Config, options: RunOptions) -> None:
        self.config, self.options = config, options
        self.selection: Selection = select_cases(options.suites, options.cases, options.checks, options.settings)
        self.is_in_process = options.in_process or self.selection.is_timed
        self.collected: set[tuple[str, int, str]] = set()
        self.answered: set[tuple[str, int, str]] = set()
        self.backends: tuple[BackendDescription, ...] = ()
        self._opened: _Opened | QuestionError | None = None
        self._stack = ExitStack()
        self._examiner: Examiner | Supervisor | None = None
        self._latest: tuple[tuple[str, int], list[Record]] | None = None
        self._faults: dict[str, QuestionError] = {}

    @cached_property
    def device(self) -> str:
        """The device of the examination; raises DeviceError if it is not there."""
        return suite_device(self.selection.device_wishes, self.options.device)[0]

    @property
    def benchmark_session(self) -> Any:
        """The session of pytest-benchmark, or None if that plugin is disabled."""
        return getattr(self.config, "_benchmarksession", None)

    @cached_property
    def benchmarks(self) -> "Benchmarks":
        """The sampler for the check ``timing`` in this process."""
        from attncheck.harness.pytest_plugin.benchmark import Benchmarks

        return Benchmarks(self.benchmark_session)

    @property
    def prepared(self) -> PreparedRun:
        """The plan and the backends, which are loaded on the first read.

        Raises:
            QuestionError: a backend cannot be loaded, the device is not there, or timing is selected without
                pytest-benchmark. Later reads raise the same error.
        """
        if self._opened is None:
            try:
                self._opened = self._open()
                self.backends = self._opened.prepared.backends
            except QuestionError as error:
                self.close()
                self._opened = error
        if isinstance(self._opened, QuestionError):
            raise self._opened.with_traceback(None)
        return self._opened.prepared

    def close(self) -> None:
        """End the processes of the backends; the next item that runs starts new ones."""
        self._stack.close()
        self._examiner = None
        if isinstance(self._opened, _Opened) and self._opened.pool is not None:
            self._opened = None

    def record_of(self, item: ExaminedItem) -> Record | QuestionError:
        """Return the record of ``item``, or the error of its case.

        Raises:
            QuestionError: a backend cannot be loaded.
        """
        if item.check == TIMING:  # alone, so that no other check disturbs the timings
            records = self._records(item, (TIMING,))
        else:
            pair = (item.case.key, item.index)
            if self._latest is None or self._latest[0] != pair:
                checks = [name for name in self.prepared.plan.checks_of(item.case) if name != TIMING]
                self._latest = (pair, self._records(item, [name for name in checks if name in self._wanted(item)]))
            records = self._latest[1]
        self.answered.add((item.case.key, item.index, item.check))
        found = next((record for record in records if record.check == item.check), None)
        return found or self._faults.get(item.case.key) or QuestionError(f"{item.case.key}: no record of {item.check}")

    def header(self, item: ExaminedItem) -> RunHeader:
        """Return the run header for the selected items of this question."""
        prepared = self.prepared
        plan, infos = self._plan(item), [each.info for each in prepared.backends]
        return make_header(prepared.selection, plan, infos, prepared.environment)

    def _open(self) -> _Opened:
        options = self.options
        if self.selection.is_timed and self.benchmark_session is None:
            reason = f"the check {TIMING} is made through pytest-benchmark, which is switched off (-p no:benchmark)"
            raise SelectionError(reason)
        make_dump_folder(options.dump)
        truths = truths_folder() if options.cache else None
        settings = RunSettings(device=self.device, seed=options.seed, dump=options.dump, truths=truths)
        pool = None
        if not self.is_in_process:
            pool = self._stack.enter_context(WorkerPool(settings=options.worker_settings))
        describing = _FewProcesses(pool) if pool and hasattr(self.config, "workerinput") else pool
        prepared = prepare_run(self.selection, options.backends, settings, pool=describing, keeps_unavailable=True)
        if pool is not None:
            pool.keep_only(backend.ref for backend in prepared.backends)
        return _Opened(prepared, pool)

    def _wanted(self, item: ExaminedItem) -> set[str]:
        mine = (each for each in item.session.items if getattr(each, "question", None) is self)
        return {each.check for each in mine}  # type: ignore[attr-defined]

    def _plan(self, item: ExaminedItem) -> RunPlan:
        wanted = self._wanted(item)
        return replace(self.prepared.plan, checks=tuple(check for check in BACKEND_CHECKS if check in wanted))

    def _records(self, item: ExaminedItem, checks: Sequence[str]) -> list[Record]:
        """Return the records of the item's case and backend, up to that of a check that lost the device."""
        prepared, examiner, records = self.prepared, self._examiner, []
        examiner = self._examiner = examiner or self._make_examiner(item)
        num_faults = len(examiner.blind)
        if isinstance(examiner, Supervisor):
            records = list(examiner.examine_case(prepared.backends[item.index], item.case, tuple(checks)))
        else:
            try:
                for record in examiner.records(item.case, prepared.plan.backends[item.index], checks=tuple(checks)):
                    records.append(record)
            except DeviceLostError as lost:
                item.session.shouldfail = f"attncheck: {lost}"
                records.append(lost.record)
        for fault in examiner.blind[num_faults:]:
            self._faults[item.case.key] = fault
        return records

    def _make_examiner(self, item: ExaminedItem) -> Examiner | Supervisor:
        prepared, plan = self.prepared, self._plan(item)
        if isinstance(self._opened, _Opened) and (pool := self._opened.pool) is not None:
            return Supervisor(plan, prepared.backends, pool, prepared.environment)
        clocks = None
        if TIMING in (plan.checks or ()):
            clocks = TimingCheck(torch.device(plan.device), plan.timing, self.benchmarks.sample)
        return Examiner(plan, prepared.environment, clocks)


class _FewProcesses:
    """Wraps ``pool`` for a pytest-xdist worker, so that few backend processes run at once.

    Each worker has processes of its own, and the memory of the host must suffice for all. Backends are described one
    after another. Each process ends afterwards, except that of the first backend.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool

    def choose_device(self, wishes: Sequence[str], wanted: str | None) -> tuple[str, tuple[str, ...], Environment]:
        """Return the device of the run, notes on the choice, and the environment on it."""
        return self._pool.choose_device(wishes, wanted)

    def begin(self, selection: Selection, plan: RunPlan, environment: Environment) -> None:
        """Give the processes the run to examine."""
        self._pool.begin(selection, plan, environment)

    def describe(self, refs: Iterable[str]) -> list[BackendDescription | QuestionError]:
        """Return the description of each of ``refs``, or the reason why it names no backend to examine."""
        found: list[BackendDescription | QuestionError] = []
        for ref in refs:
            found += self._pool.describe([ref])
            if len(found) > 1:
                self._pool.discard(ref)
        return found
