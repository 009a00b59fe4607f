"""Applies expected failures to the records of a run.

A record that failed as an entry expects, within its bound, becomes ``xfailed``. Beyond the bound its outcome stays, and
a detail states by what the bound is exceeded. A record that passed although an entry expects a failure becomes
``xpassed``, which fails the run.

An entry also fails the run if it matches no case of the run's suites, if no record confirms it, or if its ``until`` is
over. An entry with ``says`` is about a finding, which may occur in any matching case. A case that passes is not
``xpassed``. A run without the finding only has a note, unless expectations are strict: then it fails.

Entries for suites, backends, cases or checks outside this run are ignored. An unknown name of a suite or backend gives
a note, since it may belong to another run. It fails the run if it differs from a known name only in capitals.
"""

from collections.abc import Iterable, Sequence
from datetime import date
from difflib import get_close_matches
from typing import Protocol

from attncheck.backends.registry import known_names
from attncheck.cases.loader import suite_names
from attncheck.harness.run.expectation_file import LocatedExpectation
from attncheck.reports.analysis.phrases import plural, what_happened
from attncheck.reports.run_file.records import (
    UTILITIES,
    Ended,
    Errored,
    Failed,
    Passed,
    Record,
    XFailed,
    XPassed,
    without_outcome,
)


class HasNames(Protocol):
    """The suite and the id of a case."""

    @property
    def suite(self) -> str:
        """Name of the suite."""

    @property
    def id(self) -> str:
        """Id within the suite."""


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
        cases: Sequence[HasNames],
        selected: Sequence[HasNames],
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
            if not any(wanted.fits_suite(suite) for suite in suites):
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
        self._expired: dict[LocatedExpectation, int] = {}

    def apply(self, record: Record) -> Record:
        """Return the record, unchanged, with details added, or as an ``xfailed`` or ``xpassed`` one."""
        excesses: list[str] = []
        for entry in self._live:
            wanted = entry.expectation
            if not wanted.is_about(record):
                continue
            self._seen.add(entry)
            if isinstance(record, Failed | Errored | Ended) and wanted.foresees(record):
                self._met.add(entry)
                beyond = wanted.excess(record)
                if beyond:
                    excesses.append(f"more than {entry.place.file}:{entry.place.line} expects: {beyond}")
                    continue
                if wanted.has_expired(self._today):
                    self._expired[entry] = self._expired.get(entry, 0) + 1
                    continue
                return XFailed(
                    **without_outcome(record),
                    underlying=record.outcome,
                    summary=what_happened(record),
                    reason=wanted.explanation,
                    finding=record.finding,
                    figures=record.figures if isinstance(record, Failed) else {},
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
        for entry in self._live:
            wanted = entry.expectation
            if wanted.is_about(record):
                self._seen.add(entry)
                if isinstance(record, XFailed | XPassed) and record.reason.startswith(wanted.explanation):
                    self._met.add(entry)

    def unmet(self, *, stopped_early: bool = False) -> list[str]:
        """Return a line for each entry that fails the run.

        ``stopped_early``: whether the run is incomplete; then an unconfirmed entry fails it only if the entry has a
        record.
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
            and not (stopped_early and entry not in self._seen)
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


def _no_case(pattern: str, cases: Sequence[HasNames]) -> str:
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
