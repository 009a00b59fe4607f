"""Test items: a test for each case and check, examined by one run."""

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from attncheck.cases.model import Case
from attncheck.errors import InternalError, QuestionError, SelectionError
from attncheck.harness.checks.timing.check import TimingCheck, TimingConditions
from attncheck.harness.cli.common import make_folder
from attncheck.harness.pytest_plugin.plugin import BackendTests, given_to_pytest, has_question, name_in_pytest
from attncheck.harness.run.backend_loading import ThisProcess
from attncheck.harness.run.evaluate import Examiner
from attncheck.harness.run.expectations import Expectations, LocatedExpectation, load_expectations
from attncheck.harness.run.options import RunOptions, read_given, read_time
from attncheck.harness.run.outcomes import BackendDescription, DeviceLostError
from attncheck.harness.run.preparation import suite_device
from attncheck.harness.run.run import Run
from attncheck.harness.run.selection import Selection, checks_of, select_cases, telling_first
from attncheck.harness.workers.executor import Supervisor
from attncheck.harness.workers.limits import worker_settings
from attncheck.harness.workers.pool import WorkerPool
from attncheck.reference.spec import BACKEND_CHECKS, DEFAULT_CHECKS
from attncheck.reports.analysis import phrases
from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.records import FALLEN_SHORT, Errored, Record, Unavailable, Unsupported, XFailed
from attncheck.reports.run_file.timings import TIMING
from attncheck.reports.terminal.run import story

if TYPE_CHECKING:
    from attncheck.harness.pytest_plugin.benchmark import Benchmarks

# Examines the backends of a set of pytest items.
#
# The first item of a case and a backend to run produces the records for all its selected checks, or for the part of
# them that `within` puts together. Each backend is
# examined in a process of its own. It is examined in this process with `--attncheck-in-process`, or if the check
# `timing` is selected, since pytest-benchmark takes the timings here.


