"""The recommendation of backends for a combination of needs, as text and as JSON."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import PurePath
from typing import Any

from attncheck.reports.analysis import phrases
from attncheck.reports.analysis.recommendation import (
    STANDINGS,
    Suitability,
    known_needs,
    need_answers,
    needed_cases,
    recommend,
)
from attncheck.reports.analysis.verdicts import run_findings
from attncheck.reports.run_file.store import Run
from attncheck.reports.speeds.speed import speeds
from attncheck.reports.speeds.tables import time_unit
from attncheck.reports.terminal.columns import Style

_COLORS = {"right": "32", "right in each": "32", "wrong": "31"}


def needs_of(runs: Sequence[Run]) -> tuple[str, ...]:
    """Return every need of a case or declared feature of a backend in the runs."""
    return tuple(dict.fromkeys(need for run in runs for need in known_needs(run.records, run.header)))


def recommendation(run: Run, needs: Sequence[str]) -> tuple[Suitability, ...]:
    """Return the backends of a run, the most suitable first."""
    found = run_findings(run.records, run.header)
    cases = needed_cases(found)
    times = {(each.backend, each.case): each.median_ns for each in speeds(run.records) if each.part == "forward"}
    return recommend(needs, found, cases, need_answers(needs, found, cases, run.header), times)


def render_recommendation(run: Run, needs: Sequence[str], backends: Sequence[Suitability], style: Style) -> str:
    """Return a paragraph for each standing, the best first, with a line for each backend."""
    env = run.header.environment
    device = env.device_name if env.driver else f"{run.header.device}: {env.cpu}"
    parts = [style.wrap(f"{PurePath(run.path).name} ({device}): which backend is right for {', '.join(needs)}?")]
    parts += [style.wrap(warning)] if (warning := phrases.incomplete(run)) else []
    for standing, members in groupby(backends, key=lambda each: each.standing):
        lines = [style.paint(STANDINGS[standing], _COLORS.get(standing, "33"))]
        for each in members:
            lines.append(style.wrap(f"{phrases.one_line(each.backend)}: {_words(each)}", "  "))
            lines += [style.wrap(f"{_kind(each)}: {title}", "    ") for title in titles(each)]
        parts.append("\n".join(lines))
    return style.printable("\n\n".join(parts))


def titles(each: Suitability) -> list[str]:
    """Return the cause and the extent of each finding that concerns the needs."""
    return [f"{phrases.one_line(finding.title)} ({phrases.extent(finding)})" for finding in each.findings]


def as_json(run: Run, backends: Sequence[Suitability]) -> dict[str, Any]:
    """Return the recommendation as values for JSON, with times in nanoseconds."""
    return {
        "run": run.path,
        "backends": [
            {
                "backend": each.backend,
                "standing": each.standing,
                "right": each.right,
                "wrong": each.wrong,
                "why": each.why,
                "findings": titles(each),
                "median_ns": each.median_ns,
                "timed_cases": each.timed,
            }
            for each in backends
        ],
    }


def _words(each: Suitability) -> str:
    words = [phrases.plural(each.right, "case")] if each.standing == "right" else []
    if each.median_ns is not None:
        unit = time_unit([each.median_ns])
        words.append(
            f"{unit.text(each.median_ns)} {unit.name} (geometric mean over {phrases.plural(each.timed, 'case')})"
        )
    return "; ".join([*words, *([phrases.one_line(each.why)] if each.why else [])])


def _kind(each: Suitability) -> str:
    return "finding" if each.standing == "wrong" else "other finding"
