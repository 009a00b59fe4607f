"""Select cases that form a curve of latency over length: those that differ mainly in size.

A record has no context lengths. It has the least bytes to move, which grow with them.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from attncheck.reports.analysis.phrases import plural
from attncheck.reports.analysis.reasons import without_figures
from attncheck.reports.html.units import digits
from attncheck.reports.speeds.speed import Speed

FEWEST_POINTS = 3
MOST_PANELS = 6
ALIKE = 2.0
"""Cases of one curve differ in operations a byte by less than this factor."""

CaseNeeds = Mapping[str, tuple[str, ...]]


class LengthPanel(NamedTuple):
    """Speeds of cases that differ mainly in length, with a title and what the cases have in common."""

    title: str
    about: str
    speeds: tuple[Speed, ...]


class LeastWork(NamedTuple):
    """The least bytes that a case must move, and the least operations it must compute."""

    moved_bytes: int
    flops: int

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.flops / self.moved_bytes


def least_work(speed: Speed) -> LeastWork | None:
    """Return the work of a speed, or None if the record lacks it or it is zero."""
    latency = speed.rounds[0]
    return LeastWork(latency.moved_bytes, latency.flops) if latency.moved_bytes and latency.flops else None


def length_panels(speeds: Sequence[Speed], needs: CaseNeeds) -> tuple[LengthPanel, ...]:
    """Return the curves of latency over length that these speeds of ``forward`` allow, those with most cases first.

    ``needs``: the needs of each case. A panel has cases of one suite with equal needs whose ids differ only in figures.
    The other cases of a suite with equal needs are grouped by operations a byte. Each panel has at least three sizes.
    """
    work = {speed.case: own for speed in speeds if (own := least_work(speed)) is not None}
    families: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for case in work:
        families.setdefault((without_figures(case), needs.get(case, ())), []).append(case)
    found = [
        _panel(stem.replace("#", "*"), needed, cases, work, speeds)
        for (stem, needed), cases in families.items()
        if _has_sizes(cases, work)
    ]
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (stem, needed), cases in families.items():
        if not _has_sizes(cases, work):
            groups.setdefault((stem.partition("/")[0], needed), []).extend(cases)
    found += [
        _panel(suite, needed, alike, work, speeds)
        for (suite, needed), cases in groups.items()
        for alike in _alike(cases, work)
        if _has_sizes(alike, work)
    ]
    return tuple(sorted(found, key=lambda panel: -len({speed.case for speed in panel.speeds}))[:MOST_PANELS])


def _has_sizes(cases: Sequence[str], work: Mapping[str, LeastWork]) -> bool:
    """Return whether the cases form a curve: at least three sizes, the largest at least twice the smallest."""
    sizes = {work[case].moved_bytes for case in cases}
    return len(sizes) >= FEWEST_POINTS and max(sizes) >= ALIKE * min(sizes)


def _panel(
    name: str, needed: Sequence[str], cases: Sequence[str], work: Mapping[str, LeastWork], speeds: Sequence[Speed]
) -> LengthPanel:
    about = [*needed, f"{_range(sorted(work[case].intensity for case in cases))} flop/byte"]
    members = set(cases)
    own = tuple(speed for speed in speeds if speed.case in members)
    return LengthPanel(f"{name}, {plural(len(cases), 'case')}", ", ".join(about), own)


def _alike(cases: Sequence[str], work: Mapping[str, LeastWork]) -> list[list[str]]:
    """Group cases by operations a byte; a group spans less than a factor of :data:`ALIKE`."""
    found: list[list[str]] = []
    for case in sorted(cases, key=lambda case: work[case].intensity):
        if found and work[case].intensity < ALIKE * work[found[-1][0]].intensity:
            found[-1].append(case)
        else:
            found.append([case])
    return found


def _range(ordered: Sequence[float]) -> str:
    low, high = digits(ordered[0]), digits(ordered[-1])
    return low if low == high else f"{low} to {high}"
