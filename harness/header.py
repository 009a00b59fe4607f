"""The first line of a run file: what is asked, of whom, and in which circumstances.

Must not know: how the run is examined or stored.
"""

from collections.abc import Sequence
from dataclasses import asdict

from attncheck.backends.registry import LoadedBackend
from attncheck.harness.engine import Missing, Plan
from attncheck.harness.selection import Selection
from attncheck.reference.spec import BACKEND_CHECKS
from attncheck.reports.records import BackendInfo, Environment, RunHeader, SuiteInfo
from attncheck.reports.store import now


def make_header(
    selection: Selection,
    plan: Plan,
    environment: Environment,
    *,
    command: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> RunHeader:
    """The header of the run that ``plan`` describes; the suites' own notes join ``notes``."""
    counts = {suite.name: sum(case.suite == suite.name for case in plan.cases) for suite in selection.suites}
    return RunHeader(
        started=now(),
        environment=environment,
        suites=tuple(
            SuiteInfo(name=suite.name, ref=ref, cases=counts[suite.name], digest=suite.hash)
            for suite, ref in zip(selection.suites, selection.refs, strict=True)
        ),
        checks=plan.checks or BACKEND_CHECKS,
        device=plan.device,
        seed=plan.seed,
        backends=tuple(map(_info, plan.backends)),
        command=tuple(command),
        notes=(*notes, *(f"suite {suite.name}: {note}" for suite in selection.suites for note in suite.notes)),
    )


def _info(backend: LoadedBackend | Missing) -> BackendInfo:
    if isinstance(backend, Missing):
        return BackendInfo(name=backend.name, ref=backend.ref, version=backend.version)
    declared = backend.backend
    return BackendInfo(
        name=backend.name,
        ref=backend.ref,
        version=backend.version,
        conventions=asdict(declared.conventions),
        features=tuple(sorted(declared.features)),
    )
