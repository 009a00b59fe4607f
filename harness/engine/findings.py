"""An observed engine as records of a run file, with its findings grouped by what caused them.

A kind of traffic is a case of the suite ``engine``, and each kind of comparison is a check. One bad block makes many
rows wrong, in several layers and steps: they are one group. Loads no vLLM.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import get_args

from attncheck.errors import BackendUnavailableError
from attncheck.harness.checks.findings import Broken, Holds, NotExamined
from attncheck.harness.driver.observation import Raised
from attncheck.harness.engine.events import (
    FOLLOW_OPTION,
    OTHER_CACHES,
    CheckKind,
    EngineFinding,
    ObserverResult,
)
from attncheck.harness.run.outcomes import (
    BackendDescription,
    Circumstances,
    ProcessEnd,
    RecordedFinding,
    ended,
    record_of,
)
from attncheck.reports.analysis.phrases import budgets, plural
from attncheck.reports.analysis.repro import FIRST_STEP
from attncheck.reports.run_file.causes import without_figures
from attncheck.reports.run_file.header import CaseInfo, Environment, RunHeader, SuiteInfo
from attncheck.reports.run_file.records import BUDGET_SHARE, ENGINE, Failed, Passed, Record
from attncheck.reports.run_file.store import Run, now
from attncheck.reports.run_file.timings import RunFileValue

KINDS: tuple[CheckKind, ...] = get_args(CheckKind)

_WORDS: Mapping[CheckKind, tuple[str, str]] = {
    "output": ("output row", "an output row is wrong, and its cause is not known"),
    "token": ("token", "the model is given a token that is not the next of its request"),
    "position": ("position", "the model is given a position that is not that of its token"),
    "prefix_hit": ("mapped block", "a prefix hit maps a block that holds other tokens"),
    "count": ("token count", "the scheduler counts other tokens as computed than were computed"),
    "write": ("page", "a page lacks keys or values that its step should have written"),
}
"""What is compared, and what is wrong if no cause is known."""

_NOT_SOUGHT = "an output row is wrong, and its cause was not sought"
"""What is wrong in findings behind those for which causes were tried."""

STOPPED = "attncheck itself failed, and stopped watching the engine: "
"""Begins the reason of checks that a failure of attncheck left without a verdict."""

_SHOWN_GROUPS, _SHOWN = 10, 3
"""Groups that a record describes, and their causes and notes; further ones are left out."""


class EngineCase(CaseInfo):
    """Requests that an engine serves, as a case of the suite ``engine``.

    ``checks``: those that its requests cause. ``keys``: what repeats it; empty for requests of others.
    """

    suite: str = ENGINE
    shape: str = ""

    @property
    def hash(self) -> str:
        """12 hex digits over its keys."""
        text = json.dumps([self.id, self.keys], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


class EngineRecords(RunFileValue):
    """Cases of engines, as the header of a run file states them, with their records and the run's errors."""

    header: RunHeader
    records: tuple[Record, ...]
    errors: tuple[str, ...] = ()


def records_of(
    case: EngineCase,
    result: ObserverResult,
    environment: Environment,
    *,
    seed: int = 0,
    duration_s: float = 0.0,
    unmet: str = "",
    ended_by: Raised | ProcessEnd | None = None,
) -> EngineRecords:
    """Return a record of each check of ``case``, and of each other one that compared or found something.

    A check without a comparison is not passed: its record has the reason. ``duration_s``: time that serving took, which
    goes to the first record. ``unmet``: why the engine did not do what the case is for, or "". ``ended_by``: the
    exception that ended the engine, or the end of its process, which left no result.
    """
    circumstances = Circumstances(seed, environment.digest, environment.attncheck)
    backend = BackendDescription(info=result.engine.backend)
    groups = grouped(result.findings)
    records: list[Record] = []
    for kind in KINDS:
        if kind not in case.checks and not result.checks.get(kind) and not _of_kind(kind, result.findings):
            continue
        if isinstance(ended_by, ProcessEnd):
            records.append(ended(circumstances, case, backend, kind, "serving", ended_by))
            continue
        finding = _finding_of(kind, result, groups, unmet, ended_by)
        records.append(record_of(circumstances, case, backend, kind, finding, 0.0 if records else duration_s))
    checks = tuple(record.check for record in records)
    described = {"shape": result.engine.shape, "checks": checks, "backends": (backend.name,)}
    header = RunHeader(
        started=now(),
        environment=environment,
        suites=(SuiteInfo(name=ENGINE, ref=ENGINE, cases=1),),
        cases=(case.model_copy(update=described),),
        checks=checks,
        device=environment.device,
        seed=seed,
        backends=(backend.info,),
    )
    errors = () if result.failure is None else (f"{case.suite}/{case.id}: {STOPPED}{result.failure}",)
    return EngineRecords(header=header, records=tuple(records), errors=errors)


