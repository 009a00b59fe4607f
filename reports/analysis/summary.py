"""Count records: outcomes by backend, check and suite, what was not examined and why, and what did not pass.

Pure functions from records to frozen values, of which ``document`` makes sections. A check repeated in several
rounds counts once, with its worst outcome (:mod:`attncheck.reports.analysis.summary`).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal, NamedTuple, get_args

from attncheck.reports.analysis.reasons import listed, without_first_figure
from attncheck.reports.analysis.support import ANSWERED, REFUSALS, REFUSED, is_not_compared
from attncheck.reports.run_file.records import (
    EXAMINED,
    FALLEN_SHORT,
    UTILITIES,
    Outcome,
    Passed,
    Record,
    RecordKey,
    Unavailable,
    Unsupported,
    budget_share,
    chosen_kernels_of,
    is_not_reached,
    is_out_of_time,
)

_WORST_FIRST: tuple[Outcome, ...] = (
    "crashed",
    "timed_out",
    "errored",
    "failed",
    "xpassed",
    "xfailed",
    "unavailable",
    "unsupported",
    "passed",
)
_CHECK_OF = attrgetter(*(name for name in RecordKey._fields if name != "round"))


class WorstRound(NamedTuple):
    """One check of one case of one backend. ``record``: its worst round, the first of equally bad ones.

    ``rounds``: the number of rounds. ``short``: in how many of them the check did not pass.
    """

    record: Record
    rounds: int
    short: int


def worst_rounds(records: Sequence[Record]) -> tuple[WorstRound, ...]:
    """Return the worst round of each check of each case and backend, in the order of their first records.

    If no record has a round above 0, every record is returned, even one with an equal key.
    """
    if not any(record.round for record in records):
        return tuple(_worst([record]) for record in records)
    checks: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        checks.setdefault(_CHECK_OF(record), []).append(record)
    return tuple(map(_worst, checks.values()))


def _worst(members: Sequence[Record]) -> WorstRound:
    record = min(members, key=_badness) if len(members) > 1 else members[0]
    return WorstRound(record, len(members), sum(each.outcome in FALLEN_SHORT for each in members))


def _badness(record: Record) -> tuple[int, float]:
    """Return a sort key, worst first: the outcome, then the share of the error budget used."""
    return _WORST_FIRST.index(record.outcome), -(budget_share(record) or 0.0)


RunVerdict = Literal["passed", "failed", "not examined"]

CaseResult = Literal[
    "failed",
    "out of time",
    "right against expectation",
    "failed as expected",
    "right",
    "right though not declared",
    "accepted as declared",
    "refused as declared",
    "not applicable",
    "not examined",
]
"""The result of one case of one backend. A case has the first result that applies, in this order.

