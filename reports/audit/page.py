"""An audit, as Markdown for a discussion thread and as a JSON document.

It has declared and measured features in the columns of the library's own table, and CUDA-graph levels by kind of layer
and of batch. A backend without a measurement gets a row with the reason.
"""

import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Literal

from attncheck.reports.analysis import phrases
from attncheck.reports.analysis.graph_levels import LevelRow, level_rows
from attncheck.reports.analysis.summary import late_checks
from attncheck.reports.analysis.support import REFUSALS, SupportRow, SupportVerdict
from attncheck.reports.analysis.verdicts import run_findings
from attncheck.reports.audit.claims import NOT_TRIED, WRONG, AuditedClaim, audited_claims, measured_by
from attncheck.reports.audit.layers import (
    LAYER_KINDS,
    LAYERS,
    NEEDS,
    STATE,
    audited_layers,
    own_name,
    reasons_table,
    sections,
)
from attncheck.reports.markdown import markup
from attncheck.reports.run_file.graph_levels import CUDAGRAPH, PADDING_FAULTS, GraphLevel, PaddingRows
from attncheck.reports.run_file.header import SurveyedBackend
from attncheck.reports.run_file.records import EXAMINED, Ended, Record, Unavailable, Unsupported, is_out_of_time
from attncheck.reports.run_file.store import Run

FORMS = ("dtype", "kv_cache_dtype", "block_size", "head_size", "attn_type")
"""Columns whose values are forms of cases."""

FEATURES = ("sinks", "sliding_window", "non_causal")
"""Columns of yes or no that are features of cases; other claims have rows of their own."""

CAPABILITY = "compute_capability"


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
    surveyed = run.header.surveyed or tuple(_not_surveyed(each.name, run) for each in run.header.backends)
    support: dict[str, dict[str, list[SupportRow]]] = {}
    for row in run_findings(run.records, run.header).support:
        column = row.feature.partition("=")[0]
        support.setdefault(row.backend, {}).setdefault(column, []).append(row)
    return tuple(
        AuditedBackend(each.name, _features(each, support.get(each.name, {}), run), each.reason) for each in surveyed
    )


def _not_surveyed(backend: str, run: Run) -> SurveyedBackend:
    """Return a backend without declarations, but with its kind of layers if all that it ran have a state."""
    needs = [record.needs for record in _computed(backend, run.records)]
    is_state = bool(needs) and all(map(NEEDS[STATE].intersection, needs))
    return SurveyedBackend(name=backend, declared={LAYERS: (STATE,)} if is_state else {})


def _computed(backend: str, records: Sequence[Record]) -> list[Record]:
    """Return the examined records of a backend without those of its refusals, which are of any case."""
    own = (record for record in records if record.backend == backend and record.check != REFUSALS)
    return [record for record in own if record.outcome in EXAMINED]


def left_cases(run: Run) -> dict[str, tuple[int, int]]:
    """Return, for each backend without time for all cases, how many it left in whole or part, and how many it has."""
    cases = Counter(backend for backend, _ in {(record.backend, record.case) for record in run.records})
    return {backend: (len(late), cases[backend]) for backend, late in late_checks(run.records, is_out_of_time).items()}


def _features(
    backend: SurveyedBackend, support: Mapping[str, Sequence[SupportRow]], run: Run
) -> tuple[AuditedFeature, ...]:
    if backend.declared.get(LAYERS) == (STATE,):
        support = {}  # cases of attention test their builders alone; states have a section of their own
    left = (record for record in run.records if record.backend == backend.name and is_out_of_time(record))
    late = {need for record in left for need in record.needs}
    cells = [AuditedFeature(LAYERS, backend.declared.get(LAYERS, ()), (), is_testable=False)]
    for column in (*FORMS, *FEATURES):
        measured = tuple(_measured_value(row, late) for row in support.get(column, ()))
        declared = backend.declared.get(column, ()) if column in FORMS else _declared_feature(backend, column, run)
        cells.append(AuditedFeature(column, declared, measured))
    return (*cells, _capability(backend, support, run))


def _declared_feature(backend: SurveyedBackend, column: str, run: Run) -> tuple[str, ...]:
    """Return the value of a claim: that of the backend's layers if the run has it, else that of its class."""
    own = next((each.claims for each in run.header.backends if each.name == backend.name), ()) or backend.claims
    if not own or column in backend.declared or backend.declared.get(LAYERS) == (STATE,):
        return backend.declared.get(column, ())
    return tuple(claim.value for claim in own if claim.feature == column) or ("no",)


