"""What an audit has of layers with a state and of sparse attention: kinds of batch, forms, checks, and what fails.

Numbers count cases that ran. For a backend without such a case, the reason is given instead.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from attncheck.reports.analysis.measured import KINDS
from attncheck.reports.analysis.summary import worst_rounds
from attncheck.reports.analysis.support import ANSWERS, CountedCase
from attncheck.reports.analysis.verdicts import RunFindings, run_findings
from attncheck.reports.markdown import markup
from attncheck.reports.run_file.causes import BACKEND_TIME
from attncheck.reports.run_file.header import CaseInfo
from attncheck.reports.run_file.records import (
    OURSELVES,
    Errored,
    Record,
    Unavailable,
    Unsupported,
    XPassed,
    is_out_of_time,
)
from attncheck.reports.run_file.store import Run

LAYERS = "layers"
"""The column of a survey that names the kind of layers."""

STATE, SPARSE = "state", "sparse"
LAYER_KINDS = (STATE, SPARSE)
"""Layers with a state, and layers whose keys an indexer chooses: values of :data:`LAYERS`."""

NEEDS: Mapping[str, frozenset[str]] = {
    STATE: frozenset({"path=recurrence"}),
    SPARSE: frozenset({"sparse", "path=indexer"}),
}
"""A case of such layers needs one of these."""

DRAFTS, PREFIX_CACHING, PADDING = "drafts", "prefix caching", "padding"

BATCHES: Mapping[str, tuple[str, ...]] = {
    STATE: (*KINDS.values(), DRAFTS, PREFIX_CACHING, PADDING),
    SPARSE: (*KINDS.values(), DRAFTS, PADDING),
}
"""The kinds of batch of cases of each."""

_REFUSED_BY = {DRAFTS: "num_speculative_tokens", PREFIX_CACHING: "mamba_cache_mode"}
"""First word of the reason of a backend that refuses a kind of batch."""

FORMS: Mapping[str, tuple[str, ...]] = {
    STATE: ("rule", "dtype", "state_dtype", "head_size"),
    SPARSE: ("path", "dtype", "head_size"),
}
"""The forms of cases of each."""

_RIGHT = ("passed", "xpassed")

Counts = dict[str, dict[str, int]]
"""By kind of batch, form or check, the number of its examined cases that are ``right``, and that fall ``short``."""


@dataclass(frozen=True)
class Fault:
    """What is wrong in ``cases`` (``suite/id``), found by ``checks``. ``is_known``: whether the run expected it."""

    words: str
    is_known: bool
    cases: tuple[str, ...]
    checks: tuple[str, ...]


@dataclass(frozen=True)
class AuditedLayers:
    """A backend of such layers. ``reason``: why none of its cases was examined, or "".

    ``batches``, ``forms`` (``dtype=float16``): cases whose outputs were compared, or whose stored states are wrong.
    ``unexamined``: the reason of each check that ran in no case, unless attncheck makes it for no such layer, and of
    each kind of batch that the backend refuses.
    """

    backend: str
    reason: str = ""
    batches: Counts = field(default_factory=dict)
    forms: Counts = field(default_factory=dict)
    checks: Counts = field(default_factory=dict)
    unexamined: dict[str, str] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()


def audited_layers(run: Run, layers: str) -> tuple[AuditedLayers, ...]:
    """Return the backends of a kind of ``layers``: those of the survey, and those with an examined case of it."""
    found = run_findings(run.records, run.header)
    surveyed = {each.name: each.reason for each in run.header.surveyed if layers in each.declared.get(LAYERS, ())}
    own: dict[str, dict[str, CountedCase]] = {}
    for (backend, case), counted in found.cases.items():
        if counted.is_declared and NEEDS[layers].intersection(counted.needs):
            own.setdefault(backend, {})[case] = counted
    return tuple(
        _examined(name, layers, own[name], run, found)
        if name in own
        else AuditedLayers(name, surveyed[name] or _why_unexamined(name, layers, run))
        for name in dict.fromkeys([*surveyed, *own])
    )


def _why_unexamined(backend: str, layers: str, run: Run) -> str:
    own = (record for record in run.records if record.backend == backend)
    reasons = [_reason(record) for record in own if NEEDS[layers].intersection(record.needs)]
    if not reasons:
        return "no case of the run has such a layer" if run.complete else "the run ended before"
    return next(filter(None, reasons), "only its refusals were examined")


def _reason(record: Record) -> str:
    """Return why a record is no result of the backend, or "" if it is one."""
    if isinstance(record, Unsupported | Unavailable):
        return record.reasons[0]
    if isinstance(record, Errored) and record.stage == OURSELVES:
        return f"{OURSELVES} raised {record.error_type}"
    return f"{BACKEND_TIME} was used up" if is_out_of_time(record) else ""


def _examined(
    backend: str, layers: str, cases: Mapping[str, CountedCase], run: Run, found: RunFindings
) -> AuditedLayers:
    own = [each.record for each in worst_rounds(run.records) if each.record.backend == backend]
    records = [record for record in own if record.case in cases]
    ran = [record for record in records if not _reason(record)]
    checks = _counts((each.check, "right" if each.outcome in _RIGHT else "short") for each in ran)
    # Stored states alone do not show that a case is right.
    compared = {record.case: "right" for record in ran if record.check == "numerics"}
    compared |= {each.case: "short" for each in ran if each.check in ANSWERS and each.outcome not in _RIGHT}
    infos = [(info, f"{info.suite}/{info.id}") for info in run.header.cases]
    counted = [(info, cases[name], compared[name]) for info, name in infos if name in compared]
    batches = _counts((kind, count) for info, _, count in counted for kind in _kinds(info))
    return AuditedLayers(
        backend,
        batches=batches,
        forms=_counts((form, count) for _, case, count in counted for form in _forms_of(case, layers)),
        checks=checks,
        unexamined={
            **{each.check: _reason(each) for each in reversed(records) if each.check not in checks and _is_own(each)},
            **{kind: reason for kind, reason in _refused_kinds(own) if kind not in batches},
        },
        faults=tuple(_faults(backend, cases, found)),
    )


def _is_own(record: Record) -> bool:
    """Return whether a reason is of this backend or run, not of every layer of the kind."""
    return not (isinstance(record, Unsupported) and record.by == "attncheck")


def _refused_kinds(records: Iterable[Record]) -> Iterator[tuple[str, str]]:
    """Yield the kinds of batch that a backend refuses, with its reason."""
    reasons = (reason for record in records if isinstance(record, Unsupported) for reason in record.reasons)
    for reason in reasons:
        yield from ((kind, reason) for kind, word in _REFUSED_BY.items() if reason.startswith(f"{word} "))


def _forms_of(case: CountedCase, layers: str) -> Iterator[str]:
    """Yield the forms of a case. An indexer has no head size of the layer, but its own ``index_head_dim``."""
    for need in case.needs:
        key = need.partition("=")[0]
        if key in FORMS[layers] and not (key == "head_size" and "path=indexer" in case.needs):
            yield need


def _counts(found: Iterable[tuple[str, str]]) -> Counts:
    counts: Counts = {}
    for what, count in found:
        counts.setdefault(what, {"right": 0, "short": 0})[count] += 1
    return counts


def _kinds(case: CaseInfo) -> Iterator[str]:
    """Yield the kinds of batch of a case. With drafts or prefix caching, that alone is its kind, besides padding."""
    special = {
        DRAFTS: bool(case.keys.get("path.num_speculative_tokens")) or case.keys.get("path") == "tree",
        PREFIX_CACHING: case.keys.get("path.mamba_cache_mode") == "all",
    }
    if any(special.values()):
        yield from (kind for kind, holds in special.items() if holds)
    else:
        yield from (kind for key, kind in KINDS.items() if case.keys.get(key))
    if case.keys.get("batch is padded"):
        yield PADDING


def _faults(backend: str, cases: Mapping[str, CountedCase], found: RunFindings) -> Iterator[Fault]:
    """Yield each finding, once for each set of checks that found it in the same cases."""
    for finding in found.findings:
        if finding.backend != backend or isinstance(finding.example, XPassed):
            continue
        short = {(record.case, record.check) for record in finding.records if not _reason(record)}
        together: dict[tuple[str, ...], list[str]] = {}
        for case in finding.cases:
            checks = tuple(check for check in finding.checks if (case, check) in short)
            if case in cases and checks:
                together.setdefault(checks, []).append(case)
        for checks, own in together.items():
            yield Fault(finding.title, finding.is_expected, tuple(own), checks)


NOT_EXAMINED = "not examined"
_TITLES = {STATE: "Layers with a state", SPARSE: "Sparse attention"}
_LEGEND = (
    "A number counts cases. A case is right if its outputs and what it stores are. It counts for each kind of batch "
    "and each form that it has. So a fault of its prompts counts for its decodes, too. "
    "A case with drafts or prefix caching counts for these alone, and for padding."
)


def sections(run: Run, layers: str) -> Iterator[str]:
    """Yield the parts of an audit about a kind of ``layers``, in Markdown; nothing if the run has no backend of it."""
    members = audited_layers(run, layers)
    examined = [each for each in members if not each.reason]
    if not members:
        return
    yield f"### {_TITLES[layers]}"
    if examined:
        yield markup.escaped(_LEGEND)
        yield _table(examined, [*FORMS[layers], *BATCHES[layers]], lambda each: _forms(each) | _counted(each.batches))
        names = list(dict.fromkeys(check for each in examined for check in each.checks))
        yield _table(examined, names, lambda each: _counted(each.checks))
        yield _faults_table(examined)
    if unexamined := list(chain.from_iterable(map(_unexamined, members))):
        yield "Not examined here:"
        yield reasons_table("backend", unexamined)


def own_name(backend: str) -> str:
    """Return the name within its family of backends."""
    return backend.partition(":")[2] or backend


def _table(
    members: Sequence[AuditedLayers], columns: Sequence[str], cells: Callable[[AuditedLayers], Mapping[str, str]]
) -> str:
    found = [(markup.code_cell(own_name(each.backend)), cells(each)) for each in members]
    rows = [[name, *(own.get(column, NOT_EXAMINED) for column in columns)] for name, own in found]
    return markup.table(["backend", *columns], rows)


def _counted(counts: Counts) -> dict[str, str]:
    return {what: _words(count["right"], sum(count.values())) for what, count in counts.items()}


def _words(right: int, examined: int) -> str:
    return f"right ({right})" if right == examined else f"{right} of {examined} right"


def _forms(member: AuditedLayers) -> dict[str, str]:
    values: dict[str, list[str]] = {}
    for form, words in sorted(_counted(member.forms).items()):
        key, _, value = form.partition("=")
        values.setdefault(key, []).append(f"{markup.escaped(value)}: {words}")
    return {key: "; ".join(own) for key, own in values.items()}


def _faults_table(members: Sequence[AuditedLayers]) -> str:
    rows = [
        [
            markup.code_cell(own_name(each.backend)),
            ", ".join(map(markup.code_cell, fault.cases)),
            ", ".join(fault.checks),
            markup.escaped(fault.words),
            "yes" if fault.is_known else "no",
        ]
        for each in members
        for fault in each.faults
    ]
    return markup.table(["backend", "case", "checks", "what is wrong", "known"], rows) if rows else ""


def _unexamined(member: AuditedLayers) -> Iterator[tuple[str, str, str]]:
    whole = [("", member.reason)] if member.reason else []
    for check, reason in (*whole, *member.unexamined.items()):
        yield member.backend, check, reason


def reasons_table(heading: str, found: Iterable[tuple[str, str, str]]) -> str:
    """Return a row for each reason, with its backends. ``found``: backend, what of it or "", and reason."""
    reasons: dict[str, list[str]] = {}
    for backend, what, reason in found:
        own = own_name(backend)
        who = f"{markup.code_cell(own)} ({what})" if what else markup.code_cell(own)
        reasons.setdefault(reason.replace(own, "it"), []).append(who)
    return markup.table([heading, "reason"], [[", ".join(who), markup.escaped(why)] for why, who in reasons.items()])
