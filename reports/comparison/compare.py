"""Compare two runs: speeds, outcomes, cases and checks of only one run, and environments.

Both sides may be one run file in which two backends alternated on the same machine. That protocol detects the smallest
differences.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from attncheck.reports.analysis.phrases import plural
from attncheck.reports.comparison.environment_changes import (
    EnvironmentChange,
    another_device,
    environment_changes,
    kernel_changes,
    warnings_of_times,
)
from attncheck.reports.comparison.matching import (
    ComparedCounts,
    OneSidedCases,
    RunMatching,
    is_one_file,
    label,
    match_runs,
)
from attncheck.reports.comparison.outcome_changes import OutcomeChange, compare_outcomes
from attncheck.reports.comparison.speed_changes import ComparisonTerms, SpeedChange, SpeedPair, compare_speeds
from attncheck.reports.comparison.suite_speeds import SuiteSpeedChange, compare_suites
from attncheck.reports.run_file.store import Run
from attncheck.reports.run_file.timings import PARTS, StepPart
from attncheck.reports.speeds.speed import Speed, speeds

__all__ = [
    "ComparisonTerms",
    "EnvironmentChange",
    "OneSidedCases",
    "OutcomeChange",
    "RunComparison",
    "SpeedChange",
    "compare_runs",
]


ComparisonVerdict = Literal["regression", "incomplete", "cannot tell", "no regression"]


@dataclass(frozen=True)
class RunComparison:
    """The comparison of a run NEW with a run BASE.

    ``compared``: how much of BASE was compared. ``speeds``: every pair of speeds, in the order of BASE.
    ``suite_speeds``: the same by suite and part. ``outcomes``: those that changed. ``only_base``, ``only_new``: cases
    or checks of one run only. ``changed_cases``: cases with equal names and different hashes, which are not compared.
    ``warnings``: one sentence for each circumstance that weakens the comparison. All text here is unescaped.
    """

    base: Run
    new: Run
    compared: ComparedCounts
    speeds: tuple[SpeedChange, ...]
    suite_speeds: tuple[SuiteSpeedChange, ...]
    outcomes: tuple[OutcomeChange, ...]
    only_base: tuple[OneSidedCases, ...] = ()
    only_new: tuple[OneSidedCases, ...] = ()
    changed_cases: tuple[str, ...] = ()
    environments: tuple[EnvironmentChange, ...] = ()
    warnings: tuple[str, ...] = ()
    terms: ComparisonTerms = field(default_factory=ComparisonTerms)

    @property
    def is_regression(self) -> bool:
        """Whether an outcome of NEW is worse, or a pair is slower by at least its ``--fail-on`` threshold.

        A backend that can no longer run has records with other outcomes, which count here.
        """
        is_worse = any(change.kind == "worse" for change in self.outcomes)
        return is_worse or any(change.is_regression for change in self.speeds)

    @property
    def lost(self) -> tuple[OneSidedCases, ...]:
        """What BASE examined and NEW does not have."""
        return tuple(each for each in self.only_base if each.is_lost)

    @property
    def is_incomplete(self) -> bool:
        """Whether anything is lost or a run was cut off; what is missing may be worse."""
        return bool(self.lost) or not (self.base.complete and self.new.complete)

    @property
    def verdict(self) -> ComparisonVerdict:
        """The verdict of the comparison; ``cannot tell``: there are times, and every one of them is undecided."""
        if self.is_regression:
            return "regression"
        if self.is_incomplete and not self.terms.allow_missing:
            return "incomplete"
        is_unclear = bool(self.speeds) and all(each.verdict == "cannot tell" for each in self.speeds)
        return "cannot tell" if is_unclear else "no regression"

    @property
    def fails(self) -> bool:
        """Whether `attncheck compare` exits with code 1."""
        return self.verdict in ("regression", "incomplete")


def compare_runs(
    base: Run, new: Run, *, backends: Mapping[str, str] | None = None, terms: ComparisonTerms | None = None
) -> RunComparison:
    """Compare two runs. ``backends`` maps a backend of BASE to one of NEW where the names differ.

    Other backends are matched by name, unless BASE and NEW are one file.

    Raises:
        QuestionError: a backend is not in its run, a file is compared with itself, nothing is in common, or a threshold
            matches no case.
    """
    terms = terms or ComparisonTerms()
    matching = match_runs(base, new, backends or {})
    terms.thresholds.refuse_unmatched(record.case for record in (*base.records, *new.records))
    outcomes = [change for answers in matching.answers if (change := compare_outcomes(*answers))]
    refusal = another_device(base.header.environment, new.header.environment)
    pairs, lone = _pair_speeds(base, new, matching)
    changes = compare_speeds(pairs, terms, refusal=refusal)
    warnings = [*_warnings(base, new, lone), *([] if refusal else warnings_of_times(changes))]
    return RunComparison(
        base,
        new,
        matching.compared,
        changes,
        () if refusal else compare_suites(pairs, terms.effect),
        tuple(outcomes),
        matching.only_base,
        matching.only_new,
        matching.changed,
        (
            *environment_changes(base.header, new.header, matching.backends),
            *kernel_changes(base.records, new.records, matching.backends),
        ),
        tuple(warnings),
        terms,
    )


def _pair_speeds(base: Run, new: Run, matching: RunMatching) -> tuple[list[SpeedPair], int]:
    """Return the speeds of every part timed in both runs of a case, and the number of parts timed in only one of them.

    Cases that were timed in only one run are left out: their outcome changed, which is reported elsewhere.
    """
    before, after = _speeds(base), _speeds(new)
    in_one_run = is_one_file(base, new)
    pairs = []
    lone = 0
    for (one, case), parts in before.items():
        if (one, case) not in matching.cases or (other := matching.backends[one], case) not in after:
            continue
        parts_anew = after[other, case]
        lone += len(parts.keys() ^ parts_anew.keys())
        for part in PARTS:
            if part in parts and part in parts_anew:
                speed, anew = parts[part], parts_anew[part]
                took_turns = in_one_run and len(speed.rounds) == len(anew.rounds)
                pairs.append(SpeedPair(label(one, other), speed, anew, took_turns))
    return pairs, lone


def _speeds(run: Run) -> dict[tuple[str, str], dict[StepPart, Speed]]:
    found: dict[tuple[str, str], dict[StepPart, Speed]] = {}
    for speed in speeds(run.records):
        found.setdefault((speed.backend, speed.case), {})[speed.part] = speed
    return found


def _warnings(base: Run, new: Run, lone: int) -> Iterator[str]:
    for side, run in (("BASE", base), ("NEW", new)):
        if not run.complete:
            yield f"{side} was cut off after {plural(len(run.records), 'record')}: {run.path}"
        if run.errors:
            yield f"{side} ended with {plural(len(run.errors), 'error')} of its own: {run.errors[0]}"
    if lone:
        yield f"{plural(lone, 'time')} of right answers in one run only, with nothing to compare with"
