"""The change in speed of one part of a step over all cases of a suite: one ratio with its interval.

The unit of observation is the process, which times all cases of a suite. Each process is represented by its geometric
mean over the cases. Thus effects common to a process do not count once a case.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from attncheck.reports.comparison import significance
from attncheck.reports.comparison.significance import FAMILY_LEVEL
from attncheck.reports.comparison.speed_changes import SpeedPair
from attncheck.reports.run_file.timings import StepPart
from attncheck.reports.speeds.speed import by_round

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
