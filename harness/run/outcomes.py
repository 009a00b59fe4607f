"""Turns findings, refusals and exceptions into records. No other module decides on an outcome.

The evaluation of cases, the supervisor of the workers and the examination of providers all use it.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Protocol

from attncheck.backends.declarations import needs_of
from attncheck.cases.model import Case
from attncheck.harness.checks.findings import Broken, Finding, Holds, Measurements, NotExamined
from attncheck.harness.driver.observation import Raised
from attncheck.reports.run_file import records
from attncheck.reports.run_file.records import (
    Crashed,
    Ended,
    Errored,
    Failed,
    Passed,
    Record,
    TimedOut,
    Unavailable,
    Unsupported,
)

OURSELVES = records.OURSELVES

IMPORT = "the import"
"""The stage of a failure in a backend's own code while it is loaded."""


@dataclass(frozen=True)
class ProcessEnd:
    """How a backend's process ended. ``limit_s``: the time limit that it exceeded, or None.

    The other fields are those of the records.
    """

    cause: str
    output: str = ""
    native_stack: str = ""
    limit_s: float | None = None
    recurrence: Literal["", "always", "after", "flaky"] = ""
    after: str = ""


@dataclass(frozen=True)
class Circumstances:
    """Fields that all records of a run share; ``round`` is shared by the records of one process."""

    seed: int
    environment: str
    attncheck_version: str
    round: int = 0


class BackendIdentity(Protocol):
    """How records identify a backend, whether or not it could be loaded."""

    @property
    def name(self) -> str:
        """The name in reports."""

    @property
    def ref(self) -> str:
        """The reference to give to ``--backend``."""

    @property
    def version(self) -> str:
        """The version; empty if unknown."""

    @property
    def features(self) -> frozenset[str]:
        """The features that it declares; empty if unknown."""


class RecordedQuestion(Protocol):
    """What a record is about: a case, or a function of a provider."""

    @property
    def suite(self) -> str:
        """Name of the suite."""

    @property
    def id(self) -> str:
        """Id within the suite."""

    @property
    def hash(self) -> str:
        """12 hex digits that identify the content."""


def record_of(
    circumstances: Circumstances,
    case: RecordedQuestion,
    backend: BackendIdentity,
    check: str,
    finding: Finding,
    duration_s: float,
) -> Record:
    """Return the record of one finding.

    A backend that raised has the outcome ``errored`` whatever the exception, since it had declared to support the case.
    """
    common = _identity(circumstances, case, backend, check) | {"duration_s": round(duration_s, 6)}
    match finding:
        case Holds(figures, notes):
            return Passed(**common, **_measured(finding), figures=dict(figures), notes=notes)
        case Broken():
            names = ("summary", "meaning", "details", "finding", "concerns")
            own = {name: getattr(finding, name) for name in names}
            return Failed(**common, **_measured(finding), figures=dict(finding.figures), **own)
        case NotExamined(reasons, by):
            return Unsupported(**common, **_measured(finding), reasons=reasons, by=by)
        case Raised():
            return Errored(
                **common,
                stage=finding.stage,
                error_type=type(finding.error).__name__,
                message=finding.message,
                traceback=finding.trace,
            )


def _measured(finding: Measurements) -> dict[str, Any]:
    """Return the measured values of ``finding`` by record field; a record without that field rejects it."""
    values = {each.name: getattr(finding, each.name) for each in fields(Measurements)}
    return {name: value for name, value in values.items() if value is not None}


def unavailable(
    circumstances: Circumstances, case: RecordedQuestion, backend: BackendIdentity, check: str, reasons: tuple[str, ...]
) -> Record:
    """Return the record of a case that cannot run on this machine."""
    return Unavailable(**_identity(circumstances, case, backend, check), reasons=reasons)


def ended(
    circumstances: Circumstances,
    case: RecordedQuestion,
    backend: BackendIdentity,
    check: str,
    stage: str,
    end: ProcessEnd,
) -> Ended:
    """Return the record of a check without result: the backend's process ended during ``stage`` or before."""
    who = _identity(circumstances, case, backend, check)
    if end.limit_s is None:
        return Crashed(**who, stage=stage, **_without_limit(end))
    return TimedOut(**who, stage=stage, **asdict(end))


def load_error(
    circumstances: Circumstances,
    case: RecordedQuestion,
    backend: BackendIdentity,
    check: str,
    error: Mapping[str, Any],
) -> Record:
    """Return the record of a check that did not run because loading raised; ``error``: fields of the record."""
    return Errored(**_identity(circumstances, case, backend, check), **error)


def _without_limit(end: ProcessEnd) -> dict[str, Any]:
    return {name: value for name, value in asdict(end).items() if name != "limit_s"}


def _identity(
    circumstances: Circumstances, case: RecordedQuestion, backend: BackendIdentity, check: str
) -> dict[str, Any]:
    return {
        "suite": case.suite,
        "case_id": case.id,
        "case_hash": case.hash,
        "check": check,
        "seed": circumstances.seed,
        "backend": backend.name,
        "backend_ref": backend.ref,
        "backend_version": backend.version,
        "environment": circumstances.environment,
        "attncheck_version": circumstances.attncheck_version,
        "round": circumstances.round,
        "needs": needs_of(case.layer, case.cache, case.batch, backend.features) if isinstance(case, Case) else (),
    }
