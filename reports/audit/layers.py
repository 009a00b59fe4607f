"""What an audit has of layers with a state and of sparse attention: kinds of batch, forms, checks, and what fails.

Numbers count cases that ran. A backend of which no case ran has a reason instead.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from attncheck.reports.analysis.measured import KINDS
from attncheck.reports.analysis.support import CountedCase
from attncheck.reports.analysis.verdicts import RunFindings, run_findings
from attncheck.reports.markdown import markup
from attncheck.reports.run_file.causes import BACKEND_TIME
from attncheck.reports.run_file.header import CaseInfo
from attncheck.reports.run_file.records import EXAMINED, Record, Unavailable, Unsupported, XPassed, is_out_of_time
from attncheck.reports.run_file.store import Run

LAYERS = "layers"
"""The column of a survey that names the kind of layers."""

STATE, SPARSE = "state", "sparse"
LAYER_KINDS = (STATE, SPARSE)
"""Layers with a state, and layers whose keys an indexer chooses: values of :data:`LAYERS`."""

_NEEDS: Mapping[str, frozenset[str]] = {
    STATE: frozenset({"path=recurrence"}),
    SPARSE: frozenset({"sparse", "path=indexer"}),
}
"""A case of such layers needs one of these."""

DRAFTS, PREFIX_CACHING, PADDING = "drafts", "prefix caching", "padding"

BATCHES: Mapping[str, tuple[str, ...]] = {
    STATE: (*KINDS.values(), DRAFTS, PREFIX_CACHING, PADDING),
    SPARSE: (*KINDS.values(), PADDING),
}
"""The kinds of batch of cases of each."""

FORMS: Mapping[str, tuple[str, ...]] = {
    STATE: ("rule", "dtype", "state_dtype", "head_size"),
    SPARSE: ("path", "dtype", "head_size"),
}
"""The forms of cases of each."""


@dataclass
class Examined:
    """The number of examined cases that are right, and of those that are wrong."""

    right: int = 0
    wrong: int = 0

    def add(self, is_right: bool) -> None:
        """Count one more case."""
        self.right += is_right
        self.wrong += not is_right


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

    ``batches``, ``forms``: cases by kind of batch and by form (``dtype=float16``), judged by their outputs and stored
    states. ``checks``: cases by check. ``unexamined``: the reason by check, for those that ran in no case.
    """

    backend: str
    reason: str = ""
    batches: dict[str, Examined] = field(default_factory=dict)
    forms: dict[str, Examined] = field(default_factory=dict)
    checks: dict[str, Examined] = field(default_factory=dict)
    unexamined: dict[str, str] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()


def audited_layers(run: Run, layers: str) -> tuple[AuditedLayers, ...]:
    """Return the backends of a kind of ``layers``: those of the survey, and those with an examined case of it."""
    found = run_findings(run.records, run.header)
    surveyed = {each.name: each.reason for each in run.header.surveyed if layers in each.declared.get(LAYERS, ())}
    own: dict[str, dict[str, CountedCase]] = {}
    for (backend, case), counted in found.cases.items():
        if counted.is_declared and _NEEDS[layers].intersection(counted.needs):
            own.setdefault(backend, {})[case] = counted
    return tuple(
        _examined(name, layers, own[name], run, found)
        if name in own
        else AuditedLayers(name, surveyed[name] or _why_unexamined(name, layers, run))
        for name in dict.fromkeys([*surveyed, *own])
    )


def _why_unexamined(backend: str, layers: str, run: Run) -> str:
    own = (record for record in run.records if record.backend == backend)
    reasons = (_reason(record) for record in own if _NEEDS[layers].intersection(record.needs))
    return next(reasons, "no case of the run has such a layer")


def _reason(record: Record) -> str:
    return record.reasons[0] if isinstance(record, Unsupported | Unavailable) else f"{BACKEND_TIME} was used up"


def _examined(
    backend: str, layers: str, cases: Mapping[str, CountedCase], run: Run, found: RunFindings
) -> AuditedLayers:
    infos = {f"{suite}/{case}": info for (suite, case), info in run.header.case_by_name.items()}
    batches = {kind: Examined() for kind in BATCHES[layers]}
    forms: dict[str, Examined] = {}
    for case, counted in cases.items():
        is_right = counted.count == "right"
        for kind in _kinds(infos[case], layers):
            batches[kind].add(is_right)
        for form in (need for need in counted.needs if need.partition("=")[0] in FORMS[layers]):
            forms.setdefault(form, Examined()).add(is_right)
    outcomes: dict[tuple[str, str], set[str]] = {}
    unexamined: dict[str, str] = {}
    for record in run.records:
        if record.backend != backend or record.case not in cases:
            continue
        if record.outcome in EXAMINED and not is_out_of_time(record):
            outcomes.setdefault((record.check, record.case), set()).add(record.outcome)
        else:
            unexamined.setdefault(record.check, _reason(record))
    checks: dict[str, Examined] = {}
    for (check, _), became in outcomes.items():
        checks.setdefault(check, Examined()).add(became <= {"passed", "xpassed"})
    unexamined = {check: reason for check, reason in unexamined.items() if check not in checks}
    return AuditedLayers(backend, "", batches, forms, checks, unexamined, tuple(_faults(backend, cases, found)))