def _measured_value(row: SupportRow, late: Collection[str]) -> MeasuredValue:
    verdict = "late" if row.verdict == "left" and row.feature in late else row.verdict
    return MeasuredValue(row.value, verdict, row.right, row.right + row.short)


def _capability(backend: SurveyedBackend, support: Mapping[str, Sequence[SupportRow]], run: Run) -> AuditedFeature:
    """Return the cell of the run's GPU, with all cases of the backend that were examined on it."""
    found, rows = run.header.environment.capability, support.get("dtype", ())
    right, examined = sum(row.right for row in rows), sum(row.right + row.short for row in rows)
    verdict: SupportVerdict = "right" if right == examined else "short" if not right else "unproven"
    measured = (MeasuredValue(found, verdict, right, examined),) if found and examined else ()
    return AuditedFeature(CAPABILITY, backend.declared.get(CAPABILITY, ()), measured)


BATCHES: Mapping[GraphLevel, str] = {
    "UNIFORM_SINGLE_TOKEN_DECODE": "decodes of one token",
    "UNIFORM_BATCH": "uniform batches of several tokens",
    "ALWAYS": "mixed batches",
}
"""The batches that a graph of each level serves in addition to those of lower levels."""

NOT_MEASURED = "not measured"

_NO_MODIFIER = "plain"
_OTHER_FEATURES = frozenset({"lse", "cascade", "tree", "tree_depth", "short_keys", "merge_nan", "dcp", "fp8_index"})
"""Features that no layer or cache needs: those of paths, of batches, and of the backend itself."""


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
            breaks = reason or _why_unmeasured(name, run)
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
    features = [need for need in needs if "=" not in need and need not in _OTHER_FEATURES]
    return ", ".join(features) or _NO_MODIFIER


def _why_unmeasured(backend: str, run: Run) -> str:
    missing = "no case of the run includes the check cudagraph" if run.complete else "the run ended before"
    return next(_reasons(backend, run.records), missing)


def _reasons(backend: str, records: Sequence[Record]) -> Iterator[str]:
    own = [record for record in records if record.backend == backend and record.check == CUDAGRAPH]
    for record in own:
        if not isinstance(record, Unsupported | Unavailable):
            yield f"{record.outcome} in {record.case}{f': {record.finding}' if isinstance(record, Ended) else ''}"
    # A case that the backend refuses is not the reason if others ran.
    ran = {record.case for record in _computed(backend, records)}
    for record in sorted(own, key=lambda each: each.case not in ran):
        if isinstance(record, Unsupported | Unavailable):
            yield record.reasons[0]


FORMAT = 1
"""Version of the JSON document. Raise it when a field is removed or changes its meaning."""

_VERDICTS: dict[SupportVerdict | Literal["late"], str] = {
    "right": "right",
    "short": "**wrong**",
    "unproven": "fails for other reasons",
    "wrong": "not declared, **but accepted, and the output is wrong**",
    "died": "not declared, **the process died**",
    "answered": "not declared, right all the same",
    "unclear": "not declared, refused unclearly",
    "refused": "not declared, refused",
    "late": "not reached in time",
    "left": NOT_TRIED,
}
"""Verdicts in words, in the order they have within a cell."""

_SHOWN_LAYERS = 4

_LEGEND = (
    "A number counts cases. Right and wrong are measured. What is not declared is shown where it was tried. "
    "No case covers compute_capability on a CPU."
)


