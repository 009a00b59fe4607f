"""An observed engine as records of a run file, with its findings grouped by what caused them.

A kind of traffic is a case of the suite ``engine``, and each kind of comparison is a check. One bad block makes many
rows wrong, in several layers and steps: they are one group. Loads no vLLM.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, get_args

from attncheck.errors import BackendUnavailableError
from attncheck.harness.checks.findings import Broken, Holds, NotExamined
from attncheck.harness.driver.observation import Raised
from attncheck.harness.engine.events import CheckKind, EngineFacts, EngineFinding, ObserverResult
from attncheck.harness.run.outcomes import BackendDescription, Circumstances, RecordedFinding, record_of
from attncheck.reports.analysis.phrases import budgets, plural
from attncheck.reports.analysis.repro import ENGINE_OPTION, FIRST_STEP
from attncheck.reports.run_file.causes import without_figures
from attncheck.reports.run_file.header import BackendInfo, CaseInfo, Environment, RunHeader, SuiteInfo
from attncheck.reports.run_file.records import BUDGET_SHARE, ENGINE
from attncheck.reports.run_file.store import now

if TYPE_CHECKING:
    from attncheck.reports.run_file.records import Record

KINDS: tuple[CheckKind, ...] = get_args(CheckKind)

NOUNS: Mapping[CheckKind, str] = {
    "output": "output row",
    "token": "token",
    "position": "position",
    "prefix_hit": "mapped block",
    "count": "token count",
    "write": "page",
}
"""What is compared, in words."""

_WRONG: Mapping[CheckKind, str] = {
    "output": "an output row is wrong, and no reading that was tried gives it",
    "token": "the model is given a token that is not the next of its request",
    "position": "the model is given a position that is not that of its token",
    "prefix_hit": "a prefix hit maps a block that holds other tokens",
    "count": "the scheduler counts other tokens as computed than were computed",
    "write": "a page lacks keys or values that its step should have written",
}
"""What a finding states if no cause is known."""

STOPPED = "attncheck itself failed, and stopped watching the engine: "
"""Begins the reason of checks that a failure of attncheck left without a verdict."""

SHOWN_GROUPS = 10
"""Groups that a record describes; further ones are counted."""


@dataclass(frozen=True)
class EngineCase:
    """Requests that an engine serves, as a case of the suite ``engine``.

    ``options``: the options of ``attncheck engine`` that repeat it, without dashes; empty for requests of others.
    ``due``: the checks that its requests cause. ``lacks``: why the engine did not do what the case is for, or "".
    """

    id: str
    description: str
    options: Mapping[str, int | str] = field(default_factory=dict)
    due: tuple[CheckKind, ...] = KINDS
    lacks: str = ""
    suite: str = ENGINE

    @property
    def hash(self) -> str:
        """12 hex digits over its options."""
        text = json.dumps([self.id, dict(self.options)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def info(self, result: ObserverResult) -> CaseInfo:
        """Return the case as the header of a run file describes it."""
        engine = result.engine
        sizes = ", ".join(map(str, dict.fromkeys(engine.block_sizes)))
        blocks = f"blocks of {sizes} tokens, runner {_short(engine.runner)}"
        shape = f"{engine.dtype}, KV cache {engine.kv_cache_dtype}, {blocks}" if engine.dtype else ""
        return CaseInfo(
            suite=self.suite,
            id=self.id,
            shape=shape,
            description=self.description,
            keys={f"{ENGINE_OPTION}{name}": value for name, value in self.options.items()},
            checks=self.checks(result),
            backends=(backend_of(engine).name,),
        )

    def checks(self, result: ObserverResult) -> tuple[CheckKind, ...]:
        """Return the checks that have a record: those that are due, and those that compared or found something."""
        found = {finding.kind for finding in result.findings}
        return tuple(kind for kind in KINDS if kind in self.due or result.checks.get(kind) or kind in found)


def backend_of(engine: EngineFacts) -> BackendDescription:
    """Return the classes that served as a backend: ``vllm:CPU_ATTN``, or several names joined by ``+``.

    Without a class, since nothing was served, it is called ``vllm``.
    """
    classes = "+".join(engine.backends)
    name = f"vllm:{classes}" if classes else "vllm"
    facts = {"runner": _short(engine.runner), "dtype": engine.dtype, "kv_cache_dtype": engine.kv_cache_dtype}
    info = BackendInfo(name=name, ref=name, version=engine.vllm_version, conventions=dict(facts))
    return BackendDescription(info=info)


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def records_of(
    case: EngineCase,
    result: ObserverResult,
    circumstances: Circumstances,
    duration_s: float = 0.0,
    *,
    raised: Raised | None = None,
) -> tuple["Record", ...]:
    """Return a record of each check of ``case``.

    A check without a comparison is not passed: its record has the reason. ``duration_s``: time that serving took, which
    goes to the first record. ``raised``: what ended the engine, if something did.
    """
    backend = backend_of(result.engine)
    groups = grouped(result.findings)
    records: list[Record] = []
    for kind in case.checks(result):
        finding = _finding_of(kind, case, result, groups, raised)
        records.append(record_of(circumstances, case, backend, kind, finding, 0.0 if records else duration_s))
    return tuple(records)


def _finding_of(
    kind: CheckKind,
    case: EngineCase,
    result: ObserverResult,
    groups: Sequence["FindingGroup"],
    raised: Raised | None,
) -> RecordedFinding:
    own = [group for group in groups if any(finding.kind == kind for finding in group.findings)]
    if own:
        return _broken(kind, result, own)
    if result.failure is not None:
        return NotExamined((f"{STOPPED}{result.failure}",), by="attncheck")
    if raised is not None:
        return raised
    if case.lacks:
        return BackendUnavailableError(case.id, (case.lacks,))
    left_out = tuple(f"{reason} ({count})" for reason, count in result.not_followed.items())
    if not result.checks.get(kind):
        nothing = f"no {NOUNS[kind]} was compared"
        return NotExamined((nothing, *(f"not followed: {each}" for each in left_out)), by="attncheck")
    notes = (f"{plural(result.checks[kind], NOUNS[kind])} compared in {plural(result.steps, 'step')}",)
    return Holds(_figures(kind, result), (*notes, *(f"not followed: {each}" for each in left_out)))


def _figures(kind: CheckKind, result: ObserverResult) -> dict[str, float | int]:
    share = {BUDGET_SHARE: result.worst_share} if kind == "output" else {}
    counts = {"compared": result.checks.get(kind, 0), "steps": result.steps}
    return share | counts | {"not_followed": sum(result.not_followed.values())}


def _broken(kind: CheckKind, result: ObserverResult, groups: Sequence["FindingGroup"]) -> Broken:
    """Return what is wrong. ``groups``: those with a finding of this kind, the first step first."""
    own = [finding for group in groups for finding in group.findings if finding.kind == kind]
    first = min(own, key=_when)
    wrong = sum(finding.num_rows for finding in own)
    what = f"{wrong} of {plural(result.checks.get(kind, 0), NOUNS[kind])} {'is' if wrong == 1 else 'are'} wrong"
    if len(groups) > 1:
        what += f" in {len(groups)} ways"
    details = [line for group in groups[:SHOWN_GROUPS] for line in group.lines(first)]
    if len(groups) > SHOWN_GROUPS:
        details.append(f"{len(groups) - SHOWN_GROUPS} further ways are not described")
    if result.findings_left_out:
        details.append(f"{plural(result.findings_left_out, 'finding')} of the engine's run were not kept")
    details += [f"not followed: {reason} ({count})" for reason, count in result.not_followed.items()]
    causes = [finding.cause for finding in groups[0].findings if finding.cause]
    return Broken(
        summary=f"{what}, the first is in step {first.step}: {_place(first)}",
        figures=_figures(kind, result) | {"wrong": wrong, "findings": len(groups), FIRST_STEP: first.step},
        meaning=causes[0] if causes else None,
        details=tuple(details),
        finding=groups[0].words,
    )


@dataclass(frozen=True)
class FindingGroup:
    """Findings of one bad block, or of one kind and cause; the first step first."""

    findings: tuple[EngineFinding, ...]

    @property
    def words(self) -> str:
        """The cause without figures, or what is wrong if no cause is known."""
        causes = [finding.cause for finding in self.findings if finding.cause]
        return without_figures(causes[0]) if causes else _WRONG[self.findings[0].kind]

    def lines(self, shown: EngineFinding) -> list[str]:
        """Return where and when it was found, a line for each kind, and then its causes and notes.

        ``shown``: a finding whose place the summary states already.
        """
        lines = []
        for kind in dict.fromkeys(finding.kind for finding in self.findings):
            own = [finding for finding in self.findings if finding.kind == kind]
            shares = [finding.budget_share for finding in own if finding.budget_share is not None]
            worst = f", the largest error is {_size(max(shares))}" if shares else ""
            first = "" if own[0] is shown else f"; first in step {own[0].step}: {_place(own[0])}"
            lines.append(f"{_extent(kind, own)}{worst}{first}")
        causes = dict.fromkeys(finding.cause for finding in self.findings if finding.cause)
        notes = dict.fromkeys(finding.note for finding in self.findings if finding.note)
        lines += [f"  likely cause: {cause}" for cause in list(causes)[:_SHOWN_CAUSES]]
        lines += [f"  {note}" for note in list(notes)[:_SHOWN_CAUSES]]
        return lines


_SHOWN_CAUSES = 3
"""Causes and notes of a group that are shown; they differ in figures."""


def grouped(findings: Iterable[EngineFinding]) -> tuple[FindingGroup, ...]:
    """Return the findings by block, and those without a block by kind and cause; the first step first."""
    groups: dict[tuple[object, ...], list[EngineFinding]] = {}
    for finding in sorted(findings, key=_when):
        key: tuple[object, ...] = ("block", finding.group, finding.block_id)
        if finding.block_id is None:
            key = (finding.kind, without_figures(finding.cause or ""))
        groups.setdefault(key, []).append(finding)
    return tuple(FindingGroup(tuple(members)) for members in groups.values())


def _size(share: float) -> str:
    return "NaN or infinite" if math.isinf(share) else f"{budgets(share)} times the allowed error"


def _when(finding: EngineFinding) -> int:
    return finding.step


def _place(finding: EngineFinding) -> str:
    """Return where a finding is: request, position, layer and block."""
    place = f"request {finding.request_id}, position {finding.position}"
    if finding.layer:
        place += f", layer {finding.layer}"
    if finding.block_id is not None:
        number = "" if finding.block_index is None else f", number {finding.block_index} of its table"
        group = f" of KV-cache group {finding.group}" if finding.group else ""
        place += f", block {finding.block_id}{group}{number}"
    return place


def _extent(kind: CheckKind, findings: Sequence[EngineFinding]) -> str:
    """Return how much is wrong: ``12 output rows of 2 layers and 1 request in steps 12 to 19``."""
    layers = len({finding.layer for finding in findings if finding.layer})
    requests = len({finding.request_id for finding in findings})
    steps = [finding.step for finding in findings]
    when = f"step {steps[0]}" if steps[0] == steps[-1] else f"steps {steps[0]} to {steps[-1]}"
    of_layers = f"{plural(layers, 'layer')} and " if layers else ""
    rows = sum(finding.num_rows for finding in findings)
    return f"{plural(rows, NOUNS[kind])} of {of_layers}{plural(requests, 'request')} in {when}"


def header_of(
    cases: Sequence[CaseInfo],
    backends: Sequence[BackendInfo],
    environment: Environment,
    seed: int = 0,
    command: Sequence[str] = (),
) -> RunHeader:
    """Return the header of a run of ``attncheck engine``."""
    return RunHeader(
        started=now(),
        environment=environment,
        suites=(SuiteInfo(name=ENGINE, ref=ENGINE, cases=len(cases)),),
        cases=tuple(cases),
        checks=tuple(kind for kind in KINDS if any(kind in case.checks for case in cases)),
        device=environment.device,
        seed=seed,
        backends=tuple({backend.name: backend for backend in backends}.values()),
        command=tuple(command),
    )
