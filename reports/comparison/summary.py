"""Summarise a comparison: grouped changes, counts of verdicts, statistical power, and sentences.

Pure values and sentences, shared by all report formats. They may contain a backend's text, unescaped.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from attncheck.reports.analysis.phrases import plural
from attncheck.reports.analysis.reasons import named, without_figures
from attncheck.reports.comparison.changes import KINDS
from attncheck.reports.comparison.compare import OneSidedCases, OutcomeChange, RunComparison, SpeedChange
from attncheck.reports.comparison.significance import FAMILY_LEVEL, ProcessNoise, smallest_slowdown
from attncheck.reports.comparison.speed_changes import VERDICTS, SpeedVerdict
from attncheck.reports.run_file.store import Run
from attncheck.reports.run_file.timings import PARTS, StepPart
from attncheck.reports.speeds.tables import time_unit

CHANGED: tuple[SpeedVerdict, ...] = ("slower", "faster")
"""Verdicts that are listed pair by pair."""

_SHOWN_LOST = 3
"""Maximum number of lost cases of a backend that a sentence names."""

_TIMES_AS_LONG = 3.0
"""Ratio from which a change is shown as a factor instead of per cent."""


@dataclass(frozen=True)
class OutcomeGroup:
    """One or more changes of one backend with equal text except for figures; the first represents all."""

    changes: tuple[OutcomeChange, ...]

    @property
    def first(self) -> OutcomeChange:
        """The change whose text is shown."""
        return self.changes[0]

    @property
    def cases(self) -> tuple[str, ...]:
        """The distinct cases."""
        return tuple(dict.fromkeys(change.case for change in self.changes))

    @property
    def checks(self) -> tuple[str, ...]:
        """The distinct checks."""
        return tuple(dict.fromkeys(change.check for change in self.changes))

    @property
    def what(self) -> str:
        """The text of the first change, with its case if the figures of the others differ."""
        is_example = len({change.what for change in self.changes}) > 1
        return f"for example {self.first.case}: {self.first.what}" if is_example else self.first.what

    @property
    def step(self) -> str:
        """``passed -> failed``, or the outcome if only a level changed."""
        return (
            self.first.before if self.first.before == self.first.after else f"{self.first.before} -> {self.first.after}"
        )


@dataclass(frozen=True)
class StatisticalPower:
    """The differences that the tested pairs could have shown.

    ``noise``: the median over the pairs. ``slowdown``: the smallest one found four times in five at that noise, with
    ``rounds`` a side and intervals that are simultaneous over all ``pairs``.
    """

    pairs: int
    rounds: int
    noise: ProcessNoise
    slowdown: float

    @property
    def in_words(self) -> str:
        """The power as one sentence."""
        beside = "" if self.noise.in_turns is None else f", {self.noise.in_turns:.1%} between neighbours"
        return (
            f"noise between processes: {self.noise.spread:.1%}{beside} (median of {plural(self.pairs, 'pair')}); "
            f"with {self.rounds} rounds a side, a slowdown of {self.slowdown:.1%} is found in 80 % of tries"
        )


def grouped_outcomes(changes: Iterable[OutcomeChange]) -> tuple[OutcomeGroup, ...]:
    """Group changes that differ only in figures; worse ones first, then groups with most cases."""
    groups: dict[tuple[str, ...], list[OutcomeChange]] = {}
    for change in changes:
        key = (change.kind, change.backend, change.before, change.after, without_figures(change.what))
        groups.setdefault(key, []).append(change)
    found = [OutcomeGroup(tuple(members)) for members in groups.values()]
    return tuple(sorted(found, key=lambda group: (KINDS.index(group.first.kind), -len(group.cases))))


def with_verdict(changes: Iterable[SpeedChange], verdict: SpeedVerdict) -> tuple[SpeedChange, ...]:
    """Return the pairs with one verdict, regressions first, then the largest changes."""
    found = [change for change in changes if change.verdict == verdict]
    direction = -1 if verdict == "slower" else 1
    return tuple(sorted(found, key=lambda change: (not change.is_regression, direction * change.ratio)))


def unclear(changes: Iterable[SpeedChange]) -> tuple[tuple[SpeedChange, ...], ...]:
    """Return undecided pairs, grouped by reason without figures; largest groups first, widest spread first within."""
    groups: dict[str, list[SpeedChange]] = {}
    for change in changes:
        if change.verdict == "cannot tell":
            groups.setdefault(without_figures(change.reason), []).append(change)
    widest = (tuple(sorted(members, key=lambda each: -(each.base.spread or 0.0))) for members in groups.values())
    return tuple(sorted(widest, key=lambda members: -len(members)))


def counts_by_part(changes: Sequence[SpeedChange]) -> dict[StepPart, dict[SpeedVerdict, int]]:
    """Return, by part, the number of pairs with each verdict; parts without a pair are left out."""
    counts = Counter((change.part, change.verdict) for change in changes)
    timed = {change.part for change in changes}
    return {part: {verdict: counts[part, verdict] for verdict in VERDICTS} for part in PARTS if part in timed}


def power_of(comparison: RunComparison) -> StatisticalPower | None:
    """Return the power of the tested pairs, or None if no pair was tested."""
    tested = [change for change in comparison.speeds if change.low is not None]
    noises = [change.noise for change in tested if change.noise is not None]
    if not noises:
        return None
    beside = [noise.in_turns for noise in noises if noise.in_turns is not None]
    noise = ProcessNoise(
        statistics.median(each.spread for each in noises), statistics.median(beside) if beside else None
    )
    rounds = min(len(speed.rounds) for each in tested for speed in (each.base, each.new))
    level = FAMILY_LEVEL / len(tested)
    slowdown = smallest_slowdown(noise, rounds, level=level, effect=comparison.terms.effect)
    return StatisticalPower(len(tested), rounds, noise, slowdown)


def run_in_words(run: Run) -> str:
    """Return a run's file, start, versions, device and rounds on one line."""
    header, env = run.header, run.header.environment
    rounds = f", {plural(header.rounds, 'round')}"
    return f"{run.path}: {header.started}, attncheck {env.attncheck}, torch {env.torch}, {env.device_name}{rounds}"


