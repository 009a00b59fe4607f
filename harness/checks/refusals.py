"""``refusals``: a declared case runs; an undeclared case is refused or answered correctly.

Fails a backend that accepts an undeclared case and computes a wrong result, as when it silently ignores a feature.
``numerics`` judges wrong results of declared cases. Cannot see: declarations that no case of the run uses.
"""

from dataclasses import replace
from functools import partial

import torch

from attncheck.backends.declarations import is_merged, required_features
from attncheck.cases.model import Case
from attncheck.cases.outline import shape_of
from attncheck.errors import BackendUnavailableError, QuestionError
from attncheck.harness.checks.findings import Broken, Finding, Holds, NotExamined
from attncheck.harness.checks.interface import Check, CheckedCase, SelectedCases
from attncheck.harness.checks.numerics import EarlierCauses, causes_of, output_shares, summarize, wrong_figures
from attncheck.harness.checks.undeclared_forms import UndeclaredForm, is_plain, undeclared_forms
from attncheck.harness.driver.foreign_code import StageError, declared_reasons
from attncheck.harness.driver.kv_pool import same_bytes
from attncheck.harness.driver.observation import Observation, Raised
from attncheck.harness.driver.session import Session
from attncheck.harness.problem.output_quantisation import output_values
from attncheck.harness.problem.problem import Problem, build_problem
from attncheck.harness.truth.truth import Truth, truth_of
from attncheck.reports.analysis.support import ANSWERED, REFUSED, UNCLEAR
from attncheck.reports.run_file.causes import cause_of_error

NOT_REFUSABLE = frozenset({"short_keys"})
"""Features whose absence a backend can notice only by reading lengths on the host. Compared only if declared."""


def check_declared(session: Session, seen: Observation | Raised) -> Finding:
    """Judge a declared case: it must run, and so must the profiling call, which is ``forward`` without metadata."""
    if isinstance(seen, Raised):
        return failure_of_declared(seen)
    pool_before = None if session.pool is None else session.pool.bytes().clone()
    idle = session.run_without_metadata()
    if isinstance(idle, Raised):
        return Broken(
            f"forward without metadata (the profiling call) raised {type(idle.error).__name__}: {idle.message}",
            details=(idle.trace,),
        )
    if not bool(torch.isfinite(idle.double()).all()):
        return Broken("forward without metadata (the profiling call) left NaN or Inf in the output")
    if session.pool is not None and pool_before is not None and not same_bytes(pool_before, session.pool.bytes()):
        return Broken("forward without metadata (the profiling call) changed a cache it was not given")
    return Holds()


def failure_of_declared(raised: Raised) -> Broken:
    """Return the failure of a declared case that the backend refused or that raised."""
    verb = "refused" if raised.is_refusal else "raised"
    return Broken(
        f"declared, but {verb} at {raised.stage}: {type(raised.error).__name__}: {raised.message}",
        details=(raised.trace,),
        finding=_cause(raised),  # of the checks that raised as well
    )


def _cause(raised: Raised) -> str:
    return cause_of_error(type(raised.error).__name__, raised.stage, raised.message, raised.trace)


def check_refusal(raised: Raised, reasons: tuple[str, ...]) -> Holds | Broken:
    """Judge an exception on a case that the declarations exclude for ``reasons``. A refusal is right."""
    if raised.is_refusal:
        return Holds(notes=(f"{REFUSED} {raised.stage}: {raised.message}",))
    after = f" after changing {' and '.join(raised.touched)}" if raised.touched else ""
    return Broken(
        f"{UNCLEAR}: {type(raised.error).__name__} at {raised.stage}{after}: {raised.message}",
        meaning="the backend does not refuse the case clearly: a refusal is a ValueError, NotImplementedError or "
        "TypeError that the backend raises itself",
        details=(*reasons, raised.trace),
        finding=f"{UNCLEAR}: {_cause(raised)}",
    )


def check_answer(
    problem: Problem, truth: Truth, attempt: Observation, reasons: tuple[str, ...], causes: EarlierCauses | None = None
) -> Holds | Broken:
    """Judge the output for a case that the declarations exclude for ``reasons``. A correct output is right."""
    shares = output_shares(truth, attempt)
    if bool(attempt.unwritten.any()) or bool((shares > 1).any()):
        return Broken(
            f"the backend does not declare the case ({'; '.join(reasons)}), accepts it without an error, "
            f"and its output is wrong: {summarize(problem, shares)}",
            wrong_figures(shares, output_values(attempt.output[: len(shares)], truth.codes), attempt.unwritten),
            (causes or EarlierCauses()).explain(problem, truth, attempt.output[: len(shares)], shares)[0],
        )
    return Holds(notes=(f"{ANSWERED}: {'; '.join(reasons)}",))


