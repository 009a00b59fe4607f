"""Hooks for a pytest session with attncheck items: collection, expected failures and the summary."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from attncheck.errors import QuestionError
from attncheck.harness.cli.run_options import RunOptions, read_size
from attncheck.harness.pytest_plugin.backend_tests import BackendTests
from attncheck.harness.pytest_plugin.items import CheckItem, Root, module_items
from attncheck.harness.pytest_plugin.question import Question
from attncheck.harness.run.expectation_file import LocatedExpectation, load_expectations
from attncheck.harness.run.expectations import Expectations
from attncheck.harness.workers.passed_environment import read_patterns
from attncheck.reference.spec import DEFAULT_CHECKS
from attncheck.reports.analysis import phrases
from attncheck.reports.run_file.records import Record
from attncheck.reports.run_file.timings import TIMING


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
        option = config.getoption
        self._config = config
        self._questions: list[Question] = []
        self._expectations: dict[Question, _Expected] = {}
        self._entries: tuple[LocatedExpectation, ...] = ()
        self._unmet: list[str] = []
        try:
            self._options = RunOptions(
                settings=tuple(option("attncheck_set")),
                device=option("attncheck_device"),
                case_timeout=option("attncheck_case_timeout"),
                backend_timeout=option("attncheck_backend_timeout"),
                memory_limit=read_size("--attncheck-memory-limit", option("attncheck_memory_limit")),
                device_memory_limit=read_size(
                    "--attncheck-device-memory-limit", option("attncheck_device_memory_limit")
                ),
                seed=option("attncheck_seed"),
                dump=None if option("attncheck_dump") is None else Path(option("attncheck_dump")).absolute(),
                in_process=option("attncheck_in_process"),
                pass_env=read_patterns(option("attncheck_pass_env")),
                cache=not option("attncheck_no_cache"),
            )
            if option("attncheck_expect") is not None and not option("runxfail"):
                self._entries = load_expectations(Path(option("attncheck_expect")))
            if has_question(config):
                checks = option("attncheck_check")
                if option("attncheck_timing"):
                    checks = [*(checks or DEFAULT_CHECKS), TIMING]
                self._add(option("attncheck_backend"), option("attncheck_suite"), option("attncheck_case"), checks)
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
            question = self._add((tests.backend,), tests.suites, tests.cases, tests.checks)
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
        self, backends: Sequence[str], suites: Sequence[str], cases: Sequence[str], checks: Sequence[str]
    ) -> Question:
        options = replace(
            self._options, backends=tuple(backends), suites=tuple(suites), cases=tuple(cases), checks=tuple(checks)
        )
        question = Question(self._config, options)
        self._questions.append(question)
        if question.selection.is_timed and not self._config.pluginmanager.hasplugin("attncheck-machine"):
            from attncheck.harness.pytest_plugin.benchmark import Machine

            self._config.pluginmanager.register(Machine(question), "attncheck-machine")
        return question

    def _apply(self, question: Question, record: Record) -> Record:
        return self._expected(question).apply(record)

    def _expected(self, question: Question) -> Expectations:
        if question not in self._expectations:
            prepared = question.prepared
            plan = prepared.plan
            expectations = Expectations(
                self._entries,
                cases=prepared.selection.all_cases,
                selected=prepared.selection.cases,
                backends=[backend.name for backend in prepared.backends],
                checks=sorted({check for case in plan.cases for check in plan.checks_of(case)}),
                today=datetime.now(UTC).date(),
            )
            unmatched, notes = expectations.unmet(stopped_early=True), expectations.unseen()
            self._expectations[question] = _Expected(expectations, tuple(unmatched), tuple(notes))
        return self._expectations[question].expectations


def has_question(config: pytest.Config) -> bool:
    """Return whether the options request items."""
    return bool(config.getoption("attncheck_suite") or config.getoption("attncheck_backend"))


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
