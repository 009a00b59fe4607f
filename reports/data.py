"""Tables for other programs: runs and comparisons as JSON, records as CSV; docs/run-files.md describes their fields."""

import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from attncheck.reports.analysis import phrases
from attncheck.reports.analysis.graph_levels import LevelRow
from attncheck.reports.analysis.summary import OutcomeCounts
from attncheck.reports.analysis.support import SupportRow, support_rows
from attncheck.reports.comparison import summary
from attncheck.reports.comparison.compare import OneSidedCases, RunComparison, SpeedChange
from attncheck.reports.document.run_values import RunValues
from attncheck.reports.run_file.records import BUDGET_SHARE, Failed, Passed, Record, graph_of, timing_of
from attncheck.reports.run_file.store import Run
from attncheck.reports.run_file.timings import StepPart, Timing
from attncheck.reports.speeds.speed import Speed
from attncheck.reports.speeds.tables import Traffic, traffic


@dataclass(frozen=True, kw_only=True)
class RecordRow:
    """One record. A field is None if the record does not have it or it was not measured.

    ``run``: path of the run file. ``what``: one line on what happened, or why nothing was examined. ``cause``: the
    likely cause, if known. ``budget_share``: the largest share of the error budget; above 1.0 the output is wrong.
    ``..._median_ns``: nanoseconds, in one process. ``needs``: features and forms of the case, separated by spaces.
    """

    run: str
    backend: str
    backend_version: str
    suite: str
    case_id: str
    case_hash: str
    check: str
    round: int
    outcome: str
    what: str
    cause: str | None
    budget_share: float | None
    declared_level: str | None
    measured_level: str | None
    forward_median_ns: float | None
    build_median_ns: float | None
    decode_median_ns: float | None
    prefill_median_ns: float | None
    duration_s: float
    needs: str


def record_rows(run: Run) -> Iterator[RecordRow]:
    """Yield the rows of a run, in the order of its records."""
    for record in run.records:
        graph, timing = graph_of(record), timing_of(record)
        yield RecordRow(
            run=run.path,
            backend=record.backend,
            backend_version=record.backend_version,
            suite=record.suite,
            case_id=record.case_id,
            case_hash=record.case_hash,
            check=record.check,
            round=record.round,
            outcome=record.outcome,
            what=phrases.one_line(phrases.what_recorded(record)),
            cause=_cause(record),
            budget_share=record.figures.get(BUDGET_SHARE) if isinstance(record, Passed | Failed) else None,
            declared_level=graph.declared if graph else None,
            measured_level=graph.measured if graph else None,
            forward_median_ns=_median_ns(timing, "forward"),
            build_median_ns=_median_ns(timing, "build"),
            decode_median_ns=_median_ns(timing, "decode"),
            prefill_median_ns=_median_ns(timing, "prefill"),
            duration_s=record.duration_s,
            needs=" ".join(record.needs),
        )


def csv_table(runs: Sequence[Run]) -> str:
    """Return all records of the runs as CSV: a line of column names, then a row for each record."""
    text = io.StringIO()
    table = csv.DictWriter(text, [field.name for field in fields(RecordRow)], lineterminator="\n")
    table.writeheader()
    table.writerows(map(_cells, (row for run in runs for row in record_rows(run))))
    return phrases.printable(text.getvalue())


def _cells(row: RecordRow) -> dict[str, Any]:
    """Return the row as a dict; texts that a spreadsheet would evaluate as a formula get a leading apostrophe."""
    return {
        name: f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@")) else value
        for name, value in asdict(row).items()
    }


def _cause(record: Record) -> str | None:
    cause = getattr(record, "cause", None) or (record.meaning if isinstance(record, Failed) else None)
    return None if cause is None else phrases.one_line(str(cause))


def _median_ns(timing: Timing | None, part: StepPart) -> float | None:
    latency = timing.latency(part) if timing else None
    return latency.median_ns if latency else None


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
            "bits": [asdict(pair) for pair in comparison.bits],
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
        "not_reached": {name: {"cases": cases, "checks": checks} for name, (cases, checks) in values.left.items()},
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
