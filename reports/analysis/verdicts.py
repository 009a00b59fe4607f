"""The verdict on each backend of a run: whether it passed, its false claims, and what it could declare.

A false claim is a declared capability that cases which need it disprove: a feature, or a form such as ``head_size=80``.
A finding concerns a feature if its likely cause names the feature. It also does if all its cases need the feature, and
so few others do that chance does not explain it. A finding concerns a form if the form alone separates its cases from
the passing ones, and at least as many pass.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from attncheck.reports.analysis.findings import Finding, findings
from attncheck.reports.analysis.graph_levels import LevelRow, level_rows
from attncheck.reports.analysis.summary import CaseResult, OutcomeCounts, RunVerdict, case_results, verdict
from attncheck.reports.analysis.support import CountedCase, CountedCases, SupportRow, counted_cases, support_rows
from attncheck.reports.run_file.graph_levels import GRAPH_LEVELS, GraphLevel
from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.records import (
    EXAMINED,
    UTILITIES,
    Failed,
    Record,
    XFailed,
    XPassed,
    graph_of,
    is_out_of_time,
)

_FEW, _SIMPLE = 4, 1.2
"""With fewer failing cases, no other condition that is as simple may separate them from the passing ones."""

_CHANCE = 0.01
"""If failing cases would all need a feature by chance with less than this probability, the feature is blamed."""


@dataclass(frozen=True)
class FalseClaim:
    """A capability that a backend declares: ``wrong`` of the ``examined`` cases that need it did not pass.

    ``measured``: for a CUDA-graph level, the lowest level that a layer reached; empty for any other capability.
    """

    backend: str
    capability: str
    wrong: int
    examined: int
    measured: str = ""

    def __str__(self) -> str:
        if self.measured:
            return f"{self.capability} (measured: {self.measured})"
        return f"{self.capability} ({self.wrong} of {self.examined} {'case' if self.examined == 1 else 'cases'} wrong)"


def false_claims(found: Sequence[Finding], records: Sequence[Record], counted: CountedCases) -> tuple[FalseClaim, ...]:
    """Return the false claims that the findings prove, backend by backend, those with most wrong cases first.

    ``records``: all records of the run. ``counted``: their cases. Findings on undeclared cases concern no claim.
    """
    claims: list[FalseClaim] = []
    for backend in dict.fromkeys(finding.backend for finding in found):
        cases = {name: case for (owner, name), case in counted.items() if owner == backend and case.is_declared}
        false: set[str] = set()
        for finding in found:
            if finding.backend != backend or isinstance(finding.example, XPassed) or is_out_of_time(finding.example):
                continue
            false.update(_concerned(finding, cases))
        needing = {name: [case for case in cases.values() if name in case.needs] for name in false}
        own = [
            FalseClaim(backend, name, sum(case.count == "short" for case in needed), len(needed))
            for name, needed in needing.items()
        ]
        claims += sorted(own, key=lambda claim: (-claim.wrong, claim.capability))
        claims += [] if "lse" in false else _lse_claim(records, backend)
        claims += _level_claims(records, backend)
    return tuple(claims)


def _concerned(finding: Finding, declared: Mapping[str, CountedCase]) -> set[str]:
    """Return the capabilities that a finding concerns.

    ``declared``: every case that was examined as declared, by name. Cases whose outputs are right are ignored: what
    fails there is another layer, or memory.
    """
    cases = {name for name in finding.cases if name in declared and declared[name].count == "short"}
    if not cases:
        return set()
    needs = {name: frozenset(case.needs) for name, case in declared.items()}
    named = {name for record in finding.records if isinstance(record, Failed) for name in record.concerns}
    found = named or _distinctive_features(cases, needs, finding)
    key = _distinctive_key(finding)
    forms = {need for case in cases for need in needs[case] if key and need.startswith(f"{key}=")}
    return {name for name in found if any(name in needs[case] for case in cases)} | forms


def _distinctive_features(cases: Collection[str], needs: Mapping[str, frozenset[str]], finding: Finding) -> set[str]:
    """Return the features that all ``cases`` need, and so few others that chance does not explain it."""
    passing = finding.contrast.right if finding.contrast else 0
    shared = frozenset.intersection(*(needs[case] for case in cases))
    chances: dict[str, float] = {}
    for feature in (need for need in shared if "=" not in need and need != "lse"):  # see _lse_claim
        have = sum(feature in own for own in needs.values())
        if have == len(cases) and passing:
            chances[feature] = 0.0
        elif len(cases) > 1:
            chances[feature] = math.comb(have, len(cases)) / math.comb(len(needs), len(cases))
    least = min(chances.values(), default=1.0)
    return {feature for feature, chance in chances.items() if chance == least and chance < _CHANCE}


def _distinctive_key(finding: Finding) -> str:
    """Return the last part of the key that alone separates a finding's cases from the passing ones, or "".

    One failing case may differ from the others in much else. If more cases fail than pass, the form is not the reason.
    """
    contrast = finding.contrast
    if (
        contrast is None
        or contrast.exceptions
        or not 1 < contrast.wrong <= contrast.right
        or len(contrast.conditions) != 1
        or (contrast.wrong < _FEW and any(each.cost <= _SIMPLE for each in contrast.alternatives))
    ):
        return ""
    return contrast.conditions[0].key.rpartition(".")[2]


def _lse_claim(records: Sequence[Record], backend: str) -> list[FalseClaim]:
    """Return a false claim of the feature ``lse`` if the log-sum-exp is wrong where the output is right."""
    own = [record for record in records if record.backend == backend and record.outcome in EXAMINED]
    of_lse = [record for record in own if record.check == "lse"]
    short = {(r.suite, r.case_id) for r in own if r.check == "numerics" and r.outcome not in ("passed", "xpassed")}
    wrong = [r for r in of_lse if isinstance(r, Failed | XFailed) and (r.suite, r.case_id) not in short]
    return [FalseClaim(backend, "lse", len(wrong), len(of_lse))] if wrong else []


def _level_claims(records: Sequence[Record], backend: str) -> list[FalseClaim]:
    """Return each declared CUDA-graph level that a layer does not reach, with the lowest level that one reaches."""
    reached: dict[GraphLevel, list[GraphLevel]] = {}
    for record in records:
        graph = graph_of(record)
        if record.backend == backend and isinstance(record, Failed) and graph and graph.declared != graph.measured:
            reached.setdefault(graph.declared, []).extend([graph.measured] if graph.measured else [])
    return [
        FalseClaim(
            backend, f"CUDA-graph level {declared}", 1, 1, min(found, key=GRAPH_LEVELS.index, default="a lower one")
        )
        for declared, found in reached.items()
    ]


@dataclass(frozen=True)
class BackendVerdict:
    """The verdict on one backend. ``results``: the number of its cases with each result.

    ``not_needed``: declared features that no examined case needs.
    ``could_declare``: undeclared features whose outputs are right wherever the case is not refused, and a CUDA-graph
    level measured above the declared one.
    """

    backend: str
    verdict: RunVerdict
    results: Counter[CaseResult]
    findings: tuple[Finding, ...]
    false_claims: tuple[FalseClaim, ...]
    could_declare: tuple[str, ...]
    not_needed: tuple[str, ...]

    @property
    def known(self) -> int:
        """The number of findings that the run expected."""
        return len(self.findings) - len(self.failing)

    @property
    def failing(self) -> tuple[Finding, ...]:
        """The findings that make the run fail."""
        return tuple(finding for finding in self.findings if not finding.is_expected)


@dataclass(frozen=True)
class RunFindings:
    """The findings of a run, the verdicts on its backends, and the cases, measured support and levels of each."""

    findings: tuple[Finding, ...]
    verdicts: tuple[BackendVerdict, ...]
    cases: CountedCases
    support: tuple[SupportRow, ...]
    levels: tuple[LevelRow, ...]


def run_findings(records: Sequence[Record], header: RunHeader) -> RunFindings:
    """Return findings, verdicts and support of every backend that has a record, in the header's order."""
    found = findings(records, header)
    cases = counted_cases(records)
    claims = false_claims(found, records, cases)
    by_backend: dict[str, list[Record]] = {info.name: [] for info in header.backends}
    for record in records:
        if record.check != UTILITIES:
            by_backend.setdefault(record.backend, []).append(record)
    false = {name: {claim.capability for claim in claims if claim.backend == name} for name in by_backend}
    declared = header.declared
    support = support_rows(cases, declared, false)
    rows = level_rows(records)
    verdicts = []
    for name, own in by_backend.items():
        if not own:
            continue
        needed = {
            need for (owner, _), case in cases.items() if owner == name for need in case.needs if case.is_declared
        }
        verdicts.append(
            BackendVerdict(
                name,
                verdict(OutcomeCounts(tuple((record.outcome, 1) for record in own))),
                case_results(own),
                tuple(finding for finding in found if finding.backend == name),
                tuple(claim for claim in claims if claim.backend == name),
                (*_undeclared_and_right(support, name), *_higher_level(rows, name)),
                tuple(sorted(set(declared.get(name, ())) - needed)),
            )
        )
    return RunFindings(found, tuple(verdicts), cases, support, rows)


def _undeclared_and_right(support: Sequence[SupportRow], backend: str) -> list[str]:
    """Return the undeclared features whose outputs are right wherever the case is not refused."""
    return [
        f"{row.feature} ({row.answered} of {row.answered + row.refused + row.unclear} right)"
        for row in support
        if row.backend == backend and row.verdict == "answered" and not row.is_form
    ]


def _higher_level(rows: Sequence[LevelRow], backend: str) -> list[str]:
    """Return the CUDA-graph level that every examined layer reaches, if it is above the declared one."""
    own = [row for row in rows if row.backend == backend]
    lowest = min((GRAPH_LEVELS.index(row.proven) for row in own), default=0)
    highest = max((GRAPH_LEVELS.index(row.graph.declared) for row in own), default=0)
    return [f"CUDA-graph level {GRAPH_LEVELS[lowest]}"] if lowest > highest else []
