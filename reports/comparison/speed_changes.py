"""Changes in speed between two runs: of one part of one case, and of one part of all cases of a suite.

A case is faster, slower, the same, or undecided. A suite has one ratio with its interval. Its unit of observation is
the process, which times all cases of a suite and is represented by its geometric mean over them. Thus effects common to
a process do not count once a case.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Literal

from attncheck.reports.comparison import significance
from attncheck.reports.comparison.significance import (
    EFFECT,
    FAMILY_LEVEL,
    MARGIN,
    MIN_ROUNDS,
    MOST_ROUNDS,
    ProcessNoise,
    rounds_needed,
)
from attncheck.reports.comparison.thresholds import SlowdownThresholds
from attncheck.reports.run_file.timings import StepPart
from attncheck.reports.speeds.speed import Speed, by_round

SpeedVerdict = Literal["slower", "faster", "same", "cannot tell"]

VERDICTS: tuple[SpeedVerdict, ...] = ("slower", "faster", "same", "cannot tell")
"""In the order of the reports."""


@dataclass(frozen=True)
class SpeedChange:
    """One pair of speeds. ``ratio``: time of NEW over time of BASE, so that 1.1 is 10 % slower.

    ``backend``: its name, or ``OLD -> NEW`` if backends of two names were matched (``base.backend`` and
    ``new.backend``). ``low``, ``high``: the interval of the ratio, simultaneous over all tested pairs, or None if the
    pair was not tested. ``noise``: the spread between processes, or None likewise. ``reason``: why the verdict is
    ``cannot tell``, else empty. ``is_regression``: slower by at least the threshold that makes the comparison fail.
    """

    backend: str
    case: str
    part: StepPart
    base: Speed
    new: Speed
    ratio: float
    low: float | None
    high: float | None
    verdict: SpeedVerdict
    reason: str = ""
    is_regression: bool = False
    noise: ProcessNoise | None = None


@dataclass(frozen=True)
class SpeedPair:
    """Two speeds of one part of one case, and the name of the backend, before the comparison.

    ``in_turns``: processes of both sides alternated, round by round, as in one run.
    """

    backend: str
    base: Speed
    new: Speed
    in_turns: bool = False

    @cached_property
    def noise(self) -> ProcessNoise:
        """The spread between processes. Both sides need at least two processes, and equally many if they alternated."""
        medians = self.base.medians_ns, self.new.medians_ns
        beside = significance.spread_in_turns(*medians) if self.in_turns else None
        return ProcessNoise(significance.pooled_spread(*medians), beside)

    @cached_property
    def clock_step(self) -> float:
        """The apparent step of the clock, as a share of the time: the smallest difference of two samples."""
        rounds = (*self.base.rounds, *self.new.rounds)
        times = sorted({sample for latency in rounds for sample in latency.samples_ns})
        step = min((later - earlier for earlier, later in pairwise(times)), default=0)
        return step / min(self.base.median_ns, self.new.median_ns)

    @cached_property
    def obstacle(self) -> str:
        """Why the two speeds cannot be compared, or "" if they can."""
        base, new = self.base, self.new
        counts = len(base.rounds), len(new.rounds)
        if min(counts) < MIN_ROUNDS:
            return f"too few rounds: {counts[0]} in BASE, {counts[1]} in NEW, and fewer than {MIN_ROUNDS} cannot tell"
        for what, of_base, of_new in (
            ("clock", {each.clock for each in base.rounds}, {each.clock for each in new.rounds}),
            ("cache", {each.cache for each in base.timings}, {each.cache for each in new.timings}),
        ):
            if len(of_base | of_new) > 1:
                return f"{what}: {' and '.join(sorted(of_base))} in BASE, {' and '.join(sorted(of_new))} in NEW"
        return ""


@dataclass(frozen=True)
class ComparisonTerms:
    """The terms of a comparison: the least ``effect`` reported, the ``margin`` of equal times, and the thresholds.

    For a pair with a threshold, the threshold's share is the margin. ``allow_missing``: the comparison does not fail
    for cases of BASE that NEW lacks.
    """

    effect: float = EFFECT
    margin: float = MARGIN
    thresholds: SlowdownThresholds = field(default_factory=SlowdownThresholds)
    allow_missing: bool = False

    def margin_of(self, case: str, part: StepPart) -> float:
        """Return the share of the time within which times of ``part`` of ``case`` count as the same."""
        return max(self.thresholds.share(case, part) or self.margin, self.effect)


def compare_speeds(pairs: Sequence[SpeedPair], terms: ComparisonTerms, *, refusal: str = "") -> tuple[SpeedChange, ...]:
    """Return a verdict for each pair, in their order. ``refusal``: why no times of these runs can be compared, or "".

    Slower: the whole interval is above ``1 + effect``. Faster: it is below the inverse. Same: it is within the margin.
    Intervals are simultaneous over all tested pairs, so more pairs make each interval wider.
    """
    obstacles = [refusal or pair.obstacle for pair in pairs]
    tested = obstacles.count("")
    return tuple(
        _not_tested(pair, reason) if reason else _tested(pair, terms, FAMILY_LEVEL / tested)
        for pair, reason in zip(pairs, obstacles, strict=True)
    )


def _not_tested(pair: SpeedPair, reason: str) -> SpeedChange:
    base, new = pair.base, pair.new
    ratio = new.median_ns / base.median_ns
    return SpeedChange(pair.backend, base.case, base.part, base, new, ratio, None, None, "cannot tell", reason)


def _tested(pair: SpeedPair, terms: ComparisonTerms, level: float) -> SpeedChange:
    base, new = pair.base, pair.new
    found = significance.estimate_ratio(
        base.medians_ns, new.medians_ns, level=level, resolution=pair.clock_step, in_turns=pair.in_turns
    )
    effect, margin = 1 + terms.effect, 1 + terms.margin_of(base.case, base.part)
    verdict: SpeedVerdict
    reason = ""
    if found.low > effect:
        verdict = "slower"
    elif found.high < 1 / effect:
        verdict = "faster"
    elif found.low >= 1 / margin and found.high <= margin:
        verdict = "same"
    else:
        verdict, reason = "cannot tell", _why_unclear(pair, terms, level)
    enough = terms.thresholds.share(base.case, base.part)
    is_regression = verdict == "slower" and enough is not None and found.ratio - 1 >= enough
    return SpeedChange(
        pair.backend,
        base.case,
        base.part,
        base,
        new,
        found.ratio,
        found.low,
        found.high,
        verdict,
        reason,
        is_regression,
        pair.noise,
    )


def _why_unclear(pair: SpeedPair, terms: ComparisonTerms, level: float) -> str:
    """Return why a tested pair is undecided, and how many rounds would decide it."""
    if pair.clock_step > terms.effect:
        return f"the clock counts in steps of {pair.clock_step:.1%} of the time"
    margin = terms.margin_of(pair.base.case, pair.base.part)
    rounds = min(len(pair.base.rounds), len(pair.new.rounds))
    needed = rounds_needed(pair.noise, margin, level=level, effect=terms.effect)
    if needed is None:
        remedy = f"{MOST_ROUNDS} would not find {margin:.1%}"
    elif needed > rounds:
        remedy = f"{needed} a side would find {margin:.1%}"
    else:
        remedy = f"the difference is neither clearly above {terms.effect:.1%} nor clearly within {margin:.1%}"
    return f"processes differ by {pair.noise.spread:.1%} over {rounds} rounds; {remedy}"


_LEAST_SHOWN = 0.001
"""Smallest difference that a sentence rules out, as a share of the time; an interval may have zero width."""


@dataclass(frozen=True)
class SuiteSpeedChange:
    """One part of the ``cases`` of a suite, timed by one backend, or by two that were matched.

    ``base``, ``new``: the backend's name in either run. ``ratio``: time of NEW over time of BASE, geometric mean over
    the cases. ``low``, ``high``: its interval, simultaneous over all suites and parts. ``is_different``: the whole
    interval is beyond the least difference that is reported.
    """

    base: str
    new: str
    suite: str
    part: StepPart
    cases: int
    ratio: float
    low: float
    high: float
    is_different: bool

    @property
    def in_words(self) -> str:
        """The change in words, the faster side first: ``Mine is 1.32 ± 0.04 times as fast as torch_sdpa in decode``.

        The figure after the sign is the longer arm of the interval, rounded up. Without a difference, the sentence
        states the largest one that is ruled out.
        """
        place = self.suite if self.part == "forward" else f"{self.suite}, {self.part}"
        before, after = (
            (f"{self.base} of BASE", f"{self.base} of NEW") if self.base == self.new else (self.base, self.new)
        )
        if not self.is_different:
            most = max(self.high, 1 / self.low) - 1
            return f"{before} and {after}: no difference above {_percent(most)} was found in {place}"
        if self.ratio < 1:
            fast, slow, speedup, ends = after, before, 1 / self.ratio, (1 / self.high, 1 / self.low)
        else:
            fast, slow, speedup, ends = before, after, self.ratio, (self.low, self.high)
        digits = _digits(max(speedup - ends[0], ends[1] - speedup))
        shown = round(speedup, digits)
        arm = math.ceil(max(shown - ends[0], ends[1] - shown) * 10**digits) / 10**digits
        return f"{fast} is {shown:.{digits}f} ± {arm:.{digits}f} times as fast as {slow} in {place}"


def compare_suites(pairs: Sequence[SpeedPair], effect: float) -> tuple[SuiteSpeedChange, ...]:
    """Compare each part of each suite, except suites with a pair that cannot be compared or lacks rounds.

    ``effect``: the smallest difference that is reported, as a share of the time.
    """
    groups: dict[tuple[str, str, str, StepPart], list[SpeedPair]] = {}
    for pair in pairs:
        suite = pair.base.case.partition("/")[0]
        groups.setdefault((pair.base.backend, pair.new.backend, suite, pair.base.part), []).append(pair)
    tested = {key: members for key, members in groups.items() if _is_whole(members)}
    return tuple(_change(*key, members, FAMILY_LEVEL / len(tested), effect) for key, members in tested.items())


def _is_whole(members: Sequence[SpeedPair]) -> bool:
    """Return whether all cases can be compared and were timed in the same number of rounds."""
    rounds = {(len(pair.base.rounds), len(pair.new.rounds)) for pair in members}
    return len(rounds) == 1 and not any(pair.obstacle for pair in members)


def _change(
    base: str, new: str, suite: str, part: StepPart, members: Sequence[SpeedPair], level: float, effect: float
) -> SuiteSpeedChange:
    found = significance.estimate_ratio(
        by_round([pair.base for pair in members], statistics.geometric_mean),
        by_round([pair.new for pair in members], statistics.geometric_mean),
        level=level,
        resolution=max(pair.clock_step for pair in members),
        in_turns=all(pair.in_turns for pair in members),
    )
    is_different = found.low > 1 + effect or found.high < 1 / (1 + effect)
    return SuiteSpeedChange(base, new, suite, part, len(members), found.ratio, found.low, found.high, is_different)


def _digits(arm: float) -> int:
    """Return the decimals that show ``arm`` with one digit, from two to four."""
    return 2 if arm >= 0.01 else min(4, math.ceil(-math.log10(max(arm, 1e-4))))


def _percent(share: float) -> str:
    """Return a share, rounded up to a tenth of a per cent."""
    return f"{math.ceil(max(share, _LEAST_SHOWN) * 1000) / 10:.1f} %"
