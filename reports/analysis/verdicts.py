"""The verdict on each backend of a run: whether it passed, its false claims, and what it could declare."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from attncheck.reports.analysis.claims import FalseClaim, false_claims
from attncheck.reports.analysis.findings import Finding, findings
from attncheck.reports.analysis.graph_levels import LevelRow, level_rows
from attncheck.reports.analysis.summary import CaseResult, OutcomeCounts, RunVerdict, case_results, verdict
from attncheck.reports.analysis.support import CountedCases, SupportRow, counted_cases, support_rows
from attncheck.reports.run_file.graph_levels import GRAPH_LEVELS
from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.records import UTILITIES, Record


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
