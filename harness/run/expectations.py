"""Expected failures: the file, which records they match, and how a run writes one.

A file is a YAML list of entries::

    - backend: Wrong              # the backend's name, as in reports
      case: smoke/window-edge.*   # a pattern on suite/id, or on the id alone
      check: numerics             # or * for any check
      outcome: failed             # or errored, crashed, timed_out
      reason: the window is one key too long
      issue: https://example.org/issues/17   # optional
      until: 2026-12-31           # optional: the last day on which the entry applies
      id: window-edge-1           # optional: with `until`, a statement of conformance takes the entry as a waiver

Optional keys restrict an entry to some records: ``needs`` (features and forms, as records name them), ``version`` (a
pattern on the backend's version) and ``says`` (a pattern on the record's message). ``within`` bounds how much may be
wrong. A record beyond the bound keeps its outcome::

      within: {budgets: 30, rows: 5, heads: 2, values: [nan]}
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from difflib import get_close_matches
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Literal

import attncheck
from attncheck.backends.registry import known_names
from attncheck.cases.loader import suite_names
from attncheck.cases.validation import suggestion, validate
from attncheck.cases.yaml_tree import Items, Place, Table, Tree, describe, parse_yaml, read_text
from attncheck.errors import readable
from attncheck.harness.run.outcomes import RecordedQuestion
from attncheck.reference.spec import CHECKS, FEATURES, FORMER_CHECKS, FORMS
from attncheck.reports.analysis.findings import stated_cause
from attncheck.reports.analysis.phrases import cut, one_line, plural, what_happened
from attncheck.reports.analysis.reasons import without_figures
from attncheck.reports.run_file.records import (
    BUDGET_SHARE,
    OURSELVES,
    UTILITIES,
    Ended,
    Errored,
    Failed,
    Passed,
    Record,
    XFailed,
    XPassed,
    is_not_reached,
    without_outcome,
)
from attncheck.reports.run_file.store import Run

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
    id: str | None = field(
        default=None, metadata={"description": "name of the entry in statements, unique in the file"}
    )

    @property
    def explanation(self) -> str:
        """The reason, followed by the issue if there is one."""
        return f"{self.reason} ({self.issue})" if self.issue else self.reason

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

    def excuses(self, record: Failed | Errored | Ended | XFailed, day: date) -> bool:
        """Return whether the entry applies to the record on this day, and its run expected it or would have."""
        if not self.is_about(record) or (self.until is not None and date.fromisoformat(self.until) < day):
            return False
        if isinstance(record, XFailed):
            return record.underlying == self.outcome and record.reason == self.explanation
        figures = record.figures if isinstance(record, Failed) else {}
        return self.foresees(record) and not (self.within and self.within.excess(figures))

    @property
    def suite(self) -> str:
        """The part of the pattern for the suite; ``*`` if the pattern is on the id."""
        named, slash, _ = self.case.partition("/")
        return named if slash else "*"


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
    entries = list[LocatedExpectation]()
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
            key, is_form, _ = need.partition("=")
            if is_form and key not in FORMS:
                fault = "cases have no such form"
                raise _place(item, "needs").fault(fault, value=need, allowed=suggestion(key, FORMS))
            if not is_form and need not in FEATURES:
                raise _place(item, "needs").fault("unknown feature", value=need, allowed=suggestion(need, [*FEATURES]))
        if not expectation.reason.strip():
            raise _place(item, "reason").fault("an expected failure needs a reason", allowed="say why it is known")
        if expectation.until is not None:
            try:
                date.fromisoformat(expectation.until)
            except ValueError:
                place, value = _place(item, "until"), expectation.until
                raise place.fault("until must be a date", value=value, allowed="write YYYY-MM-DD") from None
        if expectation.id is not None and expectation.id in {entry.expectation.id for entry in entries}:
            raise _place(item, "id").fault(
                "two entries have this id", value=expectation.id, allowed="give each its own"
            )
        entries.append(LocatedExpectation(expectation, item.place, former))
    return tuple(entries)


def _place(item: Tree, key: str) -> Place:
    return item.entries[key].place if isinstance(item, Table) else item.place


# An entry with `says` is about a finding, which may occur in any matching case: a case that passes is no `xpassed`.
#
# An unknown name of a suite or backend gives a note, since it may belong to another run. It fails the run if it differs
# from a known name only in capitals.


class Expectations:
    """The entries of one run. Apply them to each record in turn, then read :meth:`unmet` and :meth:`unseen`.

    ``cases``: all cases of the run's suites. ``selected``: those that pass the filters. ``backends``, ``checks``: the
    names that the run examines. ``today``: the date that ``until`` of the entries is compared with. ``strict``: whether
    an entry with ``says`` fails the run, too, if no record confirms it.
    """

    def __init__(
        self,
        entries: Sequence[LocatedExpectation],
        *,
        cases: Sequence[RecordedQuestion],
        selected: Sequence[RecordedQuestion],
        backends: Sequence[str],
        checks: Sequence[str],
        today: date,
        strict: bool = False,
    ) -> None:
        self._strict = strict
        self._faults: list[str] = []
        self._notes: list[str] = []
        self._live: list[LocatedExpectation] = []
        self._today = today
        suites = {case.suite for case in cases}
        for entry in entries:
            wanted = entry.expectation
            self._check_name(entry, "backend", wanted.backend, backends, known_names())
            if not any(fnmatchcase(suite, wanted.suite) for suite in suites):
                self._check_name(entry, "suite", wanted.suite, sorted(suites), [*suite_names(), UTILITIES])
            elif not any(wanted.fits_case(case.suite, case.id) for case in cases):
                self._faults.append(f"{entry}, but {_no_case(wanted.case, cases)}")
            elif (
                wanted.backend in backends
                and (wanted.check == "*" or wanted.check in checks)
                and any(wanted.fits_case(case.suite, case.id) for case in selected)
            ):
                self._live.append(entry)
        self._met: set[LocatedExpectation] = set()
        self._seen: set[LocatedExpectation] = set()
        self._late: set[LocatedExpectation] = set()
        self._expired: dict[LocatedExpectation, int] = {}

    def apply(self, record: Record) -> Record:
        """Return the record, unchanged, with details added, or as an ``xfailed`` or ``xpassed`` one."""
        if self._is_late(record):
            return record
        excesses: list[str] = []
        for entry in self._live:
            wanted = entry.expectation
            if not wanted.is_about(record):
                continue
            self._seen.add(entry)
            if isinstance(record, Failed | Errored | Ended) and wanted.foresees(record):
                self._met.add(entry)
                figures = record.figures if isinstance(record, Failed) else {}
                if wanted.within is not None and (beyond := wanted.within.excess(figures)):
                    excesses.append(f"more than {entry.place.file}:{entry.place.line} expects: {beyond}")
                    continue
                if wanted.until is not None and date.fromisoformat(wanted.until) < self._today:
                    self._expired[entry] = self._expired.get(entry, 0) + 1
                    continue
                return XFailed(
                    **without_outcome(record),
                    underlying=record.outcome,
                    summary=what_happened(record),
                    reason=wanted.explanation,
                    finding=record.finding,
                    figures=figures,
                )
            if isinstance(record, Passed) and wanted.says is None:
                self._met.add(entry)  # not confirmed, but the `xpassed` record reports that
                reason = f"{wanted.explanation} ({entry.place.file}:{entry.place.line})"
                return XPassed(**without_outcome(record), reason=reason)
        if excesses and isinstance(record, Failed):
            return record.model_copy(update={"details": (*record.details, *excesses)})
        return record

    def recall(self, record: Record) -> None:
        """Count a record of an earlier part of the run, to which the expectations are already applied."""
        if self._is_late(record):
            return
        for entry in self._live:
            wanted = entry.expectation
            if wanted.is_about(record):
                self._seen.add(entry)
                if isinstance(record, XFailed | XPassed) and record.reason.startswith(wanted.explanation):
                    self._met.add(entry)

    def _is_late(self, record: Record) -> bool:
        """Return whether a record was not reached; this excuses the entries about it."""
        if not is_not_reached(record):
            return False
        self._late.update(entry for entry in self._live if entry.expectation.is_about(record))
        return True

    def unmet(self, *, stopped_early: bool = False) -> list[str]:
        """Return a line for each entry that fails the run.

        ``stopped_early``: whether the run is incomplete. Then, and if a record that was not reached matches it, an
        unconfirmed entry fails the run only if the entry has another record.
        """
        expired = [
            f"{entry}, but only until {entry.expectation.until}, and today is {self._today}: {plural(count, 'record')} "
            "not excused; repair the fault, or move the date"
            for entry, count in self._expired.items()
        ]
        missed = [
            f"{entry}, but no record matched it; remove the entry if the fault is fixed"
            for entry in self._live
            if entry not in self._met
            and self._must_be_met(entry)
            and (entry.expectation.version is None or entry in self._seen)
            and (entry in self._seen or not (stopped_early or entry in self._late))
        ]
        return [*self._faults, *expired, *missed]

    def unseen(self) -> list[str]:
        """Return a line for each finding that did not occur, each unknown name, and each old name of a check."""
        unseen = [
            f"{entry}: not seen in this run; remove it if this is repaired"
            for entry in self._live
            if entry not in self._met and not self._must_be_met(entry) and entry in self._seen
        ]
        former = [
            f"{entry.place.file}:{entry.place.line}: the check {entry.former_check} is called {entry.expectation.check}"
            for entry in self._live
            if entry.former_check
        ]
        return [*former, *self._notes, *unseen]

    def _must_be_met(self, entry: LocatedExpectation) -> bool:
        """Return whether the run fails if no record confirms the entry."""
        return entry.expectation.says is None or (self._strict and entry in self._seen)

    def _check_name(
        self, entry: LocatedExpectation, kind: str, name: str, own: Sequence[str], known: Iterable[str]
    ) -> None:
        """Report a name that is neither in this run (``own``) nor known; patterns are never reported.

        A name with an argument, such as ``vllm:CPU_ATTN``, is looked up by the part before the colon.
        """
        if name in own or name.partition(":")[0] in known or _is_pattern(name):
            return
        meant = _resembling(name, [*own, *known])
        if meant is not None and meant.casefold() == name.casefold():
            self._faults.append(f"{entry}, but there is no {kind} {name}; write {meant}")
            return
        hint = f"did you mean {meant}?" if meant else f"this run has {', '.join(own) or 'none'}"
        self._notes.append(f"{entry}: not looked at, since there is no {kind} {name} in this run; {hint}")


def _no_case(pattern: str, cases: Sequence[RecordedQuestion]) -> str:
    names = [f"{case.suite}/{case.id}" if "/" in pattern else case.id for case in cases]
    meant = _resembling(pattern, names)
    hint = f"did you mean {meant}?" if meant else "`attncheck list cases` shows the ids"
    verb = "matches" if _is_pattern(pattern) else "is called"
    return f"no case of this run's suites {verb} {pattern}; {hint}"


def _is_pattern(name: str) -> bool:
    return any(sign in name for sign in "*?[")


def _resembling(name: str, known: Sequence[str]) -> str | None:
    lower = {each.casefold(): each for each in known}
    found = get_close_matches(name.casefold(), lower, n=1)
    return lower[found[0]] if found else None


# Writes the expectation file under which a given run would not have failed: one entry for each finding.

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_SHOWN = 100
"""Maximum length of a comment, in characters."""

Fallen = Failed | Errored | Ended | XFailed


def expectations_text(run: Run) -> str:
    """Return a YAML file of expectations that excuses exactly the failures in ``run``.

    The entry of a finding in one case names that case. The entry of a finding in several cases has a pattern on the
    cases and ``says``, a pattern on their common message, so that it does not apply to cases that passed.
    """
    found: dict[tuple[str, ...], list[Fallen]] = {}  # by all that makes a finding; figures do not
    for record in run.records:
        # No expectation excuses a fault of attncheck itself.
        if isinstance(record, Fallen) and not (isinstance(record, Errored) and record.stage == OURSELVES):
            reason = record.reason if isinstance(record, XFailed) else ""
            key = (record.backend, record.check, _outcome(record), _pattern(_words(record)), reason)
            found.setdefault(key, []).append(record)
    results = {(key, _place_of(record)) for key, records in found.items() for record in records}
    results |= {((), _place_of(record)) for record in run.records if isinstance(record, Passed)}
    ways = Counter(place for _, place in results)
    day = run.header.started[:10]
    opening = [f"# Expected failures, from {one_line(run.path)}: {plural(len(found), 'finding')}."]
    if not run.complete:
        opening.append("# The run is incomplete: a whole run may find more.")
    lone, others = list[str](), list[str]()
    for records in found.values():
        is_lone = len(_cases_of(records)) == 1 and ways[_place_of(records[0])] == 1  # rounds of a case may differ
        (lone if is_lone else others).append(_entry(records, day, is_lone=is_lone))
    # An entry without `says` needs a matching record. An earlier entry with `says` could consume that record.
    return "\n".join([*opening, *(f"\n{entry}" for entry in (*lone, *others))]) + "\n"


def _place_of(record: Record) -> tuple[str, str, str]:
    return record.backend, record.check, record.case


def _cases_of(records: Iterable[Record]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(record.case for record in records))


def _entry(records: Sequence[Fallen], day: str, *, is_lone: bool) -> str:
    """Return the entry of a finding. ``is_lone``: whether its only case has no other result for this check."""
    first, cases = records[0], _cases_of(records)
    comments = [f"{plural(len(cases), 'case')}, such as {cases[0]}: {_happened(first)}"]
    if isinstance(first, Failed) and first.meaning:
        comments.append(stated_cause(first))
    fields = {
        "backend": first.backend,
        "case": _case_pattern(cases),
        "check": first.check,
        "outcome": _outcome(first),
        **({} if is_lone else {"says": _pattern(_words(first))}),
        "reason": first.reason if isinstance(first, XFailed) else f"not explained yet; found by the run of {day}",
    }
    lines = [f"{name}: {json.dumps(_plain(value), ensure_ascii=False)}" for name, value in fields.items()]
    comment_lines = [f"# {cut(one_line(comment), _SHOWN)}" for comment in comments]
    return "\n".join([*comment_lines, f"- {lines[0]}", *(f"  {line}" for line in lines[1:])])


def _case_pattern(cases: Sequence[str]) -> str:
    """Return the shortest form that fits these ``suite/id``: the only one, their common prefix with ``*``, or ``*``."""
    if len(cases) == 1:
        return escape(cases[0])
    if len({case.partition("/")[0] for case in cases}) > 1:
        return "*"
    low, high = min(cases), max(cases)
    alike = (index for index, (one, other) in enumerate(zip(low, high, strict=False)) if one != other)
    return f"{escape(low[: next(alike, len(low))])}*"


def _pattern(words: str) -> str:
    """Return a pattern that matches ``words`` with any figures and addresses."""
    without = without_figures(_ADDRESS.sub("#", escape(words)))
    return re.sub(r"[*#]*#[*#]*", "*", _plain(without))


def _words(record: Fallen) -> str:
    """Return the text that ``says`` is matched against: the likely cause if there is one, else what happened."""
    return (record.meaning if isinstance(record, Failed) else None) or _happened(record)


def _happened(record: Fallen) -> str:
    return record.summary if isinstance(record, XFailed) else what_happened(record)


def _outcome(record: Fallen) -> str:
    return record.underlying if isinstance(record, XFailed) else record.outcome


def _plain(text: str) -> str:
    """Return ``text`` with ``?`` for each character that YAML rejects; in a pattern ``?`` matches any character."""
    return "".join(character if character.isprintable() else "?" for character in text)
