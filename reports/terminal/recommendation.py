"""The recommendation of backends for a combination of needs, as text and as JSON."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from attncheck.reports.analysis import phrases
from attncheck.reports.analysis.measured import MeasuredFinding, Subject
from attncheck.reports.analysis.recommendation import STANDINGS, Suitability, pace_words
from attncheck.reports.speeds.tables import time_unit
from attncheck.reports.terminal.columns import Style

_COLORS = {"wrong": "31", "right": "32", "right in each": "32"}


def by_device(members: Sequence[Subject]) -> dict[str, tuple[Subject, ...]]:
    """Return the subjects of each device, in their order."""
    return {device: tuple(own) for device, own in groupby(members, key=lambda subject: subject.device)}


def render_recommendation(device: str, needs: Sequence[str], backends: Sequence[Suitability], style: Style) -> str:
    """Return a paragraph for each standing, in the order of ``STANDINGS``, with a line for each backend."""
    parts = [style.wrap(f"On {phrases.one_line(device)}: which backend is right for {', '.join(needs)}?")]
    for standing, members in groupby(backends, key=lambda each: each.standing):
        lines = [style.paint(STANDINGS[standing], _COLORS.get(standing, "33"))]
        for each in members:
            lines.append(style.wrap(f"{phrases.one_line(each.subject.name)}: {_words(each)}", "  "))
            kind = "finding" if standing == "wrong" else "other finding"
            lines += [style.wrap(f"{kind}: {title(finding)}", "    ") for finding in each.findings]
        parts.append("\n".join(lines))
    return style.printable("\n\n".join(parts))


def title(finding: MeasuredFinding) -> str:
    """Return the cause and the number of cases of a finding."""
    return f"{phrases.one_line(finding.title)} ({phrases.plural(len(finding.cases), 'case')})"


def as_json(device: str, backends: Sequence[Suitability]) -> dict[str, Any]:
    """Return the recommendation as values for JSON, with times in nanoseconds."""
    return {
        "device": device,
        "backends": [
            {
                "backend": each.subject.name,
                "standing": each.standing,
                "right": each.right,
                "wrong": each.wrong,
                "why": each.why,
                "findings": [title(finding) for finding in each.findings],
                "coverage": each.subject.coverage,
                "median_ns": each.median_ns,
                "timed_cases": each.timed,
                "times_the_fastest": each.pace.ratio if each.pace else None,
            }
            for each in backends
        ],
    }


def _words(each: Suitability) -> str:
    words = [phrases.plural(each.right, "case")] if each.standing == "right" else []
    if each.median_ns is not None:
        unit = time_unit([each.median_ns])
        mean = f"geometric mean over {phrases.plural(each.timed, 'case')}"
        words.append(f"{unit.text(each.median_ns)} {unit.name} ({mean})")
        words += [pace_words(each.pace)] if each.pace else []
    words += [phrases.one_line(each.why)] if each.why else []
    words += [each.subject.coverage] if each.subject.is_stopped else []
    return "; ".join(words)
