"""Phrases for a run's figures and circumstances, shared by all reports."""

import math
import re
import unicodedata
from collections.abc import Mapping
from pathlib import PurePath

from attncheck.reports.analysis.findings import Finding
from attncheck.reports.analysis.graph_levels import LevelRow
from attncheck.reports.analysis.reasons import joined
from attncheck.reports.analysis.summary import CASE_RESULTS, FAILING, CaseResult, RunSummary, UnexaminedCases
from attncheck.reports.analysis.verdicts import BackendVerdict
from attncheck.reports.run_file.graph_levels import GraphLevel, GraphProbe
from attncheck.reports.run_file.header import BackendInfo, RunHeader, SuiteInfo
from attncheck.reports.run_file.records import (
    UTILITIES,
    Crashed,
    Ended,
    Errored,
    Failed,
    Passed,
    Record,
    TimedOut,
    Unavailable,
    Unsupported,
    XFailed,
    XPassed,
)
from attncheck.reports.run_file.store import Run, lacking_in_words

_FIGURES = re.compile(r"([^(;]*)(;.*)", re.DOTALL)
"""The cause of a process's end, and the figures that follow it."""


def plural(count: int, noun: str) -> str:
    """Return ``1 case``, ``2 cases``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def sentence(text: str) -> str:
    """Return ``text`` with a capital first letter."""
    return f"{text[:1].upper()}{text[1:]}"


def budgets(share: float | None) -> str:
    """Return a share of the error budget to about three digits, or ``-`` if it is None."""
    if share is None:
        return "-"
    if math.isinf(share):
        return "inf"
    return f"{share:.2f}" if share < 10 else f"{share:.3g}"


_UNUSUAL = re.compile(r"[^\n\t\x20-\x7e]")
_COMMAND = re.compile(r"(?<!\S)::(?=\S)|##(?=\[)")
"""The start of a line that GitHub's runner interprets as a command: ``::error ...``, or the older ``##[error]``."""


def printable(text: str) -> str:
    """Return ``text`` with everything neutralised that a terminal or a GitHub runner would interpret.

    Messages come from foreign code. A terminal interprets control characters; the log of a GitHub runner interprets
    lines that look like its commands.
    """
    return _COMMAND.sub(lambda match: " ".join(match[0]), _UNUSUAL.sub(_visible, text))


def _visible(match: re.Match[str]) -> str:
    return "?" if unicodedata.category(match[0]) in ("Cc", "Cf") else match[0]


def title(header: RunHeader) -> str:
    """Return one line with versions, machine, suites and seed."""
    env = header.environment
    machine = plural(env.cores, "core") if env.driver is None else env.device_name
    suites = ", ".join(f"{suite.name}: {suite_size(suite)}" for suite in header.suites)
    noun = "suite" if len(header.suites) == 1 else "suites"
    shard = f", shard {header.shard}" if header.shard else ""
    return f"attncheck {env.attncheck}, torch {env.torch}, {machine}, {noun} {suites}{shard}, seed {header.seed}"


def suite_size(suite: SuiteInfo) -> str:
    """Return ``57 cases``, or ``12 functions`` for the suite of providers."""
    return plural(suite.cases, "function" if suite.name == UTILITIES else "case")


def chosen_kernels(cases: Mapping[str, int]) -> str:
    """Return kernels and the number of cases in which each ran: ``flash (52 cases), math (1 case)``."""
    return ", ".join(f"{one_line(kernel)} ({plural(count, 'case')})" for kernel, count in cases.items())


def conventions(backend: BackendInfo) -> str:
    """Return the backend's conventions on one line."""
    return ", ".join(f"{name}: {_word(value)}" for name, value in backend.conventions.items()) or "none stated"


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else printable(str(value))


def gap(item: UnexaminedCases, checks: int) -> str:
    """Return the extent of a gap: ``9 cases``, or ``41 cases (lse)`` if only some checks were not examined.

    ``checks``: the number of checks of the run.
    """
    some = f" ({', '.join(item.checks)})" if len(item.checks) < checks else ""
    return f"{plural(item.cases, 'case')}{some}"