def render(run: Run, *others: Run) -> str:
    """Return the audit of ``run`` as Markdown, ending in a newline; ``others``: runs whose levels are listed beside."""
    levels, backends = audited_levels(run), audited_features(run)
    able, left = [each for each in backends if not each.reason], [each for each in backends if each.reason]
    plain = [each for each in able if each.features[0].declared != (STATE,)]
    stated = [each for each in left if any(feature.declared for feature in each.features)]
    measured = [row for row in levels if row.measured != NOT_MEASURED]
    parts = [
        f"## {markup.escaped(_title(run))}",
        markup.escaped(_circumstances(run)),
        markup.escaped(phrases.incomplete(run) or ""),
        _left(run),
        "### CUDA-graph levels",
        _level_table(measured) if measured else "No level was measured.",
        *_unmeasured([row for row in levels if row.measured == NOT_MEASURED]),
        *(["### CUDA-graph levels of several runs", _levels_beside([run, *others])] if others else []),
        *(["### Features, declared and measured", markup.escaped(_LEGEND), _table(plain, _cell)] if plain else []),
        *chain(*(sections(run, kind) for kind in LAYER_KINDS)),
        *(["### Claims of vLLM's contract", _claims_table(claims)] if (claims := audited_claims(run)) else []),
        *([f"### Declared, and not examined here ({len(left)})", _table(stated, _declared)] if left else []),
        f"Command: {markup.code(shlex.join(run.header.command))}" if run.header.command else "",
    ]
    return phrases.printable("\n\n".join(part for part in parts if part)) + "\n"


def document(run: Run, *others: Run) -> str:
    """Return the same as a JSON document, ending in a newline; ``beside`` has the values of the other runs."""
    parts = {"format": FORMAT, "kind": "audit", **_facts(run), "beside": [*map(_facts, others)]}
    return json.dumps(parts, indent=2) + "\n"


def _facts(run: Run) -> dict[str, object]:
    environment = run.header.environment
    return {
        "title": _title(run),
        "device": environment.device_name,
        "capability": environment.capability,
        "versions": {each.name: each.version for each in run.header.backends},
        "complete": run.complete,
        "left": {name: {"left": left, "cases": cases} for name, (left, cases) in left_cases(run).items()},
        "levels": [asdict(row) | {"batches": dict(row.batches)} for row in audited_levels(run)],
        "backends": [asdict(each) for each in audited_features(run)],
        "layers": {kind: [asdict(each) for each in audited_layers(run, kind)] for kind in LAYER_KINDS},
        "claims": [
            {"backend": each.backend, **each.claim.model_dump(), "state": each.state} for each in audited_claims(run)
        ],
        "command": list(run.header.command),
    }


def _title(run: Run) -> str:
    families = dict.fromkeys(each.name.partition(":")[0] for each in run.header.surveyed)
    versions = dict.fromkeys(
        each.version.partition(",")[0] for each in run.header.backends if each.name.partition(":")[0] in families
    )
    what = " ".join([*families, *(version for version in versions if version)])
    return f"Attention backends{f' of {what}' if what else ''}: declared and measured"


def _circumstances(run: Run) -> str:
    env = run.header.environment
    device = f"{env.device_name}{f', compute capability {env.capability}' if env.capability else ''}"
    suites = ", ".join(f"{suite.name} ({phrases.suite_size(suite)})" for suite in run.header.suites)
    return f"Measured by attncheck {env.attncheck} on {device}, torch {env.torch}; suites: {suites}."


def _device(run: Run) -> str:
    environment = run.header.environment
    return environment.device_name if environment.device != "cpu" else f"{environment.device_name}, emulated"


def _left(run: Run) -> str:
    lines = [
        f"- {markup.code_cell(own_name(name))}: {left} of {phrases.plural(cases, 'case')}"
        for name, (left, cases) in left_cases(run).items()
    ]
    return "\n".join(["Not reached in time, so not measured in whole or in part:", "", *lines]) if lines else ""


def _levels_beside(runs: Sequence[Run]) -> str:
    """Return a table of the levels in each run, each with its kinds of layers, since the runs may have other cases."""
    found = [audited_levels(run) for run in runs]
    names = dict.fromkeys(row.backend for rows in found for row in rows if row.measured != NOT_MEASURED)
    headings = [f"{what} ({_device(run)})" for run in runs for what in ("declared", "measured")]
    cells = [[markup.code_cell(own_name(name)), *chain(*(_levels_of(name, rows) for rows in found))] for name in names]
    return markup.table(["backend", *map(markup.escaped, headings)], cells)


def _levels_of(name: str, rows: Sequence[AuditedLevel]) -> tuple[str, str]:
    own = [row for row in rows if row.backend == name]
    declared = dict.fromkeys(row.declared for row in own)
    measured = [f"{row.measured} ({'; '.join(row.layers)})" if row.layers else row.measured for row in own]
    return ", ".join(declared), markup.escaped(", ".join(measured)) or "not in this run"


