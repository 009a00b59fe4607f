"""Outcomes and CUDA-graph levels that changed between two runs, classified as worse, better or other."""

from dataclasses import dataclass
from typing import Literal

from attncheck.reports.analysis import phrases
from attncheck.reports.run_file.graph_levels import GRAPH_LEVELS, GraphLevel, GraphLevels
from attncheck.reports.run_file.records import Outcome, Record, Unavailable, Unsupported, XFailed, XPassed, graph_of

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