class Question:
    """The suites, cases, checks and backends of ``options``. Reading :attr:`run` loads the backends.

    ``collected``: the collected items, as case, index of the backend, check. ``answered``: those that ran.
    ``backends``: the loaded backends, whether or not their processes have ended since. ``within``: a time such as
    ``60s``, after which no more items are examined; empty for no limit.

    Raises:
        QuestionError: an unknown suite, case or check.
    """

    def __init__(self, config: pytest.Config, options: RunOptions, within: str = "") -> None:
        self.config, self.options, self.within = config, options, within
        self._within_s = read_time("within", within) if within else None
        self._deadline: float | None = None
        self.selection: Selection = select_cases(options.suites, options.cases, options.checks, options.settings)
        self.is_in_process = options.in_process or self.selection.is_timed
        self.collected: set[tuple[str, int, str]] = set()
        self.answered: set[tuple[str, int, str]] = set()
        self.backends: tuple[BackendDescription, ...] = ()
        self._opened: Run | QuestionError | None = None
        self._executor: WorkerPool | ThisProcess | None = None
        self._stack = ExitStack()
        self._examiner: Examiner | Supervisor | None = None
        self._latest: tuple[tuple[str, int, tuple[str, ...]], list[Record]] | None = None
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
    def run(self) -> Run:
        """The plan and the backends, which are loaded on the first read.

        Raises:
            QuestionError: a backend cannot be loaded, the device is not there, or timing is selected without
                pytest-benchmark. Later reads raise the same error.
        """
        if self._opened is None:
            try:
                self._opened = self._open()
                self.backends = self._opened.backends
            except QuestionError as error:
                self.close()
                self._opened = error
        if isinstance(self._opened, QuestionError):
            raise self._opened.with_traceback(None)
        return self._opened

    def close(self) -> None:
        """End the processes of the backends; the next item that runs starts new ones."""
        self._stack.close()
        self._examiner = None
        if isinstance(self._opened, Run) and isinstance(self._executor, WorkerPool):
            self._opened = None

    def record_of(self, item: "CheckItem") -> Record | QuestionError:
        """Return the record of ``item``, or the error of its case; skip it if the time is over.

        Raises:
            QuestionError: a backend cannot be loaded.
        """
        if item.check == TIMING:  # alone, so that no other check disturbs the timings
            self._skip_if_late()
            records = self._records(item, (TIMING,))
        else:
            part = (item.case.key, item.index, item.part)
            if self._latest is None or self._latest[0] != part:
                self._skip_if_late()
                wanted = self._wanted(item)
                checks = [name for name in item.part if name != TIMING and name in wanted]
                self._latest = (part, self._records(item, checks))
            records = self._latest[1]
        self.answered.add((item.case.key, item.index, item.check))
        found = next((record for record in records if record.check == item.check), None)
        return found or self._faults.get(item.case.key) or QuestionError(f"{item.case.key}: no record of {item.check}")

    def header(self, item: "CheckItem") -> RunHeader:
        """Return the run header for the selected items of this question."""
        return self._run_of(item).header()

    def _open(self) -> Run:
        options = self.options
        if self.selection.is_timed and self.benchmark_session is None:
            reason = f"the check {TIMING} is made through pytest-benchmark, which is switched off (-p no:benchmark)"
            raise SelectionError(reason)
        if options.dump is not None:
            make_folder(options.dump, f"--attncheck-dump {options.dump}")
        options = replace(options, device=self.device, rounds=1)
        if self.is_in_process:
            self._executor = ThisProcess()
            return Run.open(self.selection, options, self._executor, keeps_unavailable=True)
        kind = FewProcesses if hasattr(self.config, "workerinput") else WorkerPool
        pool = self._executor = self._stack.enter_context(kind(settings=worker_settings(options)))
        run = Run.open(self.selection, options, pool, keeps_unavailable=True)
        pool.keep_only(backend.ref for backend in run.backends)
        return run

    def _skip_if_late(self) -> None:
        if self._within_s is None:
            return
        if self._deadline is None:
            _ = self.run  # loads the backend, which takes none of the time
            self._deadline = time.monotonic() + self._within_s
        elif time.monotonic() > self._deadline:
            raise pytest.skip.Exception(f"not reached within {self.within}", _use_item_location=True)

    def _wanted(self, item: "CheckItem") -> set[str]:
        mine = (each for each in item.session.items if getattr(each, "question", None) is self)
        return {each.check for each in mine}  # type: ignore[attr-defined]

    def _run_of(self, item: "CheckItem") -> Run:
        """Return the run with the checks of the selected items alone."""
        wanted = self._wanted(item)
        checks = tuple(check for check in BACKEND_CHECKS if check in wanted)
        return replace(self.run, plan=replace(self.run.plan, checks=checks))

    def _records(self, item: "CheckItem", checks: Sequence[str]) -> list[Record]:
        """Return the records of the item's case and backend, up to that of a check that lost the device."""
        examiner = self._examiner = self._examiner or self._make_examiner(item)
        records: list[Record] = []
        num_faults = len(examiner.blind)
        if isinstance(examiner, Supervisor):
            records += examiner.examine_case(self.run.backends[item.index], item.case, tuple(checks))
        else:
            try:
                for record in examiner.records(item.case, examiner.plan.backends[item.index], checks=tuple(checks)):
                    records.append(record)
            except DeviceLostError as lost:
                item.session.shouldfail = f"attncheck: {lost}"
                records.append(lost.record)
        for fault in examiner.blind[num_faults:]:
            self._faults[item.case.key] = fault
        return records

    def _make_examiner(self, item: "CheckItem") -> Examiner | Supervisor:
        run = self._run_of(item)
        assert self._executor is not None
        if isinstance(self._executor, WorkerPool):
            return Supervisor(run.plan, run.backends, self._executor, run.environment)
        clocks = None
        if TIMING in (run.plan.checks or ()):
            device = torch.device(run.plan.device)
            clocks = TimingCheck(TimingConditions(device, run.plan.timing, self.benchmarks.sample))
        return self._executor.examiner(run, clocks=clocks)


class FewProcesses(WorkerPool):
    """A pool for a pytest-xdist worker: of several backends, only the process of the first stays after its description.

    Each worker has processes of its own, and the memory of the host must suffice for all.
    """

    def describe(self, refs: Iterable[str]) -> list[BackendDescription | QuestionError]:
        """Return the description of each of ``refs``, one after another, or the reason why there is none."""
        found: list[BackendDescription | QuestionError] = []
        for ref in refs:
            found += super().describe([ref])
            if len(found) > 1:
                self.discard(ref)
        return found


