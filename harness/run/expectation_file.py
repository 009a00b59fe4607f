"""Reads the file of expected failures (``--expect FILE``).

A file is a YAML list of entries::

    - backend: Wrong              # the backend's name, as in reports
      case: smoke/window-edge.*   # a pattern on suite/id, or on the id alone
      check: numerics             # or * for any check
      outcome: failed             # or errored, crashed, timed_out
      reason: the window is one key too long
      issue: https://example.org/issues/17   # optional
      until: 2026-12-31           # optional: the last day on which the entry applies

Optional keys restrict an entry to some records: ``needs`` (features and forms, as records name them), ``version`` (a
pattern on the backend's version) and ``says`` (a pattern on the record's message). ``within`` bounds how much may be
wrong. A record beyond the bound keeps its outcome::

      within: {budgets: 30, rows: 5, heads: 2, values: [nan]}
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Literal

import attncheck
from attncheck.cases.validation import suggestion, validate
from attncheck.cases.yaml_tree import Items, Place, Table, Tree, describe, parse_yaml, read_text
from attncheck.errors import readable
from attncheck.reference.spec import CHECKS, FEATURES, FORMER_CHECKS, FORMS
from attncheck.reports.analysis.phrases import what_happened
from attncheck.reports.run_file.records import BUDGET_SHARE, Ended, Errored, Failed, Record

WrongValue = Literal["nan", "inf", "finite", "unwritten"]
"""Kinds of wrong values, as counted in the figures of a record."""

_COUNTED: Mapping[WrongValue, str] = MappingProxyType(
    {"nan": "rows_nan", "inf": "rows_inf", "finite": "rows_finite_wrong", "unwritten": "rows_unwritten"}
)


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Limits on how wrong a result may be. ``values``: the kinds of wrong values allowed, or None for any."""

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True}

    budgets: float | None = field(default=None, metadata={"description": "largest error of the finite values"})
    rows: int | None = field(default=None, metadata={"description": "most wrong rows"})
    heads: int | None = field(default=None, metadata={"description": "most wrong heads"})
    values: tuple[WrongValue, ...] | None = field(
        default=None, metadata={"description": "sorts of wrong values: nan, inf, finite, unwritten"}
    )

    def excess(self, figures: Mapping[str, float | int]) -> str:
        """Return a message about the first figure beyond the bound; empty if there is none."""
        measured = {
            "budgets": figures.get("finite_budget_share", figures.get(BUDGET_SHARE)),
            "rows": figures.get("rows_wrong"),
            "heads": figures.get("heads_wrong"),
        }
        for name, value in measured.items():
            most = getattr(self, name)
            if most is not None and (value is None or not value <= most):
                found = "the record has no such figure" if value is None else f"found {value:.3g}"
                return f"{name}: at most {most:g}, and {found}"
        if self.values is None:
            return ""
        if "rows_wrong" not in figures:
            return "values: the record has no figures of wrong rows"
        other = [sort for sort, name in _COUNTED.items() if sort not in self.values and figures.get(name)]
        return f"values: {', '.join(self.values)} alone, and found {', '.join(other)}" if other else ""


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """One entry of the file. ``case`` is a pattern (``*``, ``?``, ``[...]``) on ``suite/id`` or on the id."""

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True}

    backend: str = field(metadata={"description": "name of the backend"})
    case: str = field(metadata={"description": "pattern on suite/id, or on the id"})
    check: str = field(metadata={"description": "name of the check; *: any"})
    outcome: Literal["failed", "errored", "crashed", "timed_out"] = field(
        metadata={"description": "the expected outcome: failed, errored, crashed or timed_out"}
    )
    reason: str = field(metadata={"description": "why it is expected"})
    needs: tuple[str, ...] = field(default=(), metadata={"description": "only cases that take all of these"})
    version: str | None = field(default=None, metadata={"description": "pattern on the backend's version"})
    says: str | None = field(default=None, metadata={"description": "pattern on the text of the record"})
    within: Bound | None = field(default=None, metadata={"description": "how much may be wrong"})
    until: str | None = field(default=None, metadata={"description": "last day on which it is expected, YYYY-MM-DD"})
    issue: str | None = field(default=None, metadata={"description": "where it is followed up: an address, or text"})

    @property
    def explanation(self) -> str:
        """The reason, followed by the issue if there is one."""
        return f"{self.reason} ({self.issue})" if self.issue else self.reason

    def has_expired(self, today: date) -> bool:
        """Return whether ``today`` is after ``until``."""
        return self.until is not None and date.fromisoformat(self.until) < today

    def fits_case(self, suite: str, case_id: str) -> bool:
        """Return whether the pattern matches this case."""
        return fnmatchcase(f"{suite}/{case_id}", self.case) or fnmatchcase(case_id, self.case)

    def is_about(self, record: Record) -> bool:
        """Return whether the entry applies to the record's backend, version, case, check and needs."""
        return (
            record.backend == self.backend
            and self.check in ("*", record.check)
            and (self.version is None or fnmatchcase(record.backend_version, self.version))
            and self.fits_case(record.suite, record.case_id)
            and set(self.needs) <= set(record.needs)
        )

    def foresees(self, record: Failed | Errored | Ended) -> bool:
        """Return whether the record failed as expected: with this outcome, and with a message that matches ``says``."""
        if record.outcome != self.outcome:
            return False
        meaning = (record.meaning or "") if isinstance(record, Failed) else ""
        return self.says is None or any(fnmatchcase(text, self.says) for text in (what_happened(record), meaning))

    def excess(self, record: Failed | Errored | Ended) -> str:
        """Return by what an expected failure exceeds the entry's bound; empty if it does not."""
        if self.within is None:
            return ""
        return self.within.excess(record.figures if isinstance(record, Failed) else {})

    @property
    def suite(self) -> str:
        """The part of the pattern for the suite; empty if the pattern is on the id."""
        named, slash, _ = self.case.partition("/")
        return named if slash else ""

    def fits_suite(self, suite: str) -> bool:
        """Return whether the pattern could match a case of this suite."""
        return not self.suite or fnmatchcase(suite, self.suite)


