"""What a run did not examine, and what its results depend on: conventions, machine, versions, command."""

import shlex

from attncheck.reports.analysis import phrases
from attncheck.reports.analysis.utilities import function_rows
from attncheck.reports.document.blocks import Block, Heading, Item, Items, Paragraph, SectionName, Span, Table, listed
from attncheck.reports.document.run_values import RunValues
from attncheck.reports.run_file.records import EXAMINED, UTILITIES


def unexamined(run: RunValues, *, whole: bool) -> list[Block]:
    """Return what was not examined and why, backends with equal gaps together.

    In brief, one line counts it, and one prints sections whole. A run that examined nothing has all reasons in brief.
    """
    summary = run.summary
    if not whole and summary.total.examined:
        return _in_brief(run)
    if summary.providers and not summary.backends:
        return []
    backends = summary.backends if whole else run.present
    owners: dict[tuple[str, str, str], list[str]] = {}
    for gap in summary.gaps:
        if gap.backend in backends:
            row = (phrases.gap_outcome(gap), phrases.gap(gap, len(summary.checks)), phrases.gap_reasons(gap))
            owners.setdefault(row, []).append(phrases.one_line(gap.backend))
    if not owners and not whole:
        return []
    if not owners:
        return [Heading(2, "Not examined"), Paragraph("Every selected check was examined.")]
    rows = tuple((", ".join(names), *row) for row, names in owners.items())
    return [
        Heading(2, "Not examined"),
        Paragraph("The run has no verdict on these."),
        Table(("backend", "outcome", "what", "why"), rows, is_named=False),
    ]


def _in_brief(run: RunValues) -> list[Block]:
    gaps = [gap for gap in run.summary.gaps if gap.backend in run.present]
    hidden: dict[SectionName, bool] = {
        "unexamined": bool(gaps),
        "graph-levels": bool(run.found.levels),
        "timings": bool(run.speeds),
        "functions": any(row.notes for name in run.summary.providers for row in function_rows(run.records, name)),
        "expected": any(finding.is_expected for finding in run.found.findings),
    }
    names = [name for name, is_hidden in hidden.items() if is_hidden]
    lines = [*run.in_full(*names)] if names else []
    if gaps:
        checks = sum(run.summary.by_backend[backend].not_examined for backend in run.present)
        cases = {
            (record.suite, record.case_id)
            for record in run.records
            if record.outcome not in EXAMINED and record.backend in run.present and record.check != UTILITIES
        }
        counted = f"{phrases.plural(checks, 'check')} of {phrases.plural(len(cases), 'case')}"
        reasons = len({(gap.outcome, gap.by, gap.checks, gap.cases, gap.reasons) for gap in gaps})
        lines.insert(0, Item(f"not examined: {counted} ({phrases.plural(reasons, 'reason')})"))
    return [Items(tuple(lines))] if lines else []


def conventions(run: RunValues, *, whole: bool) -> list[Block]:
    """Return each backend's conventions, merged if equal; [] in brief. A backend of another project has its version."""
    groups: dict[str, list[str]] = {}
    for backend in run.header.backends:
        if whole and backend.name in run.present and backend.conventions:
            is_ours = backend.version in ("", run.header.environment.attncheck)
            name = backend.name if is_ours else f"{backend.name} ({backend.version})"
            groups.setdefault(phrases.conventions(backend), []).append(phrases.one_line(name))
    return listed([f"conventions of {', '.join(names)}: {text}" for text, names in groups.items()])


def circumstances(run: RunValues, *, whole: bool) -> list[Block]:
    """Return the suites, the machine, versions, policy and time of the run; [] in brief."""
    if not whole:
        return []
    lines = [Item(f"{name}: {value}") for name, value in facts(run).items()]
    if run.header.command:
        lines.append(Item(("Command: ", Span(shlex.join(run.header.command), is_code=True))))
    lines += [Item(f"Notes: {'; '.join(run.header.notes)}")] if run.header.notes else []
    return [Heading(2, "Circumstances"), Items(tuple(lines))]


def facts(run: RunValues) -> dict[str, str]:
    """Return the suites, the machine, versions, policy and time, without what the run does not have."""
    header, env = run.header, run.header.environment
    found = {
        "Suites": ", ".join(f"{suite.name} ({phrases.suite_size(suite)})" for suite in header.suites),
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
        "Started": header.started + (f", finished {run.finished}" if run.finished else ""),
    }
    return {name: value for name, value in found.items() if value}