# pytest items: one check of one case of one backend each.
#
# Items of the options are collected as suite, case, backend, check. Those of `attncheck.backend_tests` are collected as
# `NAME[CASE-CHECK]` of their module.

ApplyExpectations = Callable[[Question, Record], Record]
"""Function that returns a record with the expected failures applied."""


class Root(pytest.Collector):
    """Collector of everything that the options add to a session; ``apply`` as in :class:`CheckItem`."""

    question: Question
    apply: ApplyExpectations

    def collect(self) -> "Iterable[CheckItem]":
        """Yield the items by suite, case, backend and check, which their ids name."""
        run = self.question.run
        for case in run.plan.cases:
            for index, backend in enumerate(run.backends):
                if run.plan.includes(backend.ref, case):
                    yield from self._items(case, index)

    def _items(self, case: Case, index: int) -> "Iterable[CheckItem]":
        run = self.question.run
        names = (case.suite, case.id, run.backends[index].name)
        group = "::".join((self.nodeid, *names))
        checks = run.plan.checks_of(case)
        for check in checks:
            item = _item_class(check).from_parent(self, name=check, nodeid=f"{group}::{check}")
            item.become(self.question, case, index, check, self.apply, group=group, part=checks)
            item.extra_keyword_matches.update(names)  # for -k
            file, _, line = case.origin.rpartition(":")
            if line.isdigit():
                title = f"{case.key}  {item.backend.name}  {check}"
                item.place = (Path(file), int(line) - 1, title)
            yield item


def module_items(
    module: pytest.Collector, name: str, question: Question, apply: ApplyExpectations
) -> "Iterable[CheckItem]":
    """Yield the items of ``name`` in a module; the backend is loaded when the first of them runs."""
    selection = question.selection
    parts = tuple((case, checks_of(case, selection.checks)) for case in selection.cases)
    for case, checks in telling_first(parts) if question.within else parts:
        label = case.id if len(selection.suites) == 1 else case.key
        for check in checks:
            item = _item_class(check).from_parent(module, name=f"{name}[{label}-{check}]")
            item.become(question, case, 0, check, apply, group=f"{module.nodeid}::{name}::{label}", part=checks)
            yield item


def _item_class(check: str) -> "type[CheckItem]":
    if check != TIMING:
        return CheckItem
    from attncheck.harness.pytest_plugin.benchmark import TimingItem

    return TimingItem


class FellShortError(InternalError):
    """Carries a record that failed to pytest's report."""

    def __init__(self, record: Record) -> None:
        self.record = record
        super().__init__(record.outcome)


