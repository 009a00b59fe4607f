"""How a run's figures and circumstances are put into words, the same in every report."""

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence

from attncheck.reports.analysis.findings import Finding
from attncheck.reports.analysis.graph_levels import LevelRow
from attncheck.reports.analysis.reasons import joined, shortened
from attncheck.reports.analysis.summary import RunSummary, UnexaminedCases
from attncheck.reports.analysis.verdicts import BackendVerdict
from attncheck.reports.run_file.graph_levels import GraphLevel, GraphProbe
from attncheck.reports.run_file.header import BackendInfo, RunHeader, SuiteInfo
from attncheck.reports.run_file.records import (
    OUTCOMES,
    UTILITIES,
    Crashed,
    Ended,
    Errored,
    Failed,
    Record,
    TimedOut,
    XPassed,
)
from attncheck.reports.run_file.store import Run

_FIGURES = re.compile(r"([^(;]*)(;.*)", re.DOTALL)
"""What ended a process, and the figures behind it."""


def plural(count: int, noun: str) -> str:
    """``1 case``, ``2 cases``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def budgets(share: float | None) -> str:
    """A share of the error budget to about three digits; ``-`` where nothing was measured."""
    if share is None:
        return "-"
    if math.isinf(share):
        return "inf"
    return f"{share:.2f}" if share < 10 else f"{share:.3g}"


_UNUSUAL = re.compile(r"[^\n\t\x20-\x7e]")
_COMMAND = re.compile(r"(?<!\S)::(?=\S)|##(?=\[)")
"""How a line begins that GitHub's runner obeys, wherever it is printed: ``::error ...``, and of old ``##[error]``."""


def printable(text: str) -> str:
    """``text`` without what is obeyed rather than shown: messages come from foreign code.

    A terminal obeys control characters; the log of a GitHub runner obeys lines that look like its commands.
    """
    return _COMMAND.sub(lambda match: " ".join(match[0]), _UNUSUAL.sub(_visible, text))


def _visible(match: re.Match[str]) -> str:
    return "?" if unicodedata.category(match[0]) in ("Cc", "Cf") else match[0]


def title(header: RunHeader) -> str:
    """One line: versions, machine, what was asked."""
    env = header.environment
    machine = plural(env.cores, "core") if env.driver is None else env.device_name
    suites = ", ".join(f"{suite.name}: {suite_size(suite)}" for suite in header.suites)
    noun = "suite" if len(header.suites) == 1 else "suites"
    shard = f", shard {header.shard}" if header.shard else ""
    return f"attncheck {env.attncheck}, torch {env.torch}, {machine}, {noun} {suites}{shard}, seed {header.seed}"


def suite_size(suite: SuiteInfo) -> str:
    """``57 cases``; what is asked of a provider are functions."""
    return plural(suite.cases, "function" if suite.name == UTILITIES else "case")


def chosen_kernels(cases: Mapping[str, int]) -> str:
    """Kernels and in how many cases each ran: ``flash (52 cases), math (1 case)``."""
    return ", ".join(f"{one_line(kernel)} ({plural(count, 'case')})" for kernel, count in cases.items())


def conventions(backend: BackendInfo) -> str:
    """The backend's conventions in one line."""
    return ", ".join(f"{name}: {_word(value)}" for name, value in backend.conventions.items()) or "none stated"


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else printable(str(value))


def gap(item: UnexaminedCases, checks: int) -> str:
    """What was not examined, without the reasons: ``9 cases``, or ``41 cases (lse)`` where only some checks were not.

    ``checks`` is how many checks the run has.
    """
    some = f" ({', '.join(item.checks)})" if len(item.checks) < checks else ""
    return f"{plural(item.cases, 'case')}{some}"


def gap_outcome(item: UnexaminedCases) -> str:
    """The outcome's word, and whose limit it is where that is not the backend's."""
    return f"{item.outcome} by attncheck" if item.by == "attncheck" else item.outcome


def gap_reasons(item: UnexaminedCases) -> str:
    """Why something was not examined, on one line."""
    return one_line("; ".join(item.reasons))


def measured_level(level: GraphLevel | None) -> str:
    """A measured CUDA-graph level in words."""
    return level or "cannot tell"


def probe_outcome(probe: GraphProbe) -> str:
    """The outcome's word; what could not be examined, could not be examined here."""
    return "not examined here" if probe.outcome == "not examined" else probe.outcome


def broke_at(probe: GraphProbe, *, width: int | None = None) -> str:
    """The probe that ended the climb from level to level, and why, on one line; the reason cut to ``width``."""
    reason = one_line(joined(probe.reason))
    return f"{_stop(probe)}: {reason if width is None else shortened(reason, width)}"


def _stop(probe: GraphProbe) -> str:
    verb = "broke at" if probe.outcome == "failed" else "stopped at"
    return f"{verb} {one_line(probe.name)} ({probe.level})"


def why_no_higher(row: LevelRow, *, width: int | None = None) -> str:
    """The probe a row broke at, and what is proven all the same where the level cannot be told; empty: none broke.

    What a row above says in the very same words is not said again.
    """
    if row.broke_at is None:
        return ""
    proven = f"at least {row.proven}; " if row.graph.measured is None and row.proven != "NEVER" else ""
    return proven + (f"{_stop(row.broke_at)}: as above" if row.repeats else broke_at(row.broke_at, width=width))


