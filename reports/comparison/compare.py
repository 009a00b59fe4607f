"""Compare two runs: speeds, outcomes, cases and checks of only one run, and environments.

Backends are matched by name, or as the user maps them. Cases match if their ``suite/id`` and hash are equal; a case
that was rewritten is another case. Both sides may be one run file in which two backends alternated on the same machine.
That protocol detects the smallest differences.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from attncheck.errors import QuestionError, UnknownNameError
from attncheck.reports.analysis.phrases import plural
from attncheck.reports.analysis.summary import worst_rounds
from attncheck.reports.comparison.changes import (
    EnvironmentChange,
    OutcomeChange,
    another_device,
    compare_outcomes,
    environment_changes,
    kernel_changes,
    warnings_of_times,
)
from attncheck.reports.comparison.speed_changes import (
    ComparisonTerms,
    SpeedChange,
    SpeedPair,
    SuiteSpeedChange,
    compare_speeds,
    compare_suites,
)
from attncheck.reports.run_file.records import EXAMINED, Record, bits_of, budget_share, is_not_reached
from attncheck.reports.run_file.store import Run, lacking_in_words
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

ARROW = "->"


@dataclass(frozen=True)
class BitsPair:
    """One case of a pair of backends, whose inputs are equal in both runs.

    ``rows_moved``: the rows with other bits, of ``rows``; None if only that they differ is known. ``shares``: the worst
    error of each, as a share of the budget; None if ``numerics`` has no figure.
    """

    backend: str
    case: str
    rows: int
    rows_moved: int | None
    shares: tuple[float | None, float | None]


def compare_bits(answers: Iterable[tuple[str, Record, Record]]) -> tuple[BitsPair, ...]:
    """Return the pairs of records with digests. ``answers``: (label of the backend, record in BASE, record in NEW)."""
    answers = list(answers)
    shares = {
        (backend, base.case): (budget_share(base), budget_share(new))
        for backend, base, new in answers
        if base.check == "numerics"
    }
    pairs = []
    for backend, base, new in answers:
        one, other = bits_of(base), bits_of(new)
        if one is None or other is None or base.seed != new.seed:
            continue
        of_case = shares.get((backend, base.case), (None, None))
        rows = int(getattr(base, "figures", {}).get("rows", 0))
        pairs.append(BitsPair(backend, base.case, rows, one.differing_rows(other), of_case))
    return tuple(pairs)


_Questions = Mapping[tuple[str, str], Record]
"""The worst record of each case (``suite/id``) and check of one backend."""


@dataclass(frozen=True)
class OneSidedCases:
    """Cases of ``backend`` in only one run; ``is_whole`` if the other run lacks the backend.

    ``check``: empty if the other run lacks the cases, else the check that it lacks of them. ``is_lost``: BASE examined
    at least one of them.
    """

    backend: str
    cases: tuple[str, ...]
    is_whole: bool
    check: str = ""
    is_lost: bool = False


@dataclass(frozen=True)
class ComparedCounts:
    """How much of BASE was compared. A case counts if all matched backends that have it in BASE share it with NEW.

    ``of_cases``, ``of_backends``: how many BASE has; if BASE and NEW are one file, how many the matched backends have.
    """

    cases: int
    of_cases: int
    backends: int
    of_backends: int


@dataclass(frozen=True)
class RunMatching:
    """The match of two runs.

    ``backends``: names in BASE and NEW. ``answers``: (label of the backend, record in BASE, record in NEW) for every
    check of every common case, the worst of all rounds. ``cases``: (backend in BASE, case) of the common cases.
    ``changed``: cases with equal names and different hashes.
    """

    backends: Mapping[str, str]
    answers: tuple[tuple[str, Record, Record], ...]
    cases: frozenset[tuple[str, str]]
    only_base: tuple[OneSidedCases, ...]
    only_new: tuple[OneSidedCases, ...]
    changed: tuple[str, ...]
    compared: ComparedCounts


def label(base: str, new: str) -> str:
    """Return the name of a pair of backends."""
    return base if base == new else f"{base} {ARROW} {new}"


def match_runs(base: Run, new: Run, backends: Mapping[str, str]) -> RunMatching:
    """Match two runs. ``backends`` maps a backend of BASE to one of NEW where the names differ.

    Other backends are matched by name, unless BASE and NEW are one file.

    Raises:
        QuestionError: a backend is not in its run, a file is compared with itself, or nothing is in common.
    """
    matched = _match_backends(base, new, backends)
    before, after = _by_backend(base), _by_backend(new)
    answers: list[tuple[str, Record, Record]] = []
    cases: set[tuple[str, str]] = set()
    only: tuple[list[OneSidedCases], list[OneSidedCases]] = ([], [])
    changed: dict[str, None] = {}
    for one, other in matched.items():
        questions, questions_anew = before.get(one, {}), after.get(other, {})
        hashes, hashes_anew = _hashes(questions.values()), _hashes(questions_anew.values())
        if gone := {question: record for question, record in questions.items() if question[0] not in hashes_anew}:
            only[0].append(_one_sided(one, gone, is_lost=_has_examined(gone)))
        if come := {question: record for question, record in questions_anew.items() if question[0] not in hashes}:
            only[1].append(_one_sided(other, come))
        common = {case for case in hashes if hashes_anew.get(case) == hashes[case]}
        changed.update(dict.fromkeys(case for case in hashes if case in hashes_anew and case not in common))
        cases.update((one, case) for case in common)
        of_common = {question: record for question, record in questions.items() if question[0] in common}
        answers += [(label(one, other), of_common[q], questions_anew[q]) for q in of_common if q in questions_anew]
        only[0].extend(_lost_checks(one, {q: record for q, record in of_common.items() if q not in questions_anew}))
    if not is_one_file(base, new):
        only[0].extend(
            _one_sided(name, questions, is_whole=True, is_lost=name not in after and _has_examined(questions))
            for name, questions in before.items()
            if name not in matched
        )
        only[1].extend(
            _one_sided(name, questions, is_whole=True)
            for name, questions in after.items()
            if name not in matched.values()
        )
    if not cases:
        why = f"; {plural(len(changed), 'case')} of the same name changed" if changed else ""
        if not matched:
            why = f": BASE has {', '.join(before)}, NEW has {', '.join(after)}; give --match OLD=NEW"
        raise QuestionError(f"{base.path} and {new.path} have no case of the same backend{why}")
    to_compare = {name: before.get(name, {}) for name in matched} if is_one_file(base, new) else before
    compared = _counts(to_compare, matched, cases)
    return RunMatching(
        matched, tuple(answers), frozenset(cases), tuple(only[0]), tuple(only[1]), tuple(changed), compared
    )


def _match_backends(base: Run, new: Run, backends: Mapping[str, str]) -> dict[str, str]:
    """Return names in BASE and NEW, in the order of BASE."""
    names = [info.name for info in base.header.backends]
    names_anew = [info.name for info in new.header.backends]
    for one, other in backends.items():
        if one not in names:
            raise UnknownNameError(f"backend of {base.path}", one, names)
        if other not in names_anew:
            raise UnknownNameError(f"backend of {new.path}", other, names_anew)
    if is_one_file(base, new):
        if not backends:
            raise QuestionError(f"{base.path} is BASE and NEW; --match OLD=NEW names the backends to compare")
        return dict(backends)
    taken = set(backends.values())
    by_name = {name: name for name in names if name in names_anew and name not in taken}
    return {name: backends.get(name, name) for name in names if name in backends or name in by_name}


def is_one_file(base: Run, new: Run) -> bool:
    """Return whether both sides are the same run file."""
    return Path(base.path).resolve() == Path(new.path).resolve()


def _by_backend(run: Run) -> dict[str, dict[tuple[str, str], Record]]:
    """Return, by backend (each of the header), the worst record of each (``suite/id``, check) that was reached."""
    found: dict[str, dict[tuple[str, str], Record]] = {info.name: {} for info in run.header.backends}
    late = {(each.backend, each.case) for each in run.records if is_not_reached(each)}
    late -= {(each.backend, each.case) for each in run.records if each.outcome in EXAMINED}
    reached = [each for each in run.records if not is_not_reached(each) and (each.backend, each.case) not in late]
    for worst in worst_rounds(reached):
        record = worst.record
        found.setdefault(record.backend, {})[record.case, record.check] = record
    return found


def _hashes(records: Iterable[Record]) -> dict[str, str]:
    return {record.case: record.case_hash for record in records}


def _lost_checks(name: str, missing: _Questions) -> Iterator[OneSidedCases]:
    """Yield each check that is ``missing`` in NEW, although NEW has its cases."""
    for check in dict.fromkeys(check for _, check in missing):
        cases = {question: record for question, record in missing.items() if question[1] == check}
        yield _one_sided(name, cases, check=check, is_lost=_has_examined(cases))


def _has_examined(questions: _Questions) -> bool:
    return any(record.outcome in EXAMINED for record in questions.values())


def _one_sided(
    name: str, questions: _Questions, *, is_whole: bool = False, check: str = "", is_lost: bool = False
) -> OneSidedCases:
    return OneSidedCases(name, tuple(dict.fromkeys(case for case, _ in questions)), is_whole, check, is_lost)


def _counts(
    base: Mapping[str, _Questions], matched: Collection[str], compared: Collection[tuple[str, str]]
) -> ComparedCounts:
    """Count what was compared. ``matched``: backend names in BASE; ``compared``: (backend, case) in common."""
    owners: dict[str, set[str]] = {}
    for name, questions in base.items():
        for case, _ in questions:
            owners.setdefault(case, set()).add(name)
    shared = {case: names.intersection(matched) for case, names in owners.items()}
    whole = sum(bool(names) and all((name, case) in compared for name in names) for case, names in shared.items())
    return ComparedCounts(whole, len(owners), len({name for name, _ in compared}), len(base))


ComparisonVerdict = Literal["regression", "incomplete", "cannot tell", "no regression"]


@dataclass(frozen=True)
class RunComparison:
    """The comparison of a run NEW with a run BASE.

    ``compared``: how much of BASE was compared. ``speeds``: every pair of speeds, in the order of BASE.
    ``suite_speeds``: the same by suite and part. ``outcomes``: those that changed. ``only_base``, ``only_new``: cases
    or checks of one run only. ``changed_cases``: cases with equal names and different hashes, which are not compared.
    ``warnings``: one sentence for each circumstance that weakens the comparison. ``bits``: cases of the check
    ``bitwise`` in both runs. All text here is unescaped.
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
    bits: tuple[BitsPair, ...] = ()
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
        """Whether anything is lost or a run is not whole; what is missing may be worse."""
        return bool(self.lost or self.not_whole)

    @cached_property
    def not_whole(self) -> tuple[str, ...]:
        """A phrase for each run that was cut off or had no time for all checks (``--within``)."""
        phrases = []
        for side, run in (("BASE", self.base), ("NEW", self.new)):
            if not run.complete:
                phrases.append(f"the end of {side}")
            if count := sum(map(is_not_reached, run.records)):
                phrases.append(f"{plural(count, 'check')} not reached in {side}")
        return tuple(phrases)

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
        compare_bits(matching.answers),
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
        if run.footer is None:
            yield f"{side} was cut off after {plural(len(run.records), 'record')}: {run.path}"
        elif run.lacking:
            yield f"{side} is incomplete: {lacking_in_words(run)}: {run.path}"
        if run.errors:
            yield f"{side} ended with {plural(len(run.errors), 'error')} of its own: {run.errors[0]}"
    if lone:
        yield f"{plural(lone, 'time')} of right answers in one run only, with nothing to compare with"
