"""The first line of a run file: what is asked, of whom, and in which circumstances.

Must not know: how the run is examined or stored.
"""

from collections.abc import Sequence

from attncheck.harness.run.evaluation import RunPlan
from attncheck.harness.run.selection import Selection
from attncheck.reference.spec import BACKEND_CHECKS, DEFAULT_CHECKS
from attncheck.reports.run_file.header import BackendInfo, Environment, RunHeader, SuiteInfo
from attncheck.reports.run_file.store import now


def make_header(
    selection: Selection,
    plan: RunPlan,
    backends: Sequence[BackendInfo],
    environment: Environment,
    *,
    command: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> RunHeader:
    """The header of the run that ``plan`` and ``backends`` describe; the suites' own notes join ``notes``."""
    counts = {suite.name: sum(case.suite == suite.name for case in plan.cases) for suite in selection.suites}
    return RunHeader(
        started=now(),
        environment=environment,
        suites=tuple(
            SuiteInfo(name=suite.name, ref=ref, cases=counts[suite.name], digest=suite.hash)
            for suite, ref in zip(selection.suites, selection.refs, strict=True)
        ),
        checks=plan.checks or _checks_asked(plan),
        device=plan.device,
        seed=plan.seed,
        rounds=plan.rounds,
        backends=tuple(backends),
        command=tuple(command),
        notes=(*notes, *(f"suite {suite.name}: {note}" for suite in selection.suites for note in suite.notes)),
    )


def _checks_asked(plan: RunPlan) -> tuple[str, ...]:
    """All that are made of every case, and those that a case names."""
    named = {check for case in plan.cases for check in case.checks or ()}
    return tuple(check for check in BACKEND_CHECKS if check in DEFAULT_CHECKS or check in named)
