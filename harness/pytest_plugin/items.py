"""pytest items: one check of one case of one backend each.

Those that the options ask for are collected as suite, case, backend, check; those of ``attncheck.backend_tests`` as
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
from attncheck.reports.terminal.findings import story

ApplyExpectations = Callable[[Question, Record], Record]
"""Returns a record in the light of the expected failures."""


class Root(pytest.Collector):
    """Everything that the options add to a session; ``apply`` as in :class:`CheckItem`."""

    question: Question
    apply: ApplyExpectations

    def collect(self) -> "Iterable[_SuiteNode]":
        """Return the suites."""
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
    """Return the items that ``name`` stands for in a module; the backend is loaded when the first of them runs."""
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
    """A record that fell short, on its way to pytest's report."""

    def __init__(self, record: Record) -> None:
        self.record = record
        super().__init__(record.outcome)


class CheckItem(pytest.Item):
    """One check of one case of one backend, by its ``index`` in the question.

    ``apply``: what the expected failures turn a record into. ``place``: what pytest's ``location`` is.
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
        """Take these values, and the marks that ``-m`` and pytest-xdist look for.

        ``group``: that of pytest-xdist, which ignores one with a bracket.
        """
        self.question, self.case, self.index, self.check, self.apply = question, case, index, check, apply
        question.asked.add((case.key, index, check))
        self.add_marker("attncheck")
        if self.config.pluginmanager.hasplugin("xdist"):
            self.add_marker(pytest.mark.xdist_group(group.replace("::", ".")))

    @property
    def backend(self) -> BackendDescription:
        """What the backend says of itself; raises QuestionError where it cannot be loaded."""
        return self.question.prepared.backends[self.index]

    def setup(self) -> None:
        """End the backend's process when the last item of the same module, or of the options, has run."""
        owner = self.getparent(Root) or self.parent
        if owner is not None:
            owner.addfinalizer(self.question.close)

    def runtest(self) -> None:
        """Examine; what was not examined is a skip with its reasons, what fell short a failure."""
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
        """The record of this item, or what is wrong with its case."""
        return self.question.record_of(self)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: object = None) -> str:
        """What the record says: a traceback through attncheck would tell a kernel author nothing."""
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
        """The line of the case in its YAML file; for a test of a module, the module."""
        return self.place or (self.path, 0, self.name)