class CheckItem(pytest.Item):
    """One check of one case of one backend, by its ``index`` in the question.

    ``apply``: applies the expected failures to a record. ``part``: the checks of the case that are examined together.
    ``place``: the value of pytest's ``location``.
    """

    question: Question
    case: Case
    index: int
    check: str
    part: tuple[str, ...]
    apply: ApplyExpectations
    place: tuple[Path, int, str] | None = None

    def become(
        self,
        question: Question,
        case: Case,
        index: int,
        check: str,
        apply: ApplyExpectations,
        *,
        group: str,
        part: tuple[str, ...],
    ) -> None:
        """Set these values, and the marks for ``-m`` and pytest-xdist.

        ``group``: the group for pytest-xdist, which ignores names with a bracket.
        """
        self.question = question
        self.case = case
        self.index = index
        self.check = check
        self.part = part
        self.apply = apply
        question.collected.add((case.key, index, check))
        self.add_marker("attncheck")
        if self.config.pluginmanager.hasplugin("xdist"):
            self.add_marker(pytest.mark.xdist_group(group.replace("::", ".")))

    @property
    def backend(self) -> BackendDescription:
        """The description of the backend; raises QuestionError if it cannot be loaded."""
        return self.question.run.backends[self.index]

    def setup(self) -> None:
        """End the backend's process after the last item of the same module, or of the options."""
        owner = self.getparent(Root) or self.parent
        if owner is not None:
            owner.addfinalizer(self.question.close)

    def runtest(self) -> None:
        """Run the check; skip with the reasons if it was not examined, and fail if the record failed."""
        found = self.examine()
        if isinstance(found, QuestionError):
            pytest.fail(f"the case is at fault, not the backend: {found}", pytrace=False)
        record = self.apply(self.question, found)
        if isinstance(record, Unsupported | Unavailable):
            reasons = phrases.printable("; ".join(record.reasons))
            raise pytest.skip.Exception(f"{record.outcome}: {reasons}", _use_item_location=True)
        if isinstance(record, XFailed):
            pytest.xfail(f"{record.reason} ({phrases.printable(record.summary)})")
        if record.outcome in FALLEN_SHORT:
            raise FellShortError(record)

    def examine(self) -> Record | QuestionError:
        """Return the record of this item, or the error of its case."""
        return self.question.record_of(self)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: object = None) -> str:
        """Return the text of the record; a traceback through attncheck would not help a kernel author."""
        if isinstance(excinfo.value, QuestionError):
            return str(excinfo.value)
        if not isinstance(excinfo.value, FellShortError):
            return str(super().repr_failure(excinfo))
        record = excinfo.value.record
        text = story(record, self.question.header(self))
        if isinstance(record, Errored) and record.traceback:
            text += f"\n\n{phrases.printable(record.traceback).rstrip()}"
        return text

    def reportinfo(self) -> tuple[Path, int, str]:
        """Return the line of the case in its YAML file, or the module of a module's test."""
        return self.place or (self.path, 0, self.name)


# Hooks for a pytest session with attncheck items: collection, expected failures and the summary.


@dataclass(frozen=True)
class _Expected:
    """Expected failures of one question. ``unmatched``, ``notes``: lines that apply before anything ran."""

    expectations: Expectations
    unmatched: tuple[str, ...]
    notes: tuple[str, ...]


