"""pytest items: one check of one case of one backend each, collected as suite, case, backend, check.

The records of a case and backend are made once, when the first of its items runs, for all checks whose items are
selected.
"""

from collections.abc import Generator, Iterable
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from attncheck.backends.registry import LoadedBackend
from attncheck.cases.model import Case, Suite
from attncheck.errors import InternalError, QuestionError
from attncheck.harness.checks.timing.check import TimingCheck
from attncheck.harness.run.backend_choice import suite_device
from attncheck.harness.run.backend_description import BackendDescription
from attncheck.harness.run.evaluation import Examiner, UnavailableBackend
from attncheck.harness.run.lost_device import DeviceLostError
from attncheck.harness.run.preparation import RunSettings, make_header, prepare_run
from attncheck.harness.run.selection import Selection, select_cases
from attncheck.reference.spec import BACKEND_CHECKS, DEFAULT_CHECKS
from attncheck.reports.analysis import phrases
from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.records import FALLEN_SHORT, Errored, Record, Unavailable, Unsupported
from attncheck.reports.run_file.timings import TIMING
from attncheck.reports.terminal.findings import story

if TYPE_CHECKING:
    from attncheck.harness.pytest_plugin.benchmark import Benchmarks

Candidate = LoadedBackend | UnavailableBackend


class Collection:
    """The question of this pytest run, and the records found so far."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.descriptions: tuple[BackendDescription, ...] = ()
        self._examined: tuple[Examiner, RunHeader] | None = None
        self._latest: tuple[tuple[str, str], list[Record]] | None = None
        self._lost: DeviceLostError | None = None

    @cached_property
    def asked(self) -> tuple[Selection, str]:
        """Suites, cases and checks as the options have them, and the device; pytest.UsageError for a wrong question."""
        option = self.config.getoption
        checks = option("attncheck_check")
        if option("attncheck_timing"):
            checks = [*(checks or DEFAULT_CHECKS), TIMING]
        if TIMING in checks and self.benchmark_session is None:
            raise pytest.UsageError(
                f"attncheck: the check {TIMING} is made through pytest-benchmark, which is switched off "
                "(-p no:benchmark)"
            )
        try:
            selection = select_cases(option("attncheck_suite"), option("attncheck_case"), checks)
            device, _ = suite_device(selection.suites, option("attncheck_device"))
        except QuestionError as error:
            raise pytest.UsageError(f"attncheck: {error}") from error
        return selection, device

    @property
    def device(self) -> str:
        """Where everything is examined."""
        return self.asked[1]

    @property
    def benchmark_session(self) -> Any:
        """pytest-benchmark's session; None where that plugin is switched off."""
        return getattr(self.config, "_benchmarksession", None)

    @cached_property
    def benchmarks(self) -> "Benchmarks":
        """What takes the times of this process."""
        from attncheck.harness.pytest_plugin.benchmark import Benchmarks

        return Benchmarks(self.benchmark_session)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """Read the question before anything is collected; a wrong one ends the run as a usage error."""
        option = self.config.getoption
        selection, device = self.asked
        settings = RunSettings(device=device, seed=option("attncheck_seed"))
        try:
            prepared = prepare_run(selection, option("attncheck_backend"), settings, keeps_unavailable=True)
        except QuestionError as error:
            raise pytest.UsageError(f"attncheck: {error}") from error
        self.selection, self.plan, self.descriptions = prepared.selection, prepared.plan, prepared.backends

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Add our tree beside what the session collects from files."""
        report = yield
        if isinstance(collector, pytest.Session) and report.passed:
            root = _Root.from_parent(collector, name="attncheck", nodeid="attncheck")
            root.collection = self
            report.result = [*(report.result or []), root]
        return report

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Name the backends that could not run at all: their items are skips, which pytest does not explain."""
        for each in self.descriptions:
            if each.unavailable_reasons:
                reasons = phrases.printable("; ".join(each.unavailable_reasons))
                terminalreporter.write_line(f"attncheck: {each.name} cannot run here: {reasons}")

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """Under pytest-xdist, where the user did not choose another way: one case and backend, one worker."""
        if config.getoption("dist") not in ("load", "loadgroup"):
            return None
        return pair_scheduling()(config, log)

    def record_of(self, item: "CheckItem") -> Record | QuestionError:
        """The record of one item; its case and backend are examined when the first of their items asks.

        Times are taken when their own item asks, and beside nothing else.
        """
        examiner, _ = self.examined(item.session)
        if item.check == TIMING:
            records = self._examine(examiner, item, (TIMING,))
        else:
            pair = (item.case.key, item.backend.name)
            if self._latest is None or self._latest[0] != pair:
                checks = tuple(check for check in examiner.plan.checks_of(item.case) if check != TIMING)
                self._latest = (pair, self._examine(examiner, item, checks))
            records = self._latest[1]
        found = next((record for record in records if record.check == item.check), None)
        if self._lost is not None and found is self._lost.record:
            item.session.shouldfail = f"attncheck: {self._lost}"
        return found or examiner.fault_of(item.case) or QuestionError(f"{item.case.key} gave no record of {item.check}")

    def _examine(self, examiner: Examiner, item: "CheckItem", checks: tuple[str, ...]) -> list[Record]:
        """The records of the item's case and backend, up to that of a check that lost the device."""
        records: list[Record] = []
        try:
            records.extend(examiner.records(item.case, item.backend, checks=checks))
        except DeviceLostError as lost:
            self._lost = lost
            records.append(lost.record)
        return records

    def examined(self, session: pytest.Session) -> tuple[Examiner, RunHeader]:
        """The examiner of this process, for the checks whose items are selected, and the header that goes with it."""
        if self._examined is None:
            wanted = {item.check for item in session.items if isinstance(item, CheckItem)}
            plan = replace(self.plan, checks=tuple(check for check in BACKEND_CHECKS if check in wanted))
            clocks = None
            if TIMING in wanted:
                clocks = TimingCheck(torch.device(plan.device), plan.timing, self.benchmarks.sample)
            examiner = Examiner(plan, clocks=clocks)
            infos = [description.info for description in self.descriptions]
            self._examined = (examiner, make_header(self.selection, plan, infos, examiner.environment))
        return self._examined