def _level_table(rows: Sequence[AuditedLevel]) -> str:
    levels = ("backend", "layers", "declared", "measured", "head-room", *BATCHES.values())
    return markup.table([*levels, "padding rows", "what breaks next"], [_level_row(row) for row in rows])


def _level_row(row: AuditedLevel) -> list[str]:
    more = len(row.layers) - _SHOWN_LAYERS
    layers = "; ".join(row.layers[:_SHOWN_LAYERS]) + (f"; {more} more kinds" if more > 0 else "")
    return [
        markup.code_cell(own_name(row.backend)),
        f"{markup.escaped(layers)} ({phrases.plural(row.cases, 'case')})",
        row.declared,
        f"**{row.measured}**" if row.falls_short else row.measured,
        row.head_room or "-",
        *(f"**{words}**" if words == "breaks" else words for _, words in row.batches),
        f"**{row.padding_rows}**" if row.padding_rows in PADDING_FAULTS else row.padding_rows,
        markup.escaped(row.breaks) or "-",
    ]


def _unmeasured(rows: Sequence[AuditedLevel]) -> list[str]:
    reasons = reasons_table("backend (declared)", [(row.backend, row.declared, row.breaks) for row in rows])
    return ["Not measured:", reasons] if rows else []


def _table(backends: Sequence[AuditedBackend], cell: Callable[[AuditedFeature], str]) -> str:
    columns = [feature.column for feature in backends[0].features] if backends else []
    rows = [[markup.code_cell(own_name(each.name)), *map(cell, each.features)] for each in backends]
    return markup.table(["backend", *columns], rows)


def _cell(feature: AuditedFeature) -> str:
    if not (feature.declared or feature.measured):
        return "-"
    if feature.column in FEATURES:
        verdicts = [_VERDICTS[found.verdict] + _counts(found) for found in feature.measured[:1]] or [NOT_TRIED]
        return f"{_declared(feature)}: {verdicts[0]}" if feature.declared else "-"
    exact = {value for value in feature.declared if re.fullmatch(r"\w+", value) and value != "any"}
    known = {each.value: each for each in feature.measured}
    groups: dict[str, list[str]] = {}
    for value in (*feature.declared, *(each for each in known if each not in exact)):
        found = known.get(value)
        if found is not None and (found.verdict != "left" or value in exact):
            groups.setdefault(_VERDICTS[found.verdict], []).append(found.value + _counts(found))
        elif value in exact and feature.is_testable:
            groups.setdefault(NOT_TRIED, []).append(value)
    ordered = [word for word in _VERDICTS.values() if word in groups]
    measured = "; ".join(f"{word}: {_values(groups[word])}" for word in ordered)
    ranges = _values(value for value in feature.declared if value not in exact)
    if not feature.is_testable:
        return _declared(feature) or "-"
    if ranges:
        return f"{ranges} ({measured or NOT_TRIED})"
    return measured or "-"


def _claims_table(claims: Sequence[AuditedClaim]) -> str:
    """Return a row for each claim: what measures it, and the backends that make it by their states."""
    states: dict[str, dict[str, list[str]]] = {}
    ways: dict[str, str] = {}
    for each in claims:
        own = markup.code_cell(own_name(each.backend))
        own += "" if each.claim.value == "yes" else f" {markup.escaped(f'({each.claim.value})')}"
        claim = each.claim
        ways[claim.member] = markup.escaped(measured_by(claim.unexamined, claim.feature, claim.check, claim.form))
        is_wrong = each.state.startswith(WRONG)
        state = markup.escaped(each.state.removeprefix(WRONG).strip())
        state = f"**{WRONG}** {state}" if is_wrong else state
        states.setdefault(each.claim.member, {}).setdefault(state, []).append(own)
    rows = [
        [markup.code_cell(member), ways[member], "; ".join(f"{state}: {', '.join(who)}" for state, who in own.items())]
        for member, own in states.items()
    ]
    return markup.table(["claim", "measured by", "found"], rows)


def _counts(found: MeasuredValue) -> str:
    if not found.examined:
        return ""
    if found.verdict == "short":
        return f" ({found.examined - found.right} of {found.examined})"
    return f" ({found.right if found.verdict == 'right' else found.examined})"


def _declared(feature: AuditedFeature) -> str:
    return _values(feature.declared)


def _values(values: Iterable[str]) -> str:
    return markup.escaped(", ".join(values))