def _kinds(case: CaseInfo, layers: str) -> Iterator[str]:
    """Yield the kinds of batch of a case. With drafts or prefix caching, that alone is its kind, besides padding."""
    special = {
        DRAFTS: bool(case.keys.get("path.num_speculative_tokens")),
        PREFIX_CACHING: case.keys.get("path.mamba_cache_mode") == "all",
    }
    if layers == STATE and any(special.values()):
        yield from (kind for kind, holds in special.items() if holds)
    else:
        yield from (kind for key, kind in KINDS.items() if case.keys.get(key))
    if case.keys.get("batch is padded"):
        yield PADDING


def _faults(backend: str, cases: Mapping[str, CountedCase], found: RunFindings) -> Iterator[Fault]:
    for finding in found.findings:
        own = tuple(case for case in finding.cases if case in cases)
        if finding.backend == backend and own and not isinstance(finding.example, XPassed):
            yield Fault(finding.title, finding.is_expected, own, finding.checks)


NOT_EXAMINED = "not examined"
_TITLES = {STATE: "Layers with a state", SPARSE: "Sparse attention"}
_LEGEND = (
    "A number counts cases. A case counts for each kind of batch and each form that it has, and is right if its outputs "
    "and stored states are. So the second of two kinds may be at fault where the first is not right."
)
_OF_STATE = "A case with drafts or prefix caching counts for these alone, and for padding."


def sections(run: Run, layers: str) -> Iterator[str]:
    """Yield the parts of an audit about a kind of ``layers``, in Markdown; nothing if the run has no backend of it."""
    members = audited_layers(run, layers)
    examined = [each for each in members if not each.reason]
    if not members:
        return
    yield f"### {_TITLES[layers]}"
    if examined:
        yield markup.escaped(f"{_LEGEND} {_OF_STATE}" if layers == STATE else _LEGEND)
        yield _table(examined, [*FORMS[layers], *BATCHES[layers]], lambda each: _forms(each) | _counted(each.batches))
        names = list(dict.fromkeys(check for each in examined for check in each.checks))
        yield _table(examined, names, lambda each: _counted(each.checks))
        yield _faults_table(examined)
    if reasons := _reasons(members):
        yield "Not examined here:"
        yield markup.table(["backend", "reason"], reasons)


def own_name(backend: str) -> str:
    """Return the name within its family of backends."""
    return backend.partition(":")[2] or backend


def _table(
    members: Sequence[AuditedLayers], columns: Sequence[str], cells: Callable[[AuditedLayers], Mapping[str, str]]
) -> str:
    found = [(markup.code_cell(own_name(each.backend)), cells(each)) for each in members]
    rows = [[name, *(own.get(column, NOT_EXAMINED) for column in columns)] for name, own in found]
    return markup.table(["backend", *columns], rows)


def _counted(examined: Mapping[str, Examined]) -> dict[str, str]:
    return {what: _words(count) for what, count in examined.items() if count.right + count.wrong}


def _words(count: Examined) -> str:
    return f"{count.right} of {count.right + count.wrong} right" if count.wrong else f"right ({count.right})"


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
            markup.escaped(f"known: {fault.words}" if fault.is_known else fault.words),
        ]
        for each in members
        for fault in each.faults
    ]
    return markup.table(["backend", "case", "checks", "what is wrong"], rows) if rows else ""


def _reasons(members: Sequence[AuditedLayers]) -> list[list[str]]:
    """Return a row for each reason, with the backends, or the checks of backends, that were not examined for it."""
    reasons: dict[str, list[str]] = {}
    for each in members:
        own = own_name(each.backend)
        whole = [("", each.reason)] if each.reason else []
        for check, reason in (*whole, *each.unexamined.items()):
            who = markup.code_cell(own) + (f" ({check})" if check else "")
            reasons.setdefault(reason.replace(own, "it"), []).append(who)
    return [[", ".join(who), markup.escaped(reason)] for reason, who in reasons.items()]
