"""Statements of conformance: what a backend passes of a profile, in one file that others can check.

:func:`make_statement` compares the records of a run with the must-pass list of a profile. :func:`verify` repeats this
with the records in the statement, and runs no kernel. A digest detects a change of the file. It does not show that the
records were made honestly. Loads no torch.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field, ValidationError, model_validator

from attncheck.backends.declarations import needs_of
from attncheck.cases.keys import read_defaults, split_variant
from attncheck.cases.loader import load_suite
from attncheck.cases.model import Case
from attncheck.cases.profile import Must, Profile, load_profile
from attncheck.cases.yaml_tree import plain
from attncheck.errors import AttncheckError, QuestionError, readable
from attncheck.harness.run.expectations import Expectation
from attncheck.harness.run.selection import checks_of
from attncheck.reference.spec import DEFAULT_CHECKS
from attncheck.reports.analysis.phrases import what_happened
from attncheck.reports.run_file.graph_levels import CUDAGRAPH, GRAPH_LEVELS
from attncheck.reports.run_file.header import BackendInfo, Environment, SuiteInfo
from attncheck.reports.run_file.records import (
    Crashed,
    Errored,
    Failed,
    Record,
    TimedOut,
    Unavailable,
    Unsupported,
    XFailed,
    graph_of,
)
from attncheck.reports.run_file.store import Run
from attncheck.reports.run_file.timings import RunFileValue

PAGE_KEYS = frozenset({"block_size", "layout"})
"""Keys of a cache that a run may replace in a suite, so that it fits the pages of a backend."""

Verdict = Literal["conforms", "conforms with waivers", "does not conform"]
Standing = Literal["passed", "waived", "declared unsupported", "not examined", "missing"]
"""What the records show of a check; ``not examined``: attncheck cannot examine it for this case or backend."""


class ProfileInfo(RunFileValue):
    """A profile and its must-pass list: the number of entries, and the SHA-256 of all that defines them."""

    name: str
    version: int
    entries: int
    digest: str


class Missing(RunFileValue):
    """An entry of the must-pass list that does not hold, and why."""

    case: str
    check: str
    reason: str


class Judgement(RunFileValue):
    """What records show of a must-pass list: counts, the entries that do not hold, and the waivers that were used."""

    verdict: Verdict
    counts: dict[Standing, int]
    missing: tuple[Missing, ...]
    waivers: tuple[Expectation, ...]

    @model_validator(mode="after")
    def _check_dates(self) -> Self:
        for waiver in self.waivers:
            date.fromisoformat(waiver.until or "")
        return self


class Statement(RunFileValue):
    """What a backend passes of a profile. ``digest``: the SHA-256 of all other fields.

    ``day``: that of the statement, ``started``: the time of the run. ``records``: those of the must-pass list.
    """

    kind: Literal["statement"] = "statement"
    format: Literal[1] = 1
    judgement: Judgement
    profile: ProfileInfo
    backend: BackendInfo
    day: date
    started: str
    environment: Environment
    device: str
    seed: int
    suites: tuple[SuiteInfo, ...]
    digest: str = ""
    records: tuple[Record, ...] = Field(repr=False)

    @property
    def refs(self) -> dict[str, str]:
        """The references of the suites, by name."""
        return {suite.name: suite.ref for suite in self.suites}

    @property
    def content_digest(self) -> str:
        """The digest that the fields have."""
        return _digest(self.model_dump(mode="json", exclude={"digest"}))


def statement_schema() -> dict[str, Any]:
    """Return the JSON schema of a statement."""
    return Statement.model_json_schema()


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


# The must-pass list of a profile.


class Entry(NamedTuple):
    """A check of a case that the profile selects. ``case_hash``: of the case with the pages of the run.

    ``case_hash`` is empty if the case is left out with these pages, since it is invalid with them.
    """

    case: Case
    check: str
    must: Must
    case_hash: str


def must_pass(profile: Profile, refs: Mapping[str, str]) -> dict[tuple[str, str], Entry]:
    """Return the must-pass list by case key and check. ``refs``: references of suites with other pages, by name.

    The rules read the suites without other pages, so that the list is the same for all backends.
    """
    names = {rule.suite for rule in profile.rules}
    suites = {ref: load_suite(ref) for ref in names | {refs.get(name, name) for name in names}}
    chosen: dict[tuple[str, str], Entry] = {}
    for rule in profile.rules:
        hashes = {case.id: case.hash for case in suites[refs.get(rule.suite, rule.suite)]}
        for case in suites[rule.suite]:
            if rule.selects(needs_of(case.layer, case.cache, case.batch, frozenset())):
                for check in checks_of(case, DEFAULT_CHECKS if rule.checks is None else rule.checks):
                    entry = Entry(case, check, rule.must, hashes.get(case.id, ""))
                    chosen.setdefault((case.key, check), entry)
    return chosen


def profile_info(profile: Profile, entries: Mapping[tuple[str, str], Entry]) -> ProfileInfo:
    """Return what identifies a profile of the installed attncheck with its must-pass list."""
    listed = sorted([entry.case.key, entry.case.hash, entry.check, entry.must] for entry in entries.values())
    digest = _digest([profile.name, profile.version, profile.graph_level, listed])
    return ProfileInfo(name=profile.name, version=profile.version, entries=len(entries), digest=digest)


def _suites(profile: Profile, refs: Mapping[str, str]) -> tuple[SuiteInfo, ...]:
    """Return the suites of a profile as they are examined.

    Raises:
        QuestionError: a reference names another suite, or replaces more than the pages.
    """
    infos = []
    for name in dict.fromkeys(rule.suite for rule in profile.rules):
        ref = refs.get(name, name)
        built_in, braces = split_variant(ref)
        replaced = plain(read_defaults(braces, ref)) if braces else {}
        if built_in != name or not (set(replaced) <= {"cache"} and PAGE_KEYS.issuperset(replaced.get("cache", {}))):
            allowed = " and ".join(f"cache.{key}" for key in sorted(PAGE_KEYS))
            raise QuestionError(f"suite {ref}: a statement is about suite {name}, where only {allowed} may be replaced")
        suite = load_suite(ref)
        infos.append(SuiteInfo(name=name, ref=ref, cases=len(suite), digest=suite.hash))
    return tuple(infos)


# The verdict on records.


def judge(
    profile: Profile,
    entries: Mapping[tuple[str, str], Entry],
    records: Iterable[Record],
    waivers: Sequence[Expectation],
    day: date,
) -> Judgement:
    """Return what ``records`` show on ``day``; a waiver without an id or a date does not count."""
    valid = [each for each in waivers if each.id and each.until]
    found: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        found.setdefault((record.case, record.check), []).append(record)
    counts: Counter[Standing] = Counter()
    missing, used = list[Missing](), dict[Expectation, None]()
    for key, entry in entries.items():
        standing: Standing = "missing" if entry.case_hash else "not examined"
        reason = "no record"
        for record in found.get(key, ()):
            standing, reason = _standing(profile, entry, record)
            waiver = _waiver(record, valid, day) if reason else None
            if waiver is not None:
                used[waiver] = None
                standing = "waived"
            if standing == "missing":  # whatever another round shows
                break
        counts[standing] += 1
        if standing == "missing":
            missing.append(Missing(case=entry.case.key, check=entry.check, reason=reason))
    verdict: Verdict = "does not conform" if missing else "conforms with waivers" if used else "conforms"
    return Judgement(verdict=verdict, counts=dict(counts), missing=tuple(missing), waivers=tuple(used))


def _waiver(record: Record, waivers: Iterable[Expectation], day: date) -> Expectation | None:
    if not isinstance(record, Failed | Errored | Crashed | TimedOut | XFailed):
        return None
    return next((waiver for waiver in waivers if waiver.excuses(record, day)), None)


def _standing(profile: Profile, entry: Entry, record: Record) -> tuple[Standing, str]:
    """Return the standing of an entry by one record, without waivers, and if it is missing, why."""
    if record.case_hash != entry.case_hash:
        return "missing", "the record is about another version of the case"
    if isinstance(record, Unsupported) and entry.must == "pass_if_declared":
        return ("declared unsupported" if record.by == "backend" else "not examined"), ""
    if isinstance(record, Unsupported | Unavailable):
        return "missing", f"{record.outcome}: {'; '.join(record.reasons)}"
    if isinstance(record, XFailed):
        return "missing", f"{record.underlying}: {record.summary}; expected, but no valid waiver applies"
    if isinstance(record, Failed | Errored | Crashed | TimedOut):
        return "missing", f"{record.outcome}: {what_happened(record)}"
    short = _level_reason(profile, record) if entry.check == CUDAGRAPH and entry.must == "pass" else ""
    return ("missing" if short else "passed"), short


def _level_reason(profile: Profile, record: Record) -> str:
    """Return why the CUDA-graph level of a record is too low for the profile; empty if it is not."""
    levels, needed = graph_of(record), profile.graph_level
    if needed is None:
        return ""
    found = (levels.declared, levels.measured) if levels is not None else (None, None)
    enough = GRAPH_LEVELS[GRAPH_LEVELS.index(needed) :]
    if all(level in enough for level in found):
        return ""
    declared, measured = (level or "none" for level in found)
    return f"graph level {needed} is needed; declared is {declared}, measured {measured}"


def make_statement(run: Run, profile: Profile, waivers: Sequence[Expectation], day: date) -> Statement:
    """Return the statement that the records of ``run`` allow on ``day``.

    Raises:
        QuestionError: the run is about several backends or none, or about changed suites.
    """
    header = run.header
    if len(header.backends) != 1:
        names = ", ".join(each.name for each in header.backends) or "none"
        raise QuestionError(f"{run.path} has the backends {names}; a statement is about a run of one backend")
    named = {rule.suite for rule in profile.rules}
    suites = _suites(profile, {suite.name: suite.ref for suite in header.suites if suite.name in named})
    entries = must_pass(profile, {suite.name: suite.ref for suite in suites})
    records = tuple(record for record in run.records if (record.case, record.check) in entries)
    statement = Statement(
        judgement=judge(profile, entries, records, waivers, day),
        profile=profile_info(profile, entries),
        backend=header.backends[0],
        day=day,
        started=header.started,
        environment=header.environment,
        device=header.device,
        seed=header.seed,
        suites=suites,
        records=records,
    )
    return statement.model_copy(update={"digest": statement.content_digest})


def read_statement(path: Path) -> Statement:
    """Return the statement in a file; raise QuestionError if it is none."""
    try:
        return Statement.model_validate_json(path.read_bytes())
    except OSError as error:
        raise QuestionError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        message = f"{path} is no statement that this attncheck reads: {where}: {first['msg']}"
        raise QuestionError(readable(message)) from error


# Checking a statement.


@dataclass(frozen=True)
class Verification:
    """What was checked of a statement. ``faults``: what does not hold, ``notes``: what a reader should know.

    ``repeated``: the outcomes of checks that were made again.
    """

    checked: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()


def verify(statement: Statement, day: date) -> Verification:
    """Check a statement against itself and against the profiles and suites of the installed attncheck.

    ``day``: today. A waiver must be valid on the day of the statement. If it has expired since, there is a note.
    """
    stated, own = statement.digest, statement.content_digest
    other = f"the digest is {stated[:12]}..., and that of the contents is {own[:12]}..."
    found = {
        "the digest is that of the contents": [] if stated == own else [other],
        "each waiver was valid on the day of the statement": _expired_waivers(statement, statement.day),
    }
    sources = "profile and suites are those of the installed attncheck"
    try:
        profile = load_profile(statement.profile.name)
        suites, entries = _suites(profile, statement.refs), must_pass(profile, statement.refs)
    except AttncheckError as error:
        found[sources] = [str(error)]
    else:
        found[sources] = _other_sources(statement, profile_info(profile, entries), suites)
        found["the verdict follows from the records"] = _wrong_judgement(statement, profile, entries)
    checked = ["the file has the fields of a statement", *(what for what, faults in found.items() if not faults)]
    notes = () if any(found.values()) else _expired_waivers(statement, day)
    return Verification(tuple(checked), tuple(fault for faults in found.values() for fault in faults), tuple(notes))


def _expired_waivers(statement: Statement, day: date) -> list[str]:
    expired = [each for each in statement.judgement.waivers if date.fromisoformat(each.until or "") < day]
    return [f"waiver {each.id} expired on {each.until}, before {day}" for each in expired]


def _other_sources(statement: Statement, installed: ProfileInfo, suites: tuple[SuiteInfo, ...]) -> list[str]:
    faults, stated = list[str](), statement.profile
    if installed != stated:
        own, other = (f"version {each.version}, digest {each.digest[:12]}..." for each in (installed, stated))
        faults.append(f"profile {stated.name}: stated is {other}; that of the installed attncheck has {own}")
    if suites != statement.suites:
        faults.append("the suites differ from those of the installed attncheck")
    return faults


def _wrong_judgement(statement: Statement, profile: Profile, entries: Mapping[tuple[str, str], Entry]) -> list[str]:
    stated = statement.judgement
    found = judge(profile, entries, statement.records, stated.waivers, statement.day)
    if found == stated:
        return []
    reasons = [f"; {each.case}, {each.check}: {each.reason}" for each in found.missing if each not in stated.missing]
    return [f"stated is {stated.verdict!r}; the records show {found.verdict!r}{''.join(reasons[:1])}"]
