"""Declared and measured features of every backend of an audit, in the columns of its library's own table."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from attncheck.reports.analysis.support import SupportRow, SupportVerdict
from attncheck.reports.analysis.verdicts import run_findings
from attncheck.reports.run_file.header import SurveyedBackend
from attncheck.reports.run_file.records import is_out_of_time
from attncheck.reports.run_file.store import Run

FORMS = ("dtype", "kv_cache_dtype", "block_size", "head_size", "attn_type")
"""Columns whose values are forms of cases."""

FEATURES = ("sinks", "sliding_window", "non_causal")
"""Columns of yes or no that are features of cases."""

UNTRIED = ("sparse", "mm_prefix", "dcp")
"""Columns that no case tests: sparse attention, bidirectional prefixes, decode context parallelism."""

LAYERS, CAPABILITY = "layers", "compute_capability"

STATE = "state"
"""Layers that keep a state instead of a KV cache."""


@dataclass(frozen=True)
class MeasuredValue:
    """A value of a column, "" for yes or no: ``right`` of its ``examined`` cases. ``late``: no time for any of them."""

    value: str
    verdict: SupportVerdict | Literal["late"]
    right: int
    examined: int


@dataclass(frozen=True)
class AuditedFeature:
    """One cell: the declared values of a column and the measured ones. ``is_testable``: some cases can test it."""

    column: str
    declared: tuple[str, ...]
    measured: tuple[MeasuredValue, ...]
    is_testable: bool = True


@dataclass(frozen=True)
class AuditedBackend:
    """One backend with its cells in column order. ``reason``: why it was not examined, or "" if it was."""

    name: str
    features: tuple[AuditedFeature, ...]
    reason: str = ""


def audited_features(run: Run) -> tuple[AuditedBackend, ...]:
    """Return every backend of the survey; without a survey, those of the header, without declarations."""
    surveyed = run.header.surveyed or tuple(SurveyedBackend(name=each.name) for each in run.header.backends)
    support: dict[str, dict[str, list[SupportRow]]] = {}
    for row in run_findings(run.records, run.header).support:
        column = row.feature.partition("=")[0]
        support.setdefault(row.backend, {}).setdefault(column, []).append(row)
    return tuple(
        AuditedBackend(each.name, _features(each, support.get(each.name, {}), run), each.reason) for each in surveyed
    )


def left_cases(run: Run) -> dict[str, tuple[int, int]]:
    """Return, for each backend without time for all cases, how many it left in whole or part, and how many it has."""
    return {
        each.backend: (len(finding.cases), each.results.total())
        for each in run_findings(run.records, run.header).verdicts
        for finding in each.findings
        if is_out_of_time(finding.example)
    }


def _features(
    backend: SurveyedBackend,
    support: Mapping[str, Sequence[SupportRow]],
    run: Run,
    # Layers with a state: the cases test their metadata builders, and no column is about those.
) -> tuple[AuditedFeature, ...]:
    if backend.declared.get(LAYERS) == (STATE,):
        support = {}
    left = (record for record in run.records if record.backend == backend.name and is_out_of_time(record))
    late = {need for record in left for need in record.needs}
    cells = [AuditedFeature(LAYERS, backend.declared.get(LAYERS, ()), (), is_testable=False)]
    for column in (*FORMS, *FEATURES, *UNTRIED):
        measured = tuple(_measured(row, late) for row in support.get(column, ()) if column not in UNTRIED)
        cells.append(
            AuditedFeature(column, backend.declared.get(column, ()), measured, is_testable=column not in UNTRIED)
        )
    return (*cells, _capability(backend, support, run))


def _measured(row: SupportRow, late: Collection[str]) -> MeasuredValue:
    verdict = "late" if row.verdict == "left" and row.feature in late else row.verdict
    return MeasuredValue(row.value, verdict, row.right, row.right + row.short)


def _capability(backend: SurveyedBackend, support: Mapping[str, Sequence[SupportRow]], run: Run) -> AuditedFeature:
    """Return the cell of the run's GPU, with all cases of the backend that were examined on it."""
    found, rows = run.header.environment.capability, support.get("dtype", ())
    right, examined = sum(row.right for row in rows), sum(row.right + row.short for row in rows)
    verdict: SupportVerdict = "right" if right == examined else "short" if not right else "unproven"
    measured = (MeasuredValue(found, verdict, right, examined),) if found and examined else ()
    return AuditedFeature(CAPABILITY, backend.declared.get(CAPABILITY, ()), measured)