def joined(
    runs: Sequence[EngineRecords | Run], started: str, command: Sequence[str] = (), notes: Sequence[str] = ()
) -> EngineRecords:
    """Return the cases of all ``runs`` as one run; a later case replaces an earlier one of the same id.

    ``started``: an ISO 8601 time. ``command``: the words typed. ``notes``: what the report states before its counts.
    """
    first = runs[0].header
    cases = {case.id: case for run in runs for case in run.header.cases}
    records = {record.key: record for run in runs for record in run.records}
    header = {
        "started": started,
        "suites": (SuiteInfo(name=ENGINE, ref=ENGINE, cases=len(cases)),),
        "cases": tuple(cases.values()),
        "checks": tuple(kind for kind in KINDS if any(kind in case.checks for case in cases.values())),
        "backends": tuple({each.name: each for run in runs for each in run.header.backends}.values()),
        "command": tuple(command),
        "notes": (*notes, *_counted(records.values())),
    }
    errors = dict.fromkeys(error for run in runs for error in run.errors)
    return EngineRecords(header=first.model_copy(update=header), records=tuple(records.values()), errors=tuple(errors))


def _counted(records: Iterable[Record]) -> list[str]:
    """Return what the checks that have a verdict compared, and what they left out, a line each."""
    judged = [record for record in records if isinstance(record, Passed | Failed)]
    lines = []
    for figure in ("compared", "not_compared", "rows_not_followed"):
        counts: Counter[str] = Counter()
        for record in judged:
            counts[record.check] += int(record.figures[figure])
        shown = ", ".join(f"{check} {count}" for check, count in counts.items() if count)
        if shown:
            lines.append(f"{figure.replace('_', ' ')}: {shown}")
    return lines


def _finding_of(
    kind: CheckKind, result: ObserverResult, groups: Sequence["FindingGroup"], unmet: str, raised: Raised | None
) -> RecordedFinding:
    """Return what the record of a check states. A finding comes before all that keeps a check from passing."""
    compared = result.checks.get(kind, 0)
    not_compared = {reason: count for (check, reason), count in result.not_compared.items() if check == kind}
    figures: dict[str, float | int] = {
        "compared": compared,
        "not_compared": sum(not_compared.values()),
        "steps": result.steps,
        "rows_not_followed": sum(result.not_followed.values()),
    }
    if kind == "output":
        figures[BUDGET_SHARE] = result.worst_share
    notes = [f"not followed: {reason} ({plural(count, 'row')})" for reason, count in result.not_followed.items()]
    notes += [f"not compared: {reason} ({count})" for reason, count in not_compared.items()]
    own = [group for group in groups if _of_kind(kind, group.findings)]
    if own:
        if result.findings_left_out:
            notes.append(f"{plural(result.findings_left_out, 'finding')} of the engine's run were not kept")
        return _broken(kind, own, figures, notes)
    if result.failure is not None:
        return NotExamined((f"{STOPPED}{result.failure}",), by="attncheck")
    if raised is not None:
        return raised
    if unmet:
        return BackendUnavailableError(ENGINE, (unmet,))
    if not compared:
        return NotExamined((f"no {_WORDS[kind][0]} was compared", *notes), by="attncheck")
    done = f"{plural(compared, _WORDS[kind][0])} compared in {plural(result.steps, 'step')}"
    of_attention = sum(count for reason, count in not_compared.items() if not reason.startswith(OTHER_CACHES))
    if of_attention > compared or _is_mostly_lost(result):
        return NotExamined((f"most was left out: only {done}", *notes), by="attncheck")
    return Holds(figures, (done, *notes))


def _is_mostly_lost(result: ObserverResult) -> bool:
    """Return whether most rows could not be followed, of those that the user wants to be followed."""
    chosen = sum(count for reason, count in result.not_followed.items() if reason.startswith(FOLLOW_OPTION))
    lost = sum(result.not_followed.values()) - chosen
    return 2 * lost > result.counts["rows"] - chosen


