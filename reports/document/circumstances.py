"""What a run did not examine, and what its results depend on: conventions, machine, versions, command."""

import shlex
from collections.abc import Mapping

from attncheck.reports.analysis import phrases
from attncheck.reports.document.blocks import Block, Heading, Item, Items, Paragraph, Span, Table, listed
from attncheck.reports.document.run_values import RunValues
from attncheck.reports.run_file.records import UTILITIES

DEFAULTS: Mapping[str, object] = {
    "lse_base": "e",
    "alibi_reference": "query",
    "pad_seq_len": 0,
    "padded_rows": "finite",
    "needs_finite_pool": False,
    "batch_invariant": False,
    "sync_free_build": False,
    "deterministic": True,
    "operand_strides": "any",
}
"""The conventions of a backend that declares none."""


def unexamined(run: RunValues, *, whole: bool) -> list[Block]:
    """Return what was not examined and why, backends with equal gaps together; in brief one line that counts it.

    A run that examined nothing has all reasons in brief too.
    """
    summary = run.summary
    if summary.providers and not summary.backends:
        return []
    backends = summary.backends if whole else run.present
    owners: dict[tuple[str, str, str], list[str]] = {}
    for gap in summary.gaps:
        if gap.backend in backends:
            row = (phrases.gap_outcome(gap), phrases.gap(gap, len(summary.checks)), phrases.gap_reasons(gap))
            owners.setdefault(row, []).append(phrases.one_line(gap.backend))
    if not whole and (summary.total.examined or not owners):
        return [Items((_count(run, len(owners)),))] if owners else []
    if not owners:
        return [Heading(2, "Not examined"), Paragraph("Every selected check was examined.")]
    rows = tuple((", ".join(names), *row) for row, names in owners.items())
    return [
        Heading(2, "Not examined"),
        Paragraph("The run has no verdict on these."),
        Table(("backend", "outcome", "what", "why"), rows, is_named=False),
    ]


def _count(run: RunValues, reasons: int) -> Item:
    checks = sum(run.summary.by_backend[backend].not_examined for backend in run.present)
    cases = {
        (record.suite, record.case_id)
        for record in run.records
        if record.outcome in ("unsupported", "unavailable")
        and record.backend in run.present
        and record.check != UTILITIES
    }
    counted = f"{phrases.plural(checks, 'check')} of {phrases.plural(len(cases), 'case')}"
    command = f", or attncheck report {shlex.quote(run.path)} --section unexamined" if run.path else ""
    listing = Item(f"list them: {run.listing}{command}", is_whole=True)
    return Item(f"not examined: {counted} ({phrases.plural(reasons, 'reason')})", (listing,))


def conventions(run: RunValues, *, whole: bool) -> list[Block]:
    """Return each backend's conventions, merged if equal, in brief those that differ from the defaults.

    A backend of another project has its version.
    """
    groups: dict[str, list[str]] = {}
    for backend in run.header.backends:
        told = backend.conventions
        if not whole:
            told = {name: value for name, value in told.items() if name not in DEFAULTS or value != DEFAULTS[name]}
        if backend.name in run.present and told:
            is_ours = backend.version in ("", run.header.environment.attncheck)
            name = backend.name if is_ours else f"{backend.name} ({backend.version})"
            stated = phrases.conventions(backend.model_copy(update={"conventions": told}))
            groups.setdefault(stated, []).append(phrases.one_line(name))
    return listed([f"conventions of {', '.join(names)}: {text}" for text, names in groups.items()])


def circumstances(run: RunValues, *, whole: bool) -> list[Block]:
    """Return what was asked, on which machine, by which versions, and when; [] in brief."""
    if not whole:
        return []
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
        "Started": header.started + (f", finished {run.finished}" if run.finished else ""),
    }
    lines = [Item(f"{name}: {value}") for name, value in facts.items() if value]
    if header.command:
        lines.append(Item(("Command: ", Span(shlex.join(header.command), is_code=True))))
    lines += [Item(f"Notes: {'; '.join(header.notes)}")] if header.notes else []
    return [Heading(2, "Circumstances"), Items(tuple(lines))]