def not_tried(problem: Problem, features: frozenset[str]) -> NotExamined | None:
    """Return why an undeclared case is not run on the backend, or None if it is run."""
    case = problem.case
    needs = required_features(case.layer, case.cache, case.batch, features) - features
    if is_merged(case.batch, features) and needs & {"lse", "cascade"}:
        name = case.batch.path.name
        return NotExamined((f"path {name}: the backend does not declare the path, and it cannot be run over forward",))
    missing = needs & NOT_REFUSABLE
    if not missing:
        return None
    names = ", ".join(sorted(missing))
    return NotExamined((f"{names}: compared only where declared, since refusing it needs the lengths on the host",))


def _check(case: CheckedCase) -> Finding:
    if case.undeclared:
        return _check_undeclared_case(case)
    session, seen = case.try_first_step()
    finding = failure_of_declared(session) if isinstance(session, Raised) else check_declared(session, seen)
    if isinstance(seen, Raised) or not _is_first_plain(case):
        return finding
    forms = check_undeclared_forms(case)
    if isinstance(finding, Broken) and isinstance(forms, Broken):
        return replace(forms, details=(*forms.details, finding.summary))
    return finding if isinstance(finding, Broken) else forms


def check_undeclared_forms(case: CheckedCase) -> Finding:
    """Run the case with one undeclared form at a time; each must be refused or answered correctly."""
    answered, wrong = [], []
    forms = tuple(undeclared_forms(case.backend, case.problem.case, str(case.device)))
    for form in forms:
        finding = _judge_form(case, form)
        if isinstance(finding, Broken):
            summary = f"tried undeclared with {form.changes}: {finding.summary}"
            details = (shape_of(form.case), *finding.details)
            wrong.append(replace(finding, summary=summary, details=details))
        elif finding is not None and finding.notes[0].startswith(ANSWERED):
            answered.append(form.changes)
    if wrong:
        first, *others = sorted(wrong, key=lambda each: UNCLEAR in each.summary)  # a wrong answer is worse
        return replace(first, details=(*first.details, *(other.summary for other in others)))
    notes = (f"tried undeclared, and {ANSWERED}: {'; '.join(answered)}",) if answered else ()
    return Holds({"undeclared_tried": len(forms)}, notes)


def _judge_form(case: CheckedCase, form: UndeclaredForm) -> Holds | Broken | None:
    """Judge the step of one undeclared form. Return None if attncheck cannot build or judge it."""
    try:
        problem = build_problem(form.case, case.problem.seed)
        attempt = _attempt(case, problem)
        if isinstance(attempt, Raised):
            return check_refusal(attempt, form.reasons)
        return check_answer(
            problem, truth_of(problem, case.device, refuse_blindness=False), attempt, form.reasons, causes_of(case)
        )
    except (QuestionError, BackendUnavailableError):
        return None


def _attempt(case: CheckedCase, problem: Problem) -> Observation | Raised:
    try:
        return Session(case.backend, problem, case.device).run()
    except StageError as failure:
        return failure.raised


def _is_first_plain(case: CheckedCase) -> bool:
    """Return whether the case is the first plain, declared one of the run, so that forms run once per backend."""
    own, backend = case.problem.case, case.backend
    selected = case.shared.get(SelectedCases, SelectedCases).cases_with(case.loaded.ref, "refusals") or (own,)

    def is_declared(each: Case) -> bool:
        return not declared_reasons(partial(backend.unsupported_reasons, each.layer, each.cache, each.batch))

    return is_plain(own) and next((each for each in selected if is_plain(each) and is_declared(each)), None) == own


def _check_undeclared_case(case: CheckedCase) -> Finding:
    skipped = not_tried(case.problem, case.backend.features)
    if skipped is not None:
        return skipped
    session, seen = case.try_first_step()
    attempt = session if isinstance(session, Raised) else seen
    if isinstance(attempt, Raised):
        return check_refusal(attempt, case.undeclared)
    return check_answer(case.problem, case.truth, attempt, case.undeclared, causes_of(case))


CHECK = Check(_check, tries_undeclared=True)