def _broken(
    kind: CheckKind, groups: Sequence["FindingGroup"], figures: Mapping[str, float | int], notes: Sequence[str]
) -> Broken:
    """Return what is wrong. ``groups``: those with a finding of this kind, the first step first."""
    first, *others = sorted(
        _of_kind(kind, (each for group in groups for each in group.findings)), key=attrgetter("step")
    )
    wrong = sum(finding.num_rows for finding in (first, *others))
    are = "is" if wrong == 1 else "are"
    ways = f" in {len(groups)} ways" if len(groups) > 1 else ""
    details = [line for group in groups[:_SHOWN_GROUPS] for line in group.lines(first)]
    if len(groups) > _SHOWN_GROUPS:
        details.append(f"{len(groups) - _SHOWN_GROUPS} further ways are not described")
    return Broken(
        summary=f"{wrong} of {plural(int(figures['compared']), _WORDS[kind][0])} {are} wrong{ways}, "
        f"the first is in step {first.step}: {_place(first)}",
        figures={**figures, "wrong": wrong, "findings": len(groups), FIRST_STEP: first.step},
        meaning=next(iter(groups[0].causes), None),
        details=(*details, *notes),
        finding=groups[0].words,
    )


@dataclass(frozen=True)
class FindingGroup:
    """Findings of one act in the engine; the first step first."""

    findings: tuple[EngineFinding, ...]

    @property
    def causes(self) -> tuple[str, ...]:
        """The causes that are known, each once."""
        return tuple(dict.fromkeys(finding.cause for finding in self.findings if finding.cause))

    @property
    def words(self) -> str:
        """The cause without figures, or what is wrong if no cause is known."""
        if self.causes:
            return without_figures(self.causes[0])
        return _WORDS[self.findings[0].kind][1] if self.findings[0].is_sought else _NOT_SOUGHT

    def lines(self, shown: EngineFinding) -> list[str]:
        """Return what is wrong, where and when, and then the causes and notes.

        ``shown``: a finding whose place the summary states already.
        """
        first, last = self.findings[0], self.findings[-1]
        rows: Counter[CheckKind] = Counter()
        for finding in self.findings:
            rows[finding.kind] += finding.num_rows
        what = " and ".join(plural(count, _WORDS[kind][0]) for kind, count in rows.items())
        layers = {finding.layer for finding in self.findings if finding.layer}
        requests = {finding.request_id for finding in self.findings}
        where = " and ".join(
            plural(len(names), noun) for names, noun in ((layers, "layer"), (requests, "request")) if names
        )
        when = f"step {first.step}" if first.step == last.step else f"steps {first.step} to {last.step}"
        place = "" if first is shown else f"; first: {_place(first)}"
        worst = max(finding.budget_share or 0.0 for finding in self.findings)
        size = "NaN or infinite" if math.isinf(worst) else f"{budgets(worst)} times the allowed error"
        error = f"; the largest error is {size}" if worst else ""
        causes = [f"  likely cause: {cause}" for cause in self.causes]
        notes = dict.fromkeys(f"  {finding.note}" for finding in self.findings if finding.note)
        return [f"{what} of {where} in {when}{place}{error}", *causes[:_SHOWN], *list(notes)[:_SHOWN]]


def grouped(findings: Iterable[EngineFinding]) -> tuple[FindingGroup, ...]:
    """Return the findings by what caused them, the first step first.

    Findings of one block at one place of a table belong together, and so do those without a block that have one kind
    and cause. An act on several blocks is one group: their first findings have the same step, kind and cause. Outputs
    whose cause was not sought are one group.
    """
    parts: dict[tuple[object, ...], list[EngineFinding]] = {}
    for finding in sorted(findings, key=attrgetter("step")):
        key: tuple[object, ...] = (finding.group, finding.block_id, finding.block_index)
        if finding.block_id is None:
            key = (finding.kind, finding.is_sought, without_figures(finding.cause or ""))
        parts.setdefault(key, []).append(finding)
    acts: dict[tuple[object, ...], list[EngineFinding]] = {}
    for part in parts.values():
        words = FindingGroup(tuple(part)).words
        acts.setdefault((part[0].step, part[0].kind, words), []).extend(part)
    return tuple(FindingGroup(tuple(sorted(act, key=attrgetter("step")))) for act in acts.values())


def _of_kind(kind: CheckKind, findings: Iterable[EngineFinding]) -> list[EngineFinding]:
    return [finding for finding in findings if finding.kind == kind]


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