class PytestSession:
    """Hooks of one pytest run, with a question for its options and one for each ``attncheck.backend_tests``.

    Raises:
        UsageError: an option is invalid, or the file of expected failures cannot be read.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._questions: list[Question] = []
        self._expectations: dict[Question, _Expected] = {}
        self._entries: tuple[LocatedExpectation, ...] = ()
        self._unmet: list[str] = []
        try:
            given = given_to_pytest(config).items()
            options = RunOptions(**{name: read_given(name, value, name_in_pytest(name)) for name, value in given})
            self._options = replace(options, dump=options.dump and options.dump.absolute())
            if options.expect is not None and not config.getoption("runxfail"):
                self._entries = load_expectations(options.expect)
            if has_question(config):
                checks = options.checks
                if config.getoption("attncheck_timing"):
                    checks = (*(checks or DEFAULT_CHECKS), TIMING)
                self._add(options.backends, options.suites, options.cases, checks)
        except QuestionError as error:
            raise pytest.UsageError(f"attncheck: {error}") from error

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """Load the backends of the options before collection; raise UsageError if one cannot be loaded."""
        if not has_question(self._config):
            return
        question = self._questions[0]
        try:
            self._expected(question)
        except QuestionError as error:
            raise pytest.UsageError(f"attncheck: {error}") from error
        if self._config.pluginmanager.hasplugin("dsession"):  # the workers of pytest-xdist examine, not this process
            question.close()

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Add the items of the options to those that the session collects from files."""
        report = yield
        if isinstance(collector, pytest.Session) and report.passed and has_question(self._config):
            root = Root.from_parent(collector, name="attncheck", nodeid="attncheck")
            root.question, root.apply = self._questions[0], self._apply
            report.result = [*(report.result or []), root]
        return report

    def module_items(self, module: pytest.Collector, name: str, tests: BackendTests) -> list[CheckItem]:
        """Return the items of ``tests``, assigned to ``name`` in a module.

        Raises:
            CollectError: an argument of ``backend_tests`` is invalid.
        """
        try:
            question = self._add((tests.backend,), tests.suites, tests.cases, tests.checks, tests.within)
        except QuestionError as error:
            raise module.CollectError(f"{name}: {error}") from error
        return list(module_items(module, name, question, self._apply))

    @pytest.hookimpl
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Sort the items of the options by backend, so that only one backend's process works at a time."""
        places = [place for place, item in enumerate(items) if isinstance(item, CheckItem) and item.getparent(Root)]
        ours = [item for place in places if isinstance(item := items[place], CheckItem)]
        if ours and not ours[0].question.is_in_process:
            for place, item in zip(places, sorted(ours, key=lambda item: item.index), strict=True):
                items[place] = item

    @pytest.hookimpl
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail the session if an expectation was not met.

        Do nothing in a pytest-xdist worker, which has only some of the records.
        """
        if hasattr(self._config, "workerinput"):
            return
        every = self._expectations.values()
        lines = [
            line
            for question, found in self._expectations.items()
            for line in found.expectations.unmet(stopped_early=question.collected != question.answered)
            # An entry may be about another question.
            if line not in found.unmatched or all(line in other.unmatched for other in every)
        ]
        self._unmet = list(dict.fromkeys(lines))
        if self._unmet and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print unmet expectations, and backends that cannot run here: pytest does not explain their skips."""
        for line in self._unmet:
            terminalreporter.write_line(f"attncheck: error: {line}", red=True)
        every = self._expectations.values()
        unseen = [
            line
            for found in every
            for line in found.expectations.unseen()
            if line not in found.notes or all(line in other.notes for other in every)
        ]
        for line in dict.fromkeys(unseen):
            terminalreporter.write_line(f"attncheck: {line}")
        missing = {
            backend.name: phrases.printable("; ".join(backend.unavailable_reasons))
            for question in self._questions
            for backend in question.backends
            if backend.unavailable_reasons
        }
        for name, reasons in missing.items():
            terminalreporter.write_line(f"attncheck: {name} cannot run here: {reasons}")

    @pytest.hookimpl
    def pytest_unconfigure(self) -> None:
        """End the remaining processes."""
        for question in self._questions:
            question.close()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """Return a scheduler that keeps a case and backend on one worker, unless the user chose another ``--dist``."""
        if config.getoption("dist") not in ("load", "loadgroup") or not has_question(config):
            return None
        return pair_scheduling()(config, log)

    def _add(
        self,
        backends: Sequence[str],
        suites: Sequence[str],
        cases: Sequence[str],
        checks: Sequence[str],
        within: str = "",
    ) -> Question:
        options = replace(
            self._options, backends=tuple(backends), suites=tuple(suites), cases=tuple(cases), checks=tuple(checks)
        )
        question = Question(self._config, options, within)
        self._questions.append(question)
        if question.selection.is_timed and not self._config.pluginmanager.hasplugin("attncheck-machine"):
            from attncheck.harness.pytest_plugin.benchmark import Machine

            self._config.pluginmanager.register(Machine(question), "attncheck-machine")
        return question

    def _apply(self, question: Question, record: Record) -> Record:
        return self._expected(question).apply(record)

    def _expected(self, question: Question) -> Expectations:
        if question not in self._expectations:
            run = question.run
            expectations = Expectations(
                self._entries,
                cases=run.selection.all_cases,
                selected=run.selection.cases,
                backends=[backend.name for backend in run.backends],
                checks=sorted({check for case in run.plan.cases for check in run.plan.checks_of(case)}),
                today=datetime.now(UTC).date(),
            )
            unmatched, notes = expectations.unmet(stopped_early=True), expectations.unseen()
            self._expectations[question] = _Expected(expectations, tuple(unmatched), tuple(notes))
        return self._expectations[question].expectations


def pair_scheduling() -> Any:
    """Return a pytest-xdist scheduler class that runs all checks of one case and backend on the same worker.

    The ``xdist_group`` mark requests the same, but works only with ``--dist loadgroup``, and not with all releases of
    pytest and pytest-xdist (pytest 9.2 ignores the changes of pytest-xdist 3.8 to node ids).
    """
    base: Any = import_module("xdist.scheduler").LoadGroupScheduling  # pytest-xdist has no types

    class PairScheduling(base):  # type: ignore[misc]
        """Balances load by case and backend; other tests are scheduled one by one, or by their group."""

        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith("attncheck::"):
                return nodeid.partition("@")[0].rpartition("::")[0]
            return str(super()._split_scope(nodeid))

    return PairScheduling
