"""Reads one run file and returns what the site keeps of it. Runs in worker processes."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from attncheck.reports.analysis import phrases
from attncheck.reports.analysis.findings import Finding
from attncheck.reports.analysis.graph_levels import LevelRow
from attncheck.reports.analysis.recommendation import NeedAnswer, NeededCase, known_needs, need_answers, needed_cases
from attncheck.reports.analysis.repro import repro_command
from attncheck.reports.analysis.verdicts import BackendVerdict
from attncheck.reports.document.circumstances import facts
from attncheck.reports.document.run_values import RunValues
from attncheck.reports.run_file.graph_levels import GraphLevels
from attncheck.reports.run_file.header import BackendInfo, CaseInfo, RunHeader
from attncheck.reports.run_file.records import UTILITIES, XFailed, graph_of
from attncheck.reports.run_file.store import read_run
from attncheck.reports.site.model import SiteBackend, SiteCase, SiteFinding, SiteLevel, SiteRun, SiteSupport, slug

_KINDS = {
    "batch has a decode": "decode",
    "batch has a prefill with context": "prefill with context",
    "batch has a prefill without context": "prefill",
}
"""Kinds of requests, by the case key that says whether a batch has one."""


def digest_of(path: Path, name: str) -> SiteRun:
    """Return what the site keeps of the run file at ``path``, which the site calls ``name``.

    Raises:
        QuestionError: the file cannot be read, or is not a run file.
    """
    run = read_run(path)
    values = RunValues.of(run)
    header, environment = run.header, run.header.environment
    needed = needed_cases(values.found)
    cases = _cases(values, needed)
    needs = known_needs(run.records, header)
    answers: dict[str, dict[str, NeedAnswer]] = defaultdict(dict)
    for (backend, need), answer in need_answers(needs, values.found, needed, header).items():
        answers[backend][need] = answer
    infos = {info.name: info for info in header.backends}
    examined = [each for each in values.found.verdicts if each.verdict != "not examined" and each.backend in infos]
    return SiteRun(
        key=f"{slug(Path(name).name.partition('.')[0])}-{sha256(name.encode()).hexdigest()[:8]}",
        name=name,
        started=header.started,
        device=environment.device_name or environment.device,
        capability=environment.capability or "",
        digest=environment.digest,
        facts=facts(values),
        warning=values.warning,
        backends=tuple(
            _backend(each, infos[each.backend], values, cases[each.backend], answers[each.backend]) for each in examined
        ),
        descriptions={f"{case.suite}/{case.id}": (case.shape, case.description) for case in header.cases},
    )


def _cases(values: RunValues, needed: Sequence[NeededCase]) -> dict[str, dict[str, SiteCase]]:
    """Return the cases of each backend, by ``suite/id``."""
    kinds = {f"{case.suite}/{case.id}": _kind(case) for case in values.header.cases}
    outcomes: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    graphs: dict[tuple[str, str], GraphLevels] = {}
    for record in values.records:
        if record.check != UTILITIES:
            outcomes[record.backend, record.case].setdefault(record.check, record.outcome)
        if (graph := graph_of(record)) is not None:
            graphs[record.backend, record.case] = graph
    times = {
        (speed.backend, speed.case): (speed.median_ns, *speed.interval_ns, len(speed.rounds))
        for speed in values.speeds
        if speed.part == "forward"
    }
    found: dict[str, dict[str, SiteCase]] = defaultdict(dict)
    for case in needed:
        key = (case.backend, case.case)
        found[case.backend][case.case] = SiteCase(
            needs=tuple(sorted(case.needs)) + kinds.get(case.case, ()),
            count=case.count,
            false=tuple(sorted(case.false)),
            outcomes=tuple(outcomes[key].items()),
            time=times.get(key),
            declared_level=graphs[key].declared if key in graphs else "",
            level=(graphs[key].measured or "") if key in graphs else "",
        )
    return found


def _kind(case: CaseInfo) -> tuple[str, ...]:
    """Return the need that tells batches apart, such as ``batch=decode + prefill``; nothing for older run files."""
    kinds = [kind for key, kind in _KINDS.items() if case.keys.get(key)]
    return (f"batch={' + '.join(kinds)}",) if kinds else ()


def _backend(
    verdict: BackendVerdict,
    info: BackendInfo,
    values: RunValues,
    cases: Mapping[str, SiteCase],
    answers: Mapping[str, NeedAnswer],
) -> SiteBackend:
    rows = [row for row in values.found.levels if row.backend == info.name]
    is_interpreted = "interpreted" in info.version or info.required_environment.get("TRITON_INTERPRET") == "1"
    is_emulated = any(row.graph.recorder == "emulated" for row in rows)
    marks = (("interpreted",) if is_interpreted else ()) + (("emulated",) if is_emulated else ())
    return SiteBackend(
        name=info.name,
        version=info.version,
        verdict=verdict.verdict,
        marks=marks,
        features=tuple(sorted(info.features)),
        conventions=phrases.conventions(info),
        words=f"{phrases.verdict_words(verdict.verdict, verdict.known)}: {phrases.verdict_counts(verdict)}",
        false_claims=tuple(str(claim) for claim in verdict.false_claims),
        could_declare=verdict.could_declare,
        findings=tuple(_finding(finding, values.header) for finding in verdict.findings),
        levels=tuple(map(_level, rows)),
        support=tuple(
            SiteSupport(row.feature, row.verdict, row.in_words, row.is_declared)
            for row in values.found.support
            if row.backend == info.name
        ),
        answers={need: (answer.standing, answer.words) for need, answer in answers.items()},
        cases=dict(cases),
    )


def _finding(finding: Finding, header: RunHeader) -> SiteFinding:
    example = finding.example
    return SiteFinding(
        words=finding.words,
        title=finding.title,
        case=example.case,
        example=example.summary if isinstance(example, XFailed) else phrases.what_happened(example),
        repeat=repro_command(example, header),
        checks=finding.checks,
        cases=finding.cases,
        is_expected=finding.is_expected,
    )


def _level(row: LevelRow) -> SiteLevel:
    return SiteLevel(
        declared=row.graph.declared,
        measured=phrases.measured_level(row.graph.measured),
        head_room=row.head_room or "",
        broke_at=phrases.why_no_higher(row),
        cases=row.cases,
        is_emulated=row.graph.recorder == "emulated",
        falls_short=row.falls_short,
    )
