"""Values for templates, unescaped: a verdict and coverage for each backend, and the fastest backend of each suite."""

import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from attncheck.reports.analysis import phrases
from attncheck.reports.analysis.summary import RunSummary, UnexaminedCases
from attncheck.reports.analysis.support import answered_cases
from attncheck.reports.analysis.verdicts import BackendVerdict
from attncheck.reports.html.support_view import Tone
from attncheck.reports.html.units import measured_time
from attncheck.reports.run_file.records import UTILITIES
from attncheck.reports.run_file.store import Run
from attncheck.reports.speeds.speed import Speed
from attncheck.reports.speeds.summary import summary_tables
from attncheck.reports.speeds.tables import suite_of


class Coverage(NamedTuple):
    """The number of cases run on a backend (``cases``), and of those examined as it declares (``asked``)."""

    asked: int
    cases: int


class BackendAnswer(NamedTuple):
    """A line of the verdicts; ``word``: right or failed."""

    backend: str
    tone: Tone
    word: str
    sentence: str
    false_claims: tuple[str, ...]
    could_declare: tuple[str, ...]
    coverage: Coverage


class SilentBackend(NamedTuple):
    """A backend without any examination, and the reasons."""

    backend: str
    reasons: str


class FastestBackend(NamedTuple):
    """The backend with the lowest mean of a suite; ``is_certain``: all its rounds are below all of the others."""

    suite: str
    backend: str
    time: str
    averaged: int
    is_certain: bool


def coverages(run: Run, backends: Sequence[str]) -> dict[str, Coverage]:
    """Return the coverage of each backend."""
    own = {name: [r for r in run.records if r.backend == name and r.check != UTILITIES] for name in backends}
    return {
        name: Coverage(len(answered_cases(records)), len({record.case for record in records}))
        for name, records in own.items()
    }


def answers(run: Run, verdicts: Sequence[BackendVerdict]) -> tuple[BackendAnswer, ...]:
    """Return a line for each examined backend, those that are right first."""
    examined = [each for each in verdicts if each.verdict != "not examined"]
    covered = coverages(run, [each.backend for each in examined])
    return tuple(
        _answer(each, covered[each.backend], is_complete=run.complete)
        for each in sorted(examined, key=lambda each: each.verdict == "failed")
    )


def silent_backends(verdicts: Sequence[BackendVerdict], summary: RunSummary) -> tuple[SilentBackend, ...]:
    """Return the backends without any examination."""
    gaps: dict[str, list[UnexaminedCases]] = {}
    for gap in summary.gaps:
        gaps.setdefault(gap.backend, []).append(gap)
    return tuple(
        SilentBackend(each.backend, "; ".join(dict.fromkeys(map(phrases.gap_reasons, gaps.get(each.backend, ())))))
        for each in verdicts
        if each.verdict == "not examined"
    )


def fastest_backends(found: Sequence[Speed]) -> Iterator[FastestBackend]:
    """Yield the fastest backend of each suite, by the mean of ``forward`` over the cases that all backends timed."""
    for table in summary_tables(found):
        if not table.averaged or len(table.rows) < 2:
            continue
        shared = _means([each for each in found if each.part == "forward" and suite_of(each) == table.suite])
        best = min(shared, key=lambda name: shared[name])
        yield FastestBackend(table.suite, best, measured_time(shared[best]), table.averaged, table.has_fastest)


def _means(found: Sequence[Speed]) -> dict[str, float]:
    """Return the geometric mean of each backend over the cases that all of them timed."""
    times: dict[str, dict[str, float]] = {}
    for each in found:
        times.setdefault(each.backend, {})[each.case] = each.median_ns
    shared = set.intersection(*(set(cases) for cases in times.values()))
    return {name: statistics.geometric_mean(cases[case] for case in sorted(shared)) for name, cases in times.items()}


def _answer(each: BackendVerdict, coverage: Coverage, *, is_complete: bool) -> BackendAnswer:
    claims = tuple(phrases.one_line(str(claim)) for claim in each.false_claims)
    could = tuple(map(phrases.one_line, each.could_declare))
    if each.verdict == "failed":
        sentence = phrases.verdict_counts(each)
        return BackendAnswer(each.backend, "bad", "failed", sentence, claims, could, coverage)
    known = f", {phrases.plural(len(each.findings), 'expected finding')}" if each.findings else ""
    sentence = f"in every case tried{'' if is_complete else ' so far'}{known}"
    return BackendAnswer(each.backend, "good", "right", sentence, claims, could, coverage)