def other_reasons(row: LevelRow) -> str:
    """That not all cases of a row break for the reason shown."""
    return f"other figures or reasons in {row.other_cases} of {plural(row.cases, 'case')}"


def one_line(text: str) -> str:
    """``text`` without control characters and line breaks."""
    return " ".join(printable(text).split())


def cut(text: str, width: int) -> str:
    """``text``, or its beginning and ``...`` where it is longer than ``width`` characters."""
    return text if len(text) <= width else f"{text[: width - 3].rstrip()}..."


def _recurrence(record: Ended) -> str:
    match record.recurrence:
        case "always":
            return "; again in a fresh process, with nothing before it"
        case "after":
            behind = f"case {record.after}" if record.after else "the cases before it"
            return f"; only behind {behind}, not in a fresh process with nothing before it"
        case "flaky":
            return "; not again in a fresh process, not even behind the cases before it"
        case _:
            return ""


def what_happened(record: Record) -> str:
    """One line for a record that fell short; any other is told by its outcome."""
    match record:
        case Failed():
            text = record.summary if record.graph is None else joined(record.summary)
        case Errored():
            text = f"{record.error_type} in {record.stage}: {_first_line(record.message)}"
        case Crashed() | TimedOut():
            cause = _FIGURES.match(record.cause)
            what, figures = (cause[1], cause[2]) if cause else (record.cause, "")
            text = " ".join(f"{what} during {record.stage}{figures}{_recurrence(record)}".split())
        case XPassed():
            text = f"passed, but was expected to fall short: {record.reason}"
        case _:
            text = record.outcome
    return printable(text)


def _first_line(message: str) -> str:
    return next(iter(message.strip().splitlines()), "(no message)")


def verdict_counts(each: BackendVerdict) -> str:
    """Return ``5 findings in 15 of 68 cases``, or how many cases were right."""
    cases = plural(each.cases, "case")
    if not each.failing:
        known = len(each.findings)
        return f"{cases}, {plural(known, 'expected finding')}" if known else cases
    return f"{plural(len(each.failing), 'finding')} in {each.failing_cases} of {cases}"


def claims(each: BackendVerdict) -> str:
    """Return the false claims of a backend: ``sliding_window (8 of 8 wrong), logits_soft_cap (4 of 4 wrong)``."""
    return ", ".join(one_line(str(claim)) for claim in each.false_claims)


def extent(finding: Finding) -> str:
    """Return how many cases and which checks a finding makes fail: ``8 cases, checks numerics and containment``."""
    checks = finding.checks
    names = checks[0] if len(checks) == 1 else f"{', '.join(checks[:-1])} and {checks[-1]}"
    return f"{plural(len(finding.cases), 'case')}, {'check' if len(checks) == 1 else 'checks'} {names}"


def example(finding: Finding) -> str:
    """Return the case that is shown for a finding, with its check and its description."""
    record = finding.example
    described = finding.case.description if finding.case else ""
    return one_line(f"{record.case}, check {record.check}{f': {described}' if described else ''}")


def closing(
    summary: RunSummary,
    errors: Sequence[str] = (),
    *,
    complete: bool = True,
    verdicts: Sequence[BackendVerdict] = (),
) -> str:
    """The last line: the verdict and how many of everything. ``errors`` fail a run whatever its records say.

    Counts are of questions (a check of a case of a backend), however often each was put.

    What an unfinished run has not found wrong so far is no verdict.
    """
    verdict: str = "failed" if errors else summary.verdict
    if not complete and verdict != "failed":
        verdict = "unfinished"
    counts = [f"{summary.total[outcome]} {outcome}" for outcome in OUTCOMES if summary.total[outcome]]
    counts += [plural(len(errors), "error")] if errors else []
    sizes = []
    if summary.backends or not summary.providers:
        sizes += [plural(len(summary.backends), "backend"), plural(summary.cases, "case")]
    if summary.providers:
        sizes += [plural(len(summary.providers), "provider"), plural(summary.functions, "function")]
    rounds = f" (the worst of {summary.most_rounds} rounds counts)" if summary.most_rounds > 1 else ""
    false = [f"{one_line(each.backend)}: {claims(each)}" for each in verdicts if each.false_claims]
    claimed = f"; false claims of {'; of '.join(false)}" if false else ""
    return f"{verdict}: {', '.join(sizes)}: {', '.join(counts) or 'no records'}{rounds}{claimed}"


def rounds_short(summary: RunSummary, record: Record) -> str:
    """``in 3 of 10 rounds``, for a record that stands for several rounds; empty for any other."""
    short, rounds = summary.rounds.get(record.key, (1, 1))
    return f"in {short} of {rounds} rounds" if rounds > 1 else ""


def incomplete(run: Run) -> str | None:
    """A warning about a run without footer, or None."""
    if run.complete:
        return None
    where = "in the middle of a line" if run.cut_line else "before its footer"
    silent = [backend.name for backend in run.header.backends if backend.name not in {r.backend for r in run.records}]
    missing = f"; there is no record of {', '.join(silent)}" if silent else ""
    count = plural(len(run.records), "record")
    return f"{run.path} was cut off {where}: what follows is {count} of an unfinished run{missing}"