def gap_outcome(item: UnexaminedCases) -> str:
    """Return the outcome, followed by ``by attncheck`` if the limit is attncheck's."""
    return f"{item.outcome} by attncheck" if item.by == "attncheck" else item.outcome


def gap_reasons(item: UnexaminedCases) -> str:
    """Return on one line why something was not examined."""
    return one_line("; ".join(item.reasons))


def measured_level(level: GraphLevel | None) -> str:
    """Return a measured CUDA-graph level, or ``cannot tell`` for None."""
    return level or "cannot tell"


def probe_outcome(probe: GraphProbe) -> str:
    """Return the outcome of a probe; ``not examined`` becomes ``not examined here``."""
    return "not examined here" if probe.outcome == "not examined" else probe.outcome


def why_no_higher(row: LevelRow) -> str:
    """Return the probe a row broke at, and the level proven if the measured one is unknown; "" if no probe broke.

    If an earlier row has the same reason, the text is ``as above``.
    """
    if (probe := row.broke_at) is None:
        return ""
    proven = f"at least {row.proven}; " if row.graph.measured is None and row.proven != "NEVER" else ""
    verb = "broke at" if probe.outcome == "failed" else "stopped at"
    reason = "as above" if row.repeats else one_line(joined(probe.reason))
    return f"{proven}{verb} {one_line(probe.name)} ({probe.level}): {reason}"


def other_reasons(row: LevelRow) -> str:
    """Return a note that some cases of a row break for another reason than the one shown."""
    return f"other figures or reasons in {row.other_cases} of {plural(row.cases, 'case')}"


def one_line(text: str) -> str:
    """Return ``text`` without control characters and line breaks."""
    return " ".join(printable(text).split())


def cut(text: str, width: int) -> str:
    """Return ``text``, cut to ``width`` characters with ``...`` at the end if it is longer."""
    return text if len(text) <= width else f"{text[: width - 3].rstrip()}..."


def _recurrence(record: Ended) -> str:
    match record.recurrence:
        case "always":
            return "; fails again when run alone in a new process"
        case "after":
            before = f"case {record.after}" if record.after else "the cases before it"
            return f"; fails only after {before}, not when run alone in a new process"
        case "flaky":
            return "; did not fail again in a new process, neither alone nor after the cases before it"
        case _:
            return ""


def what_happened(record: Record) -> str:
    """Return one line on a record that did not pass, or the outcome of any other record."""
    match record:
        case Failed():
            text = record.summary if record.graph is None else joined(record.summary)
        case Errored():
            text = f"{record.error_type} in {record.stage}: {_first_line(record.message)}"
        case Crashed() | TimedOut():
            cause = _FIGURES.match(record.cause)
            what, figures = (cause[1], cause[2]) if cause else (record.cause, "")
            text = " ".join(f"{what}{record.stage and f' during {record.stage}'}{figures}{_recurrence(record)}".split())
        case XPassed():
            text = f"passed, though expected to fail: {record.reason}; remove or narrow this expectation"
        case _:
            text = record.outcome
    return printable(text)


def what_recorded(record: Record) -> str:
    """Return one line on what happened, or why nothing was examined; "" for a record that passed."""
    match record:
        case Passed():
            return ""
        case Unsupported() | Unavailable():
            return "; ".join(record.reasons)
        case XFailed():
            return f"{record.underlying}: {record.summary} (expected: {record.reason})"
        case Failed() | Errored() | Crashed() | TimedOut() | XPassed():
            return what_happened(record)


def _first_line(message: str) -> str:
    return next(iter(message.strip().splitlines()), "(no message)")


def verdict_words(verdict: str, known: int, *, is_partial: bool) -> str:
    """Return the verdict, with the number of ``known`` faults unless it failed: ``passed with 2 known faults``.

    ``is_partial``: whether time was over before all was reached; then ``passed`` becomes ``passed in part``.
    """
    if is_partial and verdict == "passed":
        verdict = "passed in part"
    return f"{verdict} with {plural(known, 'known fault')}" if known and verdict != "failed" else verdict


