"""pytest items: one check of one case of one backend each.

Items of the options are collected as suite, case, backend, check. Those of ``attncheck.backend_tests`` are collected as
``NAME[CASE-CHECK]`` of their module.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from attncheck.cases.model import Case, Suite
from attncheck.errors import InternalError, QuestionError
from attncheck.harness.pytest_plugin.question import Question
from attncheck.harness.run.backend_description import BackendDescription
from attncheck.harness.run.selection import checks_of
from attncheck.reports.analysis import phrases
from attncheck.reports.run_file.records import FALLEN_SHORT, Errored, Record, Unavailable, Unsupported, XFailed
from attncheck.reports.run_file.timings import TIMING
from attncheck.reports.terminal.run import story

ApplyExpectations = Callable[[Question, Record], Record]
"""Function that returns a record with the expected failures applied."""


class Root(pytest.Collector):
    """Collector of everything that the options add to a session; ``apply`` as in :class:`CheckItem`."""

    question: Question
    apply: ApplyExpectations

    def collect(self) -> "Iterable[_SuiteNode]":
        """Yield the suites."""
        for suite in self.question.prepared.selection.suites:
            node = _SuiteNode.from_parent(self, name=suite.name)
            node.root, node.suite = self, suite
            yield node


class _SuiteNode(pytest.Collector):
    root: Root
    suite: Suite

    def collect(self) -> "Iterable[_CaseNode]":
        for case in self.root.question.prepared.plan.cases:
            if case.suite == self.suite.name:
                node = _CaseNode.from_parent(self, name=case.id)
                node.root, node.case = self.root, case
                yield node


class _CaseNode(pytest.Collector):
    root: Root
    case: Case

    def collect(self) -> "Iterable[_BackendNode]":
        prepared = self.root.question.prepared
        for index, backend in enumerate(prepared.backends):
            if not prepared.plan.includes(backend.ref, self.case):
                continue
            node = _BackendNode.from_parent(self, name=backend.name)
            node.root, node.case, node.index = self.root, self.case, index
            yield node


class _BackendNode(pytest.Collector):
    root: Root
    case: Case
    index: int

    def collect(self) -> "Iterable[CheckItem]":
        question = self.root.question
        for check in question.prepared.plan.checks_of(self.case):
            item = _item_class(check).from_parent(self, name=check)
            item.become(question, self.case, self.index, check, self.root.apply, group=self.nodeid)
            file, _, line = self.case.origin.rpartition(":")
            if line.isdigit():
                title = f"{self.case.key}  {item.backend.name}  {check}"
                item.place = (Path(file), int(line) - 1, title)
            yield item


def module_items(
    module: pytest.Collector, name: str, question: Question, apply: ApplyExpectations
) -> "Iterable[CheckItem]":
    """Yield the items of ``name`` in a module; the backend is loaded when the first of them runs."""
    selection = question.selection
    for case in selection.cases:
        label = case.id if len(selection.suites) == 1 else case.key
        for check in checks_of(case, selection.checks):
            item = _item_class(check).from_parent(module, name=f"{name}[{label}-{check}]")
            item.become(question, case, 0, check, apply, group=f"{module.nodeid}::{name}::{label}")
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

    ``apply``: applies the expected failures to a record. ``place``: the value of pytest's ``location``.
    """

    question: Question
    case: Case
    index: int
    check: str
    apply: ApplyExpectations
    place: tuple[Path, int, str] | None = None

    def become(
        self, question: Question, case: Case, index: int, check: str, apply: ApplyExpectations, *, group: str
    ) -> None:
        """Set these values, and the marks for ``-m`` and pytest-xdist.

        ``group``: the group for pytest-xdist, which ignores names with a bracket.
        """
        self.question, self.case, self.index, self.check, self.apply = question, case, index, check, apply
        question.collected.add((case.key, index, check))
        self.add_marker("attncheck")
        if self.config.pluginmanager.hasplugin("xdist"):
            self.add_marker(pytest.mark.xdist_group(group.replace("::", ".")))

    @property
    def backend(self) -> BackendDescription:
        """The description of the backend; raises QuestionError if it cannot be loaded."""
        return self.question.prepared.backends[self.index]

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