def one_sided(item: OneSidedCases, *, shown: int | None = None) -> str:
    """Return the cases of a backend in only one run, at most ``shown`` of them by name (all if None)."""
    if item.is_whole:
        return f"backend {item.backend} ({plural(len(item.cases), 'case')})"
    check = f"check {item.check} of " if item.check else ""
    return f"{check}{plural(len(item.cases), 'case')} of {item.backend}: {named(item.cases, shown)}"


def missing(comparison: RunComparison) -> tuple[str, ...]:
    """Return a phrase for everything that NEW lacks and for each run that is not whole."""
    return (*(one_sided(item, shown=_SHOWN_LOST) for item in comparison.lost), *comparison.not_whole)


def change_text(ratio: float) -> str:
    """Return ``+10.4%``, or a factor such as ``x23.1`` or ``x0.04`` for a change by more than a factor of 3."""
    if 1 / _TIMES_AS_LONG <= ratio <= _TIMES_AS_LONG:
        return f"{ratio - 1:+.1%}"
    return f"x{ratio:.3g}"


def interval_text(change: SpeedChange) -> str:
    """Return ``+8.1% to +12.8%``, or ``-`` if there is no interval."""
    if change.low is None or change.high is None:
        return "-"
    return f"{change_text(change.low)} to {change_text(change.high)}"


def times_text(change: SpeedChange) -> tuple[str, str]:
    """Return both times in one unit, ``1.02 ms`` and ``1.13 ms``."""
    unit = time_unit((change.base.median_ns, change.new.median_ns))
    return f"{unit.text(change.base.median_ns)} {unit.name}", f"{unit.text(change.new.median_ns)} {unit.name}"


def closing(comparison: RunComparison) -> str:
    """Return the last line of a report: verdict, changed outcomes and times, undecided times, and extent."""
    kinds = Counter(change.kind for change in comparison.outcomes)
    outcomes = ", ".join(f"{plural(kinds[kind], 'outcome')} {kind}" for kind in KINDS if kinds[kind])
    parts = [outcomes or "outcomes as before", _speeds_in_words(comparison), _compared(comparison)]
    if lacking := missing(comparison):
        accepted = ", accepted by --allow-missing" if comparison.terms.allow_missing else ""
        parts.append(f"missing{accepted}: {named(lacking, 1)}")
    return f"{comparison.verdict}: {'; '.join(parts)}"


def _compared(comparison: RunComparison) -> str:
    """Return ``142 of 144 cases of 5 of 5 backends compared``."""
    count = comparison.compared
    cases, backends = plural(count.of_cases, "case"), plural(count.of_backends, "backend")
    return f"{count.cases} of {cases} of {count.backends} of {backends} compared"


def _speeds_in_words(comparison: RunComparison) -> str:
    counts = Counter(change.verdict for change in comparison.speeds)
    total = len(comparison.speeds)
    if not total:
        return "no times to compare"
    if counts["cannot tell"] == total:
        return f"{plural(total, 'time')}: ALL TOO NOISY TO COMPARE"
    counted = [f"{counts[verdict]} {verdict}" for verdict in ("slower", "faster", "same") if counts[verdict]]
    if comparison.terms.thresholds.members and counts["slower"]:
        failing = sum(change.is_regression for change in comparison.speeds)
        counted[0] += f" ({failing} beyond --fail-on)"
    if counts["cannot tell"]:
        counted.append(f"{counts['cannot tell']} TOO NOISY TO COMPARE")
    return f"of {plural(total, 'time')} {', '.join(counted)}"