def verdict_counts(each: BackendVerdict) -> str:
    """Return the findings, and the number of cases with each result; these add up to all cases.

    ``38 cases right, 35 refused as declared``, or ``1 finding in 15 of 78 cases; 63 right``.
    """
    if not each.failing:
        first, *others = result_counts(each.results)
        count, _, result = first.partition(" ")
        return ", ".join([f"{plural(int(count), 'case')} {result}", *others])
    failing = sum(each.results[result] for result in FAILING)
    found = f"{plural(len(each.failing), 'finding')} in {failing} of {plural(each.results.total(), 'case')}"
    others = result_counts({result: count for result, count in each.results.items() if result not in FAILING})
    return "; ".join(filter(None, [found, ", ".join(others)]))


def not_reached(whole: int, checks: Mapping[str, int], cases: int) -> str:
    """Return what was not reached: ``41 of 94 cases; of other cases, cudagraph of 12, invariance of 3``.

    ``whole``: how many cases had no check. ``checks``: by check, how many other cases lack it.
    """
    lacking = ", ".join(f"{check} of {count}" for check, count in checks.items())
    parts = [f"{whole} of {plural(cases, 'case')}"] if whole else []
    return "; ".join([*parts, f"of other cases, {lacking}"] if lacking else parts)


def result_counts(results: Mapping[CaseResult, int]) -> list[str]:
    """Return the number of cases with each result: ``38 right``, ``35 refused as declared``."""
    return [f"{results[result]} {result}" for result in CASE_RESULTS if results.get(result)]


def claims(each: BackendVerdict) -> str:
    """Return the false claims of a backend: ``sliding_window (8 of 8 cases wrong), sinks (4 of 4 cases wrong)``."""
    return ", ".join(one_line(str(claim)) for claim in each.false_claims)


def extent(finding: Finding) -> str:
    """Return the number of cases and the checks of a finding: ``8 cases, checks numerics and containment``."""
    checks = finding.checks
    names = checks[0] if len(checks) == 1 else f"{', '.join(checks[:-1])} and {checks[-1]}"
    return f"{plural(len(finding.cases), 'case')}, {'check' if len(checks) == 1 else 'checks'} {names}"


def consequence(finding: Finding, header: RunHeader) -> str:
    """Return what the finding does to the exit code of the run; ``attncheck.examine`` has none."""
    code = finding.exit_status
    if not code:
        return "it does not fail the run"
    return f"the run exits with code {code} because of it" if header.command else "the examination fails because of it"


def contrast(finding: Finding) -> str:
    """Return what separates the cases of a finding from those that pass, or "" if nothing is known to."""
    heading = "in common" if len(finding.cases) > 1 else "unlike passing cases"
    return f"{heading}: {finding.contrast}" if finding.contrast else ""


def example(finding: Finding) -> str:
    """Return the example case of a finding, with its check and its description."""
    record = finding.example
    described = finding.case.description if finding.case else ""
    return one_line(f"{record.case}, check {record.check}{f': {described}' if described else ''}")


def rounds_short(summary: RunSummary, record: Record) -> str:
    """Return ``in 3 of 10 rounds`` for a record that represents several rounds, or "" for any other."""
    short, rounds = summary.rounds.get(record.key, (1, 1))
    return f"in {short} of {rounds} rounds" if rounds > 1 else ""


def incomplete(run: Run) -> str | None:
    """Return a warning if the run has no footer or lacks records, or None."""
    if run.complete:
        return None
    if run.footer is not None:
        return f"{PurePath(run.path).name} is incomplete: {lacking_in_words(run)}"
    where = "in the middle of a line" if run.cut_line else "before its footer"
    silent = [backend.name for backend in run.header.backends if backend.name not in {r.backend for r in run.records}]
    of_all = f"{len(silent)} of {plural(len(run.header.backends), 'backend')}"
    missing = f"; there is no record of {of_all}: {', '.join(silent)}" if silent else ""
    count = plural(len(run.records), "record")
    return f"{PurePath(run.path).name} was cut off {where}: what follows is {count} of an unfinished run{missing}"
