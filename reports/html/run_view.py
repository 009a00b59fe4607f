"""Values for templates, unescaped: one run without its records, that is, verdicts, their basis and gaps."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from attncheck.reports.analysis import phrases
from attncheck.reports.analysis.graph_levels import LevelRow, legend, level_notes, level_rows, unmeasured_cases
from attncheck.reports.analysis.recommendation import known_needs
from attncheck.reports.analysis.summary import OutcomeCounts, RunSummary, UnexaminedCases, summarise
from attncheck.reports.analysis.utilities import (
    FunctionRow,
    FunctionVerdict,
    function_rows,
    notes_by_heading,
    provider_title,
)
from attncheck.reports.analysis.verdicts import RunFindings
from attncheck.reports.html.answer_view import (
    BackendAnswer,
    Coverage,
    FastestBackend,
    SilentBackend,
    answers,
    fastest_backends,
    silent_backends,
)
from attncheck.reports.html.budget_chart import BudgetUse, budget_chart, budget_uses
from attncheck.reports.html.finding_view import ExpectedFailures, FindingView, expected, finding_views
from attncheck.reports.html.speed_view import SpeedView, speed_view
from attncheck.reports.html.support_view import SupportMatrix, Tone, support_matrix
from attncheck.reports.run_file.header import BackendInfo
from attncheck.reports.run_file.store import Run
from attncheck.reports.speeds.speed import speeds

if TYPE_CHECKING:
    from markupsafe import Markup

FUNCTION_TONES: Mapping[FunctionVerdict, Tone] = {
    "equal": "good",
    "drifted": "calm",
    "judged": "calm",
    "differs": "bad",
    "missing": "none",
    "errored": "bad",
    "crashed": "bad",
    "timed_out": "bad",
    "stale": "warn",
    "expected": "warn",
}
"""The colours of verdicts on functions of providers."""


@dataclass(frozen=True)
class ProviderFunctions:
    """The functions of one provider, with notes by heading: names and a sentence."""

    title: str
    rows: tuple[FunctionRow, ...]
    notes: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]


@dataclass(frozen=True)
class RunView:
    """One run as shown on the page. ``name``: that of its file; ``key``: the prefix of its sections in links."""

    run: Run
    key: str
    name: str
    summary: RunSummary
    verdict: str
    counts: str
    warning: str | None
    facts: Mapping[str, str]
    command: str
    answers: tuple[BackendAnswer, ...]
    silent: tuple[SilentBackend, ...]
    fastest: tuple[FastestBackend, ...]
    coverages: Mapping[str, Coverage]
    needed_features: tuple[str, ...]
    needed_forms: Mapping[str, tuple[str, ...]]
    backends: tuple[BackendInfo, ...]
    support: SupportMatrix
    levels: tuple[LevelRow, ...]
    unmeasured: Mapping[str, Mapping[str, int]]
    level_legend: str
    level_notes: Mapping[str, tuple[str, ...]]
    functions: tuple[ProviderFunctions, ...]
    budgets: tuple[BudgetUse, ...]
    budget_chart: "Markup | None"
    speeds: SpeedView | None
    findings: tuple[FindingView, ...]
    expected: tuple[ExpectedFailures, ...]

    @property
    def tone(self) -> Tone:
        """The colour of the verdict."""
        match self.verdict:
            case "passed":
                return "good"
            case "failed":
                return "bad"
            case _:
                return "warn"

    @property
    def sections(self) -> tuple[tuple[str, str], ...]:
        """The sections with content: the name in links, and the heading."""
        told = (
            ("answer", "Verdicts", self.answers or self.silent),
            ("findings", "Findings", self.findings or self.run.errors),
            ("checks", "Checks", self.answers),
            ("support", "Measured support", self.support.features or self.support.forms),
            ("graphs", "CUDA-graph levels", self.levels),
            ("speeds", "Speeds", self.speeds),
            ("budgets", "Error budget", self.budgets),
            ("functions", "Utilities", self.functions),
            ("expected", "Expected failures", self.expected),
            ("gaps", "Not examined", self.summary.gaps),
            ("circumstances", "Circumstances", True),
        )
        return tuple((anchor, title) for anchor, title, is_told in told if is_told)

    def tally(self, backend: str, check: str) -> OutcomeCounts | None:
        """Return the outcomes of a check of a backend, or None if it has no record."""
        return self.summary.by_check.get((backend, check))

    def gap_what(self, gap: UnexaminedCases) -> str:
        """Return the number of cases, and the checks if only some were not examined."""
        return phrases.gap(gap, len(self.summary.checks))


def run_view(run: Run, key: str, name: str, found: RunFindings) -> RunView:
    """Return the view of one run and its findings; ``key`` and ``name`` must be unique in the page."""
    summary = summarise(run.records, checks=run.header.checks)
    verdict, _, counts = phrases.closing(summary, run.errors, complete=run.complete).partition(": ")
    levels, uses = level_rows(run.records), budget_uses(run.records)
    told = answers(run, found.verdicts)
    declared = {info.name: info.features for info in run.header.backends}
    examined = {
        each.backend: declared.get(each.backend, ()) for each in found.verdicts if each.verdict != "not examined"
    }
    right = {each.backend for each in told if each.word == "right"}
    needs = known_needs(run.records, run.header)
    return RunView(
        run=run,
        key=key,
        name=name,
        summary=summary,
        verdict=verdict,
        counts=counts,
        warning=phrases.incomplete(run),
        facts=_facts(run),
        command=shlex.join(run.header.command),
        answers=told,
        silent=silent_backends(found.verdicts, summary),
        fastest=tuple(fastest_backends([each for each in speeds(run.records) if each.backend in right])),
        coverages={each.backend: each.coverage for each in told},
        needed_features=tuple(need for need in needs if "=" not in need),
        needed_forms=_values_by_key(needs),
        backends=tuple(backend for backend in run.header.backends if backend.name in summary.backends),
        support=support_matrix(found.support, examined, levels),
        levels=levels,
        unmeasured=unmeasured_cases(run.records),
        level_legend=legend(levels),
        level_notes=level_notes(levels),
        functions=tuple(_functions(run, provider) for provider in summary.providers),
        budgets=uses,
        budget_chart=budget_chart(f"{key}-budgets", uses) if uses else None,
        speeds=speed_view(run, key),
        findings=finding_views(found.findings, summary, run.header),
        expected=expected(summary.expected),
    )


def _values_by_key(needs: Sequence[str]) -> dict[str, tuple[str, ...]]:
    values: dict[str, tuple[str, ...]] = {}
    for key, is_form, value in (need.partition("=") for need in needs):
        if is_form:
            values[key] = (*values.get(key, ()), value)
    return values


def run_names(runs: Sequence[Run]) -> list[str]:
    """Return file names that differ: with folders if names are equal, and with numbers if paths are."""
    paths = [PurePath(run.path) for run in runs]
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    if len(set(names)) < len(names):
        names = [f"{index}: {name}" for index, name in enumerate(names, start=1)]
    return names


def _facts(run: Run) -> dict[str, str]:
    return {name: value for name, value in _all_facts(run) if value}


def _all_facts(run: Run) -> Iterator[tuple[str, str]]:
    header, env = run.header, run.header.environment
    yield "Asked", ", ".join(f"{suite.name} ({phrases.suite_size(suite)})" for suite in header.suites)
    yield "Shard", header.shard
    yield "Checks", ", ".join(header.checks)
    yield "Seed", str(header.seed)
    yield "Rounds", str(header.rounds) if header.rounds > 1 else ""
    device = [f"{header.device}: {env.device_name}"]
    device += [f"compute capability {env.capability}"] if env.capability else []
    device += [f"driver {env.driver}"] if env.driver else []
    yield "Device", ", ".join(device)
    yield "Machine", f"{env.cpu}, {phrases.plural(env.cores, 'core')}, {env.platform}"
    commit = f", commit {env.git_commit}" if env.git_commit else ""
    yield "Versions", f"attncheck {env.attncheck}{commit}, torch {env.torch}, numpy {env.numpy}, Python {env.python}"
    yield "Policy", f"TF32 {_on(env.tf32)}, deterministic algorithms {_on(env.deterministic)}"
    yield "Started", header.started
    yield "Finished", run.footer.finished if run.footer else ""
    yield "Notes", "; ".join(header.notes)
    yield "File", run.path


def _on(is_on: bool) -> str:
    return "on" if is_on else "off"


def _functions(run: Run, provider: str) -> ProviderFunctions:
    rows = function_rows(run.records, provider)
    return ProviderFunctions(provider_title(run.header, provider), rows, notes_by_heading(rows))
