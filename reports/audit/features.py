"""What every backend of an audit declares, column by column of its library's table, beside what was measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attncheck.reports.analysis.support import SupportRow, SupportVerdict
from attncheck.reports.analysis.verdicts import run_findings
from attncheck.reports.run_file.header import SurveyedBackend
from attncheck.reports.run_file.store import Run

FORMS = ("dtype", "kv_cache_dtype", "block_size", "head_size", "attn_type")
"""Columns of which cases have values."""

FEATURES = ("sinks", "sliding_window", "non_causal")
"""Columns of yes or no that are features of cases."""

UNASKED = ("sparse", "mm_prefix", "dcp")
"""Columns that no case asks about: chosen keys, prefixes that see each other, a context shared out over ranks."""

LAYERS, CAPABILITY = "layers", "compute_capability"

STATE = "state"
"""Layers with a state in place of a cache."""

_AS_DECLARED: tuple[SupportVerdict, ...] = ("right", "short", "unproven")


@dataclass(frozen=True)
class MeasuredValue:
    """One value of a column: ``right`` of the ``asked`` cases. Empty ``value``: the column is yes or no."""

    value: str
    verdict: SupportVerdict
    right: int
    asked: int

    @property
    def is_asked_as_declared(self) -> bool:
        """Whether cases with it were examined as declared; the others were tried, and not declared."""
        return self.verdict in _AS_DECLARED


@dataclass(frozen=True)
class AuditedFeature:
    """One cell: what a backend declares in a column, and what was measured; ``is_asked``: cases can ask about it."""

    column: str
    declared: tuple[str, ...]
    measured: tuple[MeasuredValue, ...]
    is_asked: bool = True


@dataclass(frozen=True)
class AuditedBackend:
    """One backend: its cells in the order of the columns. ``reason``: why it was not examined; empty: it was."""

    name: str
    features: tuple[AuditedFeature, ...]
    reason: str = ""


def audited_features(run: Run) -> tuple[AuditedBackend, ...]:
    """Return every backend of the survey; of a run without one, those of its header, of which nothing is declared."""
    surveyed = run.header.surveyed or tuple(SurveyedBackend(name=each.name) for each in run.header.backends)
    support: dict[str, dict[str, list[SupportRow]]] = {}
    for row in run_findings(run.records, run.header).support:
        column = row.feature.partition("=")[0]
        support.setdefault(row.backend, {}).setdefault(column, []).append(row)
    return tuple(
        AuditedBackend(each.name, _features(each, support.get(each.name, {}), run), each.reason) for each in surveyed
    )


def _features(
    backend: SurveyedBackend, support: Mapping[str, Sequence[SupportRow]], run: Run
) -> tuple[AuditedFeature, ...]:
    if backend.declared.get(LAYERS) == (STATE,):  # a case asks its builder about a batch, and no column
        support = {}
    cells = [AuditedFeature(LAYERS, backend.declared.get(LAYERS, ()), (), is_asked=False)]
    for column in (*FORMS, *FEATURES, *UNASKED):
        measured = tuple(_measured(row) for row in support.get(column, ()) if column not in UNASKED)
        cells.append(AuditedFeature(column, backend.declared.get(column, ()), measured, is_asked=column not in UNASKED))
    return (*cells, _capability(backend, support, run))


def _measured(row: SupportRow) -> MeasuredValue:
    return MeasuredValue(row.feature.partition("=")[2], row.verdict, row.right, row.right + row.short)


def _capability(backend: SurveyedBackend, support: Mapping[str, Sequence[SupportRow]], run: Run) -> AuditedFeature:
    """The GPU of the run, with all cases of the backend that were examined on it."""
    found, rows = run.header.environment.capability, support.get("dtype", ())
    right, asked = sum(row.right for row in rows), sum(row.right + row.short for row in rows)
    verdict: SupportVerdict = "right" if right == asked else "short" if not right else "unproven"
    measured = (MeasuredValue(found, verdict, right, asked),) if found and asked else ()
    return AuditedFeature(CAPABILITY, backend.declared.get(CAPABILITY, ()), measured)
