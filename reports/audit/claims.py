"""The claims of an audit: what classes declare of vLLM's contract, and what the run shows of each claim.

A claim is measured by the cases that need a feature, by those of a form, or by a check. Without one of these, it is
declared and not examined, with the reason.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from attncheck.reports.analysis.support import SupportRow
from attncheck.reports.analysis.verdicts import run_findings
from attncheck.reports.run_file.bits import BITWISE
from attncheck.reports.run_file.graph_levels import CUDAGRAPH
from attncheck.reports.run_file.header import DeclaredClaim
from attncheck.reports.run_file.records import FALLEN_SHORT, Passed, Record, XFailed, graph_of
from attncheck.reports.run_file.store import Run

NOT_EXAMINED = "declared, not examined"
NOT_TRIED = "not tried"
WRONG = "wrong"

NUMERICS = "numerics"


@dataclass(frozen=True)
class AuditedClaim:
    """A claim of one backend. ``state``: right, wrong, not tried, or declared and not examined, with the reason."""

    backend: str
    claim: DeclaredClaim
    state: str


def audited_claims(run: Run) -> tuple[AuditedClaim, ...]:
    """Return the claims of every backend of the run and of its survey; those of layers, where the run has them."""
    claims = {each.name: each.claims for each in run.header.surveyed}
    claims |= {each.name: each.claims for each in run.header.backends if each.claims}
    reasons = {each.name: each.reason for each in run.header.surveyed}
    support = run_findings(run.records, run.header).support
    return tuple(
        AuditedClaim(name, claim, _state(claim, name, reasons.get(name, ""), support, run))
        for name, own in claims.items()
        for claim in own
    )


def claims_not_examined(claims: Sequence[DeclaredClaim]) -> list[str]:
    """Return a line for each claim that nothing measures, with the reason."""
    return [f"{claim.member}: {claim.unexamined}" for claim in claims if claim.unexamined]


def measured_by(unexamined: str, feature: str, check: str, form: str) -> str:
    """Return what measures a claim, in words; "nothing" if there is a reason why it is ``unexamined``."""
    ways = {"cases with": feature, "check": check, "cases of each": form}
    return "nothing" if unexamined else next(f"{how} {what}" for how, what in ways.items() if what)


def _state(claim: DeclaredClaim, backend: str, reason: str, support: Sequence[SupportRow], run: Run) -> str:
    if claim.unexamined:
        return f"{NOT_EXAMINED}: {claim.unexamined}"
    if reason:
        return f"{NOT_EXAMINED} here"
    if claim.feature:
        rows = [row for row in support if (row.backend, row.feature) == (backend, claim.feature)]
        right, short = sum(row.right for row in rows), sum(row.short for row in rows)
        is_false = any(row.verdict == "short" for row in rows)
    else:
        found = list(_outcomes(claim, backend, run))
        right, short = found.count(True), found.count(False)
        is_false = bool(claim.check) or _separates(claim, backend, run)
    if not right + short:
        return NOT_TRIED
    if not short:
        return f"right ({right})"
    return f"{WRONG if is_false else 'fails for other reasons'} ({short} of {right + short})"


def _outcomes(claim: DeclaredClaim, backend: str, run: Run) -> Iterator[bool]:
    """Yield for each record that examined a claim without a feature whether it is right."""
    for record in run.records:
        graph = graph_of(record)
        if record.backend != backend or record.check != (claim.check or NUMERICS):
            continue
        if claim.check == CUDAGRAPH:
            named = [] if graph is None else [each for each in graph.claims if each.name == claim.member]
            yield from (each.outcome == "passed" for each in named if each.outcome != "not examined")
        elif _examines(claim, record, run):
            # A failed check of several things is about the claim if it names the method.
            is_about = claim.check in ("", BITWISE) or claim.member.removeprefix("supports_") in str(record)
            if isinstance(record, Passed) or (_is_short(record) and is_about):
                yield isinstance(record, Passed)


def _examines(claim: DeclaredClaim, record: Record, run: Run) -> bool:
    if claim.check == BITWISE:  # without vLLM's mode for it, a class claims nothing
        conventions = {each.name: each.conventions for each in run.header.backends}
        return bool(conventions.get(record.backend, {}).get("batch_invariant"))
    return not claim.form or _has_form(claim, record, run)


def _has_form(claim: DeclaredClaim, record: Record, run: Run) -> bool:
    case = run.header.case_by_name.get((record.suite, record.case_id))
    return case is not None and claim.form in case.keys


def _separates(claim: DeclaredClaim, backend: str, run: Run) -> bool:
    """Return whether there are cases without the form, and their outputs are right."""
    own = [each for each in run.records if (each.backend, each.check) == (backend, NUMERICS)]
    plain = [each for each in own if not _has_form(claim, each, run)]
    return any(isinstance(each, Passed) for each in plain) and not any(map(_is_short, plain))


def _is_short(record: Record) -> bool:
    return isinstance(record, XFailed) or record.outcome in FALLEN_SHORT
