"""A comparison for GitHub Actions: the Markdown report as a step summary, and annotations.

Errors are what fails the comparison. Warnings are what weakens it: differences that fail nothing, and undecided times.
"""

from collections.abc import Iterator

from attncheck.reports.analysis.phrases import plural
from attncheck.reports.comparison import summary
from attncheck.reports.comparison.compare import RunComparison, SpeedChange
from attncheck.reports.github.annotations import annotation, as_shown
from attncheck.reports.github.run import MAX_SUMMARY_BYTES, first_bytes
from attncheck.reports.markdown.comparison import render_comparison

_CUT = "\n\nThe rest was cut: a summary holds 1 MiB.\n"


def render_summary(comparison: RunComparison) -> str:
    """Return the Markdown report, cut at the end of a line if it is too long; ends in a newline."""
    text = render_comparison(comparison)
    if len(text.encode()) <= MAX_SUMMARY_BYTES:
        return text
    return first_bytes(text, MAX_SUMMARY_BYTES - len(_CUT.encode())) + _CUT


def annotations(comparison: RunComparison) -> list[str]:
    """Return workflow commands, one a line, errors first; empty if nothing changed and every pair is decided."""
    return [*as_shown([*_errors(comparison)], "error"), *as_shown([*_warnings(comparison)], "warning")]


def _errors(comparison: RunComparison) -> Iterator[str]:
    for group in summary.grouped_outcomes(comparison.outcomes):
        first, further = group.first, len(group.cases) - 1
        if first.kind == "worse":
            more = f" and {plural(further, 'more case')}" if further else ""
            title = f"{first.backend}: {first.case}{more}, {', '.join(group.checks)}: {group.step}"
            yield annotation("error", title, group.what or group.step)
    for change in summary.with_verdict(comparison.speeds, "slower"):
        if change.is_regression:
            was, now = summary.times_text(change)
            title = f"{change.backend}: {change.case}, {change.part}: {summary.change_text(change.ratio)} time"
            yield annotation("error", title, f"{was} -> {now} (interval {summary.interval_text(change)})")
    if not comparison.terms.allow_missing:
        yield from (annotation("error", "missing", text) for text in summary.missing(comparison))


def _warnings(comparison: RunComparison) -> Iterator[str]:
    speeds = comparison.speeds
    for text in comparison.warnings:
        yield annotation("warning", "attncheck compare", text)
    if comparison.terms.allow_missing:
        yield from (
            annotation("warning", "missing, accepted by --allow-missing", text) for text in summary.missing(comparison)
        )
    slower = [change for change in summary.with_verdict(speeds, "slower") if not change.is_regression]
    if slower:
        yield annotation("warning", f"{plural(len(slower), 'time')} slower that --fail-on lets pass", _worst(slower[0]))
    for members in summary.unclear(speeds):
        title = f"{len(members)} of {plural(len(speeds), 'time')} too noisy to compare"
        yield annotation("warning", title, f"such as {_name(members[0])}: {members[0].reason}")


def _worst(change: SpeedChange) -> str:
    return f"{_name(change)}: {summary.change_text(change.ratio)} (interval {summary.interval_text(change)})"


def _name(change: SpeedChange) -> str:
    return f"{change.backend}, {change.case}, {change.part}"
