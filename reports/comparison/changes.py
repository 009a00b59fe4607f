"""Differences between two runs besides times: outcomes and CUDA-graph levels, environments, options, timing conditions.

A changed outcome or level is worse, better or other.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from attncheck.reports.analysis import phrases
from attncheck.reports.comparison.speed_changes import SpeedChange
from attncheck.reports.run_file.graph_levels import GRAPH_LEVELS, GraphLevel, GraphLevels
from attncheck.reports.run_file.header import BackendInfo, Environment, RunHeader
from attncheck.reports.run_file.records import (
    Outcome,
    Record,
    Unavailable,
    Unsupported,
    XFailed,
    XPassed,
    chosen_kernels_of,
    graph_of,
)
from attncheck.reports.run_file.timings import Timing
from attncheck.reports.speeds.speed import timings_of

OutcomeChangeKind = Literal["worse", "better", "other"]

KINDS: tuple[OutcomeChangeKind, ...] = ("worse", "better", "other")
"""In the order of the reports."""

_OutcomeGroup = Literal["right", "short", "expected", "refused", "absent"]

_GROUP_OF: dict[Outcome, _OutcomeGroup] = {
    "passed": "right",
    "xpassed": "right",
    "failed": "short",
    "errored": "short",
    "crashed": "short",
    "timed_out": "short",
    "xfailed": "expected",
    "unsupported": "refused",
    "unavailable": "absent",
}

_WORSE: frozenset[tuple[_OutcomeGroup, _OutcomeGroup]] = frozenset(
    {
        ("right", "short"),
        ("right", "refused"),  # a support that is lost, though declared
        ("right", "absent"),
        ("refused", "short"),  # declared, but wrong
    }
)
"""Changes for the worse. An expected failure (an entry of the ``--expect`` file) is reported, but no regression."""

_BETTER: frozenset[tuple[_OutcomeGroup, _OutcomeGroup]] = frozenset(
    {("short", "right"), ("expected", "right"), ("refused", "right"), ("absent", "right")}
)


@dataclass(frozen=True)
class OutcomeChange:
    """One check of one case of one backend with another result.

    ``backend``: its name, or ``OLD -> NEW`` if backends of two names were matched. ``before``, ``after``: outcomes,
    equal if only a CUDA-graph level changed. ``what``: the change on one line, that is, the reason for a failure or
    refusal, and the levels. It may contain a backend's text, unescaped.
    """

    backend: str
    case: str
    check: str
    before: Outcome
    after: Outcome
    kind: OutcomeChangeKind
    what: str


def compare_outcomes(backend: str, before: Record, after: Record) -> OutcomeChange | None:
    """Return the change between two records of the same check and case, or None if nothing relevant changed."""
    changes = [each for each in (_change_of_outcome(before, after), _change_of_levels(before, after)) if each]
    if not changes:
        return None
    kind = min((kind for kind, _ in changes), key=KINDS.index)
    what = "; ".join(what for _, what in changes if what)
    return OutcomeChange(backend, after.case, after.check, before.outcome, after.outcome, kind, what)


def _change_of_outcome(before: Record, after: Record) -> tuple[OutcomeChangeKind, str] | None:
    if before.outcome == after.outcome:
        return None
    return _kind(before, after), _why(after)


def _kind(before: Record, after: Record) -> OutcomeChangeKind:
    groups = _GROUP_OF[before.outcome], _GROUP_OF[after.outcome]
    if isinstance(after, Unsupported) and after.by == "attncheck":
        return "other"  # attncheck no longer runs the check
    if isinstance(before, XFailed) and groups[1] == "short":
        return "other" if after.outcome == before.underlying else "worse"
    return "worse" if groups in _WORSE else "better" if groups in _BETTER else "other"


def _why(after: Record) -> str:
    match after:
        case Unsupported() | Unavailable():
            return phrases.one_line("; ".join(after.reasons))
        case XFailed():
            return phrases.one_line(f"{after.underlying}: {after.summary} (expected: {after.reason})")
        case XPassed():
            return phrases.one_line(f"expected not to pass: {after.reason}")
        case _ if after.outcome == "passed":
            return ""
        case _:
            return phrases.one_line(phrases.what_happened(after))


def _change_of_levels(before: Record, after: Record) -> tuple[OutcomeChangeKind, str] | None:
    """Return the change of CUDA-graph levels, or None.

    Measured levels take precedence. Declaring less is no regression if less was measured before.
    """
    was, now = graph_of(before), graph_of(after)
    if was is None or now is None or (was.declared, was.measured) == (now.declared, now.measured):
        return None
    changes = [
        f"{name} level {_level(one)} -> {_level(other)}"
        for name, one, other in (("measured", was.measured, now.measured), ("declared", was.declared, now.declared))
        if one != other
    ]
    if was.recorder != now.recorder:
        return "other", f"{'; '.join(changes)} (recorder {was.recorder} -> {now.recorder})"
    return _kind_of_levels(was, now), "; ".join(changes)


def _kind_of_levels(was: GraphLevels, now: GraphLevels) -> OutcomeChangeKind:
    measured = 0 if was.measured is None or now.measured is None else _height(now.measured) - _height(was.measured)
    declared = _height(now.declared) - _height(was.declared)
    if measured < 0:
        return "worse"
    if declared < 0:
        was_short = was.measured is not None and _height(was.measured) < _height(was.declared)
        return "other" if was_short else "worse"
    return "better" if measured > 0 else "other"


def _height(level: GraphLevel) -> int:
    return GRAPH_LEVELS.index(level)


def _level(level: GraphLevel | None) -> str:
    return phrases.measured_level(level)


CEILING_DRIFT = 0.05
CLOCK_DRIFT = 0.01
"""Relative changes of the copy rate and the SM clock from which a warning is added."""

FEW_PAIRS = 5
COMMON_SHIFT = 0.01
MOST = 0.9
"""Warn of a common shift if at least FEW_PAIRS times have a median change of COMMON_SHIFT and a share MOST agree."""


@dataclass(frozen=True)
class EnvironmentChange:
    """A ``field`` of the environment, the options or a backend, with its value in either run."""

    field: str
    base: str
    new: str


def environment_changes(base: RunHeader, new: RunHeader, backends: Mapping[str, str]) -> tuple[EnvironmentChange, ...]:
    """Return the fields that differ: of the environments, the options and the backends compared.

    ``backends``: the names of those compared, in BASE and NEW.
    """
    fields = [(name, getattr(base.environment, name), getattr(new.environment, name)) for name in _FIELDS]
    fields += [(name, getattr(base, name), getattr(new, name)) for name in ("seed", "rounds")]
    fields.append(("checks", base.checks, new.checks))
    for one, other in backends.items():
        fields += _of_backend(one, _info(base, one), _info(new, other))
    return tuple(EnvironmentChange(name, _words(was), _words(now)) for name, was, now in fields if was != now)


def kernel_changes(
    base: Sequence[Record], new: Sequence[Record], backends: Mapping[str, str]
) -> tuple[EnvironmentChange, ...]:
    """Return the backends whose libraries chose other kernels in NEW; backends without known kernels are left out.

    ``backends``: the names of those compared, in BASE and NEW.
    """
    pairs = [(one, _kernels_of(one, base), _kernels_of(other, new)) for one, other in backends.items()]
    return tuple(
        EnvironmentChange(f"{name}: kernels", _words(was), _words(now))
        for name, was, now in pairs
        if was and now and was != now
    )


def another_device(base: Environment, new: Environment) -> str:
    """Return why times of the two machines cannot be compared, or "" if the device appears to be the same."""
    names = ["device", "device_name"]
    if "cpu" in (base.device, new.device):
        names += ["cpu", "cores"]
    changed = [(getattr(base, name), getattr(new, name)) for name in names]
    differences = dict.fromkeys(f"{_words(was)} and {_words(now)}" for was, now in changed if was != now)
    return f"another device: {', '.join(differences)}" if differences else ""


def warnings_of_times(changes: Sequence[SpeedChange]) -> tuple[str, ...]:
    """Return warnings about the times: throttling, another clock rate, or a machine that changed its speed."""
    base, new = timings_of(change.base for change in changes), timings_of(change.new for change in changes)
    found = [
        *_throttled("BASE", base),
        *_throttled("NEW", new),
        *_drift("the SM clock", base, new, _sm_clock, CLOCK_DRIFT),
        *_drift("the rate of a large copy", base, new, _copy_rate, CEILING_DRIFT),
        *_common_shift(changes),
    ]
    return tuple(found)


_FIELDS = tuple(name for name in Environment.model_fields)


def _kernels_of(name: str, records: Sequence[Record]) -> tuple[str, ...]:
    return tuple(sorted({kernel for r in records if r.backend == name for kernel in chosen_kernels_of(r)}))


def _info(header: RunHeader, name: str) -> BackendInfo:
    return next(info for info in header.backends if info.name == name)


def _of_backend(name: str, base: BackendInfo, new: BackendInfo) -> list[tuple[str, object, object]]:
    lost = tuple(feature for feature in base.features if feature not in new.features)
    gained = tuple(feature for feature in new.features if feature not in base.features)
    started = [tuple(f"{key}={value}" for key, value in each.required_environment.items()) for each in (base, new)]
    conventions = [
        (f"{name}: {key}", base.conventions.get(key), new.conventions.get(key))
        for key in dict.fromkeys((*base.conventions, *new.conventions))
    ]
    return [
        (f"{name}: version", base.version, new.version),
        (f"{name}: features declared on one side only", lost, gained),
        *conventions,
        (f"{name}: started with", started[0], started[1]),
    ]


def _words(value: object) -> str:
    match value:
        case None | "" | ():
            return "none"
        case bool():
            return "yes" if value else "no"
        case tuple():
            return ", ".join(map(str, value))
        case _:
            return str(value)


def _throttled(side: str, timings: Sequence[Timing]) -> list[str]:
    states = [timing.device for timing in timings if timing.device is not None]
    held_back = [state for state in states if state.throttle_reasons]
    if not held_back:
        return []
    reasons = ", ".join(dict.fromkeys(reason for state in held_back for reason in state.throttle_reasons))
    return [f"the device was held back in {len(held_back)} of {len(states)} timings of {side}: {reasons}"]


def _drift(
    what: str,
    base: Iterable[Timing],
    new: Iterable[Timing],
    read: Callable[[Timing], float | None],
    least: float,
) -> list[str]:
    """Return a warning if the median of a figure measured with the times moved by ``least`` or more, relative."""
    middles = []
    for side in (base, new):
        values = [value for timing in side if (value := read(timing)) is not None]
        if not values:
            return []
        middles.append(statistics.median(values))
    change = middles[1] / middles[0] - 1
    if abs(change) < least:
        return []
    way = "higher" if change > 0 else "lower"
    return [f"{what} is {abs(change):.1%} {way} in NEW: times may have moved with it"]


def _sm_clock(timing: Timing) -> float | None:
    return timing.device.sm_clock_mhz if timing.device else None


def _copy_rate(timing: Timing) -> float | None:
    return timing.ceilings.copy_bytes_per_s if timing.ceilings else None


def _common_shift(changes: Sequence[SpeedChange]) -> list[str]:
    """Return a warning if nearly all times of several backends moved the same way, as when the machine changed."""
    apart = [change for change in changes if change.noise is not None and change.noise.in_turns is None]
    if len(apart) < FEW_PAIRS or len({change.backend for change in apart}) < 2:
        return []
    ratios = [change.ratio for change in apart]
    middle = statistics.median(ratios)
    alike = sum((ratio > 1) == (middle > 1) for ratio in ratios)
    if abs(middle - 1) < COMMON_SHIFT or alike < MOST * len(ratios):
        return []
    way = "longer" if middle > 1 else "shorter"
    shift = f"{alike} of {len(ratios)} times are {way} in NEW, whatever the backend, by {abs(middle - 1):.1%}"
    return [f"{shift} in the middle: the machine may be the reason, not a kernel; time both in one run to find out"]
