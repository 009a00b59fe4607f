"""``attncheck report --format statement`` and ``--verify``: statements of conformance, and what is printed of them."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from random import SystemRandom

from attncheck.cases.profile import load_profile
from attncheck.errors import QuestionError
from attncheck.harness.cli.fuzz import refuse_unnamed
from attncheck.harness.run.expectations import expectation_file, load_expectations
from attncheck.harness.run.statement import Statement, Verification, make_statement, read_statement, verify
from attncheck.reports.analysis.phrases import conventions, plural
from attncheck.reports.audit.claims import claims_not_examined
from attncheck.reports.document.blocks import Block, Heading, Paragraph, listed
from attncheck.reports.markdown import text as markdown
from attncheck.reports.run_file.records import Record, Unavailable, Unsupported, XFailed
from attncheck.reports.run_file.store import read_run
from attncheck.reports.site.pages import draw_badge
from attncheck.reports.terminal import text as terminal
from attncheck.reports.terminal.columns import Style


def stated(run: Path, profile: str, expect: Path | None) -> tuple[str, bool]:
    """Return the statement of a run as JSON, and whether it states conformance.

    Raises:
        QuestionError: the profile is unknown, a file is wrong, or the run allows no statement.
    """
    located = load_expectations(expectation_file(expect)) if expect is not None else ()
    waivers = [each.expectation for each in located]
    statement = make_statement(read_run(run), load_profile(profile), waivers, datetime.now(UTC).date())
    text = json.dumps(statement.model_dump(mode="json"), indent=1) + "\n"  # in ASCII: no character controls a terminal
    return text, not statement.judgement.missing


def verified(path: Path, number: int, backend: str | None, form: str, style: Style) -> tuple[str, bool]:
    """Return what was checked of a statement, in a format of :data:`RENDERERS`, and whether conformance holds.

    ``number``: how many checks are made again, with ``backend``, or if it is None, with the backend that is stated.

    Raises:
        QuestionError: the file is no statement, there is no such format, or the backend is not here.
        BackendUnavailableError: the backend cannot run here.
    """
    if form not in RENDERERS:
        raise QuestionError(f"--verify cannot be combined with --format {form}; give {', '.join(RENDERERS)}")
    statement = read_statement(path)
    found = verify(statement, datetime.now(UTC).date())
    if number and not found.faults:
        if backend is None:
            refuse_unnamed(statement.backend.ref, str(path), "--rerun")
        again = rerun(statement, backend or statement.backend.ref, number)
        notes = (*found.notes, *again.notes)
        found = replace(found, faults=again.faults, notes=notes, repeated=again.repeated)
    holds = not found.faults and not statement.judgement.missing
    return RENDERERS[form](statement, found, style), holds


def rerun(statement: Statement, backend: str, number: int) -> Verification:
    """Examine a random sample of ``number`` examined entries again, with the backend of this reference.

    Raises:
        QuestionError: the backend, its device or a suite is not here.
        BackendUnavailableError: the backend cannot run here.
    """
    from attncheck.harness.api import examine

    examined = [each for each in statement.records if not isinstance(each, Unsupported | Unavailable)]
    sample = SystemRandom().sample(examined, min(number, len(examined)))
    stated = {(each.case, each.check): _outcome(each) for each in sample}
    repeated, faults, notes = list[str](), list[str](), dict[str, None]()
    for suite, check in sorted({(each.suite, each.check) for each in sample}):
        found = examine(
            backend,
            statement.refs[suite],
            cases=[each.case for each in sample if (each.suite, each.check) == (suite, check)],
            checks=check,
            device=statement.device,
            seed=statement.seed,
            timeout=600,
        )
        if found.header.environment != statement.environment:
            notes["the environment here is another than that of the statement"] = None
        if found.header.backends[0] != statement.backend:
            notes["version, files or declarations of the backend here are others than those of the statement"] = None
        for record in found.records:
            outcome, before = _outcome(record), stated[record.case, check]
            repeated.append(f"{record.case}, {check}: {outcome}")
            if outcome != before:
                faults.append(f"{record.case}, {check}: stated is {before}, and here it is {outcome}")
    return Verification(faults=tuple(faults), notes=tuple(notes), repeated=tuple(repeated))


def _outcome(record: Record) -> str:
    """Return the outcome without what its run expected."""
    if isinstance(record, XFailed):
        return record.underlying
    return "passed" if record.outcome == "xpassed" else record.outcome


def _verdict(statement: Statement, found: Verification) -> str:
    """Return the verdict in words, such as ``conforms to vllm-0.32-decoder version 1``."""
    about = f"{statement.profile.name} version {statement.profile.version}"
    if found.faults:
        return f"the statement on {about} does not hold"
    verb, _, extent = statement.judgement.verdict.partition(" with ")
    return f"{verb} to {about}{extent and f' with {extent}'}"


def _blocks(statement: Statement, found: Verification) -> list[Block]:
    backend, machine, judgement = statement.backend, statement.environment, statement.judgement
    counts = ", ".join(f"{count} {standing}" for standing, count in judgement.counts.items())
    waivers = [
        f"{each.id} until {each.until}: {each.case}, {each.check}: {each.explanation}" for each in judgement.waivers
    ]
    unchecked = "whether the records come from this backend: no digest shows it; --rerun N makes some checks again"
    return [
        Heading(1, f"{backend.name} {backend.version}: {_verdict(statement, found)}"),
        Paragraph(
            f"stated on {statement.day} from the run of {statement.started} on {machine.device_name} "
            f"({statement.device}): torch {machine.torch}, attncheck {machine.attncheck}, seed {statement.seed}"
        ),
        Paragraph(f"declared features: {', '.join(backend.features) or 'none'}"),
        Paragraph(f"declared conventions: {conventions(backend)}"),
        Paragraph(f"{plural(statement.profile.entries, 'check')} in the must-pass list: {counts}"),
        *listed(_missing(statement), "missing:"),
        *listed(claims_not_examined(backend.claims), "declared, not examined:"),
        *listed(waivers, "waivers:"),
        *listed(found.checked, "checked:"),
        *listed(found.repeated, "made again:"),
        *listed(found.faults, "does not hold:"),
        *listed(found.notes, "notes:"),
        *listed([] if found.repeated else [unchecked], "not checked:"),
    ]


def _missing(statement: Statement) -> list[str]:
    """Return a line for each reason why checks are missing."""
    by_reason: dict[str, list[str]] = {}
    for each in statement.judgement.missing:
        by_reason.setdefault(each.reason, []).append(f"{each.case}, {each.check}")
    return [
        f"{names[0]}: {reason}" if len(names) == 1 else f"{names[0]} and {len(names) - 1} more: {reason}"
        for reason, names in by_reason.items()
    ]


def _badge(statement: Statement, found: Verification) -> str:
    tone = "good" if statement.judgement.verdict == "conforms" else "warn"
    tone = "bad" if found.faults or statement.judgement.missing else tone
    return draw_badge(f"attncheck on {statement.environment.device_name}", _verdict(statement, found), tone)


RENDERERS: Mapping[str, Callable[[Statement, Verification, Style], str]] = {
    "terminal": lambda statement, found, style: terminal.render(_blocks(statement, found), style) + "\n",
    "markdown": lambda statement, found, _style: markdown.render(_blocks(statement, found)) + "\n",
    "badge": lambda statement, found, _style: _badge(statement, found),
}
"""The formats of a statement that was checked."""