def pair_scheduling() -> Any:
    """Return a scheduler of pytest-xdist that hands all checks of one case and backend to the same worker.

    The ``xdist_group`` mark says the same, but counts only under ``--dist loadgroup``, and releases of pytest and
    pytest-xdist do not always agree on how (pytest 9.2 ignores what pytest-xdist 3.8 does to node ids).
    """
    base: Any = import_module("xdist.scheduler").LoadGroupScheduling  # pytest-xdist has no types

    class PairScheduling(base):  # type: ignore[misc]
        """Load balancing, one case and backend at a time; foreign tests go one by one, or by their group."""

        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith("attncheck::"):
                return nodeid.partition("@")[0].rpartition("::")[0]
            return str(super()._split_scope(nodeid))

    return PairScheduling


class _Root(pytest.Collector):
    """Everything attncheck adds to a session."""

    collection: Collection

    def collect(self) -> "Iterable[_SuiteNode]":
        for suite in self.collection.selection.suites:
            node = _SuiteNode.from_parent(self, name=suite.name)
            node.collection, node.suite = self.collection, suite
            yield node


class _SuiteNode(pytest.Collector):
    collection: Collection
    suite: Suite

    def collect(self) -> "Iterable[_CaseNode]":
        for case in self.collection.plan.cases:
            if case.suite == self.suite.name:
                node = _CaseNode.from_parent(self, name=case.id)
                node.collection, node.case = self.collection, case
                yield node


class _CaseNode(pytest.Collector):
    collection: Collection
    case: Case

    def collect(self) -> "Iterable[_BackendNode]":
        for backend in self.collection.plan.backends:
            if not self.collection.plan.includes(backend.ref, self.case):
                continue
            node = _BackendNode.from_parent(self, name=backend.name)
            node.collection, node.case, node.backend = self.collection, self.case, backend
            yield node


class _BackendNode(pytest.Collector):
    collection: Collection
    case: Case
    backend: Candidate

    def collect(self) -> "Iterable[CheckItem]":
        has_xdist = self.config.pluginmanager.hasplugin("xdist")
        for check in self.collection.plan.checks_of(self.case):
            item = _item_class(check).from_parent(self, name=check)
            item.collection, item.case, item.backend, item.check = self.collection, self.case, self.backend, check
            item.add_marker("attncheck")
            if has_xdist:
                item.add_marker(pytest.mark.xdist_group(f"{self.case.suite}.{self.case.id}.{self.backend.name}"))
            yield item


def _item_class(check: str) -> "type[CheckItem]":
    if check != TIMING:
        return CheckItem
    from attncheck.harness.pytest_plugin.benchmark import TimingItem

    return TimingItem


class FellShortError(InternalError):
    """A record that fell short, on its way to pytest's report."""

    def __init__(self, record: Record) -> None:
        self.record = record
        super().__init__(record.outcome)


class CheckItem(pytest.Item):
    """One check of one case of one backend."""

    collection: Collection
    case: Case
    backend: Candidate
    check: str

    def runtest(self) -> None:
        """Examine; what was not examined is a skip with its reasons, what fell short a failure."""
        record = self.examine()
        if isinstance(record, QuestionError):
            raise record
        if isinstance(record, Unsupported | Unavailable):
            reasons = phrases.printable("; ".join(record.reasons))
            raise pytest.skip.Exception(f"{record.outcome}: {reasons}", _use_item_location=True)
        if record.outcome in FALLEN_SHORT:
            raise FellShortError(record)

    def examine(self) -> Record | QuestionError:
        """The record of this item, or what is wrong with its case."""
        return self.collection.record_of(self)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: object = None) -> str:
        """What the record says: a traceback through attncheck would tell a kernel author nothing."""
        if isinstance(excinfo.value, QuestionError):
            return f"the case is at fault, not the backend: {excinfo.value}"
        if not isinstance(excinfo.value, FellShortError):
            return str(super().repr_failure(excinfo))
        record = excinfo.value.record
        text = story(record, self.collection.examined(self.session)[1])
        if isinstance(record, Errored) and record.traceback:
            text += f"\n\n{phrases.printable(record.traceback).rstrip()}"
        return text

    def reportinfo(self) -> tuple[Path, int, str]:
        """The line of the case in its YAML file."""
        file, _, line = self.case.origin.rpartition(":")
        title = f"{self.case.key}  {self.backend.name}  {self.check}"
        return (Path(file), int(line) - 1, title) if line.isdigit() else (self.path, 0, title)