right: not only ``refusals`` ran, and all checks that ran passed. accepted: ``refusals`` alone ran a declared case. not
applicable: not declared, and not run. not examined: not run for a limit of the machine, of attncheck or of time.
"""

CASE_RESULTS: tuple[CaseResult, ...] = get_args(CaseResult)

FAILING: frozenset[CaseResult] = frozenset({"failed", "out of time", "right against expectation"})
"""Results that make a run fail."""


@dataclass(frozen=True)
class OutcomeCounts:
    """How often each outcome occurs in a set of records, and the largest share of the error budget used."""

    counts: tuple[tuple[Outcome, int], ...] = ()
    worst_share: float | None = None

    def __getitem__(self, outcome: Outcome) -> int:
        return dict(self.counts).get(outcome, 0)

    @property
    def examined(self) -> int:
        """The number of records of checks that ran."""
        return sum(count for outcome, count in self.counts if outcome in EXAMINED)

    @property
    def short(self) -> int:
        """The number of records that did not pass as declared or expected."""
        return sum(count for outcome, count in self.counts if outcome in FALLEN_SHORT)

    @property
    def not_examined(self) -> int:
        """The number of records without an examination."""
        return sum(count for _, count in self.counts) - self.examined


@dataclass(frozen=True)
class UnexaminedCases:
    """The ``cases`` and ``checks`` of one backend that were not examined for one set of reasons.

    Reasons that differ only in their first figure are merged into one that lists the figures.
    """

    backend: str
    outcome: Outcome
    by: str
    reasons: tuple[str, ...]
    cases: int
    checks: tuple[str, ...]


@dataclass(frozen=True)
class RunSummary:
    """Counts of the records of a run. Rows and columns keep the order of the records.

    ``short``: records that did not pass. Providers and their functions are left out of ``backends``, ``suites``,
    ``checks``, ``cases`` and ``gaps``, and included in all other counts. ``rounds``: for each record in ``short`` that
    represents several rounds, (rounds that did not pass, all rounds). ``most_rounds``: the largest number of rounds of
    any check. ``chosen_kernels``: by backend, in how many cases each kernel of its library ran, the most frequent
    first; backends that do not report kernels are left out.
    """

    backends: tuple[str, ...]
    suites: tuple[str, ...]
    checks: tuple[str, ...]
    cases: int
    providers: tuple[str, ...]
    functions: int
    total: OutcomeCounts
    by_backend: dict[str, OutcomeCounts]
    by_check: dict[tuple[str, str], OutcomeCounts]
    by_suite: dict[tuple[str, str], OutcomeCounts]
    gaps: tuple[UnexaminedCases, ...]
    short: tuple[Record, ...]
    rounds: Mapping[RecordKey, tuple[int, int]] = field(default_factory=dict)
    most_rounds: int = 1
    chosen_kernels: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def verdict(self) -> RunVerdict:
        """``failed`` if any record is in ``short``, ``not examined`` if no record was examined, else ``passed``."""
        return verdict(self.total)

    @property
    def has_errors_measured(self) -> bool:
        """Whether any record of a backend has a share of the error budget."""
        return any(self.by_backend[backend].worst_share is not None for backend in self.backends)


def verdict(total: OutcomeCounts) -> RunVerdict:
    """Return the verdict on a tally; a run that examined nothing has not passed."""
    if total.short:
        return "failed"
    return "passed" if total.examined else "not examined"


def tally(records: Iterable[Record]) -> OutcomeCounts:
    """Count outcomes and find the largest budget share; a share that is NaN counts as infinite."""
    members = tuple(records)
    counts = Counter(record.outcome for record in members)
    shares = (share for record in members if (share := budget_share(record)) is not None)
    return OutcomeCounts(tuple(counts.items()), max(shares, default=None))


def case_results(records: Iterable[Record]) -> Counter[CaseResult]:
    """Return the number of cases with each result. The records are those of one backend."""
    cases: dict[str, list[Record]] = {}
    for record in records:
        cases.setdefault(record.case, []).append(record)
    return Counter(map(_case_result, cases.values()))


def late_checks(records: Iterable[Record], is_late: Callable[[Record], bool]) -> dict[str, dict[str, list[str]]]:
    """Return the checks that ``is_late`` finds without a result for want of time, by backend and case."""
    late: dict[str, dict[str, list[str]]] = {}
    for record in filter(is_late, records):
        late.setdefault(record.backend, {}).setdefault(record.case, []).append(record.check)
    return late


def not_reached(records: Sequence[Record]) -> dict[str, tuple[int, Counter[str]]]:
    """Return what the time by ``--within`` left out, by backend.

    Each value has the number of cases without any check, and a counter: by check, the other cases without it.
    """
    late = late_checks(records, is_not_reached)
    begun = {(record.backend, record.case) for record in records if record.outcome in EXAMINED}
    parts = {
        backend: [checks for case, checks in cases.items() if (backend, case) in begun]
        for backend, cases in late.items()
    }
    return {
        backend: (len(cases) - len(parts[backend]), Counter(check for checks in parts[backend] for check in checks))
        for backend, cases in late.items()
    }


def _case_result(records: Sequence[Record]) -> CaseResult:
    """Return the result of one case from all records of one backend."""
    short = [record for record in records if record.outcome in FALLEN_SHORT]
    failed = [record for record in short if record.outcome != "xpassed"]
    if failed:
        return "out of time" if all(map(is_out_of_time, failed)) else "failed"
    if short:
        return "right against expectation"
    if any(record.outcome == "xfailed" for record in records):
        return "failed as expected"
    if is_not_compared(records):
        return "not examined"
    passed = [record for record in records if isinstance(record, Passed)]
    if any(record.check != REFUSALS for record in passed):
        return "right"
    if passed:
        note = "".join(passed[0].notes[:1])
        if note.startswith(REFUSED):
            return "refused as declared"
        return "right though not declared" if note.startswith(ANSWERED) else "accepted as declared"
    is_excluded = all(isinstance(record, Unsupported) and record.by == "backend" for record in records)
    return "not applicable" if is_excluded else "not examined"


def summarise(records: Sequence[Record], *, checks: Sequence[str] = ()) -> RunSummary:
    """Summarise the records of one run. ``checks`` gives the order of the columns; other checks follow."""
    worst = worst_rounds(records)
    records = [each.record for each in worst]
    of_backends = [record for record in records if record.check != UTILITIES]
    of_providers = [record for record in records if record.check == UTILITIES]
    named = {record.check for record in of_backends}
    ordered = [check for check in checks if check in named]
    ordered += [check for check in _in_order(record.check for record in of_backends) if check not in ordered]
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        groups.setdefault(("check", record.backend, record.check), []).append(record)
        groups.setdefault(("suite", record.backend, record.suite), []).append(record)
        groups.setdefault(("backend", record.backend, ""), []).append(record)
    tallies = {group: tally(members) for group, members in groups.items()}
    return RunSummary(
        backends=_in_order(record.backend for record in of_backends),
        suites=_in_order(record.suite for record in of_backends),
        checks=tuple(ordered),
        cases=len({(record.suite, record.case_id) for record in of_backends}),
        providers=_in_order(record.backend for record in of_providers),
        functions=len({record.case_id for record in of_providers}),
        total=tally(records),
        by_backend={b: t for (kind, b, _), t in tallies.items() if kind == "backend"},
        by_check={(b, c): t for (kind, b, c), t in tallies.items() if kind == "check"},
        by_suite={(b, s): t for (kind, b, s), t in tallies.items() if kind == "suite"},
        gaps=_gaps(of_backends, tuple(ordered)),
        short=tuple(record for record in records if record.outcome in FALLEN_SHORT),
        rounds={each.record.key: (each.short, each.rounds) for each in worst if each.short and each.rounds > 1},
        most_rounds=max((each.rounds for each in worst), default=1),
        chosen_kernels=_chosen_kernels(of_backends),
    )


def _in_order(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def _chosen_kernels(records: Sequence[Record]) -> dict[str, dict[str, int]]:
    found = {(r.backend, kernel, r.suite, r.case_id) for r in records for kernel in chosen_kernels_of(r)}
    counts = Counter((backend, kernel) for backend, kernel, _, _ in found)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return {
        backend: {kernel: count for (owner, kernel), count in ordered if owner == backend}
        for backend in _in_order(record.backend for record in records)
        if any(owner == backend for owner, _ in counts)
    }


def _gaps(records: Sequence[Record], checks: Sequence[str]) -> tuple[UnexaminedCases, ...]:
    """Return everything not examined, grouped by backend and reasons; backends in order, most cases first."""
    groups: dict[tuple[str, Outcome, str, tuple[str, ...]], list[Unsupported | Unavailable]] = {}
    for record in records:
        if isinstance(record, Unsupported | Unavailable):
            by = record.by if isinstance(record, Unsupported) else "machine"
            alike = tuple(map(without_first_figure, record.reasons))
            groups.setdefault((record.backend, record.outcome, by, alike), []).append(record)
    gaps = [
        UnexaminedCases(
            backend=backend,
            outcome=outcome,
            by=by,
            reasons=tuple(listed(reason) for reason in zip(*(record.reasons for record in members), strict=True)),
            cases=len({(record.suite, record.case_id) for record in members}),
            checks=tuple(check for check in checks if any(record.check == check for record in members)),
        )
        for (backend, outcome, by, _), members in groups.items()
    ]
    order = _in_order(record.backend for record in records)
    return tuple(sorted(gaps, key=lambda gap: (order.index(gap.backend), -gap.cases, gap.reasons)))
