"""A run as Markdown, for a pull request, a wiki or a file, with everything useful from the run file.

Verdicts come first, then findings with an example each. Reasons are not cut. Messages of backends are escaped, so that
they cannot become markup.
"""

import shlex
from collections.abc import Sequence

from attncheck.reports.analysis import phrases
from attncheck.reports.analysis.graph_levels import level_rows, unmeasured_cases
from attncheck.reports.analysis.summary import OutcomeCounts, RunSummary, summarise
from attncheck.reports.analysis.utilities import HEADINGS, LEGEND, function_rows, notes_by_heading, provider_title
from attncheck.reports.analysis.verdicts import RunFindings, run_findings
from attncheck.reports.markdown import markup
from attncheck.reports.markdown.findings import expected, failing, verdicts
from attncheck.reports.markdown.graph_levels import graph_levels
from attncheck.reports.markdown.speeds import speeds_section
from attncheck.reports.markdown.support import support
from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.store import Run
from attncheck.reports.speeds.speed import speeds


def render_run(run: Run) -> str:
    """Return the whole report of one run file, ending in a newline."""
    summary = summarise(run.records, checks=run.header.checks)
    found = run_findings(run.records, run.header)
    sections = [
        "# attncheck report",
        f"**{markup.escaped(phrases.closing(summary, run.errors, complete=run.complete))}**",
        f"**{markup.escaped(warning)}**" if (warning := phrases.incomplete(run)) else "",
        verdicts(found.verdicts),
        *_run_errors(run.errors),
        *failing(found.findings, summary, run.header),
        *_backends(run, summary, found),
        *graph_levels(level_rows(run.records), unmeasured_cases(run.records)),
        *speeds_section(run.header, speeds(run.records)),
        *(section for provider in summary.providers for section in _functions(run, provider)),
        *expected(found.findings),
        *(_gaps(summary) if summary.backends or not summary.providers else ()),
        "## Circumstances",
        _circumstances(run),
    ]
    return phrases.printable("\n\n".join(section for section in sections if section)) + "\n"


def _circumstances(run: Run) -> str:
    header, env = run.header, run.header.environment
    facts = {
        "Asked": ", ".join(f"{suite.name} ({phrases.suite_size(suite)})" for suite in header.suites),
        "Shard": header.shard,
        "Checks": ", ".join(header.checks),
        "Rounds": f"{header.rounds}, each in a process of its own" if header.rounds > 1 else "",
        "Seed": str(header.seed),
        "Device": f"{header.device}: {env.device_name}"
        + (f", compute capability {env.capability}" if env.capability else "")
        + (f", driver {env.driver}" if env.driver else ""),
        "Machine": f"{env.cpu}, {phrases.plural(env.cores, 'core')}, {env.platform}",
        "Versions": f"attncheck {env.attncheck}, torch {env.torch}, numpy {env.numpy}, Python {env.python}"
        + (f", commit {env.git_commit}" if env.git_commit else ""),
        "Policy": f"TF32 {'on' if env.tf32 else 'off'}, "
        f"deterministic algorithms {'on' if env.deterministic else 'off'}",
        "Started": header.started + (f", finished {run.footer.finished}" if run.footer else ""),
    }
    lines = [f"- {name}: {markup.escaped(value)}" for name, value in facts.items() if value]
    lines += [f"- Command: {markup.code(shlex.join(header.command))}"] if header.command else []
    lines += [f"- Notes: {markup.escaped('; '.join(header.notes))}"] if header.notes else []
    return "\n".join(lines)


def _backends(run: Run, summary: RunSummary, found: RunFindings) -> list[str]:
    """Return the tables of backends, or [] for a run of providers only."""
    if summary.providers and not summary.backends:
        return []
    return [
        "## Backends and suites",
        "Good records of examined ones, over all checks; `-` where nothing was examined.",
        _suite_table(summary, run.header),
        "## Backends and checks",
        check_table(summary),
        *_chosen_kernels(summary),
        *support(run, summary.backends, found.support),
    ]


def _functions(run: Run, provider: str) -> list[str]:
    rows = function_rows(run.records, provider)
    notes = [
        "\n".join(
            [f"**{heading}**", "", *(f"- {markup.escaped(names)}: {markup.escaped(note)}" for names, note in said)]
        )
        for heading, said in notes_by_heading(rows)
    ]
    return [
        f"## {markup.escaped(provider_title(run.header, provider))}",
        f"{markup.escaped(LEGEND)}.",
        markup.table(HEADINGS, [[markup.code_cell(row.name), *map(markup.escaped, row.cells[1:])] for row in rows]),
        *notes,
    ]


def _suite_table(summary: RunSummary, header: RunHeader) -> str:
    worst = ["worst error (budgets)"] if summary.has_errors_measured else []
    rows = [
        [
            _backend(backend, header),
            *(_cell(summary.by_suite.get((backend, suite))) for suite in summary.suites),
            *(phrases.budgets(summary.by_backend[backend].worst_share) for _ in worst),
            str(summary.by_backend[backend].not_examined or "-"),
        ]
        for backend in summary.backends
    ]
    return markup.table(["backend", *map(markup.escaped, summary.suites), *worst, "not examined"], rows)


def check_table(summary: RunSummary) -> str:
    """Return a table of backends by checks, whose cells are passed of examined records."""
    rows = [
        [markup.escaped(backend), *(_cell(summary.by_check.get((backend, check))) for check in summary.checks)]
        for backend in summary.backends
    ]
    return markup.table(["backend", *map(markup.escaped, summary.checks)], rows)


def _chosen_kernels(summary: RunSummary) -> list[str]:
    lines = [
        f"- Kernels of {markup.escaped(name)}: {markup.escaped(phrases.chosen_kernels(cases))}"
        for name, cases in summary.chosen_kernels.items()
    ]
    return ["\n".join(lines)] if lines else []


def _backend(name: str, header: RunHeader) -> str:
    """Return the backend's name with its version and conventions, which its figures depend on."""
    info = next((backend for backend in header.backends if backend.name == name), None)
    if info is None:
        return markup.escaped(name)
    version = f" {markup.escaped(info.version)}" if info.version else ""
    stated = f"<br>{markup.escaped(phrases.conventions(info))}" if info.conventions else ""
    return f"{markup.escaped(name)}{version}{stated}"


def _cell(tally: OutcomeCounts | None) -> str:
    if tally is None or not tally.examined:
        return "-"
    text = f"{tally['passed']}/{tally.examined}"
    return f"**{text}**" if tally.short else text


def _run_errors(errors: Sequence[str]) -> list[str]:
    return ["## Errors of the run", "\n".join(f"- {markup.escaped(error)}" for error in errors)] if errors else []


def _gaps(summary: RunSummary) -> list[str]:
    if not summary.gaps:
        return ["## Not examined", "Nothing was left out of what this run asked."]
    rows = [
        [
            markup.escaped(gap.backend),
            phrases.gap_outcome(gap),
            markup.escaped(phrases.gap(gap, len(summary.checks))),
            markup.escaped(phrases.gap_reasons(gap)),
        ]
        for gap in summary.gaps
    ]
    return [
        "## Not examined",
        "About these the run says nothing, neither good nor bad.",
        markup.table(["backend", "outcome", "what", "why"], rows),
    ]