@dataclass(frozen=True)
class LocatedExpectation:
    """An expectation and its place in the file. ``former_check``: the check's old name if the file uses it."""

    expectation: Expectation
    place: Place
    former_check: str = ""

    def __str__(self) -> str:
        wanted = self.expectation
        where = f"{self.place.file}:{self.place.line}"
        return readable(f"{where}: {wanted.backend}, {wanted.case}, {wanted.check}: {wanted.outcome} expected")


def expectation_file(wanted: Path) -> Path:
    """Return ``wanted``, or attncheck's own file of that name (``vllm-cpu-attn``) if ``wanted`` does not exist."""
    own = Path(attncheck.__file__).parent / "expected" / f"{wanted.name}.yaml"
    return own if wanted.parent == Path() and not wanted.exists() and own.is_file() else wanted


def load_expectations(path: Path) -> tuple[LocatedExpectation, ...]:
    """Read an expectation file.

    A file without entries, or with only comments, gives an empty tuple.

    Raises:
        CaseFileError: with line and column, for anything but a list of complete entries with known checks.
    """
    file = str(path)
    text = read_text(path)
    if all(not line.strip() or line.lstrip().startswith("#") for line in text.splitlines()):
        return ()
    tree = parse_yaml(text, file)
    if not isinstance(tree, Items):
        raise tree.place.fault(
            f"a list of expectations belongs here, and this is {describe(tree)}",
            allowed="write - backend: ..., one entry after the other",
        )
    entries = []
    for item in tree.items:
        expectation = validate(Expectation, item, "an expectation")
        former = expectation.check if expectation.check in FORMER_CHECKS else ""
        if former:
            expectation = replace(expectation, check=FORMER_CHECKS[former])
        if expectation.check not in ("*", *CHECKS):
            raise _place(item, "check").fault(
                "unknown check", value=expectation.check, allowed=suggestion(expectation.check, [*CHECKS])
            )
        for need in expectation.needs:
            _check_need(need, item)
        if not expectation.reason.strip():
            raise _place(item, "reason").fault("an expected failure needs a reason", allowed="say why it is known")
        if expectation.until is not None:
            _check_date(expectation.until, item)
        entries.append(LocatedExpectation(expectation, item.place, former))
    return tuple(entries)


def _check_need(need: str, item: Tree) -> None:
    """Raise CaseFileError if no record can have this need."""
    place = _place(item, "needs")
    key, is_form, _ = need.partition("=")
    if is_form and key not in FORMS:
        raise place.fault("cases have no such form", value=need, allowed=suggestion(key, FORMS))
    if not is_form and need not in FEATURES:
        raise place.fault("unknown feature", value=need, allowed=suggestion(need, [*FEATURES]))


def _check_date(text: str, item: Tree) -> None:
    try:
        date.fromisoformat(text)
    except ValueError:
        fault = _place(item, "until").fault("until must be a date", value=text, allowed="write YYYY-MM-DD")
        raise fault from None


def _place(item: Tree, key: str) -> Place:
    return item.entries[key].place if isinstance(item, Table) else item.place
