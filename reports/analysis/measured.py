"""What any number of runs measured of each backend on each device: one answer for each, over all run files.

:func:`measured_run` keeps what the answers need of one run, as plain values that pass between processes.
:func:`subjects` combines runs. What a run expected is of no concern here: a known fault is a fault.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from typing import Any, NamedTuple, TypeVar

from attncheck.reports.analysis import phrases
from attncheck.reports.analysis.findings import Finding
from attncheck.reports.analysis.repro import repro_command
from attncheck.reports.analysis.support import (
    ANSWERS,
    LATENT,
    REFUSALS,
    CountedCase,
    SupportRow,
    by_form,
    concerned,
    support_rows,
)
from attncheck.reports.analysis.verdicts import BackendVerdict, RunFindings, run_findings
from attncheck.reports.run_file.graph_levels import GRAPH_LEVELS, GraphLevel, GraphLevels
from attncheck.reports.run_file.header import BackendInfo, CaseInfo, RunHeader
from attncheck.reports.run_file.records import EXAMINED, UTILITIES, XFailed, XPassed, graph_of, is_out_of_time
from attncheck.reports.run_file.store import Run

T = TypeVar("T")

LEVEL = "cudagraph"
"""The form of a measured CUDA-graph level; a case of one level has a need for each lower level, too."""

WRONG = ("short", "wrong", "died")
"""The counts of a :class:`SupportRow` for a case whose output is wrong, or that ended the process."""

KINDS = {
    "batch has a decode": "decode",
    "batch has a prefill with context": "prefill with context",
    "batch has a prefill without context": "prefill",
}
"""Kinds of requests, by the case key that states whether a batch has one."""

MUTANT = "mutants:"
"""How the reference of a mutant of attncheck begins; its fault was planted, so it is no backend to choose."""

_OUTPUTS = (*ANSWERS, REFUSALS)
"""The checks that compare outputs; a pass of other checks alone does not outweigh them."""


class Time(NamedTuple):
    """Time of ``forward`` in nanoseconds. ``machine``: equal for equal machines and versions."""

    median: float
    low: float
    high: float
    processes: int
    machine: str


@dataclass(frozen=True, slots=True)
class MeasuredCase:
    """The result of one case of one backend in the run called ``run``.

    ``blamed``: for a declared case, the false claims that explain its failure; else the undeclared needs. ``checks``:
    those that ran. ``level``: the CUDA-graph levels, declared and measured, None if they are not known.
    """

    run: str
    counted: CountedCase
    blamed: frozenset[str]
    checks: frozenset[str]
    time: Time | None = None
    level: tuple[GraphLevel, GraphLevel] | None = None

    @property
    def needs(self) -> tuple[str, ...]:
        """Its features and forms, and the CUDA-graph levels that it reaches."""
        reached = GRAPH_LEVELS[1 : GRAPH_LEVELS.index(self.level[1]) + 1] if self.level else ()
        return self.counted.needs + tuple(f"{LEVEL}={level}" for level in reached)

    @property
    def can_count(self) -> bool:
        """Whether it counts for any needs: a refusal that concerns none of its needs does not."""
        return bool(self.blamed) or self.counted.count in ("right", "left", "short")

    def counts_for(self, needs: Iterable[str]) -> bool:
        """Return whether it needs all of ``needs``, and no other need explains its failure or its refusal."""
        wanted = set(needs)
        if not wanted.issubset(self.needs):
            return False
        if self.counted.count in ("right", "left"):
            return True
        return self.blamed <= wanted if self.counted.count == "short" else not wanted or bool(self.blamed & wanted)

    def or_older(self, older: "MeasuredCase") -> "MeasuredCase":
        """Return this result, or an older one if only that compared outputs; what this one lacks is taken from it."""
        is_outweighed = self.counted.count not in WRONG and self._rank < older._rank
        result = older if is_outweighed else self
        time, level = self.time or older.time, self.level or older.level
        return result if (time, level) == (result.time, result.level) else replace(result, time=time, level=level)

    @property
    def _rank(self) -> int:
        return 2 if self.checks.intersection(_OUTPUTS) else 1 if self.checks else 0


@dataclass(frozen=True)
class MeasuredFinding:
    """A finding of one backend in one run.

    ``words``: equal for the same cause in other runs. ``title``: the cause with figures. ``case``, ``example``,
    ``repeat``: one of its cases, what happened there, and the command that repeats it. ``places``: (``suite/id``,
    check) of all its records. ``is_known``: whether the run expected it. ``is_wrong``: whether the backend is at fault,
    which is not so for a pass against expectation and for a case without time left.
    """

    words: str
    title: str
    case: str
    example: str
    repeat: str
    places: tuple[tuple[str, str], ...]
    is_known: bool
    is_wrong: bool

    @property
    def cases(self) -> tuple[str, ...]:
        """``suite/id`` of its cases."""
        return tuple(dict.fromkeys(case for case, _ in self.places))

    @property
    def checks(self) -> tuple[str, ...]:
        """The checks of its records."""
        return tuple(dict.fromkeys(check for _, check in self.places))


@dataclass(frozen=True)
class MeasuredBackend:
    """One backend of one run. ``words``: the number of cases with each result.

    ``marks``: ``interpreted`` and ``emulated``, if they apply to its results. ``cases``: by ``suite/id``.
    ``unreached``: cases that the run ended before, or whose outputs it had no time to compare.
    ``is_whole``: whether no check is missing for this reason.
    """

    name: str
    version: str
    marks: tuple[str, ...]
    features: tuple[str, ...]
    words: str
    findings: tuple[MeasuredFinding, ...]
    cases: Mapping[str, MeasuredCase]
    unreached: frozenset[str]
    is_whole: bool

    @property
    def is_examined(self) -> bool:
        """Whether any check ran; a backend whose library is missing has records of none."""
        return any(case.checks for case in self.cases.values())


@dataclass(frozen=True)
class MeasuredRun:
    """One run. ``key``: a file name for it. ``name``: of its run file. ``described``: shape and description by case.

    ``capability``: the compute capability of a GPU, "" on a CPU. ``is_stopped``: whether it left out a check.
    """

    key: str
    name: str
    path: str
    started: str
    device: str
    capability: str
    versions: str
    is_stopped: bool
    backends: tuple[MeasuredBackend, ...] = ()
    described: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def measured_run(run: Run, name: str, times: Mapping[tuple[str, str], Time]) -> MeasuredRun:
    """Return what the run called ``name`` measured of each backend that has a record and is no mutant.

    ``times``: of ``forward``, by backend and ``suite/id``.
    """
    header, environment = run.header, run.header.environment
    found = run_findings(run.records, header)
    key = f"{slug(name.rpartition('/')[2].partition('.')[0])}-{sha256(name.encode()).hexdigest()[:8]}"
    variants = {suite.name: suite.ref[suite.ref.index("{") :] for suite in header.suites if "{" in suite.ref}
    cases = _cases(run, key, found, times)
    infos = {info.name: info for info in header.backends if not info.ref.startswith(MUTANT)}
    verdicts = [each for each in found.verdicts if each.backend in infos]
    driver = f", driver {environment.driver}" if environment.driver else ""
    return MeasuredRun(
        key=key,
        name=name,
        path=run.path,
        started=header.started,
        device=environment.device_name or environment.device,
        capability=environment.capability or "",
        versions=f"attncheck {environment.attncheck}, torch {environment.torch}{driver}",
        is_stopped=not run.complete or any(map(is_out_of_time, run.records)),
        backends=tuple(
            _backend(each, infos[each.backend], run, found, cases[each.backend], variants) for each in verdicts
        ),
        described={
            _title(f"{case.suite}/{case.id}", variants): (case.shape, case.description) for case in header.cases
        },
    )


def _title(case: str, variants: Mapping[str, str]) -> str:
    """Return the name of a case (``suite/id``) with what the run set in its suite, which makes it another case.

    ``variants``: by suite, settings such as ``{cache.block_size: 16}``.
    """
    suite, _, name = case.partition("/")
    return f"{suite}{variants.get(suite, '')}/{name}"


def slug(name: str) -> str:
    """Return ``name`` as a file name; names that differ have file names that differ, also if case is ignored."""
    plain = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "._") else "-" for letter in name)
    plain = plain.lower().strip("-.")[:60]
    return plain if plain == name else f"{plain or 'x'}-{sha256(name.encode()).hexdigest()[:8]}"


def _cases(
    run: Run, key: str, found: RunFindings, times: Mapping[tuple[str, str], Time]
) -> dict[str, dict[str, MeasuredCase]]:
    """Return the cases of each backend, by ``suite/id``."""
    kinds = {f"{case.suite}/{case.id}": _kind(case) for case in run.header.cases}
    checks: dict[tuple[str, str], set[str]] = {}
    levels: dict[tuple[str, str], GraphLevels] = {}
    for record in run.records:
        if record.check != UTILITIES and record.outcome in EXAMINED and not is_out_of_time(record):
            checks.setdefault((record.backend, record.case), set()).add(record.check)
        if (graph := graph_of(record)) is not None:
            levels[record.backend, record.case] = graph
    false = {each.backend: {claim.capability for claim in each.false_claims} for each in found.verdicts}
    declared = {name: set(features) for name, features in run.header.declared.items()}
    cases: dict[str, dict[str, MeasuredCase]] = {name: {} for name in declared}
    known: dict[Any, Any] = {}

    def shared(value: T) -> T:
        """Return the first equal value: thousands of runs would need twice the memory for copies."""
        first: T = known.setdefault(value, value)
        return first

    for (backend, name), case in found.cases.items():
        level = levels.get((backend, name))
        cases.setdefault(backend, {})[name] = MeasuredCase(
            run=key,
            counted=replace(case, needs=shared(tuple(sorted(case.needs)) + kinds.get(name, ()))),
            blamed=shared(_blamed(case, declared.get(backend, set()), false.get(backend, set()))),
            checks=shared(frozenset(checks.get((backend, name), ()))),
            time=times.get((backend, name)),
            level=(level.declared, level.measured) if level and level.measured else None,
        )
    return cases


def _blamed(case: CountedCase, declared: set[str], false: set[str]) -> frozenset[str]:
    if case.count in ("right", "short"):
        return frozenset(false.intersection(case.needs))
    if LATENT in declared and LATENT not in case.needs:
        return frozenset()  # refused for its cache, whatever else it needs
    return frozenset(concerned(case, declared))


def _kind(case: CaseInfo) -> tuple[str, ...]:
    """Return the form that tells batches apart, such as ``batch=decode + prefill``; nothing for older run files."""
    kinds = [kind for key, kind in KINDS.items() if case.keys.get(key)]
    return (f"batch={' + '.join(kinds)}",) if kinds else ()


def _backend(
    verdict: BackendVerdict,
    info: BackendInfo,
    run: Run,
    found: RunFindings,
    cases: Mapping[str, MeasuredCase],
    variants: Mapping[str, str],
) -> MeasuredBackend:
    is_interpreted = "interpreted" in info.version or info.required_environment.get("TRITON_INTERPRET") == "1"
    is_emulated = any(row.backend == info.name and row.graph.recorder == "emulated" for row in found.levels)
    marks = (("interpreted",) if is_interpreted else ()) + (("emulated",) if is_emulated else ())
    late = {record.case for record in run.records if record.backend == info.name and is_out_of_time(record)}
    unreached = {name for name, case in cases.items() if name in late and case.counted.count == "left"}
    if not run.complete:
        unreached |= {f"{case.suite}/{case.id}" for case in run.header.cases} - set(cases)
    return MeasuredBackend(
        name=info.name,
        version=info.version,
        marks=marks,
        features=tuple(sorted(info.features)),
        words=", ".join(phrases.result_counts(verdict.results)),
        findings=tuple(_finding(finding, run.header, variants) for finding in verdict.findings),
        cases={_title(name, variants): case for name, case in cases.items()},
        unreached=frozenset(_title(name, variants) for name in unreached),
        is_whole=run.complete and not late,
    )


def _finding(finding: Finding, header: RunHeader, variants: Mapping[str, str]) -> MeasuredFinding:
    example = finding.example
    return MeasuredFinding(
        words=finding.words,
        title=f"likely: {finding.title}" if finding.is_inferred and finding.is_confirmed else finding.title,
        case=_title(example.case, variants),
        example=example.summary if isinstance(example, XFailed) else phrases.what_happened(example),
        repeat=repro_command(example, header),
        places=tuple((_title(record.case, variants), record.check) for record in finding.records),
        is_known=finding.is_expected,
        is_wrong=not isinstance(example, XPassed) and not is_out_of_time(example),
    )


@dataclass(frozen=True)
class Subject:
    """One backend on one device. ``runs``: what they measured of it, newest first, one or more.

    Its answers are those of the newest version: of each case the newest result that compared outputs.
    ``needs_of``: the needs of every known case, by ``suite/id``.
    """

    name: str
    device: str
    runs: tuple[tuple[MeasuredRun, MeasuredBackend], ...]
    needs_of: Mapping[str, tuple[str, ...]] = field(repr=False)

    @property
    def version(self) -> str:
        """The newest version."""
        return self.runs[0][1].version

    @property
    def features(self) -> tuple[str, ...]:
        """What the newest run declares."""
        return self.runs[0][1].features

    @cached_property
    def current(self) -> tuple[tuple[MeasuredRun, MeasuredBackend], ...]:
        """The runs of the newest version, newest first."""
        return tuple(each for each in self.runs if each[1].version == self.version)

    @cached_property
    def cases(self) -> dict[str, MeasuredCase]:
        """The current results, by ``suite/id``."""
        found: dict[str, MeasuredCase] = {}
        for _, backend in self.current:
            for name, case in backend.cases.items():
                if name not in backend.unreached:
                    found[name] = found[name].or_older(case) if name in found else case
        return found

    @cached_property
    def sources(self) -> frozenset[str]:
        """The keys of the runs that a current result or finding is from."""
        return frozenset(case.run for case in self.cases.values()) | {run.key for _, run in self.findings}

    @cached_property
    def unreached(self) -> frozenset[str]:
        """The cases that no run of the version reached, although one of them selected them."""
        return frozenset(name for _, backend in self.current for name in backend.unreached if name not in self.cases)

    @property
    def is_stopped(self) -> bool:
        """Whether a run that counts left out a check, so that no verdict on the whole is known."""
        return bool(self.unreached) or any(not own.is_whole and run.key in self.sources for run, own in self.current)

    @property
    def coverage(self) -> str:
        """The number of cases, ``78 cases``, or, if a run left something out, ``1 of 78 cases, not all reached``."""
        if not self.is_stopped:
            return phrases.plural(len(self.cases), "case")
        every = len(self.cases) + len(self.unreached)
        return f"{len(self.cases)} of {phrases.plural(every, 'case')}, not all reached"

    @cached_property
    def findings(self) -> tuple[tuple[MeasuredFinding, MeasuredRun], ...]:
        """The findings that no newer run of the version has examined again in all places, newest first."""
        concerned_cases = {case for _, backend in self.current for each in backend.findings for case in each.cases}
        examined: set[tuple[str, str]] = set()
        found: dict[str, tuple[MeasuredFinding, MeasuredRun]] = {}
        for run, backend in self.current:
            for finding in backend.findings:
                if not examined.issuperset(finding.places):
                    found.setdefault(finding.words, (finding, run))
            again = concerned_cases.intersection(backend.cases)
            examined.update((name, check) for name in again for check in backend.cases[name].checks)
        return tuple(found.values())

    @property
    def faults(self) -> tuple[MeasuredFinding, ...]:
        """The findings in which the backend is at fault, expected or not."""
        return tuple(finding for finding, _ in self.findings if finding.is_wrong)

    @cached_property
    def counts(self) -> Counter[str]:
        """The number of current cases with each count of a :class:`SupportRow`."""
        return Counter(case.counted.count for case in self.cases.values())

    @property
    def wrong(self) -> int:
        """The number of cases with a wrong output, or that ended the process."""
        return sum(self.counts[count] for count in WRONG)

    @cached_property
    def support(self) -> dict[str, SupportRow]:
        """The measured support of each need, over the current results of all runs."""
        counted = {(self.name, name): case.counted for name, case in self.cases.items()}
        false = {need for case in self.cases.values() if case.counted.count == "short" for need in case.blamed}
        rows = support_rows(counted, {self.name: self.features}, {self.name: false})
        return {row.feature: row for row in sorted((*rows, *self._levels()), key=lambda row: by_form(row.feature))}

    def _levels(self) -> list[SupportRow]:
        """Return a row for each CUDA-graph level: cases that reach it, and those that are measured below it."""
        known = [case.level for case in self.cases.values() if case.level]
        return [
            SupportRow(
                self.name,
                f"{LEVEL}={level}",
                any(rank(declared) >= rank(level) for declared, _ in known),
                right=sum(rank(measured) >= rank(level) for _, measured in known),
                short=sum(rank(declared) >= rank(level) > rank(measured) for declared, measured in known),
                refused=sum(rank(level) > max(rank(declared), rank(measured)) for declared, measured in known),
            )
            for level in (GRAPH_LEVELS[1:] if known else ())
        ]

    @cached_property
    def not_reached(self) -> Counter[str]:
        """The number of cases with each need that no run reached."""
        return Counter(need for name in self.unreached for need in self.needs_of.get(name, ()))

    @property
    def level(self) -> str:
        """The CUDA-graph level that every examined case reaches; "" if none is known."""
        return min((case.level[1] for case in self.cases.values() if case.level), key=rank, default="")

    @property
    def marks(self) -> tuple[str, ...]:
        """``interpreted`` and ``emulated``, if they apply to a current result."""
        used = [backend for run, backend in self.current if run.key in self.sources]
        return tuple(dict.fromkeys(mark for backend in used for mark in backend.marks))


def rank(level: GraphLevel) -> int:
    """Return the position of a CUDA-graph level, 0 for the lowest."""
    return GRAPH_LEVELS.index(level)


def subjects(runs: Iterable[MeasuredRun]) -> tuple[Subject, ...]:
    """Return every backend on every device, ordered by device and backend, GPUs first."""
    newest_first = sorted(runs, key=lambda run: (run.started, run.key), reverse=True)
    needs_of: dict[str, tuple[str, ...]] = {}
    found: dict[tuple[bool, str, str], list[tuple[MeasuredRun, MeasuredBackend]]] = {}
    for run in newest_first:
        for backend in run.backends:
            found.setdefault((not run.capability, run.device, backend.name), []).append((run, backend))
            for name, case in backend.cases.items():
                needs_of.setdefault(name, case.counted.needs)
    return tuple(
        Subject(name, device, tuple(found[is_cpu, device, name]), needs_of) for is_cpu, device, name in sorted(found)
    )


class Pace(NamedTuple):
    """A time as a multiple of the fastest one of the same case, machine and versions.

    ``low``, ``high``: its interval; both are None if one of the two was timed in fewer than three processes.
    """

    ratio: float
    low: float | None
    high: float | None


def paces(members: Sequence[Subject]) -> dict[tuple[str, str], Pace]:
    """Return the pace of each backend of one device by (backend, case); only cases that two or more timed rightly."""
    timed: dict[tuple[str, str], dict[str, Time]] = {}
    for subject in members:
        for name, case in subject.cases.items():
            if case.time and case.counted.count == "right":
                timed.setdefault((name, case.time.machine), {})[subject.name] = case.time
    found = {}
    for (name, _), times in timed.items():
        fastest = min(times.values())
        for backend, time in times.items() if len(times) > 1 else ():
            has_interval = min(time.processes, fastest.processes) > 2
            low, high = (time.low / fastest.high, time.high / fastest.low) if has_interval else (None, None)
            found[backend, name] = Pace(time.median / fastest.median, low, high)
    return found
