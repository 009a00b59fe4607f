"""The current results of each backend on each device, and their history. Pure functions of the site's runs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Self

from attncheck.reports.analysis.support import by_size
from attncheck.reports.run_file.graph_levels import GRAPH_LEVELS
from attncheck.reports.site.model import SiteBackend, SiteCase, SiteFinding, SiteLevel, SiteRun, SiteSupport, slug


@dataclass(frozen=True)
class Measured:
    """What one run measured of one backend."""

    run: SiteRun
    backend: SiteBackend


@dataclass(frozen=True)
class CurrentCase:
    """The newest result of one case, and the run it is from."""

    case: SiteCase
    run: SiteRun


class CaseCounts(NamedTuple):
    """Numbers of current results. ``others``: of cases that are not declared, or not examined."""

    right: int
    wrong: int
    others: int

    @classmethod
    def of(cls, results: Iterable[CurrentCase]) -> Self:
        """Return the counts of ``results``."""
        counts = [result.case.count for result in results]
        right, wrong = counts.count("right"), sum(count in ("short", "wrong", "died") for count in counts)
        return cls(right, wrong, len(counts) - right - wrong)


@dataclass(frozen=True)
class Subject:
    """One backend on one device. ``runs``: everything measured of it, newest first, one or more.

    The current results are those of the newest version. If several runs examined a case, the newest counts.
    """

    name: str
    device: str
    runs: tuple[Measured, ...]

    @property
    def badge(self) -> str:
        """The file name of its badge."""
        return f"{slug(f'{self.name} on {self.device}')}.svg"

    @property
    def newest(self) -> Measured:
        """The newest run."""
        return self.runs[0]

    @property
    def version(self) -> str:
        """The newest version."""
        return self.newest.backend.version

    @cached_property
    def current(self) -> tuple[Measured, ...]:
        """The runs of the newest version that have the newest result of a case, newest first."""
        keys = {current.run.key for current in self.cases.values()}
        return tuple(each for each in self.runs if each.run.key in keys)

    @cached_property
    def cases(self) -> dict[str, CurrentCase]:
        """The current results by ``suite/id``."""
        found: dict[str, CurrentCase] = {}
        for each in self.runs:
            if each.backend.version == self.version:
                for name, case in each.backend.cases.items():
                    found.setdefault(name, CurrentCase(case, each.run))
        return found

    @cached_property
    def findings(self) -> tuple[tuple[SiteFinding, SiteRun], ...]:
        """The findings with a case whose current result is from the same run, by cause, newest first."""
        found: dict[str, tuple[SiteFinding, SiteRun]] = {}
        for each in self.current:
            for finding in each.backend.findings:
                if any(self.cases[case].run is each.run for case in finding.cases if case in self.cases):
                    found.setdefault(finding.words, (finding, each.run))
        return tuple(found.values())

    @cached_property
    def support(self) -> tuple[SiteSupport, ...]:
        """The measured support of each need, from the newest run that examined it."""
        found: dict[str, SiteSupport] = {}
        for each in self.current:
            for row in each.backend.support:
                if row.need not in found or (found[row.need].verdict == "left" and row.verdict != "left"):
                    found[row.need] = row
        return tuple(
            sorted(
                found.values(),
                key=lambda row: ("=" in row.need, row.need.partition("=")[0], by_size(row.need.partition("=")[2])),
            )
        )

    @property
    def failing(self) -> tuple[SiteFinding, ...]:
        """The findings that were not expected."""
        return tuple(finding for finding, _ in self.findings if not finding.is_expected)

    @cached_property
    def levels(self) -> tuple[tuple[SiteLevel, ...], SiteRun] | None:
        """The CUDA-graph levels of the newest run that has any, and that run."""
        return next(((each.backend.levels, each.run) for each in self.current if each.backend.levels), None)

    @property
    def broadest(self) -> Measured:
        """The current run with most cases, the newest of equal ones; what it claims is known best."""
        return max(self.current or self.runs, key=lambda each: len(each.backend.cases))

    @property
    def counts(self) -> CaseCounts:
        """The numbers of its current results."""
        return CaseCounts.of(self.cases.values())

    @property
    def level(self) -> str:
        """The CUDA-graph level that every current case reaches; "" if none was examined, or one is not known."""
        levels = {each.case.level for each in self.cases.values() if each.case.declared_level}
        return min(levels, key=GRAPH_LEVELS.index) if levels and "" not in levels else ""

    @property
    def marks(self) -> tuple[str, ...]:
        """``interpreted`` and ``emulated``, if they apply to a current result."""
        return tuple(dict.fromkeys(mark for each in self.current for mark in each.backend.marks))


@dataclass(frozen=True)
class Change:
    """A run whose result differs from the run before, on the same device.

    ``appeared``, ``gone``: titles of findings. ``alike``: the later runs with the same result, newest last.
    """

    measured: Measured
    appeared: tuple[str, ...]
    gone: tuple[str, ...]
    alike: tuple[Measured, ...] = ()

    @property
    def newest(self) -> Measured:
        """The newest run with this result."""
        return (self.measured, *self.alike)[-1]


def subjects(runs: Iterable[SiteRun]) -> tuple[Subject, ...]:
    """Return every backend on every device, ordered by backend and device."""
    found: dict[tuple[str, str], list[Measured]] = {}
    for run in sorted(runs, key=lambda run: (run.started, run.key), reverse=True):
        for backend in run.backends:
            found.setdefault((backend.name, run.device), []).append(Measured(run, backend))
    return tuple(Subject(*key, tuple(found[key])) for key in sorted(found))


def history(measured: Sequence[Measured]) -> tuple[Change, ...]:
    """Return the changes from run to run, newest first, for the runs of a :class:`Subject`.

    A finding is gone only if the newer run examined one of its cases.
    """
    changes: list[Change] = []
    known: dict[str, SiteFinding] = {}
    for each in reversed(measured):
        now = {finding.words: finding for finding in each.backend.findings}
        examined = {name for name, case in each.backend.cases.items() if case.count in ("right", "short")}
        gone = {words for words, old in known.items() if words not in now and examined.intersection(old.cases)}
        appeared = tuple(finding.title for words, finding in now.items() if words not in known)
        known_now = {words: old for words, old in known.items() if words not in gone} | now
        before = changes[-1].newest if changes else None
        if before and not appeared and not gone and _result(before) == _result(each):
            changes[-1] = replace(changes[-1], alike=(*changes[-1].alike, each))
        else:
            changes.append(Change(each, appeared, tuple(known[words].title for words in gone)))
        known = known_now
    return tuple(reversed(changes))


def _result(each: Measured) -> tuple[object, ...]:
    backend = each.backend
    return backend.version, backend.words, each.run.warning
