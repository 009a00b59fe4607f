"""Expected failures: a file that says who falls short where, and why that is known (``--expect FILE``).

A file is a YAML list of entries::

    - backend: Wrong              # the backend's name, as reports show it
      case: smoke/window-edge.*   # a pattern on suite/id, or on the id alone
      check: numerics
      outcome: failed             # or errored, crashed
      reason: the window is one key too long, issue 17

An entry may narrow down what it is about: ``needs`` (features and forms, as records name them) and ``says`` (a pattern
on what the record tells). With ``says`` it is about a finding, wherever that turns up: a case that passes is none, and
a run in which it does not turn up says so and does not fail.

A record that fell short as an entry says becomes ``xfailed``; one that passed although expected to fall short becomes
``xpassed`` and fails the run. An entry that matches no case of the run's suites, or that no record bears out, fails the
run as well, by its line. Entries for suites, backends, cases or checks this run leaves out are not looked at.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import ClassVar, Literal, Protocol

from attncheck.cases.tree import Items, Place, Table, Tree, describe
from attncheck.cases.validation import suggestion, validate
from attncheck.cases.yaml_tree import parse_yaml
from attncheck.errors import CaseFileError
from attncheck.reference.spec import CHECKS, FEATURES, FORMS
from attncheck.reports.analysis.phrases import what_happened
from attncheck.reports.run_file.records import (
    Crashed,
    Errored,
    Failed,
    Passed,
    Record,
    XFailed,
    XPassed,
    without_outcome,
)


class HasNames(Protocol):
    """What is read of a case: a suite and an id."""

    @property
    def suite(self) -> str:
        """Name of the suite."""

    @property
    def id(self) -> str:
        """Id within the suite."""


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """One entry of the file. ``case`` is a pattern (``*``, ``?``, ``[...]``) on ``suite/id`` or on the id."""

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True}

    backend: str = field(metadata={"description": "name of the backend"})
    case: str = field(metadata={"description": "pattern on suite/id, or on the id"})
    check: str = field(metadata={"description": "name of the check"})
    outcome: Literal["failed", "errored", "crashed"] = field(
        metadata={"description": "what is expected: failed, errored or crashed"}
    )
    reason: str = field(metadata={"description": "why it is expected"})
    needs: tuple[str, ...] = field(default=(), metadata={"description": "only cases that take all of these"})
    says: str | None = field(default=None, metadata={"description": "pattern on what the record tells"})

    def fits_case(self, suite: str, case_id: str) -> bool:
        """Whether the pattern matches this case."""
        return fnmatchcase(f"{suite}/{case_id}", self.case) or fnmatchcase(case_id, self.case)

    def is_about(self, record: Record) -> bool:
        """Whether the record is of a case and a check that the entry names."""
        return (
            (record.backend, record.check) == (self.backend, self.check)
            and self.fits_case(record.suite, record.case_id)
            and set(self.needs) <= set(record.needs)
        )

    def foresees(self, record: Failed | Errored | Crashed) -> bool:
        """Whether this is how the record was to fall short."""
        if record.outcome != self.outcome:
            return False
        meaning = (record.meaning or "") if isinstance(record, Failed) else ""
        return self.says is None or any(fnmatchcase(told, self.says) for told in (what_happened(record), meaning))

    def fits_suite(self, suite: str) -> bool:
        """Whether the pattern could match a case of this suite."""
        named, slash, _ = self.case.partition("/")
        return not slash or fnmatchcase(suite, named)


@dataclass(frozen=True)
class LocatedExpectation:
    """An expectation and where it is written."""

    expectation: Expectation
    place: Place

    def __str__(self) -> str:
        wanted = self.expectation
        where = f"{self.place.file}:{self.place.line}"
        return f"{where}: {wanted.backend}, {wanted.case}, {wanted.check}: {wanted.outcome} expected"


def load_expectations(path: Path) -> tuple[LocatedExpectation, ...]:
    """Read an expectation file.

    Raises:
        CaseFileError: with line and column, for anything but a list of complete entries with known checks.
    """
    file = str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise CaseFileError(f"cannot be read: {error.strerror}", file=file) from error
    except UnicodeDecodeError as error:
        raise CaseFileError("is not UTF-8 text", file=file) from error
    tree = parse_yaml(text, file)
    if not isinstance(tree, Items):
        raise tree.place.fault(
            f"a list of expectations belongs here, and this is {describe(tree)}",
            allowed="write - backend: ..., one entry after the other",
        )
    entries = []
    for item in tree.items:
        expectation = validate(Expectation, item, "an expectation")
        if expectation.check not in CHECKS:
            place = item.entries["check"].place if isinstance(item, Table) else item.place
            raise place.fault(
                "unknown check", value=expectation.check, allowed=suggestion(expectation.check, [*CHECKS])
            )
        for need in expectation.needs:
            _check_need(need, item)
        if not expectation.reason.strip():
            place = item.entries["reason"].place if isinstance(item, Table) else item.place
            raise place.fault("an expected failure needs a reason", allowed="say why it is known")
        entries.append(LocatedExpectation(expectation, item.place))
    return tuple(entries)


def _check_need(need: str, item: Tree) -> None:
    """Raises CaseFileError for a need that no record can have."""
    place = item.entries["needs"].place if isinstance(item, Table) else item.place
    key, is_form, _ = need.partition("=")
    if is_form and key not in FORMS:
        raise place.fault("cases have no such form", value=need, allowed=suggestion(key, FORMS))
    if not is_form and need not in FEATURES:
        raise place.fault("unknown feature", value=need, allowed=suggestion(need, [*FEATURES]))


class Expectations:
    """The entries of one run, applied to its records one by one and then asked what was left unmet.

    ``cases`` are all cases of the run's suites, ``selected`` those the filters leave; ``backends`` and ``checks`` are
    the names the run examines.
    """

    def __init__(
        self,
        entries: Sequence[LocatedExpectation],
        *,
        cases: Sequence[HasNames],
        selected: Sequence[HasNames],
        backends: Sequence[str],
        checks: Sequence[str],
    ) -> None:
        suites = {case.suite for case in cases}
        self._blind = []
        self._live = []
        for entry in entries:
            wanted = entry.expectation
            if not any(wanted.fits_suite(suite) for suite in suites):
                continue
            if not any(wanted.fits_case(case.suite, case.id) for case in cases):
                self._blind.append(entry)
            elif (
                wanted.backend in backends
                and wanted.check in checks
                and any(wanted.fits_case(case.suite, case.id) for case in selected)
            ):
                self._live.append(entry)
        self._met: set[LocatedExpectation] = set()
        self._seen: set[LocatedExpectation] = set()

    def apply(self, record: Record) -> Record:
        """The record as it stands in the light of the expectations: itself, or an ``xfailed`` or ``xpassed`` one."""
        for entry in self._live:
            wanted = entry.expectation
            if not wanted.is_about(record):
                continue
            self._seen.add(entry)
            if isinstance(record, Failed | Errored | Crashed) and wanted.foresees(record):
                self._met.add(entry)
                return XFailed(
                    **without_outcome(record),
                    underlying=record.outcome,
                    summary=what_happened(record),
                    reason=wanted.reason,
                    finding=record.finding,
                )
            if isinstance(record, Passed) and wanted.says is None:
                self._met.add(entry)  # not borne out, but its record says so
                reason = f"{wanted.reason} ({entry.place.file}:{entry.place.line})"
                return XPassed(**without_outcome(record), reason=reason)
        return record

    def unmet(self, *, stopped_early: bool = False) -> list[str]:
        """One line for each entry that fails the run. Of a run that stopped early, only what it saw can be judged."""
        blind = [
            f"{entry}, but it matches no case of this run's suites; remove it or mend the pattern"
            for entry in self._blind
        ]
        missed = [
            f"{entry}, but no record bears it out; remove it if this is mended"
            for entry in self._live
            if entry not in self._met
            and entry.expectation.says is None
            and not (stopped_early and entry not in self._seen)
        ]
        return blind + missed

    def unseen(self) -> list[str]:
        """One line for each finding that did not turn up, though it might have. Other cases may show it: no failure."""
        return [
            f"{entry}: not seen in this run; remove it if this is mended"
            for entry in self._live
            if entry not in self._met and entry.expectation.says is not None and entry in self._seen
        ]
