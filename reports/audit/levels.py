"""Declared and measured CUDA-graph levels of every backend of an audit, by kind of layer and of batch.

The rows come from ``analysis.graph_levels``. A backend without a measurement gets a row with the reason.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from attncheck.reports.analysis import phrases
from attncheck.reports.analysis.graph_levels import LevelRow, level_rows
from attncheck.reports.run_file.graph_levels import CUDAGRAPH, GraphLevel, PaddingRows
from attncheck.reports.run_file.records import Ended, Record, Unavailable, Unsupported
from attncheck.reports.run_file.store import Run

BATCHES: Mapping[GraphLevel, str] = {
    "UNIFORM_SINGLE_TOKEN_DECODE": "decodes of one token",
    "UNIFORM_BATCH": "uniform batches of several tokens",
    "ALWAYS": "mixed batches",
}
"""The batches that a graph of each level serves in addition to those of lower levels."""

NOT_MEASURED = "not measured"

_NO_MODIFIER = "plain"
_LAYER_FEATURES = frozenset(
    {
        *("sliding_window", "logits_soft_cap", "alibi", "alibi_sqrt", "alibi_non_causal", "sinks", "non_causal"),
        *("head_size_v", "kv_sharing", "fp8_kv", "fp8_per_head", "output_quant", "mla", "local"),
    }
)
"""Needs of a case that belong to its layer or cache."""


@dataclass(frozen=True)
class AuditedLevel:
    """One row: layers of one backend with equal levels.

    ``layers``: the kinds of layers among its ``cases`` cases. ``measured``: a level, ``cannot tell``, or
    :data:`NOT_MEASURED`. ``head_room``: a higher level that could be declared, or "". ``batches``: the result for each
    kind of batch of :data:`BATCHES`. ``padding_rows``: their worst state in replays; the level does not depend on it.
    ``breaks``: what breaks at the next level, or why nothing was measured.
    """

    backend: str
    declared: str
    measured: str
    falls_short: bool = False
    head_room: str = ""
    padding_rows: PaddingRows = "not examined"
    breaks: str = ""
    batches: tuple[tuple[str, str], ...] = ()
    layers: tuple[str, ...] = ()
    cases: int = 0


def audited_levels(run: Run) -> tuple[AuditedLevel, ...]:
    """Return rows of every backend of the run, and of those it could not examine, in the survey's order."""
    needs = {(record.backend, record.case): record.needs for record in run.records}
    rows: dict[str, list[AuditedLevel]] = {}
    for row in level_rows(run.records):
        rows.setdefault(row.backend, []).append(_measured(row, needs))
    surveyed = {each.name: each for each in run.header.surveyed}
    names = dict.fromkeys([*surveyed, *(each.name for each in run.header.backends)])
    for name in names:
        if name not in rows:
            level, reason = (surveyed[name].level, surveyed[name].reason) if name in surveyed else ("", "")
            breaks = reason or _unmeasured(name, run)
            rows[name] = [AuditedLevel(name, level or "unknown", NOT_MEASURED, breaks=breaks)]
    return tuple(row for name in names for row in rows[name])


def _measured(row: LevelRow, needs: Mapping[tuple[str, str], Sequence[str]]) -> AuditedLevel:
    cases = [case for result in row.results for case in result.cases]
    kinds = (_kind(needs.get((row.backend, case), ())) for case in cases)
    return AuditedLevel(
        backend=row.backend,
        declared=row.graph.declared,
        measured=phrases.measured_level(row.graph.measured),
        falls_short=row.falls_short,
        head_room=row.head_room or "",
        padding_rows=row.padding_rows,
        breaks=phrases.why_no_higher(row),
        batches=tuple((words, _became(row, level)) for level, words in BATCHES.items()),
        layers=tuple(dict.fromkeys(kinds)),
        cases=row.cases,
    )


def _became(row: LevelRow, level: GraphLevel) -> str:
    outcomes = [probe.outcome for probe in row.graph.probes if probe.level == level]
    if "failed" in outcomes:
        return "breaks"
    if "not examined" in outcomes:
        return "cannot be examined here"
    passed = outcomes.count("passed")
    return f"right ({phrases.plural(passed, 'probe')})" if passed and passed == len(outcomes) else "not tried"


def _kind(needs: Sequence[str]) -> str:
    return ", ".join(need for need in needs if need in _LAYER_FEATURES) or _NO_MODIFIER


def _unmeasured(backend: str, run: Run) -> str:
    missing = "no case of the run includes the check cudagraph" if run.complete else "the run was cut off before"
    return next(_reasons(backend, run.records), missing)


def _reasons(backend: str, records: Sequence[Record]) -> Iterator[str]:
    own = [record for record in records if record.backend == backend and record.check == CUDAGRAPH]
    for record in own:
        if not isinstance(record, Unsupported | Unavailable):
            yield f"{record.outcome} in {record.case}{f': {record.finding}' if isinstance(record, Ended) else ''}"
    for record in own:
        if isinstance(record, Unsupported | Unavailable):
            yield record.reasons[0]
