"""Runs, and the comparison of two, as JSON documents; docs/run-files.md describes their fields."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from attncheck.reports.analysis.graph_levels import LevelRow
from attncheck.reports.analysis.summary import OutcomeCounts
from attncheck.reports.analysis.support import SupportRow, support_rows
from attncheck.reports.comparison import summary
from attncheck.reports.comparison.compare import OneSidedCases, RunComparison, SpeedChange
from attncheck.reports.data.rows import record_rows
from attncheck.reports.document.run_values import RunValues
from attncheck.reports.run_file.store import Run
from attncheck.reports.speeds.speed import Speed
from attncheck.reports.speeds.traffic import Traffic, traffic

FORMAT = 1
"""Version of these documents. Raise it when a field is removed or changes its meaning, not for new fields."""

_Json = dict[str, Any]


def runs_document(runs: Sequence[Run]) -> str:
    """Return every table of the runs as one JSON document."""
    return _text({"format": FORMAT, "kind": "runs", "runs": [_run(run) for run in runs]})


def comparison_document(comparison: RunComparison) -> str:
    """Return a comparison of two runs as one JSON document."""
    return _text(
        {
            "format": FORMAT,
            "kind": "comparison",
            "base": _identity(comparison.base),
            "new": _identity(comparison.new),
            "verdict": comparison.verdict,
            "fails": comparison.fails,
            "closing": summary.closing(comparison),
            "compared": asdict(comparison.compared),
            "missing": [_one_sided(item) for item in comparison.lost],
            "only_base": [_one_sided(item) for item in comparison.only_base],
            "only_new": [_one_sided(item) for item in comparison.only_new],
            "changed_cases": comparison.changed_cases,
            "warnings": comparison.warnings,
            "environment": [asdict(change) for change in comparison.environments],
            "outcomes": [asdict(change) for change in comparison.outcomes],
            "speeds": [_speed_change(change) for change in comparison.speeds],
            "suite_speeds": [{**asdict(change), "sentence": change.in_words} for change in comparison.suite_speeds],
        }
    )


def _run(run: Run) -> _Json:
    values = RunValues.of(run)
    return {
        **_identity(run),
        "verdict": values.verdict,
        "closing": values.closing(),
        "errors": run.errors,
        "header": run.header.model_dump(mode="json"),
        "summary": [
            {"backend": backend, "check": check, **_counts(counts)}
            for (backend, check), counts in values.summary.by_check.items()
        ],
        "not_examined": [asdict(gap) for gap in values.summary.gaps],
        "support": [_support(row) for row in support_rows(values.found.cases, run.header.declared)],
        "graph_levels": [_level(row) for row in values.found.levels],
        "speeds": [_speed(speed) for speed in values.speeds],
        "traffic": [_traffic(each) for each in traffic(run.header, values.speeds)],
        "records": [asdict(row) for row in record_rows(run)],
    }


def _identity(run: Run) -> _Json:
    return {"run": run.path, "started": run.header.started, "complete": run.complete}


def _counts(counts: OutcomeCounts) -> _Json:
    return {
        "outcomes": dict(counts.counts),
        "examined": counts.examined,
        "fell_short": counts.short,
        "worst_budget_share": counts.worst_share,
    }


def _support(row: SupportRow) -> _Json:
    return {**asdict(row), "verdict": row.verdict}


def _level(row: LevelRow) -> _Json:
    broken = row.broke_at
    return {
        "backend": row.backend,
        "cases": [case for result in row.results for case in result.cases],
        "declared": row.graph.declared,
        "measured": row.graph.measured,
        "proven": row.proven,
        "recorder": row.graph.recorder,
        "broke_at": None if broken is None else broken.model_dump(mode="json"),
        "notes": row.notes,
        "padding_rows": row.padding_rows,
    }


def _traffic(calls: Traffic) -> _Json:
    return {**asdict(calls), "times": [each._asdict() for each in calls.times]}


def _speed(speed: Speed) -> _Json:
    low, high = speed.interval_ns
    return {
        "backend": speed.backend,
        "case": speed.case,
        "part": speed.part,
        "rounds": len(speed.rounds),
        "median_ns": speed.median_ns,
        "low_ns": low,
        "high_ns": high,
        "spread": speed.spread,
        "bytes_per_s": speed.bytes_per_s,
        "flops_per_s": speed.flops_per_s,
        "roofline_share": speed.roofline_share,
    }


def _speed_change(change: SpeedChange) -> _Json:
    return {
        "backend": change.backend,
        "case": change.case,
        "part": change.part,
        "verdict": change.verdict,
        "is_regression": change.is_regression,
        "ratio": change.ratio,
        "low": change.low,
        "high": change.high,
        "base_median_ns": change.base.median_ns,
        "new_median_ns": change.new.median_ns,
        "reason": change.reason,
    }


def _one_sided(item: OneSidedCases) -> _Json:
    return {
        "backend": item.backend,
        "check": item.check or None,
        "is_whole_backend": item.is_whole,
        "cases": item.cases,
    }


def _text(document: _Json) -> str:
    return json.dumps(_finite(document), indent=1, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    """Return the value with non-finite floats as strings, as in run files, since JSON has no such numbers."""
    match value:
        case float() if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        case dict():
            return {name: _finite(member) for name, member in value.items()}
        case list() | tuple():
            return [_finite(member) for member in value]
        case _:
            return value
