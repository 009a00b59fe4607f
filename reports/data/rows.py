"""Records as flat rows: one row for each record, with the same columns for every outcome."""

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from attncheck.reports.analysis import phrases
from attncheck.reports.run_file.records import (
    BUDGET_SHARE,
    Failed,
    Passed,
    Record,
    graph_of,
    timing_of,
)
from attncheck.reports.run_file.store import Run
from attncheck.reports.run_file.timings import StepPart, Timing


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
